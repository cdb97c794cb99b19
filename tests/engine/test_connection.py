"""The connection to a pool's scheduler."""

import gc
import socket

import pytest

from skyward_core.engine.certificates import make_certificate
from skyward_core.engine.connection import PoolClient, connect


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
