"""Processes in which a pool cannot live: those whose threads and sockets have been replaced by greenlets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from skyward_core.errors import BadRequest

MODULES = ("thread", "threading", "socket", "select", "selectors", "subprocess", "queue", "time")
"""Modules that a pool's threads and event loops use. If they are replaced, the threads wait for each other for ever."""


def refuse_greenlets(modules: Mapping[str, ModuleType] = sys.modules) -> None:
    """Raise BadRequest if gevent or eventlet has replaced modules of the standard library: a pool would hang in `open`
    without an error.
    """
    for library, patched in (("gevent", _by_gevent(modules)), ("eventlet", _by_eventlet(modules))):
        if patched:
            raise BadRequest(
                f"{library} has replaced {', '.join(patched)} in this process, and a pool needs the real ones: its"
                " threads would wait for each other for ever. Open the pool in a separate process that is not"
                f" patched (`subprocess`, or a worker of another kind for these tasks), or do not call {library}'s"
                " monkey patching in this one."
            )


def _by_gevent(modules: Mapping[str, Any]) -> list[str]:
    if (monkey := modules.get("gevent.monkey")) is None:
        return []
    return [name for name in MODULES if monkey.is_module_patched(name)]


def _by_eventlet(modules: Mapping[str, Any]) -> list[str]:
    if (patcher := modules.get("eventlet.patcher")) is None:
        return []
    return [name for name in MODULES if patcher.is_monkey_patched(name)]
