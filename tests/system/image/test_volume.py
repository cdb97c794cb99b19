"""S3 volumes: valid paths, buckets, prefixes and services, overlaps, and the quoting of the script."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.errors import BadRequest
from skyward_core.image.image import Image
from skyward_core.image.volume import S3Volume
from skyward_core.image.volume_shell import mount_volumes

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


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
        ("s3://my-bucket", "only the name"),
        ("my-bucket/datasets", "prefix"),
        ("bücket", "lowercase letters, digits"),
        ("bucket\n", "lowercase letters, digits"),
        ("bucket٣", "lowercase letters, digits"),
    ],
)
def test_invalid_bucket_names_are_refused_with_the_rule(bucket, reason):
    """The message has the rule of AWS that the name violates."""
    with pytest.raises(BadRequest) as caught:
        S3Volume(mount_path="/data", bucket=bucket)
    assert reason in str(caught.value)


def test_the_script_passes_shellcheck():
    """It is checked together with an image's script."""
    volumes = [
        S3Volume(mount_path="/it's $HOME", bucket="a.b.c", prefix="`x`"),
        S3Volume(mount_path="/out", bucket="out", read_only=False, region="eu-west-1"),
    ]
    script = Image().bootstrap() + mount_volumes(volumes)
    assert (
        subprocess.run(
            [SHELLCHECK, "--shell=bash", "-"], input=script + "\n", capture_output=True, text=True, check=False
        ).stdout
        == ""
    )


WORDS = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF).filter(str.isprintable), min_size=1, max_size=20
).filter(lambda word: ".." not in word)


@settings(max_examples=50, deadline=None)
@given(WORDS, WORDS)
def test_special_characters_reach_the_shell_literally(path, prefix):
    """Quotes, substitutions and globs in a path or prefix are not interpreted."""
    volume = S3Volume(mount_path=f"/x{path}", bucket="my-bucket", prefix=f"x{prefix}", endpoint_url="http://x.org:1")
    call = mount_volumes([volume]).splitlines()[-1]
    output = subprocess.run(
        ["bash", "-c", f'skyward_volume() {{ printf "%s\\0" "$@"; }}\n{call}'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split("\0") == [volume.mount_path, "ro", "my-bucket", volume.prefix, "http://x.org:1", "", ""]
