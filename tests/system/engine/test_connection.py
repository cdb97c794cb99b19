"""The connection to a pool's scheduler."""

import gc
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.engine.certificates import make_certificate
from skyward_core.engine.connection import (
    PoolClient,
    call_scheduler,
    connect,
)
from skyward_core.engine.dask_loop import DaskLoop
from skyward_core.errors import NodeLost


@pytest.mark.parametrize("is_there", [False, True])
def test_a_connection_that_fails_leaves_nothing_to_be_closed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """No process listens, or the listener is silent.

    Collected as garbage, Dask's client would close itself, on a loop that is closed by then.
    """
    clients = list[PoolClient]()
    start = PoolClient.start
    monkeypatch.setattr(PoolClient, "start", lambda client, **words: clients.append(client) or start(client, **words))
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        if is_there:
            there.listen()
        with pytest.raises(OSError):
            connect(f"tls://127.0.0.1:{there.getsockname()[1]}", make_certificate("p"), 0.5)
    assert [client.status for client in clients] == ["closed"]
    clients.clear()
    gc.collect()


# ── a client that is closed meanwhile ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def dask_loop() -> Iterator[DaskLoop]:
    it = DaskLoop()
    it.start()
    yield it
    it.stop()


def closed_pool(**_: Any) -> Any:
    raise RuntimeError("ConnectionPool is closed")  # Dask's words


@pytest.mark.parametrize("scheduler", [None, SimpleNamespace(skyward_call=closed_pool)])
def test_a_question_to_a_client_that_is_closed_meanwhile_has_no_answer(dask_loop: DaskLoop, scheduler: Any) -> None:
    """Dask raises AttributeError or RuntimeError, which no caller expects."""
    client: Any = SimpleNamespace(loop=dask_loop.loop, scheduler=scheduler, status="closing")
    with pytest.raises(NodeLost, match="does not answer"):
        call_scheduler(client, "skyward_call", lambda: True, {})
    client.status = "running"  # then it is a fault
    with pytest.raises((AttributeError, RuntimeError), match=r"NoneType|is closed"):
        call_scheduler(client, "skyward_call", lambda: True, {})
