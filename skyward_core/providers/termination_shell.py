"""Shell text that ends a node on a machine over SSH: for its guard, on the machine, and for a provider, from outside.

It is POSIX sh with coreutils, grep and util-linux, as a minimal Debian has them. The shell that runs it may have the
instance's tag itself. Its short-lived commands run with an empty environment, so that a search for the tag finds only
the node.
"""

import shlex

from skyward_core.image.shell import UNPARTITION

UNPARTITION_SECONDS = 40
"""How long restoring the GPUs may take: about ten calls of nvidia-smi for each, of 0.5 to 2 s; GPUs run in parallel."""

PROOFS = {
    "group": "its control group (cgroup v2) is empty, and nothing is left below its keeper",
    "tree": "nothing is left below its keeper, from which all of its processes come (no control group)",
    "tag": (
        "no process has its tag; its keeper was killed and it had no control group: a process that has removed the tag,"
        " or has another user, would not be seen"
    ),
}
"""Proofs that nothing of a node is left, by the mechanism that kept its processes together; for receipts.

`worker/keeper.py` has the states.
"""

OWN = r"""skyward_is_own() { # pid: whether it runs as this user, by its real user id: a tag of another user's process says what that user likes
  for skyward_process in self "$1"; do
    skyward_user=${skyward_uid:-} skyward_uid=
    { while read -r skyward_key skyward_uid _ && [ "$skyward_key" != Uid: ]; do :; done <"/proc/$skyward_process/status"; } 2>/dev/null
  done
  [ "$skyward_uid" = "$skyward_user" ]
}
"""  # noqa: E501
_ENDING = r"""skyward_find() { # id: sets skyward_pids to this user's processes with this instance's tag and all below them, this shell left out
  # Of these, skyward_keepers are its keepers, and skyward_others the others.
  skyward_pids=" " skyward_others='' skyward_keepers=" " skyward_rows=''
  for skyward_file in $(exec env -i PATH="$PATH" LC_ALL=C grep -lsaxzF -e "SKYWARD_INSTANCE_ID=$1" /proc/[0-9]*/environ 9<&-); do
    skyward_pid=${skyward_file#/proc/}
    skyward_pid=${skyward_pid%/environ}
    [ "$skyward_pid" = "$$" ] || ! skyward_is_own "$skyward_pid" || skyward_pids="$skyward_pids$skyward_pid "
  done
  if [ "$skyward_pids" = " " ]; then
    skyward_pids='' skyward_keepers=''
    return 0
  fi
  skyward_table=$(exec env -i PATH="$PATH" LC_ALL=C cat /proc/[0-9]*/stat 2>/dev/null 9<&-)
  set -f # names of processes may have any characters
  skyward_ifs=$IFS
  IFS='
'
  for skyward_row in $skyward_table; do
    skyward_name=${skyward_row#*(}
    skyward_name=${skyward_name%)*}
    skyward_rest=${skyward_row##*) }
    skyward_pid=${skyward_row%% *}
    case $skyward_name:$skyward_rest in
      *:[ZX]\ * | skyward-reaper:*) continue ;;
      skyward-keeper:*) case $skyward_pids in *" $skyward_pid "*) skyward_keepers="$skyward_keepers$skyward_pid " ;; esac ;;
    esac
    skyward_rest=${skyward_rest#* }
    skyward_rows="$skyward_rows${skyward_rest%% *}:$skyward_pid
"
  done
  skyward_more=yes
  while [ -n "$skyward_more" ]; do
    skyward_more=
    for skyward_row in $skyward_rows; do
      skyward_pid=${skyward_row#*:}
      case $skyward_pids in
        *" $skyward_pid "*) ;;
        *" ${skyward_row%%:*} "*) [ "$skyward_pid" = "$$" ] || skyward_more=yes skyward_pids="$skyward_pids$skyward_pid " ;;
      esac
    done
  done
  IFS=' '
  for skyward_pid in $skyward_pids; do
    case $skyward_keepers in *" $skyward_pid "*) ;; *) skyward_others="$skyward_others $skyward_pid" ;; esac
  done
  IFS=$skyward_ifs
  set +f
  skyward_pids=${skyward_pids% }
}
skyward_kill() { # id, directory: SIGKILL until no process is left, for 10 s at most; fails if a process survives, stuck in the kernel
  # Its keepers are killed last: they become the parents of orphans, which are then found below them.
  skyward_tries=500
  skyward_find "$1"
  while [ -n "$skyward_pids" ]; do
    [ "$skyward_tries" -gt 0 ] || return 1
    skyward_tries=$((skyward_tries - 1))
    # shellcheck disable=SC2086 # one word each
    kill -KILL ${skyward_others:-$skyward_pids} 2>/dev/null
    env -i PATH="$PATH" sleep 0.02 9<&-
    skyward_find "$1"
  done
  skyward_group_of "$1" "$2" || return 0
  while grep -qs 'populated 1' "$skyward_group/cgroup.events"; do
    [ "$skyward_tries" -gt 0 ] || return 1
    skyward_tries=$((skyward_tries - 1))
    { echo 1 >"$skyward_group/cgroup.kill"; } 2>/dev/null
    env -i PATH="$PATH" sleep 0.02 9<&-
  done
  rmdir "$skyward_group"/*/*/ "$skyward_group"/*/ "$skyward_group" 2>/dev/null
  return 0
}
skyward_group_of() { # id, directory: sets skyward_group to the node's control group; fails if it has none
  skyward_group=
  { read -r skyward_group <"$2/group"; } 2>/dev/null
  case $skyward_group in /*/skyward."$1") [ -e "$skyward_group/cgroup.kill" ] ;; *) false ;; esac
}
skyward_unmount() { # directory: unmounts what the node has mounted, last first
  [ -f "$1/mounts" ] || return 0
  { cat "$1/mounts" && echo; } | tac | while IFS= read -r skyward_point; do
    [ -n "$skyward_point" ] || continue
    {
      timeout 10 fusermount -u "$skyward_point" || timeout 10 fusermount3 -u "$skyward_point" ||
        timeout 10 umount -l "$skyward_point" || timeout 10 sudo -n umount -l "$skyward_point"
    } </dev/null >/dev/null 2>&1
  done
}
skyward_unpartition() { # directory: restores the GPUs; waits at most this long for a driver that hangs and cannot be killed
  [ -f "$1/mig" ] || return 0
  # The lock on descriptor 9 is kept: no other pool may begin to use a GPU that is being restored. The last argument shows others who has it.
  skyward_mig_log=$1/mig.log
  { true >"$skyward_mig_log"; } 2>/dev/null || skyward_mig_log=/dev/null
  timeout -k 1 "$skyward_unpartition_seconds" sh -c "$skyward_unpartition_program" skyward "$1/mig" skyward-pool=giving-back-GPUs \
    </dev/null >"$skyward_mig_log" 2>&1 &
  skyward_tries=$((skyward_unpartition_seconds * 20))
  while [ -f "$1/mig" ] && [ "$skyward_tries" -gt 0 ]; do
    skyward_tries=$((skyward_tries - 1))
    env -i PATH="$PATH" sleep 0.05 9<&-
  done
  cat "$skyward_mig_log"
  [ ! -f "$1/mig" ] || echo "the GPUs could not be restored in $skyward_unpartition_seconds s: they may still be partitioned"
  rm -f -- "$1/mig"
}
skyward_remove() { # path ...: tries again if a process still writes into a folder
  for skyward_try in 1 2 3 4 5; do
    rm -rf --one-file-system -- "$@" 2>/dev/null && return 0
    [ "$skyward_try" = 5 ] || sleep 0.05
  done
  return 1
}
skyward_clean() { # id, directory: removes all that the node leaves, other than processes
  skyward_unmount "$2"
  skyward_unpartition "$2"
  skyward_remove /dev/shm/skyward-*-"$1"
  [ -n "${SKYWARD_KEEP_DIRECTORY:-}" ] || skyward_remove "$2"
}
"""  # noqa: E501

ENDING = f"""skyward_unpartition_seconds={UNPARTITION_SECONDS}
# shellcheck disable=SC2016 # a program
skyward_unpartition_program={shlex.quote(UNPARTITION)}
{OWN}{_ENDING}"""
"""Functions, all named `skyward_...`.

Descriptor 9 is the provider's lock on the machine. Short-lived commands must not inherit it.
"""
