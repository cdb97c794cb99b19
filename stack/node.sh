# A node: sshd for the user that runs it. PORT, LISTEN_HOST and HOST_KEY are of this node, KEYS is the folder with the
# public key of the clients, VARIABLES are set for each command.
#
# StrictModes would refuse keys below /tmp, where tests put them; only this user can write to the folder.
set -eu
options=(
  "Port=$PORT"
  "ListenAddress=$LISTEN_HOST"
  "HostKey=$HOST_KEY"
  "AuthorizedKeysFile=$KEYS/authorized_keys"
  "SetEnv=$VARIABLES"
  AuthenticationMethods=publickey
  PermitRootLogin=no
  StrictModes=no
  UsePAM=no
  UseDNS=no
  MaxSessions=100
  MaxStartups=100
  PidFile=none
)
exec /usr/sbin/sshd -D -e -f /dev/null "${options[@]/#/-o}"
