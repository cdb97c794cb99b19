"""A fake cloud as a real HTTP server on this machine, with faults on demand. Each REST cloud's fake is a subclass.

class FakeAcme(FakeCloud):
    @route("GET", "/v1/machines/{id}")
    def machine(self, request: Request) -> Reply: ...
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

type Handle = Callable[[Any, "Request"], "Reply"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `words` are the parts of the path that the route names."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: JSON, or plain text if the body is a string and `is_text` is true."""

    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    is_text: bool = False


@dataclass(slots=True)
class Fault:
    """A failure of the next `times` requests of a method with a path that matches a pattern.

    `reply` replaces the answer. With `is_done` the request has taken effect. Without a reply the connection is reset.
    """

    method: str
    pattern: str
    reply: Reply | None = None
    is_done: bool = False
    times: int = 1


def route(method: str, path: str) -> Callable[[Handle], Handle]:
    """Mark a method of a fake as the handler of a request. `{name}` in the path is one part of it."""

    def mark(handle: Handle) -> Handle:
        handle.route = (method, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)))  # type: ignore[attr-defined]
        return handle

    return mark


class FakeCloud:
    """A server on a free port with a thread for each request. One handler runs at a time. It is a context manager.

    `refuse` answers before any route does, for instance requests without credentials. `requests` are all that came,
    faults included. `delay_seconds` is the latency of each answer, outside of the lock. `address` is its host and port. With `tls` it is an HTTPS server.
    """

    address = "127.0.0.1"

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.delay_seconds = 0.0
        self.lock = threading.RLock()
        self._routes = [
            (*handle.route, handle)
            for kind in reversed(type(self).__mro__)
            for handle in vars(kind).values()
            if hasattr(handle, "route")
        ]
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # head and body are two packets: the second would wait 40 ms for the acknowledgement of the first
            disable_nagle_algorithm = True

            def answer(self) -> None:
                fake._answer(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Ignore errors of clients that have closed their connection."""

        self._scheme = "https" if tls else "http"
        self._server = Server((self.address, 0), Handler)
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-cloud", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Return its base URL."""
        return f"{self._scheme}://{self.address}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse(self, request: Request) -> Reply | None:
        """Return the answer to a request without the right credentials; None if the request is accepted."""
        return None

    def fail(
        self, method: str, pattern: str, reply: Reply | None = None, *, is_done: bool = False, times: int = 1
    ) -> None:
        """Let the next requests of a method fail if their path begins with the pattern."""
        with self.lock:
            self.faults.append(Fault(method, pattern, reply, is_done, times))

    def asked(self, method: str, pattern: str = "") -> list[Request]:
        """Return the requests of a method with a path that begins with the pattern."""
        with self.lock:
            return [
                request for request in self.requests if request.method == method and re.match(pattern, request.path)
            ]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        parts = urlsplit(handler.path)
        try:
            body = json.loads(content) if content else None
        except ValueError:
            body = dict(parse_qsl(content.decode()))
        request = Request(
            handler.command,
            parts.path,
            dict(parse_qsl(parts.query)),
            body,
            {name.lower(): value for name, value in handler.headers.items()},
        )
        with self.lock:
            self.requests.append(request)
            fault = next(
                (
                    fault
                    for fault in self.faults
                    if fault.method == request.method and re.match(fault.pattern, request.path) and fault.times
                ),
                None,
            )
            if fault is not None:
                fault.times -= 1
            reply = self._reply(request) if fault is None or fault.is_done else None
            if fault is not None:
                reply = fault.reply
            # under the lock, because it may contain rows that the next request changes
            content = b"" if reply is None else _content(reply)
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        if reply is None:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.close_connection = True
            handler.connection.close()
            return
        _send(handler, reply, content)

    def _reply(self, request: Request) -> Reply:
        if (refusal := self.refuse(request)) is not None:
            return refusal
        for method, pattern, handle in self._routes:
            if method == request.method and (match := pattern.fullmatch(request.path)):
                return handle(
                    self,
                    Request(
                        request.method, request.path, request.query, request.body, request.headers, match.groupdict()
                    ),
                )
        return Reply(404, {"message": f"no route for {request.method} {request.path}"})


def _content(reply: Reply) -> bytes:
    return b"" if reply.body is None else str(reply.body).encode() if reply.is_text else json.dumps(reply.body).encode()


def _send(handler: BaseHTTPRequestHandler, reply: Reply, content: bytes) -> None:
    handler.send_response(reply.status)
    handler.send_header("Content-Type", "text/plain" if reply.is_text else "application/json")
    handler.send_header("Content-Length", str(len(content)))
    for name, value in reply.headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)
