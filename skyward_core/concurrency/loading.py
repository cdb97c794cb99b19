"""Imports large modules without garbage collections meanwhile.

An import makes tens of thousands of objects that stay. The collector would visit them again and again, with all that
the program has: that took a tenth of the time until a process that joins a pool has its first result.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from types import ModuleType


class _Pause:
    """Disables the collector while at least one thread imports; it is enabled again if it was so before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._imports = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._imports:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._imports += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._imports -= 1
            if not self._imports and self._was_enabled:
                _make_old()
                gc.enable()

    def end_in_fork(self) -> None:
        """In a fork no other thread of its parent imports."""
        self._lock = threading.Lock()
        if self._imports and self._was_enabled:
            gc.enable()
        self._imports = 0


def _make_old() -> None:
    """Move all objects to the oldest generation, as if they had outlived collections: else the next one visits each."""
    if not gc.get_freeze_count():  # the program's own frozen objects would thaw
        gc.freeze()
        gc.unfreeze()


_PAUSE = _Pause()
os.register_at_fork(after_in_child=_PAUSE.end_in_fork)


def load(name: str) -> ModuleType:
    """Import a module, and return it."""
    if (known := sys.modules.get(name)) is not None and not getattr(known.__spec__, "_initializing", False):
        return known
    with _PAUSE:
        return importlib.import_module(name)
