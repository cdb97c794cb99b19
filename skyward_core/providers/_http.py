"""One session with a cloud's REST API: what may be asked again is, what the cloud answers becomes our errors, and no
secret gets into a message.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Self, cast

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, RateLimited, SkywardError
from skyward_core.worker.masking import spellings

TIMEOUT_SECONDS = 30.0
PATIENCE_SECONDS = 60.0
"""How long a request that may be repeated is repeated, pauses included."""
PAUSE_SECONDS = 0.5
"""The first pause where the cloud names none; each one is twice as long as the one before, and `LONGEST_PAUSE_SECONDS`
at most.

The shortest where it names one: "again in 0 s" must not become a storm.
"""
LONGEST_PAUSE_SECONDS = 15.0
TOLD_CHARACTERS = 500
SECRET_FIELD = re.compile(r"(.*[_-])?(key|token|secret|password)", re.IGNORECASE)
"""What fields are called whose values are told in no message: an answer may have a secret in it that nobody has given
us before.
"""

NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
NEVER_TO_BE_SENT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class _RepeatableError(Exception):
    """A request has failed with `failure` and may be sent again, after `wait_seconds` if the cloud has said so."""

    def __init__(self, failure: SkywardError, wait_seconds: float | None = None) -> None:
        super().__init__(failure)
        self.failure = failure
        self.wait_seconds = wait_seconds


type Classify = Callable[[int, Mapping[str, Any], str], SkywardError | None]
"""Status, body (empty if it is no JSON object) and our message in; what it means for this cloud out, None for what it
means everywhere.
"""


type Reset = Callable[[Mapping[str, str]], float | None]
"""The headers of a 429 without Retry-After in, by any case of their names; when to ask again out, in seconds since
1970, None if they do not tell.
"""


class Api:
    """A client of one cloud, for the length of one verb: a context manager.

    Args:
        name: how the cloud is called in messages.
        base_url: what paths are put behind.
        headers: sent with every request.
        classify: what this cloud's refusals mean, looked at before what they mean everywhere.
        secrets: what never gets into a message, however it is spelled there.
        reset: how this cloud says when it has room again, where that is not Retry-After.

    Raises CredentialsError if a header cannot be sent as it is, for instance with a key that has a line break in it,
    and BadRequest for what is no URL.
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
    ) -> None:
        self._name = name
        self._says_missing = says_missing
        self._classify = classify
        self._reset = reset
        self._secrets = tuple(
            sorted({spelling for secret in secrets if secret for spelling in spellings(secret)}, key=len, reverse=True)
        )
        for header, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()) or value != value.strip():
                raise CredentialsError(
                    f"what {name} is to be told as {header} cannot be sent: it is not whole, or has a line break or the"
                    " like in it"
                )
        try:
            self._client = httpx.Client(
                base_url=base_url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=False
            )
        except httpx.InvalidURL as error:
            raise BadRequest(self._clean(f"{name} cannot be asked at {base_url!r}: {error}")) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        is_repeatable: bool | None = None,
        missing_is_none: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request; return the JSON of the answer, its text if that is no JSON, None if it is empty.

        Repeated within PATIENCE_SECONDS are requests that the cloud refused for their number (429), and after failures
        of cloud or wire those that may be: `is_repeatable`, by default GET, HEAD and DELETE. A connection that was
        never made is tried again in any case. With `missing_is_none` a 404 or 410 in the cloud's own words
        (`says_missing`) is None, any other is ProviderFailed (a proxy has no such page, which says nothing of what
        there is), and a GET of nothing is no answer. Raises CredentialsError (401, 403), RateLimited, ProviderFailed
        (5xx, or no answer), BadRequest for every other refusal, and before all of them what `classify` returns.
        """
        may_repeat = method in ("GET", "HEAD", "DELETE") if is_repeatable is None else is_repeatable
        deadline = time.monotonic() + PATIENCE_SECONDS

        def send() -> Any:
            answer = self._sent(method, path, may_repeat, params=_given(query), json=body, headers=headers)
            return self._content_of(method, path, answer, may_repeat, missing_is_none)

        sending = Retrying(
            retry=retry_if_exception_type(_RepeatableError),
            wait=_wait_seconds,
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
            raise BadRequest(self._clean(f"{self._name} cannot be asked {method} {path}: {error}")) from None
        except httpx.RequestError as error:
            failure = ProviderFailed(
                self._clean(f"{self._name} did not answer {method} {path}: {str(error) or type(error).__name__}")
            )
            failure.__cause__ = error
            raise (_RepeatableError(failure) if may_repeat or isinstance(error, NEVER_SENT) else failure) from error

    def _content_of(
        self,
        method: str,
        path: str,
        answer: httpx.Response,
        may_repeat: bool,
        missing_is_none: bool,
    ) -> Any:
        """Return the content of an answer, or raise what it means."""
        content = _content(answer)
        if answer.is_success:
            if content is None and missing_is_none and method == "GET":
                raise ProviderFailed(self._clean(f"{self._name} answered {method} {path} with nothing"))
            return content
        failure = self._failure(method, path, answer)
        if missing_is_none and answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            if isinstance(content, dict) and self._says_missing(cast("dict[str, Any]", content)):
                return None
            failure = ProviderFailed(f"{failure}, which are not the words of {self._name}").coded(failure.code)
        if type(failure) is RateLimited or (type(failure) is ProviderFailed and may_repeat):
            raise _RepeatableError(failure, _wish(answer, self._reset))
        raise failure

    def _failure(self, method: str, path: str, answer: httpx.Response) -> SkywardError:
        content = _content(answer)
        body = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        status = answer.status_code
        told = self._told(content)
        message = self._clean(f"{self._name} answered {method} {path} with {status}") + (f": {told}" if told else "")
        code = next(
            (body[key] for key in ("code", "id", "error", "title") if isinstance(body.get(key), str) and body[key]),
            str(status),
        )
        return (self._classify(status, body, message) or _meaning(status, message)).coded(self._told(code))

    def _told(self, content: object) -> str:
        """What the cloud said, in one line: without secrets first, so that the cut leaves no half of one."""
        text = (
            ""
            if content is None
            else content
            if isinstance(content, str)
            else json.dumps(_without_secrets(content), ensure_ascii=False)
        )
        return " ".join(self._clean(text).split())[:TOLD_CHARACTERS]

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


type Row = Mapping[str, Any]
"""A JSON object as a cloud tells it."""


def field_of[T](answer: object, name: str, kind: type[T], who: str) -> T:
    """Return a field of an answer, which is of this kind. `who` has answered what: "RunPod answered GET /v2/pods".

    Raises ProviderFailed for what is no JSON object, or has no such field: the page of a proxy, with status 200, is no
    answer. Nor is it a refusal: a creating call that is answered so may have created something.
    """
    value = cast("Row", answer).get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise ProviderFailed(f"{who} without {name!r}")
    return value


def rows_of(answer: object, name: str, who: str) -> list[Row]:
    """Return the list of JSON objects in a field of an answer.

    Raises ProviderFailed like `field_of`: an answer without it says nothing of what there is.
    """
    return rows_in(field_of(answer, name, list, who), who)


def rows_in(answer: object, who: str) -> list[Row]:
    """Return an answer that is a list of JSON objects. Raises ProviderFailed for any other."""
    if not isinstance(answer, list) or not all(isinstance(row, dict) for row in cast("list[object]", answer)):
        raise ProviderFailed(f"{who} with no list of things")
    return cast("list[Row]", answer)


def nothing_in(answer: object, who: str) -> None:
    """Raise ProviderFailed for an answer that says something, of a cloud that says nothing when it has done what it was
    asked.
    """
    if answer is not None:
        raise ProviderFailed(f"{who} with what is none of its answers")


def _wait_seconds(state: RetryCallState) -> float:
    """Return how long to wait before the next try: what the cloud wants, or the next pause of the back-off."""
    error = None if state.outcome is None else state.outcome.exception()
    wanted = error.wait_seconds if isinstance(error, _RepeatableError) else None
    if wanted is not None:
        return max(wanted, PAUSE_SECONDS)
    return Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).seconds(state.attempt_number)


def _without_secrets(content: object) -> object:
    if isinstance(content, dict):
        fields = cast("dict[str, object]", content).items()
        return {
            name: "***" if isinstance(value, str) and SECRET_FIELD.fullmatch(name) else _without_secrets(value)
            for name, value in fields
        }
    return [_without_secrets(one) for one in cast("list[object]", content)] if isinstance(content, list) else content


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


def _wish(answer: httpx.Response, reset: Reset) -> float | None:
    """How many seconds the cloud wants us to wait: a number, or a date (RFC 9110, 10.2.3); else until its own header
    says, if that is still to come.
    """
    told = answer.headers.get("Retry-After", "").strip()
    if not told:
        at = reset(answer.headers) if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS else None
        return None if at is None or at <= time.time() else at - time.time()
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", told):
        return float(told)
    try:
        moment = parsedate_to_datetime(told)
    except ValueError:
        return None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - time.time())


def _given(query: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if query is None else {name: value for name, value in query.items() if value is not None}
