# Run a command as in a container of a node, without a container engine: `bash as_node.sh COMMAND...`.
#
# The command is of the user `skyward` with the number 1000, sees only its own processes, and has no capability. Linux
# namespaces do that, also for users who are not root. Its files are those of the user who runs this, and so are the
# rights that it has outside: it protects nothing from the command.
set -eu
own=$(mktemp -d "$HOME/node.XXXXXX")
{ grep -v -e '^skyward:' -e '^[^:]*:[^:]*:1000:' /etc/passwd; echo "skyward:x:1000:1000::$HOME:/bin/bash"; } >"$own/passwd"
{ grep -v -e '^skyward:' -e '^[^:]*:[^:]*:1000:' /etc/group; echo skyward:x:1000:; } >"$own/group"
chmod 755 "$own" && chmod 644 "$own"/*
# --kill-child: the kernel ends all of them with this process, whatever ends it
exec unshare --user --map-root-user --mount --pid --fork --kill-child --mount-proc \
  bash -euc '
    mount --bind "$0/passwd" /etc/passwd
    mount --bind "$0/group" /etc/group
    rm -r "$0"
    exec unshare --user --map-user=1000 --map-group=1000 "$@"
  ' "$own" "$@"
