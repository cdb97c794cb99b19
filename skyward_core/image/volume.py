"""`S3Volume`: a bucket, or a part of one, as a folder on every node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import combinations
from posixpath import normpath
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from skyward_core.errors import BadRequest
from skyward_core.frozen import Frozen

_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")
_RESERVED_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
# `mountpoint` cannot be used: it calls the file system, and a dead one does not answer.
_UNMOUNT = r"""skyward_is_mounted() {
  findmnt --noheadings --mountpoint "$1" >/dev/null 2>&1
}
skyward_unmount() { # as root, or as the user who mounted it
  for skyward_undo in 'umount' 'fusermount3 -u' 'fusermount -u' 'umount --lazy' 'fusermount3 -u -z' 'fusermount -u -z'; do
    skyward_is_mounted "$1" || return 0
    $skyward_undo -- "$1" >/dev/null 2>&1 || :
  done
  ! skyward_is_mounted "$1"
}
"""  # noqa: E501
# Without an answer s3fs requests an instance's role for minutes (seen: more than 20 s without a route), and 1.90
# requests its name without the token that IMDSv2 needs: so we find the name. Other clouds have a service at that
# address too, but no roles.
_CREDENTIALS = r"""skyward_metadata() { # method, path, header: the body, if the status is 200
  timeout 2 bash -c 'exec 3<>/dev/tcp/169.254.169.254/80
    printf "%s %s HTTP/1.1\r\nHost: 169.254.169.254\r\n%s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" "$1" "$2" "$3" >&3
    read -r _ status _ <&3
    [ "$status" = 200 ] && sed -e "1,/^\r*\$/d" <&3' skyward-metadata "$@" 2>/dev/null
}
skyward_find_role() {
  local token
  [ "${AWS_EC2_METADATA_DISABLED:-}" != true ] || return 1
  token=$(skyward_metadata PUT /latest/api/token 'X-aws-ec2-metadata-token-ttl-seconds: 60') || return 1
  skyward_role=$(skyward_metadata GET /latest/meta-data/iam/security-credentials/ "X-aws-ec2-metadata-token: $token") || return 1
  [ -n "$skyward_role" ]
}
skyward_find_credentials() {
  if [ -n "${AWS_ACCESS_KEY_ID:-}" ]; then
    skyward_credentials=environment
  elif [ -s "$HOME/.aws/credentials" ] || { [ "$skyward_mounter" = s3fs ] && { [ -s "$HOME/.passwd-s3fs" ] || [ -s /etc/passwd-s3fs ]; }; }; then
    skyward_credentials=files
  elif skyward_find_role; then
    skyward_credentials=role
  else
    skyward_credentials=none
  fi
}
"""  # noqa: E501
# The name of an s3fs mount identifies its owner and its content: skyward- and a hash of all its settings. All mounts of
# mountpoint-s3 have the same name; for them the list of this instance decides. Another user's mount is never on that
# list.
_PLACE = r"""skyward_mounted_by() {
  findmnt --noheadings --output SOURCE --mountpoint "$1" 2>/dev/null | tail -n 1
}
skyward_is_listed() {
  grep --quiet --line-regexp --fixed-strings -e "$1" "$SKYWARD_INSTANCE_DIRECTORY/mounts" 2>/dev/null
}
skyward_is_ours() { # mount path, what is mounted there
  case $2 in
    skyward-*) ;;
    mountpoint-s3) skyward_is_listed "$1" ;;
    *) return 1 ;;
  esac
}
skyward_list() {
  skyward_is_listed "$1" || printf '%s\n' "$1" >>"$SKYWARD_INSTANCE_DIRECTORY/mounts"
}
skyward_clear() { # mount path, what is mounted there
  if skyward_is_ours "$1" "$2"; then skyward_unmount "$1"; fi
  if skyward_is_mounted "$1"; then
    printf '%s is taken: %s is mounted there; choose another mount_path, or unmount it\n' "$1" "$2"
    return 1
  fi
  if ! mkdir -p -- "$1" 2>/dev/null; then
    skyward_sudo mkdir -p -- "$1"
    skyward_sudo chown -- "$(id -u):$(id -g)" "$1"
  fi
  if [ -n "$(ls -A -- "$1")" ]; then
    printf '%s is not empty, and a volume would hide what is there: choose another mount_path\n' "$1"
    return 1
  fi
  skyward_list "$1"
}
"""
# s3fs detaches before it contacts the service. If the service refuses, s3fs ends without a message (and with status 0,
# in the foreground too). Until it knows, its file system does not answer. Before it ends, it answers at most one more
# request. So two answers prove that the mount works. Listing the files would prove no more, and costs a request for
# each of them.
_MOUNT = r"""skyward_answers() {
  for _ in first second; do
    # f_type of every FUSE file system, statfs(2)
    [ "$(timeout --signal=KILL 45 stat --file-system --format=%t -- "$1" 2>/dev/null)" = 65735546 ] || return 1
  done
}
skyward_s3fs() { # bucket:/prefix, mount path, options of s3fs
  local code=0
  s3fs "$@"
  if skyward_answers "$2"; then return 0; fi
  skyward_unmount "$2"
  timeout --kill-after=5 20 s3fs "$@" -f -o dbglevel=err,retries=1 2>&1 | tail -n 20 || code=$?
  skyward_unmount "$2"
  [ "$skyward_credentials" != none ] ||
    printf '%s\n' 'the request had no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in Image(env=...)'
  return "$((code ? code : 1))"
}
skyward_mount_s3() { # options of mount-s3, bucket, mount path
  mount-s3 "$@"
  skyward_answers "${!#}"
}
skyward_find_mounter() {
  skyward_mounter=mount-s3
  if ! command -v mount-s3 >/dev/null; then
    skyward_mounter=s3fs
    command -v s3fs >/dev/null || skyward_apt s3fs
  fi
  skyward_find_credentials
}
skyward_volume() { # mount path, ro or rw, bucket, prefix, endpoint, region
  local endpoint=${5:-${AWS_ENDPOINT_URL_S3:-${AWS_ENDPOINT_URL:-}}} region=${6:-${AWS_REGION:-${AWS_DEFAULT_REGION:-}}} name found
  endpoint=${endpoint%/}
  name=mountpoint-s3
  [ "$skyward_mounter" = mount-s3 ] ||
    name=skyward-$(printf '%s\n' "$@" "$endpoint" "$region" "$skyward_credentials" "${AWS_ACCESS_KEY_ID:-}" | sha256sum | cut -c 1-16)
  found=$(skyward_mounted_by "$1") || found=
  if [ "$found" = "$name" ] && skyward_is_ours "$1" "$found" && skyward_answers "$1"; then
    skyward_list "$1"
  else
    skyward_run skyward_clear "$1" "$found"
    if [ "$skyward_mounter" = s3fs ]; then
      skyward_by_s3fs "$1" "$2" "$3" "$4" "$name"
    else
      skyward_by_mount_s3 "$1" "$2" "$3" "$4"
    fi
  fi
}
skyward_by_s3fs() { # objects have no owner or mode: they get the node's user
  local options
  options="fsname=$5,uid=$(id -u),gid=$(id -g),umask=0022,mp_umask=0022,connect_timeout=10,sigv4"
  case $2 in
    ro) options+=,ro ;;
    *) options+=,stat_cache_expire=5 ;; # seconds until this node sees a file that another node has replaced
  esac
  if [ -n "$endpoint" ]; then
    options+=",url=$endpoint,use_path_request_style"
  else
    [ -z "$region" ] || options+=",url=https://s3.$region.amazonaws.com"
    case $3 in *.*) options+=,use_path_request_style ;; esac # no certificate covers a name with more dots
  fi
  [ -z "$region" ] || options+=",endpoint=$region"
  case $skyward_credentials in
    environment) options+=${AWS_SESSION_TOKEN:+,use_session_token} ;;
    role) options+=",iam_role=$skyward_role" ;;
    none) options+=,public_bucket=1 ;;
  esac
  skyward_run skyward_s3fs "$3${4:+:/${4%/}}" "$1" -o "$options"
}
skyward_by_mount_s3() {
  local options=()
  case $2 in
    ro) options+=(--read-only) ;;
    *) options+=(--allow-delete --allow-overwrite) ;;
  esac
  [ -z "$4" ] || options+=(--prefix "$4")
  [ -z "$endpoint" ] || options+=(--endpoint-url "$endpoint" --force-path-style)
  [ -z "$region" ] || options+=(--region "$region")
  [ "$skyward_credentials" != none ] || options+=(--no-sign-request)
  skyward_run skyward_mount_s3 "${options[@]}" "$3" "$1"
}
"""  # noqa: E501


class S3Volume(Frozen):
    """A bucket of S3, mounted at an absolute path.

    `prefix` limits it to the keys below one "folder"; it gets the "/" at its end that mounting needs, and `mount_path`
    loses its own. `endpoint_url` is the URL of another service with the S3 protocol ("https://minio.example.org:9000"),
    and `region` is the bucket's. With None the node's environment has them (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL;
    AWS_REGION, AWS_DEFAULT_REGION). Credentials are not part of a volume: the environment has them too. Raises
    BadRequest.

    >>> volume = S3Volume(mount_path="/data/", bucket="my-bucket", prefix="datasets")
    >>> volume.mount_path, volume.prefix, volume.read_only
    ('/data', 'datasets/', True)
    """

    kind: Literal["s3"] = "s3"
    """The kind of volume, for its plain data."""
    mount_path: str
    """The absolute path of the folder on each node."""
    bucket: str
    """The bucket's name, without "s3://"."""
    prefix: str = ""
    """Only the keys below it."""
    read_only: bool = True
    """Mount it so that calls cannot write."""
    endpoint_url: str | None = None
    """Another service with the S3 protocol; None: the node's environment, else AWS."""
    region: str | None = None
    """The bucket's region; None: the node's environment."""

    @field_validator("mount_path")
    @classmethod
    def _is_an_absolute_path(cls, path: str) -> str:
        if not path.startswith("/") or not path.isprintable() or ".." in path.split("/"):
            raise ValueError(f'mount_path={path!r} is not an absolute path: write "/data"')
        path = "/" + normpath(path).lstrip("/")
        if path == "/":
            raise ValueError('mount_path="/" would hide the whole machine: write "/data"')
        return path

    @field_validator("bucket")
    @classmethod
    def _is_a_bucket_name(cls, bucket: str) -> str:
        if "/" in bucket:
            raise ValueError(
                f'bucket={bucket!r} must be only the name, without "s3://"; the text after the name goes to prefix'
            )
        if fault := _fault_of_bucket(bucket):
            raise ValueError(f"bucket={bucket!r} is not a valid name of an S3 bucket: it must {fault}")
        return bucket

    @field_validator("prefix")
    @classmethod
    def _is_a_folder_of_keys(cls, prefix: str) -> str:
        if prefix.startswith("/") or not prefix.isprintable():
            raise ValueError(
                f'prefix={prefix!r} is not the beginning of a key: keys do not start with "/"; write "datasets/"'
            )
        prefix = prefix and prefix.removesuffix("/") + "/"
        if len(prefix.encode()) > 1024:
            raise ValueError("prefix is longer than a key may be, 1024 bytes")
        return prefix

    @field_validator("endpoint_url")
    @classmethod
    def _is_the_url_of_a_service(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if "@" in url:
            raise ValueError(
                "endpoint_url must not hold a password: credentials go to Image(env=...), as AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY"
            )
        if not _ENDPOINT.fullmatch(url) or not urlsplit(url).hostname:
            raise ValueError(
                f"endpoint_url={url!r} is not the URL of a service, without a path: write"
                ' "https://minio.example.org:9000"'
            )
        return url.removesuffix("/")

    @field_validator("region")
    @classmethod
    def _looks_like_a_region(cls, region: str | None) -> str | None:
        if region is not None and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", region):
            raise ValueError(f'region={region!r} is not the name of a region: write "eu-central-1"')
        return region


type Volume = S3Volume
"""Any volume; `kind` distinguishes them in JSON."""


def refuse_overlaps(volumes: Sequence[Volume]) -> None:
    """Raise BadRequest, naming both paths, if a volume would be mounted over another or inside it."""
    for one, other in combinations(volumes, 2):
        outer, inner = sorted((one.mount_path, other.mount_path))
        if inner == outer:
            raise BadRequest(f"two volumes have the mount_path {outer!r}: give each its own path")
        if inner.startswith(f"{outer}/"):
            raise BadRequest(
                f"a volume's mount_path {inner!r} is inside another's, {outer!r}: give each a path outside the other's"
            )


def _fault_of_bucket(name: str) -> str:
    """Return the rule that the name violates, or "".

    Source: "General purpose bucket naming rules" of the Amazon S3 User Guide, checked 2026-11.
    """
    if not 3 <= len(name) <= 63:
        return "have 3 to 63 characters"
    if not re.fullmatch(r"[a-z0-9.-]+", name):
        return "have only lowercase letters, digits, dots and hyphens"
    if not (name[0].isalnum() and name[-1].isalnum()):
        return "begin and end with a letter or digit"
    if ".." in name:
        return "not have two dots in a row"
    if re.fullmatch(r"\d+\.\d+\.\d+\.\d+", name):
        return "not look like an IP address"
    if reserved := next((p for p in _RESERVED_PREFIXES if name.startswith(p)), None):
        return f"not begin with {reserved!r}"
    if reserved := next((s for s in _RESERVED_SUFFIXES if name.endswith(s)), None):
        return f"not end with {reserved!r}"
    return ""


# Shell text that mounts volumes on a node.
#
# As in `shell`, the program is constant and values enter it only as quoted words. Credentials are never words: they
# stay in the environment, so that neither `ps` nor the line of a failed command shows them.


def mount_volumes(volumes: Sequence[Volume]) -> str:
    """Return lines of bash that mount all volumes, in this order; "" without volumes. The lines are idempotent.

    They follow `Image.bootstrap()`'s text, or `shell.prelude()`, in the same shell, and need
    `$SKYWARD_INSTANCE_DIRECTORY`. Phases: "volumes", and "apt" if s3fs must be installed first; `mount-s3`
    (mountpoint-s3) is used if the image has it. A volume that cannot be mounted fails the phase. The message of the
    mounting program stands above the line with the failure.

    Each mount point is written to `$SKYWARD_INSTANCE_DIRECTORY/mounts` before anything is mounted there;
    `termination_shell` reads that file. A mount of another user at the path is not changed, and fails the phase.

    The first credentials found are used: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) of the
    environment, the machine's own files (`~/.aws/credentials`, s3fs's passwd files), the role of an EC2 instance, none
    (public buckets). If the volume has no endpoint or region, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION,
    AWS_DEFAULT_REGION of the environment are used.
    """
    if not volumes:
        return ""
    return "\n".join(
        [_UNMOUNT, _CREDENTIALS, _PLACE, _MOUNT, "skyward_find_mounter", "skyward_phase volumes", *map(_mount, volumes)]
    )


def _mount(volume: Volume) -> str:
    mode = "ro" if volume.read_only else "rw"
    return "skyward_volume " + shlex.join(
        [volume.mount_path, mode, volume.bucket, volume.prefix, volume.endpoint_url or "", volume.region or ""]
    )
