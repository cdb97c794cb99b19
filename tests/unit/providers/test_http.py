"""The client of REST APIs: retries, meanings of errors, and masking of secrets."""

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import pytest

from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, RateLimited, SkywardError
from skyward_core.providers import _http
from skyward_core.providers._http import Api
from tests.providers.http_fake import FakeCloud, Reply, Request, route
from tests.providers.in_process import Clock, Install

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


@pytest.fixture
def cloud(in_process: Install) -> FakeThings:
    in_process(fake := FakeThings())
    return fake


@pytest.fixture(autouse=True)
def _today(clock: Clock) -> None:
    clock.start = datetime(2026, 11, 21, tzinfo=UTC).timestamp()


@pytest.fixture
def api(cloud: FakeThings, clock: Clock) -> Iterator[Api]:
    with Api("Acme", cloud.url, {"Authorization": f"Bearer {TOKEN}"}, secrets=(TOKEN, ODD, "")) as api:
        yield api


def refused(api: Api, method: str = "GET", path: str = "/things", **settings: Any) -> SkywardError:
    with pytest.raises(SkywardError) as caught:
        api.request(method, path, **settings)
    return caught.value


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


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("page", ["error code: 1010", "<html>Access denied</html>", ""])
def test_a_refusal_that_is_no_answer_of_the_cloud_says_nothing_of_the_key(
    api: Api, cloud: FakeThings, status: int, page: str
) -> None:
    """An edge in front of the API refuses a request for reasons of its own. It is not asked again at once."""
    cloud.fail("GET", "/things", Reply(status, page, is_text=True))
    error = refused(api)
    assert type(error) is ProviderFailed
    assert "which is no answer of Acme's API" in str(error)
    assert len(cloud.asked("GET")) == 1


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


@pytest.mark.parametrize(("method", "pauses"), [("GET", [0.5]), ("POST", [])])
def test_a_timeout_is_a_failure(in_process: Install, clock: Clock, method: str, pauses: list[float]) -> None:
    """A creating call that was sent and not answered is not repeated. A read is repeated."""

    class SilentThings(FakeThings):
        def respond(self, request: httpx.Request) -> httpx.Response:
            super().respond(request)
            seconds = request.extensions["timeout"]["read"]
            clock.passed += seconds
            raise httpx.ReadTimeout(f"nothing for {seconds:g} s", request=request)

    in_process(cloud := SilentThings())
    with Api("Acme", cloud.url) as api:
        error = refused(api, method)
    assert type(error) is ProviderFailed
    assert str(error) == f"Acme did not answer {method} /things: nothing for 30 s"
    assert len(cloud.asked(method)) == 1 + len(pauses)
    assert clock.pauses == pauses


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
        cloud.fail(method, "/things", Reply(429, {"code": "slow"}, {} if header is None else {"Retry-After": header}))
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


@pytest.mark.parametrize(("total", "is_complete"), [("2", True), ("1", True), ("3", False), ("many", True)])
def test_a_page_is_not_taken_for_the_whole_list(api: Api, cloud: FakeThings, total: str, is_complete: bool) -> None:
    """A machine on the next page would count as gone."""
    cloud.reply = Reply(200, [{"id": 1}, {"id": 2}], {"X-Total-Count": total})
    if is_complete:
        assert len(api.request("GET", "/things")) == 2
    else:
        assert "2 of 3 rows" in str(refused(api))


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


def test_retry_after_is_used_after_a_failure_too(api: Api, cloud: FakeThings, clock: Clock) -> None:
    """The answer is a 503 with Retry-After."""
    cloud.fail("GET", "/things", Reply(503, None, {"Retry-After": "11"}))
    api.request("GET", "/things")
    assert clock.pauses == [11.0]
