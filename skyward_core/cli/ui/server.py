"""`PageServer`: answers GET requests on the loopback from readers who have the token.

Every user of this machine, and every page in this user's browser, can send requests to a port of the loopback. The
token keeps out the first. It is never in a cookie, so a page of another site cannot send it. A page whose own name
leads to 127.0.0.1 (DNS rebinding) has another `Host` header, and is refused before the token is looked at.
"""

from __future__ import annotations

import hmac
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, ClassVar, Self, cast, override
from urllib.parse import parse_qsl, urlsplit

from skyward_core.errors import BadRequest, LedgerConflict, LedgerError

ADDRESS = "127.0.0.1"
OURS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
"""What `Host` may be. The port is any: it is another one at the end of an SSH forwarding."""
REQUEST_SECONDS = 5.0
"""How long a client may take with its request. Browsers connect in advance, and Ctrl-C waits for these connections."""
JSON = "application/json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the URL has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, its media type, and further headers."""

    body: bytes
    media_type: str = JSON
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, data: object) -> Self:
        """Return data as JSON."""
        return cls(json.dumps(data).encode())


type Answers = Mapping[str, Callable[[Mapping[str, str]], Answer]]
"""What answers a path, from the parameters of the query.

It may raise BadRequest (400), LedgerConflict (404: no such pool) and LedgerError (503).
"""


class PageServer(ThreadingHTTPServer):
    """Listens as soon as it is made, on 127.0.0.1 only. Raises BadRequest if the port is taken."""

    daemon_threads = False  # the end waits for answers, which read the ledger

    def __init__(self, port: int, token: str, answers: Answers) -> None:
        self.token = token
        self.answers = answers
        try:
            super().__init__((ADDRESS, port), _Request)
        except OSError as error:
            raise BadRequest(
                f"port {port} of {ADDRESS} cannot be used ({error.strerror}): choose another with --port, or none"
            ) from error

    @property
    def url(self) -> str:
        """The URL of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    @override
    def server_bind(self) -> None:
        # the method of HTTPServer looks up the name of this host, which may take seconds
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the browser has gone
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    timeout: ClassVar[float | None] = REQUEST_SECONDS
    server_version = "skyward"
    sys_version = ""

    def do_GET(self) -> None:
        """Check host and token, then answer."""
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        if why := self._why_not(query.pop("token", None)):
            self._send(*why)
            return
        found = self._server.answers.get(url.path)
        if found is None:
            self._refuse(404, "there is no such page")
            return
        try:
            answer = found(query)
        except BadRequest as error:
            self._refuse(400, str(error))
        except LedgerConflict as error:
            self._refuse(404, str(error))
        except LedgerError as error:
            self._refuse(503, str(error))
        else:
            self._send(200, answer)

    @property
    def _server(self) -> PageServer:
        return cast(PageServer, self.server)

    def _why_not(self, token: str | None) -> tuple[int, Answer] | None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not OURS.fullmatch(hosts[0].strip()):
            return 403, _error("this page has another name: open the URL that `skyward ui` has printed")
        scheme, _, bearer = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            token = bearer.strip()
        if not token:
            refusal = _error("this needs a token: open the URL that `skyward ui` has printed")
            return 401, Answer(refusal.body, JSON, {"WWW-Authenticate": "Bearer"})
        # headers are Latin-1, and compare_digest takes no text beyond ASCII
        if not hmac.compare_digest(token.encode(errors="replace"), self._server.token.encode()):
            return 403, _error("this token is not that of the running `skyward ui`: open the URL that it has printed")
        return None

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, _error(why))

    def _send(self, status: int, answer: Answer) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **(answer.headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.media_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the URL has the token."""


def _error(why: str) -> Answer:
    return Answer.of({"error": why})
