r"""Shell text that partitions a node's GPUs with MIG, and a program that restores them.

As in `shell`, the program is constant and values enter it only as quoted words. Files of the node's directory:

    mig         "INDEX MODE BOOT" of each GPU, written before the GPU is changed: its mode ("Enabled" or "Disabled"),
                and the id of this boot
    partitions  the UUID of each partition, one in each line, in the order of `nvidia-smi -L`; written when all
                partitions exist

Commands and their output: NVIDIA MIG User Guide, "Getting Started with MIG", 2026-11.
"""

import shlex
from collections.abc import Sequence


def partition_gpus(profiles: Sequence[str], gpus: int) -> str:
    """Return lines of bash that split each of the first `gpus` GPUs into these profiles; "" without profiles.

    The lines are idempotent. The profiles are created in this order, which must be the largest first. The lines follow
    `shell.prelude()`'s text in the same shell, and need `$SKYWARD_INSTANCE_DIRECTORY`, root or sudo without a password.
    Phase: "mig". A GPU that another user has partitioned is not changed, and fails the phase.
    """
    if not profiles:
        return ""
    return (
        _PARTITION + "skyward_phase mig\nskyward_run skyward_partition " + shlex.join([str(gpus), ",".join(profiles)])
    )


# `-lgi` and `-L` end with an error if there is nothing to list, so their output decides. It is captured before it is
# searched, because `grep -q` would close the pipe of a program that still writes.
_PARTITION = r"""skyward_smi() {
  skyward_sudo "$skyward_nvidia_smi" "$@"
}
skyward_mig_mode() { # index: current and pending mode, as "Enabled Disabled"
  local modes
  modes=$("$skyward_nvidia_smi" -i "$1" --query-gpu=mig.mode.current,mig.mode.pending --format=csv,noheader)
  printf '%s\n' "${modes//,/}"
}
skyward_is_partitioned() { # index
  local output
  output=$(skyward_smi mig -i "$1" -lgi 2>&1) || :
  grep -q '^| *[0-9][0-9]* *MIG ' <<<"$output"
}
skyward_look_at_gpus() { # how many are needed
  local output found
  if ! skyward_nvidia_smi=$(command -v nvidia-smi); then
    echo 'there is no nvidia-smi here: install the driver of NVIDIA, or choose a machine image that has it'
    return 1
  fi
  if ! output=$("$skyward_nvidia_smi" --query-gpu=index --format=csv,noheader 2>&1); then
    printf '%s\n' "$output" 'the driver of the GPUs does not answer'
    return 1
  fi
  found=$(grep -c '^[0-9]' <<<"$output") || :
  if [ "$found" -lt "$1" ]; then
    printf 'there are %s GPUs here, and %s are to be partitioned\n' "$found" "$1"
    return 1
  fi
  if ! output=$(skyward_smi -L 2>&1); then
    printf '%s\n' "$output" 'GPUs are partitioned by root only: log in as root, or let sudo run nvidia-smi without a password'
    return 1
  fi
}
skyward_claim() { # index: records the state of the GPU, before anything is changed
  local modes
  modes=$(skyward_mig_mode "$1")
  case $modes in
    Enabled* | Disabled*) ;;
    *)
      printf 'GPU %s cannot be partitioned: its MIG mode is %s\n' "$1" "${modes:-unknown}"
      return 1
      ;;
  esac
  if grep -qs "^$1 " "$SKYWARD_INSTANCE_DIRECTORY/mig"; then # an earlier run of these lines has created the partitions
    skyward_smi mig -i "$1" -dci >/dev/null 2>&1 || :
    skyward_smi mig -i "$1" -dgi >/dev/null 2>&1 || :
  elif skyward_is_partitioned "$1"; then
    printf 'GPU %s is partitioned already; if no other user needs that: sudo nvidia-smi mig -i %s -dci; sudo nvidia-smi mig -i %s -dgi\n' "$1" "$1" "$1"
    return 1
  else
    printf '%s %s %s\n' "$1" "${modes%% *}" "$(cat /proc/sys/kernel/random/boot_id)" >>"$SKYWARD_INSTANCE_DIRECTORY/mig"
  fi
}
skyward_enable() { # index
  local output reset
  [ "$(skyward_mig_mode "$1")" != 'Enabled Enabled' ] || return 0
  output=$(skyward_smi -i "$1" -mig 1 2>&1) || :
  if [ "$(skyward_mig_mode "$1")" = 'Disabled Enabled' ]; then # Ampere needs a reset, Hopper and later do not
    reset=$(skyward_smi --gpu-reset -i "$1" 2>&1) || :
    output+=$'\n'$reset
  fi
  [ "$(skyward_mig_mode "$1")" != 'Enabled Enabled' ] || return 0
  printf '%s\n' "$output"
  skyward_why_not_enabled "$1"
  return 1
}
skyward_why_not_enabled() { # index
  local busy
  busy=$("$skyward_nvidia_smi" -i "$1" --query-compute-apps=pid,process_name --format=csv,noheader 2>/dev/null) || :
  if [ -n "$busy" ]; then
    printf 'GPU %s cannot change to MIG mode while processes use it: %s. End them and open the pool again\n' "$1" "${busy//$'\n'/; }"
  elif [ "$(skyward_mig_mode "$1")" = 'Disabled Enabled' ]; then
    printf 'GPU %s would be in MIG mode after a reset, which is refused here, as an A100 in a virtual machine does. ' "$1"
    printf 'Run "sudo nvidia-smi -i %s -mig 1", reboot the machine, and open the pool again: a GPU that is in MIG mode needs no reset. ' "$1"
    printf 'A rented machine does not come back from a reboot: there, choose an H100 or a later chip\n'
  else
    printf 'GPU %s cannot change to MIG mode. Something may hold it that is no process of its list: ' "$1"
    printf 'stop monitoring (nvidia-dcgm) and displays, or reboot, and open the pool again\n'
  fi
}
skyward_create() { # index, profiles
  local output
  if ! output=$(skyward_smi mig -i "$1" -cgi "$2" -C 2>&1); then
    printf '%s\n' "$output"
    printf 'GPU %s cannot be split into %s: "nvidia-smi mig -lgip" on the machine lists what it can be split into\n' "$1" "$2"
    return 1
  fi
}
skyward_list_partitions() { # number of GPUs: prints the UUIDs of their partitions
  local output line gpu=-1
  output=$("$skyward_nvidia_smi" -L)
  while IFS= read -r line; do
    case $line in
      'GPU '*)
        gpu=${line#GPU }
        gpu=${gpu%%:*}
        ;;
      *'(UUID: MIG-'*)
        line=${line##*UUID: }
        [ "$gpu" -ge "$1" ] || printf '%s\n' "${line%%)*}"
        ;;
    esac
  done <<<"$output"
}
skyward_partition() { # number of GPUs, profiles of each
  local index wanted found partial="$SKYWARD_INSTANCE_DIRECTORY/.partitions.partial" profiles
  rm -f -- "$SKYWARD_INSTANCE_DIRECTORY/partitions"
  skyward_look_at_gpus "$1"
  for ((index = 0; index < $1; index++)); do
    skyward_claim "$index"
    skyward_enable "$index"
    skyward_create "$index" "$2"
  done
  skyward_list_partitions "$1" >"$partial"
  IFS=, read -r -a profiles <<<"$2"
  wanted=$(($1 * ${#profiles[@]}))
  found=$(wc -l <"$partial")
  if [ "$found" -ne "$wanted" ]; then
    "$skyward_nvidia_smi" -L
    printf '%s partitions were made, and "nvidia-smi -L" lists %s\n' "$wanted" "$found"
    return 1
  fi
  mv -f -- "$partial" "$SKYWARD_INSTANCE_DIRECTORY/partitions"
}
"""  # noqa: E501

# A command under sudo survives the SIGKILL that ends the node. The program waits for it, because it would change a GPU
# that has been restored. The driver may still hold a process that was just killed, so this tries again. grep -q finds a
# process even if another one ends during the search; with -l that was an error, and the program did not wait.
UNPARTITION = r"""smi() {
  if [ "$(id -u)" -eq 0 ]; then nvidia-smi "$@"; else sudo -n nvidia-smi "$@"; fi 2>&1
}
is_partitioned() { # index
  smi mig -i "$1" -lgi | grep "^| *[0-9][0-9]* *MIG " >/dev/null
}
is_as_before() { # index, mode
  [ "$(smi -i "$1" --query-gpu=mig.mode.current,mig.mode.pending --format=csv,noheader)" = "$2, $2" ] || return 1
  [ "$2" = Disabled ] || ! is_partitioned "$1"
}
give_back() { # index, mode, boot: a reboot removes partitions, so those found after one are not ours
  [ "$3" = "$(cat /proc/sys/kernel/random/boot_id)" ] || ! is_partitioned "$1" || return 0
  for _ in 1 2 3 4 5; do
    output=$(smi mig -i "$1" -dci; smi mig -i "$1" -dgi; [ "$2" = Enabled ] || smi -i "$1" -mig 0)
    ! is_as_before "$1" "$2" || return 0
    [ "$2" = Enabled ] || output="$output; $(smi --gpu-reset -i "$1")"
    ! is_as_before "$1" "$2" || return 0
    sleep 0.5
  done
  printf "%s\n" "GPU $1 is not as it was before (MIG mode $2, not partitioned): $output" | tr "\n" " "
  echo
}
for _ in $(seq 100); do
  grep -qsxz -e "-[cd][cg]i" -e "-m[i]g" /proc/[0-9]*/cmdline || break
  sleep 0.1
done
while read -r index mode boot; do
  give_back "$index" "$mode" "$boot" &
done <"$1"
wait
rm -f -- "$1"
"""
"""POSIX sh, without single quotes: restores the GPUs listed in the file $1, a node's `mig`, prints those that it could
not restore, and removes the file.
"""
