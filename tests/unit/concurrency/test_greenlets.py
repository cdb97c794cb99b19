"""A process that gevent or eventlet has patched gets no pool, and a clear error at once."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.concurrency.greenlets import refuse_greenlets


def patched(*names: str) -> Any:
    return SimpleNamespace(is_module_patched=lambda name: name in names, is_monkey_patched=lambda name: name in names)


@pytest.mark.parametrize(("module", "library"), [("gevent.monkey", "gevent"), ("eventlet.patcher", "eventlet")])
def test_the_patched_module_is_named(module: str, library: str) -> None:
    """The error says what to do instead; a library that has patched nothing that a pool needs is no error."""
    with pytest.raises(
        sky.BadRequest, match=f"{library} has replaced socket, select in this process.*separate process"
    ):
        refuse_greenlets({module: patched("socket", "select", "os")})
    refuse_greenlets({module: patched("os", "dns")})
    refuse_greenlets({})


def test_neither_opening_nor_attaching_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched before the import or after: it is checked when a pool opens."""
    pool = sky.ComputePool(provider=sky.Local(), display="quiet")
    monkeypatch.setitem(sys.modules, "gevent.monkey", cast("Any", patched("thread")))
    with pytest.raises(sky.BadRequest, match="gevent has replaced thread"):
        pool.open()
    with pytest.raises(sky.BadRequest, match="gevent has replaced thread"):
        sky.ComputePool.attach("{}")
