"""A fake cloud with faults on demand. Each REST cloud's fake is a subclass.

class FakeAcme(FakeCloud):
    @route("GET", "/v1/machines/{id}")
    def machine(self, request: Request) -> Reply: ...

It answers in this process (the fixture `in_process`), or, in a `with` block, as a real HTTP server.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

import httpx

from tests.providers.vendor_refusals import code_of, is_known

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
    """An answer: JSON, or plain text if the body is a string and `is_text` is true. `is_of_test`: the test chose it."""

    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    is_text: bool = False
    is_of_test: bool = False

    def content(self) -> bytes:
        if self.body is None:
            return b""
        return str(self.body).encode() if self.is_text else json.dumps(self.body).encode()


@dataclass(slots=True)
class Fault:
    """A failure of the next `times` requests of a method with a path that matches a pattern, after `after` of them.

    `reply` replaces the answer. With `is_done` the request has taken effect. Without a reply the connection is reset.
    """

    method: str
    pattern: str
    reply: Reply | None = None
    is_done: bool = False
    times: int = 1
    after: int = 0


def route(method: str, path: str) -> Callable[[Handle], Handle]:
    """Mark a method of a fake as the handler of a request. `{name}` in the path is one part of it."""

    def mark(handle: Handle) -> Handle:
        handle.route = (method, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)))  # type: ignore[attr-defined]
        return handle

    return mark


class FakeCloud:
    """One account of a cloud. One handler runs at a time.

    A subclass names the calls of the contract (`creating`, `listing`), and the cloud's own words for what may go wrong.
    `refuse` answers before any route does, for instance requests without credentials. `requests` are all that came,
    faults included. As a server it has a thread for each request, on a free port of `address`, with `tls` over HTTPS;
    `delay_seconds` is the latency of each answer, outside of the lock.
    """

    address = "127.0.0.1"
    creating: ClassVar[tuple[str, str]]
    listing: ClassVar[tuple[str, str]]
    sold_out: ClassVar[Reply]
    cloud: ClassVar[str] = ""
    """The name in `vendor_refusals.json`: its refusals must be there. "": they are not checked."""
    prefix: ClassVar[str] = ""
    """The part of each path that is not in that file."""
    over_limit: ClassVar[Reply]
    too_many: ClassVar[Reply]
    outage: ClassVar[Reply] = Reply(500, {"code": "server_error", "message": "Internal server error"})

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.delay_seconds = 0.0
        self.is_refusing = self.is_out = False
        self.creates_left: int | None = None
        self.lock = threading.RLock()
        self._routes = [
            (*handle.route, handle)
            for kind in type(self).__mro__  # a subclass may replace a handler
            for handle in vars(kind).values()
            if hasattr(handle, "route")
        ]
        self._tls = tls
        self._server: ThreadingHTTPServer | None = None

    def alive(self) -> set[str]:
        """Return the ids of all billed machines."""
        raise NotImplementedError

    # ── what a test of the contract causes ───────────────────────────────────────────────────────────────────────────

    def fail(
        self,
        method: str,
        pattern: str,
        reply: Reply | None = None,
        *,
        is_done: bool = False,
        times: int = 1,
        after: int = 0,
    ) -> None:
        """Let the next requests of a method fail if their path begins with the pattern."""
        with self.lock:
            self.faults.append(Fault(method, pattern, reply, is_done, times, after))

    def no_capacity(self) -> None:
        """Let the next creating calls find no machine, in the cloud's own words."""
        self.fail(*self.creating, self.sold_out, times=99)

    def quota(self) -> None:
        """Let the next creating calls exceed the account's limit, in the cloud's own words."""
        self.fail(*self.creating, self.over_limit, times=99)

    def throttle(self) -> None:
        """Refuse the next listing with the cloud's way to say "too many"."""
        self.fail(*self.listing, self.too_many)

    def lose_create_answer(self) -> None:
        """Let the next creating call take effect, and lose its answer."""
        self.fail(*self.creating, is_done=True)

    def recover(self) -> None:
        """End the outage, and the failures of creating calls."""
        self.is_out, self.creates_left = False, None

    def refuse(self, request: Request) -> Reply | None:
        """Return the answer to a request without the right credentials; None if the request is accepted."""
        return None

    def spend_create(self) -> Reply | None:
        """Count a machine. Return the answer if creating calls fail by now (`creates_left`)."""
        if self.creates_left is None:
            return None
        if self.creates_left == 0:
            return self.outage
        self.creates_left -= 1
        return None

    def asked(self, method: str, pattern: str = "") -> list[Request]:
        """Return the requests of a method with a path that begins with the pattern."""
        with self.lock:
            return [
                request for request in self.requests if request.method == method and re.match(pattern, request.path)
            ]

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def respond(self, request: httpx.Request) -> httpx.Response:
        """Answer in this process: the handler of an httpx.MockTransport."""
        reply = self._answer(request.method, request.url.raw_path.decode(), request.read(), request.headers)
        if reply is None:
            raise httpx.ReadError("Connection reset by peer", request=request)
        return httpx.Response(reply.status, headers=_headers(reply), content=reply.content())

    def _answer(self, method: str, target: str, content: bytes, headers: Mapping[str, str]) -> Reply | None:
        parts = urlsplit(target)
        try:
            body = json.loads(content) if content else None
        except ValueError:
            body = dict(parse_qsl(content.decode()))
        words = {name.lower(): value for name, value in headers.items()}
        request = Request(method, parts.path, dict(parse_qsl(parts.query)), body, words)
        with self.lock:
            self.requests.append(request)
            fault = self._fault_of(request)
            if fault is not None and not fault.is_done:
                return fault.reply
            reply = self._reply(request)
            if self.cloud and reply.status >= 400 and not reply.is_of_test:
                path, code = request.path.removeprefix(self.prefix), code_of(reply.body)
                assert is_known(self.cloud, request.method, path, reply.status, reply.body), (
                    f"no vendor file has {request.method} {path}: {reply.status} {code!r}; see vendor_refusals.py"
                )
            # a copy, because the answer may contain rows that the next request changes
            return replace(reply, body=json.loads(json.dumps(reply.body))) if fault is None else fault.reply

    def _fault_of(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if fault.method == request.method and re.match(fault.pattern, request.path) and fault.times:
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _reply(self, request: Request) -> Reply:
        if self.is_out:
            return self.outage
        if (refusal := self.refuse(request)) is not None:
            return refusal
        for method, pattern, handle in self._routes:
            if method == request.method and (match := pattern.fullmatch(request.path)):
                return handle(self, replace(request, words=match.groupdict()))
        return Reply(404, {"message": f"no route for {request.method} {request.path}"})

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def url(self) -> str:
        """Return its base URL."""
        if self._server is None:
            return "https://cloud.test"
        return f"{'https' if self._tls else 'http'}://{self.address}:{self._server.server_address[1]}"

    def serve(self) -> Self:
        """Listen on a free port."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # head and body are two packets: the second would wait 40 ms for the acknowledgement of the first
            disable_nagle_algorithm = True

            def answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = fake._answer(self.command, self.path, content, dict(self.headers.items()))
                time.sleep(fake.delay_seconds)
                if reply is None:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response(reply.status)
                for name, value in {**_headers(reply), "Content-Length": str(len(reply.content()))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.content())

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Ignore errors of clients that have closed their connection."""

        self._server = server = Server((self.address, 0), Handler)
        if self._tls:
            server.socket = self._tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-cloud", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.serve()

    def __exit__(self, *_: object) -> None:
        self.close()


def _headers(reply: Reply) -> dict[str, str]:
    return {"Content-Type": "text/plain" if reply.is_text else "application/json", **reply.headers}
