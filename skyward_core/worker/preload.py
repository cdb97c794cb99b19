"""Modules that a node imports once, in the process from which runners are forked (`Image(preload=...)`).

States of a module: named -> imported, or skipped for a reason. It is skipped if its import fails. It is also skipped if
it starts a thread or opens an accelerator: a fork copies neither, so this process could not be forked safely. An import
cannot be undone, so the process then starts again without the module. Nothing was forked before, and the client sees
one start.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

MARK = "::skyward preload "
SKIPPED = "SKYWARD_PRELOAD_SKIPPED"
"""Variable with the skipped modules and the reasons, from a start before."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/neuron", "/dev/accel", "/dev/vfio/")


def preload(modules: Sequence[str]) -> Mapping[str, str]:
    """Import these modules; return those that were skipped, with the reason.

    Starts this program again if a module may not be imported in it.
    """
    skipped: dict[str, str] = json.loads(os.environ.pop(SKIPPED, "{}"))
    inherited = frozenset(_descriptors())
    for module in modules:
        if module in skipped:
            continue
        try:
            import_module(module)
        except BaseException as error:  # a module may raise anything, also SystemExit
            skipped[module] = f"{type(error).__name__}: {error}"
        if reason := why_unsafe():
            skipped[module] = reason
            _start_again(skipped, inherited)
    if modules:
        gc.collect()
        gc.freeze()  # the collector writes to what it looks at, and forks would get copies of these pages
    return skipped


def why_unsafe() -> str:
    """Return why this process cannot be forked safely; "" if it can.

    A fork comes first, because OpenBLAS and others end their threads before a fork and start them again when they are
    needed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what is looked for
        if not (pid := os.fork()):
            os._exit(0)
    os.waitpid(pid, 0)
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    count = len(os.listdir("/proc/self/task")) - 1
    if count:
        return f"the import has started {count} threads{f' ({", ".join(names)})' if names else ''}"
    devices = sorted({what for what in _descriptors().values() if what.startswith(DEVICES)})
    return f"the import has opened {', '.join(devices)}" if devices else ""


def _descriptors() -> Mapping[int, str]:
    found = dict[int, str]()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # it was the descriptor of this listing
            continue
    return found


def _start_again(skipped: Mapping[str, str], inherited: frozenset[int]) -> NoReturn:
    """Run this program from its beginning, in this process, with the descriptors that it had then."""
    for descriptor in _descriptors().keys() - inherited:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - the only way to call it
    os.environ[SKIPPED] = json.dumps(dict(skipped))
    sys.stdout.flush()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - a shell would be another process
