"""Which folders count as private: no other user can change them."""

import subprocess
import sys
from pathlib import Path

from tests.unit.worker.test_private_folders import (
    made,
)

AS_ON_MACOS = """
import os, sys
del os.O_PATH

def without_proc(real):
    def call(path, *arguments, **named):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "no /proc here", path)
        return real(path, *arguments, **named)
    return call

for name in ("readlink", "open", "stat", "access"):
    setattr(os, name, without_proc(getattr(os, name)))
from pathlib import Path
from skyward_core.paths import first_private
from skyward_core.worker.private_folders import make_private
print(first_private("nodes", [("A", lambda: Path(sys.argv[1]))], is_locked=True), make_private(Path(sys.argv[1], "b")))
"""


def test_a_client_without_proc_has_its_places(tmp_path: Path) -> None:
    """macOS has neither /proc nor O_PATH. The path is resolved there too."""
    (tmp_path / "link").symlink_to(made(tmp_path / "real"))
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_MACOS, str(tmp_path / "link" / "skyward")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(tmp_path / "real/skyward/nodes"), str(tmp_path / "real/skyward/b")], done.stderr
