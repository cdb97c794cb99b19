"""The operator's side of the rental service: it starts the service, sets its faults, and reads its full state."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.kill.clock import SharedClock

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Seen:
    """The state that the console shows: every machine ever created, and every request."""

    machines: tuple[dict[str, Any], ...]
    requests: tuple[dict[str, Any], ...]

    def billed(self, pool_id: str | None = None) -> set[str]:
        return {
            machine["id"]
            for machine in self.machines
            if machine["is_billed"] and pool_id in (None, machine["tags"].get("skyward-pool"))
        }

    def of(self, pool_id: str) -> list[dict[str, Any]]:
        return [machine for machine in self.machines if machine["tags"].get("skyward-pool") == pool_id]

    def touched(self) -> set[str]:
        """Ids of the machines for which any client requested the end."""
        return {
            machine_id
            for request in self.requests
            if request["verb"] in ("terminate", "shutdown")
            for machine_id in request["ids"]
        }

    def count(self, verb: str) -> int:
        return sum(request["verb"] == verb for request in self.requests)


class RunningService:
    """A rental service in its own process, with its machines' files in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.clock = SharedClock(folder / "clock")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.service", str(folder)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self._saved_offset = 0.0
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)
        self.clock.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> Seen:
        """Return what the console shows, after the requests of killed clients have been processed."""
        seen = self._ask("GET", "/admin/console")
        return Seen(tuple(seen["machines"]), tuple(seen["requests"]))

    def break_down(self, **faults: Any) -> None:
        """Set these faults (`service.Faults`), and no others, from now on."""
        self._ask("POST", "/admin/faults", faults)

    def reset(self, machines: list[dict[str, Any]] | None = None) -> None:
        """Start again: no faults, no requests, these machines; the clock shows the real time again."""
        self.clock.reset()
        self._ask("POST", "/admin/reset", {"machines": machines or []})

    def save(self) -> None:
        """Save the whole state, including the clock, for `restore`."""
        self._saved_offset = self.clock.offset_seconds
        self._ask("POST", "/admin/save", {})

    def restore(self) -> None:
        """Restore the state of `save`. May be called repeatedly."""
        self.clock.reset(self._saved_offset)
        self._ask("POST", "/admin/restore", {})

    def shut_down(self, machine_id: str) -> None:
        self._ask("POST", f"/machines/{machine_id}/shutdown")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (method, path, answer.status, text)
        return json.loads(text)
