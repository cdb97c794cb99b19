"""The client of REST APIs, against a real server: retries, meanings of errors, and masking of secrets."""

import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import pytest

from skyward_core.engine.certificates import make_certificate
from skyward_core.errors import BadRequest, CredentialsError, NoCapacity, ProviderFailed, RateLimited, SkywardError
from skyward_core.providers import _http
from skyward_core.providers._http import Api
from tests.providers.http_fake import FakeCloud, Reply, Request, route

TOKEN = "dop_v1_0123456789abcdef"
ODD = "tök/en+w%ith&odd=\"letters\" <of>  'all' kinds\\"
"""A secret that each cloud quotes in another form."""


class FakeThings(FakeCloud):
    """A server that answers with `reply`, or echoes the request."""

    reply: Reply | None = None

    @route("GET", "/things")
    def things(self, request: Request) -> Reply:
        return self.reply or Reply(200, {"query": request.query, "body": request.body, "headers": request.headers})

    @route("POST", "/things")
    def make(self, request: Request) -> Reply:
        return self.things(request)

    @route("DELETE", "/things/{id}")
    def end(self, request: Request) -> Reply:
        return Reply(204)


class Clock:
    """A clock for `_http` alone. Its pauses take no time."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def monotonic(self) -> float:
        return sum(self.pauses)

    def time(self) -> float:
        return datetime(2026, 11, 21, tzinfo=UTC).timestamp()


@pytest.fixture
def cloud() -> Iterator[FakeThings]:
    with FakeThings() as cloud:
        yield cloud


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_http, "time", clock)
    return clock


@pytest.fixture
def api(cloud: FakeThings, clock: Clock) -> Iterator[Api]:
    with Api("Acme", cloud.url, {"Authorization": f"Bearer {TOKEN}"}, secrets=(TOKEN, ODD, "")) as api:
        yield api


def refused(api: Api, method: str = "GET", path: str = "/things", **settings: Any) -> SkywardError:
    with pytest.raises(SkywardError) as caught:
        api.request(method, path, **settings)
    return caught.value


def test_requests_and_answers_are_transferred(api: Api) -> None:
    """Query, body and headers arrive. A None in a query is left out."""
    echo = api.request(
        "POST",
        "/things",
        query={"page": 2, "tag": None, "is_spot": True},
        body={"name": "é"},
        headers={"X-More": "yes"},
    )
    assert (echo["query"], echo["body"]) == ({"page": "2", "is_spot": "true"}, {"name": "é"})
    assert (echo["headers"]["authorization"], echo["headers"]["x-more"]) == (f"Bearer {TOKEN}", "yes")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(204), None),
        (Reply(200), None),
        (Reply(201, "a-plain-id\n", is_text=True), "a-plain-id\n"),
        (Reply(200, '"a quoted id"', is_text=True), "a quoted id"),
        (Reply(200, "[" * 100_000, is_text=True), "[" * 100_000),
        (Reply(202, []), []),
    ],
)
def test_an_answer_may_be_text_or_empty(api: Api, cloud: FakeThings, reply: Reply, expected: object) -> None:
    """Text that is no JSON is returned unchanged, also endless brackets. An empty answer is None."""
    cloud.reply = reply
    assert api.request("GET", "/things") == expected


def test_a_missing_object_may_be_none(api: Api, cloud: FakeThings) -> None:
    """With `missing_is_none` a 404 or a 410 is None. Without it both are BadRequest."""
    for status in (404, 410):
        cloud.fail("GET", "/things", Reply(status, "<html>Not Found</html>", is_text=True), times=100)
        with pytest.raises(ProviderFailed, match="no answer of"):
            api.request("GET", "/things", missing_is_none=True)
        cloud.faults.clear()
        cloud.fail("GET", "/things", Reply(status, {"code": "not_found"}), times=2)
        assert api.request("GET", "/things", missing_is_none=True) is None
        assert isinstance(refused(api), BadRequest)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *(
            (401, CredentialsError),
            (403, CredentialsError),
            (429, RateLimited),
            (408, ProviderFailed),
            (500, ProviderFailed),
            (503, ProviderFailed),
        ),
        *((400, BadRequest), (402, BadRequest), (409, BadRequest), (422, BadRequest), (301, BadRequest)),
    ],
)
def test_a_status_determines_the_error(api: Api, cloud: FakeThings, status: int, kind: type[SkywardError]) -> None:
    """The type of the error depends on the status. Message and code are the cloud's."""
    cloud.reply = Reply(status, {"code": "its_word", "message": "because"}, {"Location": "/elsewhere"})
    error = refused(api, "POST")
    assert type(error) is kind
    assert error.code == "its_word"
    assert str(error) == f'Acme answered POST /things with {status}: {{"code": "its_word", "message": "because"}}'


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"id": "unprocessable_entity", "message": "m"}, "unprocessable_entity"),
        ({"success": False, "error": "no_such_ask"}, "no_such_ask"),
        ({"title": "Bad Request", "status": 400}, "Bad Request"),
        ({"code": "", "id": "second"}, "second"),
        ({"code": 17, "error": {"message": "nested"}}, "400"),
        ("no JSON", "400"),
    ],
)
def test_the_code_is_the_clouds_own_or_the_status(api: Api, cloud: FakeThings, body: object, code: str) -> None:
    """There is always a code."""
    cloud.reply = Reply(400, body, is_text=isinstance(body, str))
    assert refused(api).code == code


def test_a_cloud_may_classify_errors_itself(cloud: FakeThings, clock: Clock) -> None:
    """The result of `classify` has precedence, with the code."""
    seen: list[tuple[int, Mapping[str, Any], str]] = []

    def classify(status: int, body: Mapping[str, Any], message: str) -> SkywardError | None:
        seen.append((status, body, message))
        return NoCapacity(message) if body.get("code") == "none_left" else None

    with Api("Acme", cloud.url, classify=classify) as api:
        cloud.reply = Reply(500, {"code": "none_left"})
        error = refused(api)
        assert (type(error), error.code, clock.pauses) == (NoCapacity, "none_left", [])
        cloud.reply = Reply(400, "text", is_text=True)
        assert type(refused(api)) is BadRequest
    assert seen[0] == (500, {"code": "none_left"}, str(error))
    assert seen[1][:2] == (400, {})


@pytest.mark.parametrize("fault", [Reply(500), Reply(503, "try later", is_text=True), Reply(408), None])
@pytest.mark.parametrize(("method", "path"), [("GET", "/things"), ("DELETE", "/things/7")])
def test_reads_and_deletions_are_repeated(
    api: Api, cloud: FakeThings, clock: Clock, fault: Reply | None, method: str, path: str
) -> None:
    """They are repeated after a failure of the cloud and after a reset, with growing pauses."""
    cloud.fail(method, path, fault, times=3)
    api.request(method, path)
    assert len(cloud.asked(method, path)) == 4
    assert clock.pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("fault", [Reply(500), Reply(408), None])
def test_a_creating_call_is_not_repeated(api: Api, cloud: FakeThings, clock: Clock, fault: Reply | None) -> None:
    """It may have taken effect, so ProviderFailed is raised at once. `is_repeatable` overrides that."""
    cloud.fail("POST", "/things", fault, is_done=True)
    error = refused(api, "POST")
    assert type(error) is ProviderFailed
    assert len(cloud.asked("POST")) == 1
    cloud.fail("POST", "/things", fault)
    api.request("POST", "/things", is_repeatable=True)
    cloud.fail("GET", "/things", fault)
    refused(api, "GET", is_repeatable=False)
    assert clock.pauses == [0.5]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_refused_connection_is_tried_again(clock: Clock, method: str) -> None:
    """No process listened, so the request had no effect."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Api("Acme", url) as api:
        error = refused(api, method)
    assert type(error) is ProviderFailed
    assert "Connection refused" in str(error)
    assert isinstance(error.__cause__, httpx.ConnectError)
    assert clock.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert sum(clock.pauses) <= _http.PATIENCE_SECONDS


def test_the_variable_for_certificates_may_change_between_clients(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The certificates are loaded once for each value of SSL_CERT_FILE, not once for each process."""
    pem, made = tmp_path / "server.pem", make_certificate("a pool")
    pem.write_text(made.certificate + made.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with FakeThings(tls=server) as cloud:
        with Api("Acme", cloud.url) as api:
            assert "self-signed certificate" in str(refused(api))
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        with Api("Acme", cloud.url) as api:
            assert "IP address mismatch" in str(refused(api))  # trusted, but made for another name
    monkeypatch.setenv("SSL_CERT_FILE", f"{pem}.old")
    with pytest.raises(BadRequest, match=r"certificates of SSL_CERT_FILE=.*server.pem.old cannot be read"):
        Api("Acme", cloud.url)


@pytest.mark.parametrize(("method", "tries"), [("GET", 3), ("POST", 1)])
def test_a_timeout_is_a_failure(
    cloud: FakeThings, clock: Clock, monkeypatch: pytest.MonkeyPatch, method: str, tries: int
) -> None:
    """A creating call that was sent and not answered is not repeated. A read is repeated."""
    monkeypatch.setattr(_http, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(_http, "PATIENCE_SECONDS", 1.6)
    cloud.delay_seconds = 0.3
    with Api("Acme", cloud.url) as api:
        error = refused(api, method)
    assert type(error) is ProviderFailed
    assert str(error) == f"Acme did not answer {method} /things: timed out"
    assert len(cloud.asked(method)) == tries


def _date(seconds: float, **changes: Any) -> str:
    return format_datetime(datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=seconds), **changes)


@pytest.mark.parametrize(
    ("header", "pause"),
    [
        (None, 0.5),
        ("7", 7.0),
        ("1.5", 1.5),
        ("0", 0.5),
        (_date(9, usegmt=True), 9.0),
        ("Saturday, 21-Nov-26 00:00:09 GMT", 9.0),
        (_date(-3600, usegmt=True), 0.5),
        ("soon", 0.5),
        ("Mon, 99 Foo 2026 99:00:00 GMT", 0.5),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_throttling_is_waited_out_for_the_time_that_the_cloud_names(
    api: Api,
    cloud: FakeThings,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    header: str | None,
    pause: float,
    method: str,
) -> None:
    """Retry-After is a number of seconds or a date."""
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        cloud.fail(
            method,
            "/things",
            Reply(429, {"code": "slow"}, {} if header is None else {"Retry-After": header}),
        )
        api.request(method, "/things")
        assert clock.pauses == [pause]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("header", "tries"), [(None, 8), ("25", 3), ("60", 2), ("61", 1), ("9" * 400, 1)])
def test_retries_have_a_time_limit(api: Api, cloud: FakeThings, clock: Clock, header: str | None, tries: int) -> None:
    """All tries together take at most PATIENCE_SECONDS. A pause that would take longer is not begun."""
    cloud.reply = Reply(429, {"code": "slow"}, {"Retry-After": header} if header else {})
    error = refused(api, "POST")
    assert (type(error), error.code) == (RateLimited, "slow")
    assert len(cloud.asked("POST")) == tries
    assert sum(clock.pauses) <= _http.PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("status", "headers", "pauses"),
    [
        (429, {"acme-reset": "+25"}, [25.0]),
        (429, {"acme-reset": "+25", "Retry-After": "3"}, [3.0]),
        (
            429,
            {"acme-reset": "-5"},
            [0.5, 1.0],
        ),  # the time is in the past and the errors continue: the header is ignored
        (503, {"acme-reset": "+25"}, [0.5]),
    ],
)
def test_a_cloud_may_name_the_end_of_throttling_in_its_own_header(
    cloud: FakeThings, clock: Clock, status: int, headers: dict[str, str], pauses: list[float]
) -> None:
    """The header has a time. Retry-After has priority, and other errors ignore the header."""

    def reset(headers: Mapping[str, str]) -> float | None:
        return clock.time() + float(headers["acme-reset"]) if "acme-reset" in headers else None

    cloud.fail("GET", "/things", Reply(status, None, headers), times=len(pauses))
    with Api("Acme", cloud.url, reset=reset) as api:
        api.request("GET", "/things")
    assert clock.pauses == pytest.approx(pauses)


@pytest.mark.parametrize(
    "echo",
    [
        lambda secret: {"message": f"Authorization: Bearer {secret}"},
        lambda secret: {"code": secret, "nested": [{"key": secret}]},
        lambda secret: f"<p>Bearer {secret}</p>",
        lambda secret: f"?api_key={quote(secret, safe='')}",
        lambda secret: f"?api_key={quote(secret, safe='').lower()}" if secret == TOKEN else f"?api_key={quote(secret)}",
        lambda secret: f"?api_key={quote_plus(secret)}&",
        lambda secret: f"Illegal value {secret!r}",
        lambda secret: "x" * (_http.QUOTED_CHARACTERS - 8) + secret,
    ],
)
@pytest.mark.parametrize("secret", [TOKEN, ODD])
def test_no_secret_is_in_a_message(
    api: Api, cloud: FakeThings, caplog: pytest.LogCaptureFixture, echo: Callable[[str], object], secret: str
) -> None:
    """All forms in which a cloud may quote it are masked: in JSON, in text, in a URL, in Python's form, or truncated."""
    caplog.set_level(logging.DEBUG)
    body = echo(secret)
    cloud.reply = Reply(400, body, is_text=isinstance(body, str))
    error = refused(api, "POST", body={"secret": "of the caller"})
    written = " ".join((str(error), error.code, repr(error), caplog.text))
    assert "***" in str(error) or str(error).endswith("x" * 8)
    for part in (
        secret,
        secret[:8],
        quote(secret),
        quote_plus(secret),
        secret.split(maxsplit=1)[0],
        repr(secret)[1:-1],
    ):
        assert part not in written


def test_a_longer_secret_with_the_same_beginning_is_masked(cloud: FakeThings, clock: Clock) -> None:
    """One secret may be the beginning of another."""
    cloud.reply = Reply(400, {"message": "abc abcdef"})
    with Api("Acme", cloud.url, secrets=("abc", "abcdef")) as api:
        assert str(refused(api)).endswith('{"message": "*** ***"}')


@pytest.mark.parametrize("key", ["key\n", "k\ney", "key\x00", "käy", "key ", ""])
def test_a_key_that_no_header_can_carry_is_refused_at_once(cloud: FakeThings, key: str) -> None:
    """A line break from a file, or an incomplete key: CredentialsError is raised before any request, without the key."""
    with pytest.raises(CredentialsError, match="Authorization") as caught:
        Api("Acme", cloud.url, {"Authorization": f"Bearer {key}"}, secrets=(key,))
    assert not key or key not in str(caught.value)
    assert cloud.requests == []


@pytest.mark.parametrize("url", ["acme.example", "ftp://acme.example", "", "http://[::1"])
def test_an_invalid_url_is_refused_at_once(clock: Clock, url: str) -> None:
    """The user sets `endpoint_url`: BadRequest is raised without a pause."""
    with pytest.raises(BadRequest, match="Acme cannot be"), Api("Acme", url) as api:
        api.request("GET", "/things")
    assert clock.pauses == []


def test_threads_share_a_client_and_it_closes_all_connections(cloud: FakeThings, clock: Clock) -> None:
    """The suite counts descriptors."""
    with Api("Acme", cloud.url) as api, ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda number: api.request("GET", "/things", query={"n": number})["query"]["n"], range(40))
        )
    assert answers == [str(number) for number in range(40)]
    with pytest.raises(RuntimeError, match="closed"):
        api.request("GET", "/things")
