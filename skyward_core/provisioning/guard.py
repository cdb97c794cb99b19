"""The guard of a node on its own machine: a shell script that ends the node by its clocks (ADR 0006, ADR 0011).

It works before there is a Python on the machine, and after that Python has died. It runs as the provider's `startup`,
with SKYWARD_INSTANCE_ID and SKYWARD_INSTANCE_DIRECTORY in its environment. It uses these files in that directory:

    lease       read     the uptime in seconds at which the lease runs out, one line; the guard writes the first one
    paid        read     the uptime in seconds until which the machine is paid for, one line; overrides its argument
    warm        read     the uptime in seconds at which the warm time of a node without a client ends; absent otherwise
    guard       written  its pid, once it watches
    supervisor  read     the pid of the node's supervisor: when that process is gone, the node ends
    ended       read     the reason why the node has ended, one line
    group       read     the folder of the node's control group, one line; without it the node has none
    mounts      read     the mount points of the node, one per line
    log         written  the reason why the node ends, appended

The end of a node: the reason is written into its log. SIGKILL goes to all processes with its tag, to their descendants,
and to all in its control group. Its keepers get it last (`worker/keeper.py`). If SKYWARD_ENDS names a folder, reason
and time are written into a file with the node's id there, which stays (`machines/node_end.py`); not for a node that was
asked to end: the process that asked knows when. Mounts are undone. Its folders in memory and on disk are removed (the
latter is kept if SKYWARD_KEEP_DIRECTORY is set). Then the command runs with which the machine ends itself.
"""

from __future__ import annotations

import math
import re
import shlex

from skyward_core.providers.termination_shell import ENDING

PAUSE_SECONDS = 1.0
"""Between two checks."""


def guard_script(
    lease_seconds: float, max_lifetime_seconds: float | None, end_command: str = "", paid_seconds: float | None = None
) -> str:
    """Return the POSIX sh text of a guard.

    Args:
        lease_seconds: how long the node lives without a lease renewal, from now on. A renewal writes the file `lease`.
        max_lifetime_seconds: how long it lives at most; None: no end.
        end_command: shell text that runs when the node has ended; empty if the machine goes on without us.
        paid_seconds: for how long it is paid, from now on, unless the file `paid` has another time; None: no limit.
    """
    values = {
        "skyward_lease_seconds": str(math.ceil(lease_seconds)),
        "skyward_max_lifetime": "" if max_lifetime_seconds is None else str(math.ceil(max_lifetime_seconds)),
        "skyward_paid_seconds": "" if paid_seconds is None else str(math.floor(paid_seconds)),
        "skyward_pause": f"{PAUSE_SECONDS:g}",
        "skyward_end_command": end_command,
    }
    # user data is small: 16 KiB on AWS, in which a line end and a quote count twice
    program = re.sub(r"(?m)^ +", "", ENDING + GUARD)
    return "\n".join(["#!/bin/sh", *(f"{name}={shlex.quote(value)}" for name, value in values.items()), program])


GUARD = r"""skyward_write() { # file, text: whole or not at all
  echo "$2" >"$skyward_directory/.$1.partial" && mv -f -- "$skyward_directory/.$1.partial" "$skyward_directory/$1"
}
skyward_clock() { # sets skyward_now, in seconds; the time of day may jump
  { read -r skyward_uptime _ <"${SKYWARD_UPTIME_FILE:-/proc/uptime}" && skyward_now=${skyward_uptime%%.*}; } 2>/dev/null
}
skyward_read() { # file: sets skyward_text to the uptime in it; fails for what cannot be read, a line without its end included
  { read -r skyward_text _ <"$skyward_directory/$1"; } 2>/dev/null || return 1
  skyward_text=${skyward_text%%.*}
  case $skyward_text in '' | *[!0-9]*) return 1 ;; esac
  [ "${#skyward_text}" -le 15 ]
}
skyward_birth() { # pid: sets skyward_born to when it was started; fails if it is gone or a zombie
  { read -r skyward_stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  # shellcheck disable=SC2086 # its fields
  set -- ${skyward_stat##*) }
  case ${1:-Z} in Z | X) return 1 ;; esac
  skyward_born=${20:-}
}
skyward_lost_supervisor() { # succeeds if there was a supervisor and it is gone; its pid may be reused
  { read -r skyward_pid _ <"$skyward_directory/supervisor"; } 2>/dev/null || return 1
  case $skyward_pid in '' | *[!0-9]*) return 1 ;; esac
  skyward_birth "$skyward_pid" || return 0
  [ "$skyward_pid $skyward_born" != "$skyward_supervisor" ] || return 1
  env -i PATH="$PATH" LC_ALL=C grep -qsaxzF -e "SKYWARD_INSTANCE_ID=$SKYWARD_INSTANCE_ID" "/proc/$skyward_pid/environ" 9<&- || return 0
  skyward_supervisor="$skyward_pid $skyward_born"
  return 1
}
skyward_ended() { # sets skyward_reason if the file says that the node has ended
  [ -e "$skyward_directory/ended" ] || return 1
  skyward_reason=
  { read -r skyward_reason <"$skyward_directory/ended"; } 2>/dev/null
  [ -n "$skyward_reason" ] || skyward_reason="it says so"
}
skyward_verdict() { # succeeds, with skyward_reason, if the node must end now
  skyward_clock
  ! skyward_read lease || skyward_lease=$skyward_text # else the last good value stands
  ! skyward_read paid || skyward_paid=$skyward_text
  if skyward_ended; then
    return 0
  elif skyward_read warm && [ "$skyward_now" -ge "$skyward_text" ]; then
    skyward_reason="its warm time is over (keep_warm)"
  elif [ "$skyward_now" -ge "$skyward_lease" ]; then
    skyward_reason="no sign of life from a client, and the lease has run out (lease_seconds)"
  elif [ -n "$skyward_paid" ] && [ "$skyward_now" -ge "$skyward_paid" ]; then
    skyward_reason="the money is used up (max_cost, budget)"
  elif [ -n "$skyward_max_lifetime" ] && [ "$skyward_now" -ge $((skyward_started + skyward_max_lifetime)) ]; then
    skyward_reason="alive for $skyward_max_lifetime s (max_lifetime)"
  elif skyward_lost_supervisor; then
    skyward_ended || skyward_reason="its supervisor is gone"
  else
    return 1
  fi
}
skyward_end() { # reason
  trap : TERM
  skyward_say "node ends: $1"
  [ -z "$skyward_sleep" ] || kill "$skyward_sleep" 2>/dev/null
  skyward_kill "$SKYWARD_INSTANCE_ID" "$skyward_directory" || skyward_say "SIGKILL does not end the processes$skyward_pids"
  skyward_note "$1"
  skyward_clean "$SKYWARD_INSTANCE_ID" "$skyward_directory"
  if [ -n "$skyward_end_command" ]; then
    env -i PATH="$PATH" sleep 0.5 9<&- # until who follows the log has read why
    sh -c "$skyward_end_command"
  fi
  exit 0
}
skyward_note() { # reason
  skyward_place=${SKYWARD_ENDS:-}
  [ -n "$skyward_place" ] && [ "$1" != "asked to" ] && mkdir -p -- "$skyward_place" 2>/dev/null || return 0
  skyward_clock
  skyward_boot=
  { read -r skyward_boot </proc/sys/kernel/random/boot_id; } 2>/dev/null
  { printf '%s %s %s\n%s\n' "$skyward_now" "$(env -i PATH="$PATH" date +%s 9<&-)" "$skyward_boot" "$1" >"$skyward_place/$SKYWARD_INSTANCE_ID"; } 2>/dev/null
}
skyward_say() {
  { printf 'skyward: %s\n' "$1" >>"$skyward_directory/log"; } 2>/dev/null
}

set -u
umask 077
: "${SKYWARD_INSTANCE_ID:?}" "${SKYWARD_INSTANCE_DIRECTORY:?}"
skyward_directory=$SKYWARD_INSTANCE_DIRECTORY
skyward_sleep='' skyward_supervisor='' skyward_now='' skyward_paid=''
cd / || exit 1
trap '' HUP INT
trap 'skyward_end "asked to"' TERM
skyward_clock
: "${skyward_now:?the uptime of this machine cannot be read}"
skyward_started=$skyward_now
skyward_lease=$((skyward_now + skyward_lease_seconds))
[ -z "$skyward_paid_seconds" ] || skyward_paid=$((skyward_now + skyward_paid_seconds))
if ! { mkdir -p -- "$skyward_directory" && skyward_write lease "$skyward_lease" && skyward_write guard "$$"; }; then
  echo "skyward: the guard cannot write to $skyward_directory" >&2
  skyward_end "its guard cannot write"
fi
while ! skyward_verdict; do
  env -i PATH="$PATH" sleep "$skyward_pause" 9<&- &
  skyward_sleep=$!
  wait "$skyward_sleep"
  skyward_sleep=''
done
skyward_end "$skyward_reason"
"""  # noqa: E501
"""The program, after ENDING and the five values.

One `sleep` a look is all that it starts; `wait`, unlike a command, is cut short by a signal.
"""
