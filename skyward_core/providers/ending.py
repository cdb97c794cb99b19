"""Shell text that ends a node on a machine reached over SSH: the same for its guard, from inside, and for a provider, from outside.

POSIX sh over coreutils, grep and util-linux, as a bare Debian has them. The shell that runs it may carry the instance's tag itself: what it starts
for a moment runs with an empty environment, so that the tag finds the node and nothing else.
"""

import shlex

from skyward_core.image.mig_shell import UNPARTITION

UNPARTITION_SECONDS = 40
"""How long giving the GPUs back may take: some ten calls of nvidia-smi for each, of half a second to two, several GPUs at once."""

_ENDING = r"""skyward_find() { # id: sets skyward_pids to the processes that were started with this instance's tag, this shell left out
  skyward_pids=
  for skyward_file in $(exec env -i PATH="$PATH" LC_ALL=C grep -lsaxzF -e "SKYWARD_INSTANCE_ID=$1" /proc/[0-9]*/environ 9<&-); do
    skyward_pid=${skyward_file#/proc/}
    skyward_pid=${skyward_pid%/environ}
    [ "$skyward_pid" = "$$" ] || skyward_pids="$skyward_pids $skyward_pid"
  done
}
skyward_kill() { # id: SIGKILL until nobody is left, for 10 s at most; fails if somebody outlives that, stuck in the kernel
  skyward_tries=500
  skyward_find "$1"
  while [ -n "$skyward_pids" ]; do
    [ "$skyward_tries" -gt 0 ] || return 1
    skyward_tries=$((skyward_tries - 1))
    # shellcheck disable=SC2086 # one word each
    kill -KILL $skyward_pids 2>/dev/null
    env -i PATH="$PATH" sleep 0.02 9<&-
    skyward_find "$1"
  done
}
skyward_unmount() { # directory: undoes what the node has mounted, last first
  [ -f "$1/mounts" ] || return 0
  { cat "$1/mounts" && echo; } | tac | while IFS= read -r skyward_point; do
    [ -n "$skyward_point" ] || continue
    {
      timeout 10 fusermount -u "$skyward_point" || timeout 10 fusermount3 -u "$skyward_point" ||
        timeout 10 umount -l "$skyward_point" || timeout 10 sudo -n umount -l "$skyward_point"
    } </dev/null >/dev/null 2>&1
  done
}
skyward_unpartition() { # directory: gives the GPUs back as they were; a driver that hangs, and cannot be killed, holds nobody up for longer than that
  [ -f "$1/mig" ] || return 0
  # The lock on descriptor 9 is kept: nobody else may begin with a GPU that is being given back.
  skyward_told=$1/mig.told
  { true >"$skyward_told"; } 2>/dev/null || skyward_told=/dev/null
  timeout -k 1 "$skyward_unpartition_seconds" sh -c "$skyward_unpartition_program" skyward "$1/mig" </dev/null >"$skyward_told" 2>&1 &
  skyward_tries=$((skyward_unpartition_seconds * 20))
  while [ -f "$1/mig" ] && [ "$skyward_tries" -gt 0 ]; do
    skyward_tries=$((skyward_tries - 1))
    env -i PATH="$PATH" sleep 0.05 9<&-
  done
  cat "$skyward_told"
  [ ! -f "$1/mig" ] || echo "the GPUs could not be given back in $skyward_unpartition_seconds s: they may still be partitioned"
  rm -f -- "$1/mig"
}
skyward_remove() { # path ...: a folder goes at once or, with somebody writing into it, soon
  for skyward_try in 1 2 3 4 5; do
    rm -rf --one-file-system -- "$@" 2>/dev/null && return 0
    [ "$skyward_try" = 5 ] || sleep 0.05
  done
  return 1
}
skyward_clean() { # id, directory: what the node leaves beside its processes
  skyward_unmount "$2"
  skyward_unpartition "$2"
  skyward_remove /dev/shm/skyward-*-"$1"
  [ -n "${SKYWARD_KEEP_DIRECTORY:-}" ] || skyward_remove "$2"
}
"""

ENDING = f"""skyward_unpartition_seconds={UNPARTITION_SECONDS}
# shellcheck disable=SC2016 # a program
skyward_unpartition_program={shlex.quote(UNPARTITION)}
{_ENDING}"""
"""Functions, all named `skyward_...`. Descriptor 9 is the provider's lock on the machine: it must not live on in what is started for a moment."""
