"""`S3Volume`: a bucket, or a part of one, as a folder on every node."""

import re
from collections.abc import Sequence
from itertools import combinations
from posixpath import normpath
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from skyward_core.errors import BadRequest
from skyward_core.frozen import Frozen


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


_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")


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


_RESERVED_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
