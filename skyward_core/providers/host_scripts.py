"""Scripts that `Hosts` runs on a host, in sh."""

from skyward_core.providers.termination_shell import ENDING, OWN

PLACES = r"""skyward_places() { # sets skyward_home, the folder of all our files on this host, and skyward_ip, its address for this connection
  skyward_home=${SKYWARD_HOME:-${HOME:-~}/.cache/skyward}
  case $skyward_home in /*) ;; *) skyward_home=$PWD/$skyward_home ;; esac
  skyward_home=${skyward_home%/}
  # shellcheck disable=SC2086 # addresses and ports of the client and this host
  set -- ${SSH_CONNECTION:-}
  skyward_ip=${3:-}
}
skyward_lock() { # seconds: takes the machine's lock on descriptor 9
  exec 9</proc
  flock -w "$1" 9 && return 0
  [ -r /proc/1/cmdline ] || return 1 # mounted with hidepid: the holder of the lock is invisible
  for _ in 1 2 3 4 5 6; do
    [ -z "$(skyward_holders)" ] || return 1
    flock -w 0.5 9 && return 0
  done
  [ -r "${HOME:-/}" ] || return 0
  exec 9<"${HOME:-/}"
  flock -w "$1" 9
  [ $? -ne 1 ] # 1 means that it is held; other codes: NFS cannot lock folders
}
skyward_holders() { # prints the pools that have processes here: our own by their tags, other users' by the command lines of their guards
  {
    grep -hsaz '^skyward-pool=' /proc/[0-9]*/cmdline
    env -i PATH="$PATH" LC_ALL=C grep -hsaz '^SKYWARD_POOL_ID=' /proc/[0-9]*/environ
  } | tr '\0' '\n' | sed 's/^[^=]*=/::skyward held /' | sort -u
}
skyward_list() { # prints the tags of this user's processes of nodes. The search must also find its own process, else it has failed
  skyward_files=/proc/self/environ
  for skyward_file in $(env -i PATH="$PATH" LC_ALL=C grep -lsaz '^SKYWARD_INSTANCE_ID=' /proc/[0-9]*/environ 9<&-); do
    skyward_pid=${skyward_file#/proc/}
    ! skyward_is_own "${skyward_pid%/environ}" || skyward_files="$skyward_files $skyward_file"
  done
  # shellcheck disable=SC2086 # one word each
  skyward_tags=$(env -i PATH="$PATH" LC_ALL=C SKYWARD_LOOK=1 grep -sHazE \
    '^SKYWARD_(LOOK|INSTANCE_ID|POOL_ID|RANK|INSTANCE_DIRECTORY|INSTANCE_TYPE|PRICE_PER_HOUR|PRIVATE_IP|TAGS)=' $skyward_files 9<&- | tr '\0' '\n')
  case $skyward_tags in
    *:SKYWARD_LOOK=1*) printf '%s\n' "$skyward_tags" ;;
    *) echo "grep does not find the tags of processes here" && exit 1 ;;
  esac
}
skyward_sweep() { # removes the caches, unless a node of ours is here
  if skyward_lock 1 && [ -z "$(skyward_holders)" ]; then
    for skyward_cache in envs files uv uv.partial uv.lock apt.lock ship uv-cache python; do skyward_remove "$skyward_home/$skyward_cache"; done
    rmdir "$skyward_home/instances" "$skyward_home" 2>/dev/null
    echo "::skyward swept $skyward_home"
  fi
}
"""  # noqa: E501
"""The lock is /proc. Each pid namespace has one, so pools that see each other share it. It belongs to root, so no user
can create, replace or remove it.

But any user can hold it. If a pool holds it, its guard is visible within moments. If no guard is visible, the lock of
this user's home is taken instead, which only this user's pools hold.
"""

LOOK = (
    PLACES
    + r"""skyward_places
unset OMP_NUM_THREADS OMP_THREAD_LIMIT # nproc would obey them
echo "::skyward vcpus $(nproc)"
echo "::skyward machine $(uname -m)"
sed -n 's/^MemTotal: *\([0-9]*\) kB$/::skyward memory_kib \1/p' /proc/meminfo
if [ "$1" = gpus ] && skyward_gpus=$(timeout 30 nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null); then
  printf '%s\n' "$skyward_gpus" | sed 's/^/::skyward gpu /'
fi
skyward_holders
"""  # noqa: E501
)
"""Prints the host's properties and the pools that hold it; GPUs only if $1 is "gpus", which may take seconds."""

START = (
    ENDING
    + PLACES
    + r"""umask 077
skyward_places
if ! skyward_lock 0.3 || [ -n "$(skyward_holders)" ]; then
  skyward_holders
  echo "::skyward taken"
  exit 0
fi
directory=$skyward_home/instances/$1
trap 'skyward_remove "$directory"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p -- "$directory" || exit 1
for skyward_place in "$skyward_home" "$skyward_home/instances" "$directory"; do
  case "$(stat -L -c '%u %a' -- "$skyward_place")" in
    "$(id -u) "*[2367]) ;; # every user may write to it
    "$(id -u) "*) continue ;;
  esac
  echo "$skyward_place belongs to another user, or every user may write to it: its programs could be replaced. Set SKYWARD_HOME to a folder of your own" >&2
  exit 1
done
# shellcheck disable=SC2012 # names of ours
[ ! -d "$skyward_home/ended" ] || ls -1t -- "$skyward_home/ended" | tail -n +1001 | while read -r old; do
  rm -f -- "$skyward_home/ended/$old"
done
cat >"$directory/startup.sh" || exit 1
[ "$(wc -c <"$directory/startup.sh")" -eq "$6" ] || { echo "only a part of the script arrived" >&2; exit 1; }
SKYWARD_HOME=$skyward_home SKYWARD_INSTANCE_ID=$1 SKYWARD_POOL_ID=$2 SKYWARD_RANK=$3 SKYWARD_PRICE_PER_HOUR=$4 SKYWARD_INSTANCE_TYPE=$5 \
  SKYWARD_PRIVATE_IP=$skyward_ip SKYWARD_INSTANCE_DIRECTORY=$directory SKYWARD_TAGS=$7 SKYWARD_ENDS=$skyward_home/ended \
  setsid sh "$directory/startup.sh" "skyward-pool=$2" </dev/null >>"$directory/log" 2>&1 &
trap - EXIT
echo "::skyward ip $skyward_ip"
echo "::skyward directory $directory"
"""  # noqa: E501
)
"""Takes the lock and starts the script on stdin under it, detached from this connection; or prints who holds the host.
"""

LIST = (
    OWN
    + PLACES
    + r"""skyward_places
echo "::skyward ip $skyward_ip"
skyward_list
"""
)

END = (
    ENDING
    + PLACES
    + r"""end() { # id
  skyward_find "$1"
  directory=$skyward_home/instances/$1
  for pid in $skyward_pids; do
    found=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^SKYWARD_INSTANCE_DIRECTORY=//p')
    case $found in /*/"$1") directory=$found && break ;; esac
  done
  [ -n "$skyward_pids" ] || [ -e "$directory" ] || return 0
  echo "::skyward found $1"
  if skyward_group_of "$1" "$directory"; then
    echo "::skyward proof $1 group"
  elif [ "${skyward_keepers:- }" != " " ] || [ -e "$directory/kept" ]; then
    echo "::skyward proof $1 tree"
  elif [ -e "$directory/supervisor" ]; then
    echo "::skyward proof $1 tag"
  fi
  guard=
  { read -r guard <"$directory/guard"; } 2>/dev/null
  case " $skyward_pids " in
    *" ${guard:-none} "*)
      kill -TERM "$guard" 2>/dev/null
      patience=100
      [ ! -f "$directory/mig" ] || patience=$((skyward_unpartition_seconds * 50 + patience)) # the guard restores the GPUs
      while [ "$patience" -gt 0 ] && kill -0 "$guard" 2>/dev/null; do
        patience=$((patience - 1))
        sleep 0.02
      done
      ;;
  esac
  skyward_kill "$1" "$directory"
  [ ! -f "$directory/mig" ] || skyward_lock 5 || : # no other pool may begin to use a GPU that is being restored
  skyward_clean "$1" "$directory" | sed 's/^/::skyward warning /'
}
skyward_places
keep=$1
shift
for id; do end "$id" & done
wait
skyward_list
[ "$keep" = keep ] || skyward_sweep || :
"""  # noqa: E501
)
"""Signals the guards of these instances to end them. After 2 s (longer with GPUs to restore), or without a guard, it
kills the instances itself. Then it lists the processes that are left.
"""

ENDS = (
    PLACES
    + r"""skyward_places
read -r up _ </proc/uptime
read -r boot </proc/sys/kernel/random/boot_id
for id; do
  [ -f "$skyward_home/ended/$id" ] || continue
  { read -r ended epoch of_boot && read -r reason; } <"$skyward_home/ended/$id" || continue
  if [ "$of_boot" = "$boot" ]; then
    seconds=$((${up%.*} - ${ended%.*}))
  else
    seconds=$(($(date +%s) - ${epoch%.*}))
  fi
  [ "$seconds" -ge 0 ] || seconds=0
  echo "::skyward ended $id $seconds $reason"
done
"""
)
"""Prints for how many seconds these instances have ended, and why, if their guards have written it."""

SWEEP = ENDING + PLACES + "skyward_places\nskyward_sweep\n"
