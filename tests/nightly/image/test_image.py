"""Images: refused values, the content hash, and the effect of the script on a machine."""

import dataclasses
import gzip
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward_core.image import uv_wheels
from skyward_core.image.image import Image
from skyward_core.transport import code_upload
from skyward_core.worker.masking import MASK
from tests.conftest import examples
from tests.system.image.test_image import (
    _NASTY,
    _acceptable,
    _shellcheck,
)


@settings(max_examples=examples(20), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(pip=st.lists(_NASTY, max_size=3), values=st.lists(_NASTY.filter(lambda value: value != MASK), max_size=3))
@pytest.mark.generated
def test_special_characters_pass_shellcheck(pip, values):
    """Quotes, substitutions and globs in any place cause no fault."""
    image = Image(pip=_acceptable(pip), env={f"V{rank}": value for rank, value in enumerate(values)})
    assert _shellcheck(image.bootstrap()) == ""


def test_the_uv_for_another_architecture_is_downloaded_and_cached(tmp_path, monkeypatch):
    """For arm64 it is a static program (183 is EM_AARCH64 of ELF), downloaded once.

    A file with another hash is refused.

    Looks inside: the result is kept as long as the process lives.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code_upload._fetched_uv.cache_clear()
    try:
        packed = code_upload.shipped_uv("Linux", "aarch64")
        with gzip.open(packed.path) as content:
            binary = content.read()
        assert len(binary) == packed.unpacked_bytes
        assert (binary[:4], int.from_bytes(binary[18:20], "little")) == (b"\x7fELF", 183)
        assert [path.name for path in packed.path.parent.iterdir()] == [packed.path.name]
        code_upload._fetched_uv.cache_clear()
        monkeypatch.setattr(code_upload, "_fetch", None)
        assert code_upload.shipped_uv("Linux", "aarch64") == packed
        monkeypatch.undo()
        wrong = dataclasses.replace(uv_wheels.WHEELS["aarch64"], sha256="0" * 64)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            code_upload._fetch(wrong, tmp_path)
        assert "Hash mismatch" in caught.value.stderr or "hash" in caught.value.stderr
    finally:
        code_upload._fetched_uv.cache_clear()
