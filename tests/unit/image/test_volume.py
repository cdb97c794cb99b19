"""S3 volumes: valid paths, buckets, prefixes, services and regions, and overlaps."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from skyward_core.errors import BadRequest
from skyward_core.image.volume import S3Volume, Volume, refuse_overlaps


def volume(**fields: Any) -> S3Volume:
    return S3Volume(**{"mount_path": "/data", "bucket": "my-bucket"} | fields)


def test_a_volume_is_a_frozen_value() -> None:
    class Options(BaseModel):
        volume: tuple[Volume, ...] = ()

    requested = Options(volume=(volume(), volume(mount_path="/out", read_only=False)))
    assert Options.model_validate_json(requested.model_dump_json()) == requested
    assert [one["kind"] for one in requested.model_dump(mode="json")["volume"]] == ["s3", "s3"]
    assert len({volume(mount_path="//data//x/", prefix="a"), volume(mount_path="/data/x", prefix="a/")}) == 1
    assert (volume().prefix, volume().read_only) == ("", True)
    with pytest.raises(ValidationError):
        volume().bucket = "other"


# Of a bucket, one case or more for each of the "General purpose bucket naming rules" of the Amazon S3 User Guide.
# A comma in the URL of a service would begin another option of s3fs.
REFUSED = {
    "mount_path": [
        (path, 'write "/data"')
        for path in ["", "data", "~/data", "//", "/.", "/data/../etc", "/da\nta", "/da\0ta", "s3://data"]
    ],
    "prefix": [(prefix, "prefix") for prefix in ["/datasets", "a\nb", "é" * 512]],
    "endpoint_url": [
        *((f"https://x.org{end}", "https://minio.example.org:9000") for end in ["/path", "?a=b", ",use_cache=/etc", "\n"]),
        *((url, "https://minio.example.org:9000") for url in ["minio:9000", "ftp://x.org", "https://", "https://x .org", ""]),
        ("https://key:hush@x.org", "AWS_SECRET_ACCESS_KEY"),
    ],
    "region": [(region, "eu-central-1") for region in ["", "EU", "eu central", "eu,ro", "-eu", "eu\n"]],
    "bucket": [
        *((name, "lowercase letters, digits") for name in ["doc_example", "DocExample", "bücket", "bucket\n", "bucket٣"]),
        *((name, "3 to 63") for name in ["ab", "a" * 64, ""]),
        *((name, "begin and end") for name in ["doc-example-", ".bucket"]),
        ("my..bucket", "two dots"),
        ("192.168.5.4", "IP address"),
        ("xn--bucket", "'xn--'"),
        ("sthree-configurator", "'sthree-'"),
        ("amzn-s3-demo-bucket", "'amzn-s3-demo-'"),
        ("bucket-s3alias", "'-s3alias'"),
        ("bucket--ol-s3", "'--ol-s3'"),
        ("bucket.mrap", "'.mrap'"),
        ("bucket--use1-az4--x-s3", "'--x-s3'"),
        ("bucket--table-s3", "'--table-s3'"),
        ("s3://my-bucket", "only the name"),
        ("my-bucket/datasets", "prefix"),
    ],
    "readonly": [(True, "did you mean 'read_only'")],
    "kind": [("gcs", "'s3'")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "advice"), [(field, *case) for field, cases in REFUSED.items() for case in cases]
)
def test_a_wrong_field_is_refused_with_what_to_write(field: str, value: object, advice: str) -> None:
    with pytest.raises(BadRequest) as caught:
        volume(**{field: value})
    assert advice in str(caught.value)
    assert "hush" not in str(caught.value).partition("[type=")[0]


def test_what_services_accept_is_accepted() -> None:
    for bucket in (
        "my-reports-a1b2c3d4-5678-90ab-cdef-example33",
        "www.example.com",
        "abc",
        "a" * 63,
        "1.2.3",
        "256-b",
    ):
        assert volume(bucket=bucket).bucket == bucket
    for url in ("https://minio.example.org:9000", "http://10.0.0.5:9000", "https://[2001:db8::1]:9000"):
        assert volume(endpoint_url=f"{url}/").endpoint_url == url
    assert volume(region="eu-central-1").region == "eu-central-1"


@pytest.mark.parametrize(
    ("paths", "is_refused"),
    [
        (("/data", "/data2"), False),
        (("/a/b", "/a/c"), False),
        (("/data-1", "/data", "/dat"), False),
        (("/data", "/data/"), True),
        (("/x", "/data/x/y", "/data"), True),
        (("/a", "/a-b", "/a/b"), True),
    ],
)
def test_a_volume_with_the_path_of_another_or_inside_it_is_refused(paths: tuple[str, ...], is_refused: bool) -> None:
    volumes = [volume(mount_path=path) for path in paths]
    if not is_refused:
        refuse_overlaps(volumes)
        return
    with pytest.raises(BadRequest, match=r"'/(data|a)'.*(its own|a) path"):
        refuse_overlaps(volumes)
