"""A fake of EC2's metadata service (IMDSv2), only for preemption notices.

In a test: `with FakeMetadata(folder) as service:`. On a host of the test bed, as a program: `python3 fake_metadata.py
FOLDER ADDRESS PORT`. The files `instance-action` and `rebalance` of the folder are served; a missing file is 404. It
uses only the standard library.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

PATHS = {
    "/latest/meta-data/spot/instance-action": "instance-action",
    "/latest/meta-data/events/recommendations/rebalance": "rebalance",
}


def instance_action(seconds_left: float, action: str = "terminate") -> str:
    """Return the notice with this preemption time."""
    return json.dumps({"action": action, "time": stamp(time.time() + seconds_left)})


def stamp(seconds: float) -> str:
    """Return a time in EC2's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class FakeMetadata:
    """A service on an address of this machine; a context manager.

    A test may expire its tokens, let it hang, or let it fail with a status.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.tokens_given = 0
        self.status = 0
        self.date: str | None = None
        self.hangs = False
        self._awake = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                service.tokens_given += 1
                token = f"token-{service.tokens_given}"
                service.tokens.add(token)
                is_right = (
                    self.path == "/latest/api/token"
                    and 1 <= int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21_600
                )
                self.answer(*((200, token) if is_right else (400, "")))

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") not in service.tokens:
                    self.answer(401, "")
                elif service.status:
                    self.answer(service.status, "")
                else:
                    try:
                        self.answer(200, (folder / PATHS[self.path]).read_text())
                    except (KeyError, FileNotFoundError):
                        self.answer(404, "not found")

            def answer(self, status: int, body: str) -> None:
                service.asked.append(f"{self.command} {self.path} {status}")
                if service.hangs:
                    service._awake.wait()
                    return
                self.send_response_only(status)
                self.send_header("Date", service.date or self.date_time_string())
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.02), name="fake-metadata", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._awake.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Return its URL."""
        return "http://{}:{}".format(*self._server.server_address[:2])


if __name__ == "__main__":
    with FakeMetadata(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])):
        threading.Event().wait()
