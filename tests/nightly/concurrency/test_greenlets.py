"""A process that gevent or eventlet has patched gets no pool, and a clear error at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uv

PROGRAM = """
{before}
import skyward_core as sky
{after}
if __name__ == "__main__":
    try:
        with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
            print("open")
    except sky.BadRequest as error:
        print("refused:", error)
"""
PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real libraries, which none of our environments has."""
    folder = tmp_path_factory.mktemp("greenlets")
    command = [
        uv.find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
        "--target",
        str(folder),
        "gevent",
        "eventlet",
    ]
    subprocess.run(command, check=True, timeout=200)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", PATCHES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_real_library_is_noticed(library: str, when: str, site: Path, tmp_path: Path) -> None:
    """Patched before or after the import, `open` ends in seconds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**{"before": "", "after": "", when: PATCHES[library]}))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith(f"refused: {library} has replaced "), done.stderr[-2000:]
    assert time.monotonic() - began < 30
