"""A client for a cloud's REST API.

It repeats requests where that is safe, turns refusals into our errors, and keeps secrets out of messages.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Self, cast

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
    shown_unread,
    without_logins,
)
from skyward_core.wire.masking import spellings

TIMEOUT_SECONDS = 30.0
PATIENCE_SECONDS = 60.0
"""How long a repeatable request is repeated, pauses included."""
PAUSE_SECONDS = 0.5
"""The first pause where the cloud names none. Each later pause is twice as long, up to `LONGEST_PAUSE_SECONDS`.

It is also the shortest pause where the cloud names one: "again in 0 s" must not cause a storm of requests.
"""
LONGEST_PAUSE_SECONDS = 15.0
QUOTED_CHARACTERS = 500
TOTAL_HEADER = "X-Total-Count"
"""The number of all rows, in an answer that may have only a page of them. Verda is reported to send it."""
SECRET_FIELD = re.compile(r"(.*[_-])?(key|token|secret|password)", re.IGNORECASE)
"""Names of fields whose values appear in no message: an answer may hold a secret that we do not know."""

NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
NEVER_TO_BE_SENT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class _RepeatableError(Exception):
    """A request has failed with `failure` and may be sent again, after `wait_seconds` if the cloud has said so."""

    def __init__(self, failure: SkywardError, wait_seconds: float | None = None) -> None:
        super().__init__(failure)
        self.failure = failure
        self.wait_seconds = wait_seconds


type Classify = Callable[[int, Mapping[str, Any], str], SkywardError | None]
"""Takes status, body (empty if it is no JSON object) and our message.

Returns this cloud's meaning of a refusal; None means the usual one.
"""


type Reset = Callable[[Mapping[str, str]], float | None]
"""Takes the headers of a 429 without Retry-After; names match in any case.

Returns when to try again, in seconds since 1970; None if the headers do not say.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A key, and where it came from, in words for messages: "the variable VAST_API_KEY"."""

    key: str = field(repr=False)
    source: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What a user of one cloud does next about a refusal; "" where there is nothing to say beyond the cloud's words.

    Attributes:
        key: the credentials are wrong: where they came from, and where to make others. Never the credentials.
        rights: they are right, and may not do this: which rights are needed, and where they are set.
        quota: the account's limit: where it is raised.
        capacity: no machine is free: what to try.
    """

    key: str = ""
    rights: str = ""
    quota: str = ""
    capacity: str = ""

    def about(self, error: SkywardError, status: int) -> str:
        """Return the advice for a refusal with this status."""
        if isinstance(error, QuotaExceeded):
            return self.quota
        if isinstance(error, NoCapacity):
            return self.capacity
        if isinstance(error, CredentialsError):
            return self.rights if status == HTTPStatus.FORBIDDEN else self.key
        return ""


@lru_cache(maxsize=4)
def _trust(file: str | None, directory: str | None) -> ssl.SSLContext:
    """Return the TLS context for SSL_CERT_FILE and SSL_CERT_DIR, as httpx chooses it. Loading takes 10 ms.

    Raises BadRequest if the certificates cannot be read.
    """
    try:
        if file:
            return ssl.create_default_context(cafile=file)
        return ssl.create_default_context(capath=directory) if directory else httpx.create_ssl_context(trust_env=False)
    except OSError as error:
        raise BadRequest(f"the certificates of SSL_CERT_FILE={file or ''} cannot be read: {error}") from error


class Api:
    """A client of one cloud for the length of one method of the provider. It is a context manager.

    Args:
        name: name of the cloud in messages.
        base_url: prefix of all paths.
        headers: sent with every request.
        classify: what this cloud's refusals mean. It is used before the usual meaning.
        secrets: texts that appear in no message, in any spelling.
        reset: when this cloud accepts requests again, where it does not send Retry-After.
        says_missing: whether a 404's body is this cloud's own answer, and not a proxy's.
        advice: what the user does next; it is added to the cloud's words.

    Raises CredentialsError if a header cannot be sent, for example because a key contains a line break. Raises
    BadRequest for an invalid URL.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        classify: Classify = lambda *_: None,
        secrets: Sequence[str] = (),
        reset: Reset = lambda _: None,
        says_missing: Callable[[Mapping[str, Any]], bool] = bool,
        advice: Advice = Advice(),
    ) -> None:
        self._name = name
        self._says_missing = says_missing
        self._advice = advice
        self._classify = classify
        self._reset = reset
        self._secrets = tuple(
            sorted({spelling for secret in secrets if secret for spelling in spellings(secret)}, key=len, reverse=True)
        )
        for header, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()) or value != value.strip():
                raise CredentialsError(
                    f"the {header} header for {name} cannot be sent: it is incomplete, or has a line break or a"
                    " similar character"
                )
        try:
            self._client = httpx.Client(
                base_url=base_url,
                headers=headers,
                timeout=TIMEOUT_SECONDS,
                follow_redirects=False,
                verify=_trust(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            )
        except BadRequest:
            raise
        except (httpx.InvalidURL, ValueError):  # its words may have a piece of a password
            raise BadRequest(
                self._clean(
                    f"{name} cannot be reached at {shown_unread(base_url)}: that, or the address of a proxy"
                    " (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY), is no URL"
                )
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        is_repeatable: bool | None = None,
        missing_is_none: bool = False,
        headers: Mapping[str, str] | None = None,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> Any:
        """Send a request. Return the JSON of the answer, its text if it is no JSON, None if it is empty.

        Requests that the cloud throttles (429) are repeated within PATIENCE_SECONDS. After a failure of the cloud or
        the network, a request is repeated only if it may be: `is_repeatable`, by default GET, HEAD and DELETE. A
        connection that was never made is always tried again.

        With `missing_is_none`, a 404 or 410 in the cloud's own words (`says_missing`) returns None. Any other 404 is
        ProviderFailed: it may be a proxy's page, which says nothing about the resource. An empty answer to GET is
        ProviderFailed too.

        `pause_seconds` is the shortest pause before a repetition, where a cloud has a limit of its own for a request.

        Raises what `classify` returns; else CredentialsError (401, 403), RateLimited, ProviderFailed (5xx or no
        answer), and BadRequest for every other refusal.
        """
        may_repeat = method in ("GET", "HEAD", "DELETE") if is_repeatable is None else is_repeatable
        deadline = time.monotonic() + PATIENCE_SECONDS

        def send() -> Any:
            answer = self._sent(method, path, may_repeat, params=_without_none(query), json=body, headers=headers)
            return self._content_of(method, path, answer, may_repeat, missing_is_none)

        sending = Retrying(
            retry=retry_if_exception_type(_RepeatableError),
            wait=lambda state: _wait_seconds(state, pause_seconds),
            stop=lambda state: time.monotonic() + state.upcoming_sleep > deadline,
            sleep=time.sleep,
            reraise=True,
        )
        try:
            return sending(send)
        except _RepeatableError as error:
            raise error.failure from error.failure.__cause__

    def _sent(self, method: str, path: str, may_repeat: bool, **request: Any) -> httpx.Response:
        """Send a request once. Raises BadRequest if it can never be sent."""
        try:
            return self._client.request(method, path, **request)
        except NEVER_TO_BE_SENT as error:
            raise BadRequest(self._clean(f"{self._name} cannot be sent {method} {path}: {error}")) from None
        except httpx.RequestError as error:
            failure = ProviderFailed(
                self._clean(f"{self._name} did not answer {method} {path}: {str(error) or type(error).__name__}")
            )
            failure.__cause__ = error
            raise (_RepeatableError(failure) if may_repeat or isinstance(error, NEVER_SENT) else failure) from error

    def _content_of(
        self, method: str, path: str, answer: httpx.Response, may_repeat: bool, missing_is_none: bool
    ) -> Any:
        """Return the content of an answer, or raise what it means."""
        content = _content(answer)
        if answer.is_success:
            if content is None and missing_is_none and method == "GET":
                raise ProviderFailed(self._clean(f"{self._name} answered {method} {path} with no content"))
            total = answer.headers.get(TOTAL_HEADER, "")
            if isinstance(content, list) and total.isdecimal() and int(total) > len(cast("list[Any]", content)):
                raise ProviderFailed(
                    self._clean(
                        f"{self._name} answered {method} {path} with {len(cast('list[Any]', content))} of {total} rows:"
                        " what is missing in a part of a list may exist"
                    )
                )
            return content
        failure = self._failure(method, path, answer)
        if type(failure) is CredentialsError and not (isinstance(content, dict) and content):
            # an edge before the API refuses requests for reasons of its own: "error code: 1010" says nothing of a key
            raise ProviderFailed(
                f"{failure.without_advice}, which is no answer of {self._name}'s API: something between here and there"
                " refuses the request, such as a proxy, a firewall, or the cloud's edge"
            ).coded(failure.code)
        is_missing = answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
        if missing_is_none and is_missing and not isinstance(failure, CredentialsError):
            if isinstance(content, dict) and self._says_missing(cast("dict[str, Any]", content)):
                return None
            failure = ProviderFailed(f"{failure}, which is no answer of {self._name}").coded(failure.code)
        if type(failure) is RateLimited or (type(failure) is ProviderFailed and may_repeat):
            raise _RepeatableError(failure, _retry_after(answer, self._reset))
        raise failure

    def _failure(self, method: str, path: str, answer: httpx.Response) -> SkywardError:
        content = _content(answer)
        body = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        status = answer.status_code
        quoted = self._quoted(content)
        message = self._clean(f"{self._name} answered {method} {path} with {status}") + (
            f": {quoted}" if quoted else ""
        )
        code = next(
            (body[key] for key in ("code", "id", "error", "title") if isinstance(body.get(key), str) and body[key]),
            str(status),
        )
        error = self._classify(status, body, message) or _meaning(status, message)
        if isinstance(error, NoCapacity) and error.if_all is not None:
            error.if_all.coded(self._quoted(code)).advised(self._advice.about(error.if_all, status))
        return error.coded(self._quoted(code)).advised(self._advice.about(error, status))

    def _quoted(self, content: object) -> str:
        """Return the cloud's answer as one line. Secrets are removed before the cut, so that no half of one is left."""
        text = (
            ""
            if content is None
            else content
            if isinstance(content, str)
            else json.dumps(_without_secrets(content), ensure_ascii=False)
        )
        return " ".join(self._clean(text).split())[:QUOTED_CHARACTERS]

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return without_logins(text)


def missing(find: Callable[[], object]) -> str:
    """Return why there are no credentials, in the words of the error; "" if `find` finds some."""
    try:
        find()
    except CredentialsError as error:
        return str(error)
    return ""


type Row = Mapping[str, Any]
"""A JSON object of a cloud's answer."""


def field_of[T](answer: object, name: str, kind: type[T], who: str) -> T:
    """Return a field of an answer. `who` names the request: "RunPod answered GET /v2/pods".

    Raises ProviderFailed if the answer is no JSON object or lacks a field of this kind: a proxy's page with status 200
    is no answer. It is no refusal either: a creating call with such an answer may have created something.
    """
    value = cast("Row", answer).get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise ProviderFailed(f"{who} without {name!r}")
    return value


def number_of(answer: object, name: str, who: str) -> float:
    """Return a number in a field of an answer. Raises ProviderFailed like `field_of`."""
    value = field_of(answer, name, object, who)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ProviderFailed(f"{who} with {name}={value!r}, which is no number")
    return float(value)


def rows_of(answer: object, name: str, who: str) -> list[Row]:
    """Return the list of JSON objects in a field of an answer.

    Raises ProviderFailed like `field_of`: an answer without the list does not mean that nothing exists.
    """
    return rows_in(field_of(answer, name, list, who), who)


def rows_in(answer: object, who: str) -> list[Row]:
    """Return an answer that is a list of JSON objects. Raises ProviderFailed for any other."""
    if not isinstance(answer, list) or not all(isinstance(row, dict) for row in cast("list[object]", answer)):
        raise ProviderFailed(f"{who} without a list of objects")
    return cast("list[Row]", answer)


def nothing_in(answer: object, who: str) -> None:
    """Raise ProviderFailed for an answer with content, where the cloud answers success with nothing."""
    if answer is not None:
        raise ProviderFailed(f"{who} with content, where it sends none")


def tried[K, R](work: Callable[[K], R], things: Sequence[K], name: str) -> tuple[dict[K, R], dict[K, SkywardError]]:
    """Work on each thing, side by side. Return the results and the errors of ours."""

    def answer(thing: K) -> tuple[R | None, SkywardError | None]:
        try:
            return work(thing), None
        except SkywardError as error:
            return None, error

    answers = dict(zip(things, side_by_side(answer, things, name), strict=True))
    errors = {thing: error for thing, (_, error) in answers.items() if error is not None}
    return {thing: cast("R", found) for thing, (found, _) in answers.items() if thing not in errors}, errors


def is_unsure(error: SkywardError) -> bool:
    """Return whether a creating call with this error may have created something."""
    return isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)


def certain_if_refused(error: SkywardError) -> SkywardError:
    """Note that a launch ends with this refusal of its first creating call, if it is one; return the error."""
    error.left_nothing = error.left_nothing or not is_unsure(error)
    return error


@contextmanager
def before_creation() -> Generator[None]:
    """What fails within has created nothing, whatever the error is."""
    try:
        yield
    except SkywardError as error:
        error.left_nothing = True
        raise


def _wait_seconds(state: RetryCallState, pause_seconds: float) -> float:
    """Return how long to wait before the next try: what the cloud wants, or the next pause of the back-off."""
    error = None if state.outcome is None else state.outcome.exception()
    wanted = error.wait_seconds if isinstance(error, _RepeatableError) else None
    if wanted is not None:
        return max(wanted, pause_seconds)
    return Backoff(pause_seconds, LONGEST_PAUSE_SECONDS).seconds(state.attempt_number)


def _without_secrets(content: object) -> object:
    if isinstance(content, dict):
        fields = cast("dict[str, object]", content).items()
        return {
            name: "***" if isinstance(value, str) and SECRET_FIELD.fullmatch(name) else _without_secrets(value)
            for name, value in fields
        }
    return [_without_secrets(item) for item in cast("list[object]", content)] if isinstance(content, list) else content


def _meaning(status: int, message: str) -> SkywardError:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return CredentialsError(message)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return RateLimited(message)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
        return ProviderFailed(message)
    return BadRequest(message)


def _content(answer: httpx.Response) -> Any:
    if not answer.content:
        return None
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return answer.text


def _retry_after(answer: httpx.Response, reset: Reset) -> float | None:
    """Return how many seconds the cloud wants us to wait; None if it does not say.

    Retry-After is a number or a date (RFC 9110, 10.2.3). Without it the cloud's own header counts, if its time is to
    come.
    """
    header = answer.headers.get("Retry-After", "").strip()
    if not header:
        at = reset(answer.headers) if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS else None
        return None if at is None or at <= time.time() else at - time.time()
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", header):
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - time.time())


def _without_none(query: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if query is None else {name: value for name, value in query.items() if value is not None}
