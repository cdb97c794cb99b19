"""S3 volumes: which paths, buckets and prefixes are taken."""

import pytest
from pydantic import BaseModel, ValidationError

from skyward_core.image.volume import S3Volume, Volume


def test_the_example_of_the_reference():
    """The reference's volume is taken as it is written; only the bucket and the path are required."""
    volume = S3Volume(mount_path="/data", bucket="my-bucket", prefix="datasets/", read_only=True)
    assert (volume.mount_path, volume.bucket, volume.prefix, volume.read_only) == ("/data", "my-bucket", "datasets/", True)
    assert S3Volume(mount_path="/data", bucket="my-bucket") == S3Volume(mount_path="/data", bucket="my-bucket", prefix="", read_only=True)


def test_a_list_of_volumes_travels_through_json():
    """Volumes in a model come back equal from JSON, and say there what kind they are."""

    class Wish(BaseModel):
        volume: tuple[Volume, ...] = ()

    wish = Wish(volume=(S3Volume(mount_path="/data", bucket="my-bucket"), S3Volume(mount_path="/out", bucket="other", read_only=False)))
    assert Wish.model_validate_json(wish.model_dump_json()) == wish
    assert [volume["kind"] for volume in wish.model_dump(mode="json")["volume"]] == ["s3", "s3"]


def test_a_volume_is_a_value():
    """Volumes hash, compare by value whichever way the path and prefix are written, and cannot be changed."""
    volume = S3Volume(mount_path="//data//x/", bucket="my-bucket", prefix="datasets")
    assert len({volume, S3Volume(mount_path="/data/x", bucket="my-bucket", prefix="datasets/")}) == 1
    with pytest.raises(ValidationError):
        volume.bucket = "other"


@pytest.mark.parametrize("path", ["", "data", "./data", "~/data", "/", "//", "/.", "/data/../etc", "/da\nta", "/da\0ta", "s3://data"])
def test_a_path_that_is_not_absolute_is_refused(path):
    """A mount path is absolute, on one line, does not climb and is not the root."""
    with pytest.raises(ValidationError, match=r"write \"/data\""):
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
def test_names_that_aws_allows_are_taken(bucket):
    """A bucket's name by AWS's rules is taken."""
    assert S3Volume(mount_path="/data", bucket=bucket).bucket == bucket


@pytest.mark.parametrize(
    ("bucket", "reason"),
    [
        ("doc_example_bucket", "lowercase letters, digits"),
        ("DocExampleBucket", "lowercase letters, digits"),
        ("doc-example-bucket-", "begin and end"),
        ("my..bucket", "two dots"),
        ("192.168.5.4", "IP address"),
        ("ab", "3 to 63"),
        ("a" * 64, "3 to 63"),
        ("", "3 to 63"),
        (".bucket", "begin and end"),
        ("xn--bucket", "'xn--'"),
        ("sthree-configurator", "'sthree-'"),
        ("amzn-s3-demo-bucket", "'amzn-s3-demo-'"),
        ("bucket-s3alias", "'-s3alias'"),
        ("bucket--ol-s3", "'--ol-s3'"),
        ("bucket.mrap", "'.mrap'"),
        ("bucket--use1-az4--x-s3", "'--x-s3'"),
        ("bucket--table-s3", "'--table-s3'"),
        ("s3://my-bucket", "name alone"),
        ("my-bucket/datasets", "prefix"),
        ("bücket", "lowercase letters, digits"),
        ("bucket\n", "lowercase letters, digits"),
        ("bucket٣", "lowercase letters, digits"),
    ],
)
def test_names_that_aws_refuses_are_refused_with_the_rule(bucket, reason):
    """A name that breaks one of AWS's rules is refused, and the rule is told."""
    with pytest.raises(ValidationError) as caught:
        S3Volume(mount_path="/data", bucket=bucket)
    assert reason in str(caught.value)


@pytest.mark.parametrize("prefix", ["/datasets", "/", "a\nb", "é" * 512])
def test_a_prefix_that_no_key_has_is_refused(prefix):
    """A prefix does not start with a slash, is one line, and fits in a key of 1024 bytes with its slash."""
    with pytest.raises(ValidationError, match="prefix"):
        S3Volume(mount_path="/data", bucket="my-bucket", prefix=prefix)


def test_an_unknown_field_is_refused_with_the_nearest_name():
    """A misspelt field is refused and the right one told; another kind of volume is refused too."""
    with pytest.raises(ValidationError, match="did you mean 'read_only'"):
        S3Volume(mount_path="/data", bucket="my-bucket", readonly=True)
    with pytest.raises(ValidationError, match="'s3'"):
        S3Volume(mount_path="/data", bucket="my-bucket", kind="gcs")
