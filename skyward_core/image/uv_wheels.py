"""Wheels of uv, by version and hash, for machines that have no uv and cannot use this client's.

The version is that of `uv.lock`; a test compares every line with it. The musl files are linked statically and run on
any Linux of their architecture. uv chooses the Python to download by the machine, not by its own binary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERSION = "0.13.8"


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


_FILES = "https://files.pythonhosted.org/packages"
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
