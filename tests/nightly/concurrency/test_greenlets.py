"""A process that gevent or eventlet has patched gets no pool, and a clear error at once."""

import os
import subprocess
import sys
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
    install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder)]
    subprocess.run([*install, "gevent", "eventlet"], check=True, timeout=200)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", PATCHES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_real_library_is_noticed(library: str, when: str, site: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**{"before": "", "after": "", when: PATCHES[library]}))
    environ = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, program], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith(f"refused: {library} has replaced "), done.stderr[-2000:]
