"""Our own package for the nodes: a copy of what this client runs, so that both sides always speak the same language."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import uuid
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

PACKAGE = "skyward_core"


@cache
def shipped_package() -> Path:
    """Return a directory that holds a copy of our package and nothing else, for PYTHONPATH. Made once for each content, under the user's cache."""
    source = Path(__file__).parent.parent
    files = sorted(path for path in source.rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    target = user_cache_path("skyward") / "ship" / digest.hexdigest()[:12]
    if not target.exists():
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
        for path in files:
            copy = partial / PACKAGE / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        compileall.compile_dir(str(partial), quiet=2)
        try:
            os.rename(partial, target)
        except OSError:  # another process was faster
            shutil.rmtree(partial, ignore_errors=True)
    return target
