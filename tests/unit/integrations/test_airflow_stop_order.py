"""The process that a kill starts: it ends the pool with the credentials of a connection."""

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from airflow_provider_skyward import stop_order


def test_the_order_goes_through_stdin_and_no_argument_has_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users see the arguments and the environment of a process."""
    started: list[tuple[list[str], dict[str, Any], bytes]] = []
    ended: list[tuple[str, Any]] = []

    class Pipe(io.BytesIO):
        def close(self) -> None:
            started[-1] = (*started[-1][:2], self.getvalue())

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        started.append((command, options, b""))
        return SimpleNamespace(stdin=Pipe())

    monkeypatch.setattr(stop_order, "subprocess", SimpleNamespace(Popen=start, PIPE=-1, DEVNULL=-3))
    stop_order.order_stop("nightly", sky.RunPod(api_key="a-secret", region="EU-RO-1"))
    ((command, options, order),) = started
    assert command == [sys.executable, "-m", "airflow_provider_skyward.stop_order"]
    assert "env" not in options
    assert options["start_new_session"], "SIGKILL to the task's process group must not end it"

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(order)))
    monkeypatch.setattr(sky, "release", lambda pool, credentials: ended.append((pool, credentials)))
    stop_order.main()
    ((pool, credentials),) = ended
    assert pool == "nightly"
    assert credentials.api_key.get_secret_value() == "a-secret"
    assert credentials.region == "EU-RO-1"
