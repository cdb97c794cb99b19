"""A process that gevent or eventlet has patched gets no pool, and a clear error at once."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.concurrency.threads import refuse_greenlets


def patched(*names: str) -> Any:
    return SimpleNamespace(is_module_patched=lambda name: name in names, is_monkey_patched=lambda name: name in names)


@pytest.mark.parametrize(("module", "library"), [("gevent.monkey", "gevent"), ("eventlet.patcher", "eventlet")])
def test_a_process_with_patched_modules_opens_and_attaches_no_pool(
    module: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that has patched nothing that a pool needs is no error. It is checked when a pool opens."""
    refuse_greenlets({module: patched("os", "dns")})
    pool = sky.ComputePool(provider=sky.Local(), display="quiet")
    monkeypatch.setitem(sys.modules, module, cast("Any", patched("socket", "select", "os")))
    words = f"{library} has replaced socket, select in this process.*separate process"
    with pytest.raises(sky.BadRequest, match=words):
        pool.open()
    with pytest.raises(sky.BadRequest, match=words):
        sky.ComputePool.attach("{}")
