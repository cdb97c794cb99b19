"""S3 volumes: valid paths, buckets, prefixes and services, overlaps, and the quoting of the script."""

import pytest
from pydantic import BaseModel, ValidationError

from skyward_core.errors import BadRequest
from skyward_core.image.volume import S3Volume, Volume, refuse_overlaps
from skyward_core.image.volume_shell import mount_volumes


def test_the_example_of_the_reference():
    """The reference's volume is valid as written; only the bucket and the path are required."""
    volume = S3Volume(mount_path="/data", bucket="my-bucket", prefix="datasets/", read_only=True)
    assert (volume.mount_path, volume.bucket, volume.prefix, volume.read_only) == (
        "/data",
        "my-bucket",
        "datasets/",
        True,
    )
    assert S3Volume(mount_path="/data", bucket="my-bucket") == S3Volume(
        mount_path="/data", bucket="my-bucket", prefix="", read_only=True
    )


def test_a_list_of_volumes_survives_json():
    """Volumes come back equal, and their JSON has their kind."""

    class Options(BaseModel):
        volume: tuple[Volume, ...] = ()

    requested = Options(
        volume=(
            S3Volume(mount_path="/data", bucket="my-bucket"),
            S3Volume(mount_path="/out", bucket="other", read_only=False),
        )
    )
    assert Options.model_validate_json(requested.model_dump_json()) == requested
    assert [volume["kind"] for volume in requested.model_dump(mode="json")["volume"]] == ["s3", "s3"]


def test_a_volume_is_a_value():
    """Volumes hash, compare by value in any spelling of path and prefix, and cannot be changed."""
    volume = S3Volume(mount_path="//data//x/", bucket="my-bucket", prefix="datasets")
    assert len({volume, S3Volume(mount_path="/data/x", bucket="my-bucket", prefix="datasets/")}) == 1
    with pytest.raises(ValidationError):
        volume.bucket = "other"


@pytest.mark.parametrize(
    "path", ["", "data", "./data", "~/data", "/", "//", "/.", "/data/../etc", "/da\nta", "/da\0ta", "s3://data"]
)
def test_a_path_that_is_not_absolute_is_refused(path):
    """A mount path is absolute, is one line, has no "..", and is not the root."""
    with pytest.raises(BadRequest, match=r"write \"/data\""):
        S3Volume(mount_path=path, bucket="my-bucket")


# One case or more for each of the "General purpose bucket naming rules" of the Amazon S3 User Guide.
@pytest.mark.parametrize(
    "bucket",
    [
        "docexamplebucket-1a1b2c3d4-5678-90ab-cdef-example11",
        "logs-a1b2c3d4-5678-90ab-cdef-example22",
        "my-reports-a1b2c3d4-5678-90ab-cdef-example33",
        "example.com",
        "www.example.com",
        "my.example.s3.bucket",
        "abc",
        "a" * 63,
        "1.2.3",
        "256-bucket",
    ],
)
def test_valid_bucket_names_are_accepted(bucket):
    """The rules are AWS's."""
    assert S3Volume(mount_path="/data", bucket=bucket).bucket == bucket


@pytest.mark.parametrize("prefix", ["/datasets", "/", "a\nb", "é" * 512])
def test_an_invalid_prefix_is_refused(prefix):
    """A prefix does not start with a slash, is one line, and fits in a key of 1024 bytes with its slash."""
    with pytest.raises(BadRequest, match="prefix"):
        S3Volume(mount_path="/data", bucket="my-bucket", prefix=prefix)


def test_an_unknown_field_is_refused_with_the_nearest_name():
    """The message has the right name. Another kind of volume is refused too."""
    with pytest.raises(BadRequest, match="did you mean 'read_only'"):
        S3Volume(mount_path="/data", bucket="my-bucket", readonly=True)
    with pytest.raises(BadRequest, match="'s3'"):
        S3Volume(mount_path="/data", bucket="my-bucket", kind="gcs")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("https://minio.example.org:9000", "https://minio.example.org:9000"),
        ("http://10.0.0.5:9000/", "http://10.0.0.5:9000"),
        ("https://[2001:db8::1]:9000", "https://[2001:db8::1]:9000"),
        (None, None),
    ],
)
def test_the_url_of_another_service_is_accepted(given, taken):
    """Scheme, host and port are kept, a slash at the end is removed."""
    assert S3Volume(mount_path="/data", bucket="my-bucket", endpoint_url=given).endpoint_url == taken


# A comma would begin another option of s3fs.
@pytest.mark.parametrize(
    "url",
    [
        "minio:9000",
        "ftp://x.org",
        "https://",
        "https://x.org/path",
        "https://x.org?a=b",
        "https://x.org,use_cache=/etc",
        "https://x .org",
        "https://x.org\n",
        "",
    ],
)
def test_an_invalid_url_of_a_service_is_refused(url):
    """Another scheme, a path, a query or extra text is refused with an example."""
    with pytest.raises(BadRequest, match=r"https://minio\.example\.org:9000"):
        S3Volume(mount_path="/data", bucket="my-bucket", endpoint_url=url)


def test_a_password_in_the_url_is_refused_without_repeating_it():
    """The message says where credentials go."""
    with pytest.raises(BadRequest) as caught:
        S3Volume(mount_path="/data", bucket="my-bucket", endpoint_url="https://key:hush@x.org")
    assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)
    assert "hush" not in str(caught.value).partition("[type=")[0]


@pytest.mark.parametrize("region", ["", "EU", "eu central", "eu,ro", "-eu", "eu\n"])
def test_an_invalid_region_is_refused(region):
    """A region is one word of lowercase letters, digits and hyphens."""
    assert S3Volume(mount_path="/data", bucket="my-bucket", region="eu-central-1").region == "eu-central-1"
    with pytest.raises(BadRequest, match="eu-central-1"):
        S3Volume(mount_path="/data", bucket="my-bucket", region=region)


# ── several volumes ──────────────────────────────────────────────────────────────────────────────────────────────────


def volumes_at(*paths):
    return [S3Volume(mount_path=path, bucket="my-bucket") for path in paths]


@pytest.mark.parametrize("paths", [(), ("/data",), ("/data", "/data2"), ("/a/b", "/a/c"), ("/data-1", "/data", "/dat")])
def test_volumes_with_separate_paths_are_accepted(paths):
    """No path equals another one or is inside another one."""
    assert refuse_overlaps(volumes_at(*paths)) is None  # no error was raised


@pytest.mark.parametrize(
    "paths", [("/data", "/data/"), ("/x", "/data/x/y", "/data"), ("/data", "/x", "/data/x"), ("/a", "/a-b", "/a/b")]
)
def test_a_volume_with_the_path_of_another_or_inside_it_is_refused(paths):
    """The order does not matter. The message has the path."""
    with pytest.raises(BadRequest, match=r"'/(data|a)'.*(its own|a) path"):
        refuse_overlaps(volumes_at(*paths))


# ── the script ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_volumes_need_no_script():
    """Without volumes the script is empty, without a phase."""
    assert mount_volumes([]) == ""
