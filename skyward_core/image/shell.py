r"""Shell text from plain values.

Every function here is pure and returns lines of bash. The program is constant; values enter it only as quoted words.
Text after `prelude` may use its functions, and reports on stdout, one line each:

    ::skyward phase NAME
    ::skyward failed phase=NAME exit=CODE command=TEXT
    ::skyward done phase=NAME

`partition_gpus` partitions a node's GPUs with MIG, and `UNPARTITION` is the program that restores them. Files of the
node's directory:

    mig         "INDEX MODE BOOT" of each GPU, written before the GPU is changed: its mode ("Enabled" or "Disabled"),
                and the id of this boot
    partitions  the UUID of each partition, one in each line, in the order of `nvidia-smi -L`; written when all
                partitions exist

Commands and their output: NVIDIA MIG User Guide, "Getting Started with MIG", 2026-11.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyward_core.image.packages import Step

# cloud-init runs user data without HOME; then `~` comes from the password database.
_STRICT = r"""set -euo pipefail
set -E  # so that the trap below works in functions
[ -n "${HOME:-}" ] || HOME=~
export HOME
export SKYWARD_HOME="${SKYWARD_HOME:-$HOME/.cache/skyward}"
case $SKYWARD_HOME in /*) ;; *) SKYWARD_HOME="$PWD/$SKYWARD_HOME" ;; esac
"""
_REPORTS = r"""skyward_phase_name=uv
skyward_command=
skyward_phase() {
  skyward_phase_name=$1
  printf '::skyward phase %s\n' "$1"
}
skyward_run() { # keeps the command with its expanded arguments, for the trap
  skyward_command=$*
  "$@" </dev/null # the script itself may come from stdin, and apt-get would read the rest of it
  skyward_command=
}
skyward_failed() {
  [ "$BASH_SUBSHELL" -eq 0 ] || return 0 # the parent shell reports it, once
  local command=${skyward_command:-$2}
  command=${command#skyward_}
  [ -z "${SKYWARD_RESERVE:-}" ] || rm -f -- "$SKYWARD_RESERVE" # so that a full disk has space for these lines
  case $(df --output=pcent -- "$SKYWARD_HOME" 2>/dev/null || true) in
    *100%*) printf '\nThe disk that holds %s is full, or nearly so.\n' "$SKYWARD_HOME" ;;
  esac
  printf '::skyward failed phase=%s exit=%s command=%s\n' "$skyward_phase_name" "$1" "${command//[$'\n\r']/ }"
}
trap 'skyward_failed "$?" "$BASH_COMMAND"' ERR
skyward_sudo() {
  if [ "$EUID" -eq 0 ]; then "$@"; else sudo -n -- "$@"; fi
}
"""
# Descriptor 9 is inherited by what runs under the lock: if this shell is killed, the next one waits until its orphaned
# installer is gone.
_LOCKS = r"""skyward_lock() {
  mkdir -p -- "${1%/*}"
  exec 9>"$1"
  skyward_run flock --timeout 1800 9
}
skyward_unlock() {
  exec 9>&-
}
"""
# The timer leads its own process group (setsid), so that a later call can kill it with its sleep. "skyward-ttl" in its
# command line shows that the pid is still the timer's.
_SHUTDOWN = r"""skyward_shutdown_after() {
  local timer="$SKYWARD_HOME/ttl.pid" pid root=()
  [ "$EUID" -eq 0 ] || root=(sudo -n --)
  mkdir -p -- "$SKYWARD_HOME"
  skyward_run skyward_sudo true
  if [ -f "$timer" ]; then
    pid=$(<"$timer")
    if grep -qsa skyward-ttl "/proc/$pid/cmdline"; then kill -- "-$pid" || true; fi
    rm -f -- "$timer"
  fi
  skyward_sudo shutdown -c >/dev/null 2>&1 || true
  if ! skyward_sudo shutdown -P "+$((($1 + 59) / 60))" >/dev/null 2>&1; then
    setsid sh -c 'sleep "$1"; shift; "$@"' skyward-ttl "$1" "${root[@]}" sh -c 'shutdown -P now || poweroff -f' </dev/null >/dev/null 2>&1 &
    printf '%s\n' "$!" >"$timer"
  fi
}
"""
# UV_PYTHON has precedence over VIRTUAL_ENV; --python has precedence over both. uv takes the indexes of a `uv.toml` or
# `pyproject.toml` from the working directory and any folder above it, and another user may write to one: to /tmp.
_UV = r"""skyward_uv() {
  (cd / && exec "${skyward_uv_command[@]}" "$@")
}
skyward_find_uv() {
  if [ -n "${SKYWARD_UV:-}" ]; then
    skyward_uv_command=("$SKYWARD_UV")
  elif uv --version >/dev/null 2>&1; then
    skyward_uv_command=(uv)
  elif python3 -m uv --version >/dev/null 2>&1; then
    skyward_uv_command=(python3 -m uv)
  else
    skyward_install_uv
    skyward_uv_command=("$SKYWARD_HOME/uv/bin/uv")
  fi
}
skyward_install_uv() {
  local target="$SKYWARD_HOME/uv"
  skyward_lock "$target.lock"
  if ! "$target/bin/uv" --version >/dev/null 2>&1; then
    rm -rf -- "$target" "$target.partial"
    mkdir -p -- "$target.partial"
    skyward_run skyward_fetch_uv "$target.partial"
    mv -- "$target.partial" "$target"
  fi
  skyward_unlock
}
"""
VERSION = "0.13.8"
_FILES = "https://files.pythonhosted.org/packages"
# A service that an apt package starts must not inherit the lock, so 9>&- closes it.
_APT = r"""skyward_has_apt() { # name, name=version, name:architecture, name/release
  local version='' found
  case $1 in *=*) version=${1#*=} ;; esac
  found=$(dpkg-query --show --showformat '${db:Status-Status} ${Version}' "${1%%[=/]*}" 2>/dev/null) || return 1
  case $found in
    "installed "*) [ -z "$version" ] || [ "${found#installed }" = "$version" ] ;;
    *) return 1 ;;
  esac
}
skyward_apt() {
  local package missing=()
  for package; do skyward_has_apt "$package" || missing+=("$package"); done
  [ "${#missing[@]}" -gt 0 ] || return 0
  skyward_phase apt
  skyward_lock "$SKYWARD_HOME/apt.lock"
  skyward_run skyward_sudo apt-get -o Acquire::Retries=3 update 9>&-
  skyward_run skyward_sudo env DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends -- "${missing[@]}" 9>&-
  skyward_unlock
}
"""
# The mark is written last: an environment without it is from a killed build. bin/python is checked too, because its
# target, the interpreter, may have been removed.
_ENVIRONMENT = r"""skyward_is_complete() {
  [ -f "$skyward_environment/.skyward-complete" ] && [ -x "$skyward_environment/bin/python" ]
}
skyward_find() {
  skyward_environment="$SKYWARD_HOME/envs/$1"
  if skyward_is_complete && skyward_use "$1"; then
    skyward_complete=yes
  else
    skyward_complete=
    skyward_phase uv
    skyward_find_uv
  fi
}
skyward_use() { # name: sets the time of the environment, so that it is not pruned; fails if it just was
  exec 9>"$SKYWARD_HOME/envs/$1.lock"
  flock --timeout 60 9 || : # a file system without locks
  skyward_is_complete && touch -c -- "$skyward_environment/.skyward-complete"
  local code=$?
  exec 9>&-
  return "$code"
}
skyward_prune() { # removes what no pool has used for 30 days, and no process names
  local entry mark
  for entry in "$SKYWARD_HOME"/envs/* "$SKYWARD_HOME"/files/*; do
    [ -d "$entry" ] && [ ! -L "$entry" ] || continue
    mark="$entry/.skyward-complete"
    [ -e "$mark" ] || mark=$entry
    [ -n "$(find "$mark" -maxdepth 0 -mtime +29 2>/dev/null)" ] || continue
    (
      exec 8>"$entry.lock"
      flock -n 8 || exit 0
      [ -n "$(find "$mark" -maxdepth 0 -mtime +29)" ] || exit 0 # again, with the lock
      ! grep -qsaF -- "$entry" /proc/[0-9]*/environ || exit 0
      rm -f -- "$entry/.skyward-complete"
      rm -rf -- "$entry"
    ) || :
  done
}
skyward_pip() { # arguments of uv pip install
  skyward_run skyward_uv pip install --no-progress --python "$skyward_environment/bin/python" "$@"
}
skyward_build() { # name, version of Python; skyward_packages installs the rest
  local name=$1 version=$2
  skyward_phase deps
  skyward_prune
  skyward_lock "$SKYWARD_HOME/envs/$name.lock"
  if ! skyward_is_complete; then
    skyward_run rm -rf -- "$skyward_environment"
    skyward_run skyward_uv venv --no-project --python "${SKYWARD_PYTHON:-$version}" "$skyward_environment"
    skyward_run "$skyward_environment/bin/python" -c "$skyward_check" "$version"
    skyward_packages
    : >"$skyward_environment/.skyward-complete"
  fi
  skyward_unlock
}
skyward_check='import sys
found = "%d.%d" % sys.version_info[:2]
if found != sys.argv[1]: sys.exit("This interpreter is Python %s, not %s: unset SKYWARD_PYTHON or let it name another." % (found, sys.argv[1]))'
"""
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
"""
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


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file of the package index.

    `other_sha256` is the hash of the file for glibc, which pip prefers on machines with glibc; empty if there is none.
    """

    url: str
    sha256: str
    uv_platform: str
    """The platform's name for `uv pip install --python-platform`."""
    other_sha256: str = ""

    @property
    def requirement(self) -> str:
        """A line of a requirements file that only this file fulfils."""
        hashes = [f"--hash=sha256:{one}" for one in (self.sha256, self.other_sha256) if one]
        return " ".join([f"uv=={VERSION}", *hashes])


WHEELS: Mapping[str, Wheel] = {
    "x86_64": Wheel(
        url=f"{_FILES}/4d/a3/1ac9cd75985371da0d29c9c12132e6d5b5627b9d0de87c5ad97ab9ad69b0/uv-{VERSION}-py3-none-musllinux_1_1_x86_64.whl",
        sha256="29451c60f5e8b07403e0a175d5229efc36b0289b34143ff4aaa499a5dd52553a",
        uv_platform="x86_64-unknown-linux-musl",
        other_sha256="e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984",
    ),
    "aarch64": Wheel(
        url=f"{_FILES}/9e/f0/d989ac5fcebf83f1c8c5d78974f27788e8364945969eb646f5d0db35d924/"
        f"uv-{VERSION}-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64.whl",
        sha256="0b3e8b1a4f5e405e31e2ff33de8af4744831e9f7338539671efbd8c3c94e791d",
        uv_platform="aarch64-unknown-linux-musl",
    ),
}
"""By the output of `uname -m` on Linux."""


# pip is tried first because it knows the machine's own index. The hash is checked for each source of the file.
_FETCH_UV = r"""skyward_fetch_uv() { # folder
  local kind requirement url sha256
  kind=$(uname -s)-$(uname -m)
  case $kind in
@WHEELS@
    *) skyward_missing "no uv is known for $kind: install uv on the machine, or in its image" ;;
  esac
  printf '%s\n' "$requirement" >"$1/uv.txt"
  if python3 -m pip --version >/dev/null 2>&1; then
    if python3 -m pip install --quiet --no-deps --only-binary :all: --require-hashes --target "$1" -r "$1/uv.txt"; then return; fi
    rm -rf -- "${1:?}/bin"
  fi
  mkdir -p -- "$1/bin"
  skyward_download "$url" "$1/uv.whl"
  printf '%s  %s\n' "$sha256" "$1/uv.whl" | sha256sum -c - >/dev/null || skyward_missing "$url has changed (its sha256 must be $sha256)"
  skyward_unpack_uv "$1/uv.whl" >"$1/bin/uv"
  chmod 755 "$1/bin/uv"
  rm -f -- "$1/uv.whl"
}
skyward_download() { # URL, file
  if command -v curl >/dev/null; then
    curl --fail --silent --show-error --location --retry 3 --output "$2" "$1"
  elif command -v wget >/dev/null; then
    wget -q -O "$2" "$1"
  elif command -v python3 >/dev/null; then
    python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$1" "$2"
  else
    skyward_missing "there is no uv, and neither curl, wget nor python3 to fetch it: install one of them on the machine, or in its image"
  fi
}
skyward_unpack_uv() { # wheel, which is a zip archive
  if command -v unzip >/dev/null; then
    unzip -p "$1" '*/scripts/uv'
  elif command -v python3 >/dev/null; then
    python3 -c 'import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
sys.stdout.buffer.write(wheel.read(next(name for name in wheel.namelist() if name.endswith("/scripts/uv"))))' "$1"
  elif command -v bsdtar >/dev/null; then
    bsdtar -xOf "$1" '*/scripts/uv'
  elif busybox unzip -l "$1" >/dev/null 2>&1; then
    busybox unzip -p "$1" '*/scripts/uv'
  else
    skyward_missing "there is nothing to unpack uv with: install unzip, python3, bsdtar or busybox on the machine, or in its image"
  fi
}
skyward_missing() { # the message, with a remedy
  printf '%s\n' "$1" >&2
  return 1
}
""".replace(
    "@WHEELS@",
    "\n".join(
        f"    Linux-{machine}) requirement={shlex.quote(wheel.requirement)} url={wheel.url} sha256={wheel.sha256} ;;"
        for machine, wheel in WHEELS.items()
    ),
)
_PARTS = (_STRICT, _REPORTS, _LOCKS, _SHUTDOWN, _UV, _FETCH_UV, _APT, _ENVIRONMENT)


def prelude() -> str:
    """Return the head of a script: strict mode, `SKYWARD_HOME`, the trap that reports a failure, and all functions."""
    return "\n".join(_PARTS)


def shutdown_after(ttl_seconds: int) -> str:
    """Return a line that turns the machine off after some seconds, and replaces an earlier such timer; "" for 0.

    It needs root, or sudo without a password. With systemd, seconds are rounded up to minutes.
    """
    return _call("skyward_shutdown_after", [str(ttl_seconds)]) if ttl_seconds else ""


def python_environment(name: str, python: str, steps: Iterable[Step], apt: Iterable[str]) -> str:
    """Return lines that install the apt packages, and `$SKYWARD_HOME/envs/NAME`, an environment with Python `python`.

    `python` is as "3.13". Phases: "uv" and "deps" unless the environment is complete, "apt" if a package is missing.
    """
    packages = list(apt)
    install = _call("skyward_apt", packages) + "\n" if packages else ""
    body = "\n".join(f"  {_step(step)}" for step in steps)
    build = _call("skyward_build", [name, python])
    return f'skyward_packages() {{\n{body}\n}}\n{_call("skyward_find", [name])}\n{install}[ -n "$skyward_complete" ] || {build}'


def _step(step: Step) -> str:
    if step.file is None:
        return _call("skyward_pip", step.arguments)
    name, text = step.file
    path = f'"$skyward_environment/{name}"'
    return f"printf '%s' {_quoted(text)} >{path}\n  {_call('skyward_pip', step.arguments)} -r {path}"


def export(env: Mapping[str, str]) -> str:
    """Return one `export` for each variable, by name. Names must be valid identifiers; values are taken literally."""
    return "\n".join(f"export {name}={_quoted(value)}" for name, value in sorted(env.items()))


def source(path: str) -> str:
    """Return one line that runs a file in the same shell, and removes it."""
    return f". {shlex.quote(path)}; rm -f -- {shlex.quote(path)}"


def done(phase: str) -> str:
    """Return the line that reports the success of all phases up to this one."""
    return f"printf '::skyward done phase=%s\\n' {shlex.quote(phase)}"


def script(*parts: str) -> str:
    """Join parts to a bash script, leaving out the empty ones."""
    return (
        "#!/usr/bin/env bash\n# shellcheck disable=SC1003,SC2016,SC2088 # a value that looks like an expansion is literal text\n"
        + "\n".join(part for part in parts if part)
        + "\n"
    )


def _quoted(value: str) -> str:
    # shlex.quote omits quotes if it can; shellcheck reports its "export A==" as a mistake
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _call(function: str, words: Iterable[str]) -> str:
    return f"{function} {shlex.join(words)}"


# Wheels of uv, by version and hash, for machines that have no uv and cannot use this client's.
#
# The version is that of `uv.lock`; a test compares every line with it. The musl files are linked statically and run on
# any Linux of their architecture. uv chooses the Python to download by the machine, not by its own binary.


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
