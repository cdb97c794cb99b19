"""Verda's REST API: credentials, tokens, and what its answers and refusals mean."""

from __future__ import annotations

import configparser
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import quote

from skyward_core.errors import BadRequest, CredentialsError, NoCapacity, ProviderFailed, QuotaExceeded, SkywardError
from skyward_core.providers._http import Advice, Api, field_of, rows_in

type Json = dict[str, Any]
URL = "https://api.verda.com/v1"
CONSOLE = "https://console.verda.com"
# Verda has one code, invalid_request, for most refusals: these texts separate them.
QUOTA_WORDS = ("quota", "limit exceeded", "exceeds the limit")
CAPACITY = "Try again later, another location or another type (`skyward offers`)"
CAPACITY_WORDS = ("capacity", "not available", "unavailable", "out of stock")
GONE_WORDS = ("invalid instance id", "discontinued instance", "already discontinued", "instance not found")


@dataclass(frozen=True, slots=True)
class Credentials:
    client_id: str
    client_secret: str
    url: str
    source: str
    """Where they came from, in words for messages."""

    def __repr__(self) -> str:
        return "Credentials()"


class _TokenRefused(CredentialsError):
    """401: the token has expired, or was never valid."""


class VerdaApi:
    """A client of the API for the length of one method of the provider. It is a context manager.

    It fetches a token when one is first needed, and again when the token is refused.
    """

    def __init__(self, credentials: Credentials, planted: Sequence[str] = ()) -> None:
        self.credentials = credentials
        self._advice = advice_of(credentials.source)
        self._api = Api(
            "Verda",
            credentials.url,
            classify=_meaning,
            secrets=(credentials.client_secret, credentials.client_id, *planted),
            says_missing=_says_missing,
            advice=self._advice,
        )
        self._token = ""
        self._fetching = threading.Lock()

    def __enter__(self) -> Self:
        self._api.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._api.__exit__()

    def request(self, method: str, path: str, **how: Any) -> Any:
        """Like `Api.request`, with a token."""
        token = self._token_but("")
        try:
            return self._api.request(method, path, **how, headers={"Authorization": f"Bearer {token}"})
        except _TokenRefused:
            token = self._token_but(token)
        try:
            return self._api.request(method, path, **how, headers={"Authorization": f"Bearer {token}"})
        except _TokenRefused as error:
            raise CredentialsError(error.without_advice).coded(error.code).advised(error.advice) from None

    def list(self, path: str, **query: Any) -> list[Json]:
        """Return all objects of a kind. Verda has no pages."""
        return cast("list[Json]", rows_in(self.request("GET", path, query=query or None), f"Verda answered GET {path}"))

    def machine(self, machine_id: str) -> Json | None:
        """Return a machine, also one that is discontinued; None if there is none."""
        path = f"/instances/{quote(machine_id, safe='')}"
        try:
            machine = self.request("GET", path, missing_is_none=True)
        except BadRequest as error:
            if speaks_of(str(error), GONE_WORDS):
                return None
            raise
        if machine is not None:
            field_of(machine, "status", str, f"Verda answered GET {path}")
        return machine

    def make(
        self, path: str, name: str, fields: Json, is_it: Callable[[Json, str], bool], *, is_kept: bool = False
    ) -> str:
        """Make an object and return its id.

        With `is_kept`, an existing one is used. After a lost answer or a conflict the object is looked up.
        """
        if is_kept and (found := self._look_up(path, name, is_it)) is not None:
            return found
        try:
            return id_in(self.request("POST", path, body={"name": name, **fields}), path)
        except (ProviderFailed, BadRequest):  # the answer was lost, or another process has created it meanwhile
            if (found := self._look_up(path, name, is_it)) is None:
                raise
            return found

    def _look_up(self, path: str, name: str, is_it: Callable[[Json, str], bool]) -> str | None:
        return next((str(one["id"]) for one in self.list(path) if is_it(one, name)), None)

    def _token_but(self, stale: str) -> str:
        """Return a token other than this one. Threads whose token was refused at the same time fetch only one."""
        with self._fetching:
            if self._token == stale:
                halves = {"client_id": self.credentials.client_id, "client_secret": self.credentials.client_secret}
                try:
                    answer = self._api.request(
                        "POST", "/oauth2/token", body={"grant_type": "client_credentials", **halves}, is_repeatable=True
                    )
                except (BadRequest, CredentialsError) as error:  # OAuth answers 400 for a wrong secret too
                    refused = CredentialsError(f"Verda refuses the client id or its secret: {error.without_advice}")
                    raise refused.coded(error.code).advised(self._advice.key) from None
                self._token = field_of(answer, "access_token", str, "Verda answered POST /oauth2/token")
            return self._token


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of credentials from this source."""
    return Advice(
        key=f"The credentials of {source} are refused: make others at {CONSOLE}, under Keys",
        rights=(
            f"The credentials of {source} belong to a member of the team who may not do this. Change the role at"
            f" {CONSOLE}"
        ),
        quota=f"Add credit at {CONSOLE}; Verda's support (support@verda.com) raises limits",
        capacity=CAPACITY,
    )


def _says_missing(body: Mapping[str, Any]) -> bool:
    return body.get("code") == "not_found" and isinstance(body.get("message"), str)


def _meaning(status: int, body: Mapping[str, Any], message: str) -> SkywardError | None:
    text = str(body.get("message", ""))
    # Verda's command line takes the status alone for it (verda-cli, agent_error.go at 0b0cd028)
    if body.get("code") == "insufficient_funds" or status == HTTPStatus.PAYMENT_REQUIRED:
        return QuotaExceeded.of_money(message)
    if status == HTTPStatus.UNAUTHORIZED:
        return _TokenRefused(message)
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
        if speaks_of(text, QUOTA_WORDS):
            return QuotaExceeded(message)
        if speaks_of(text, CAPACITY_WORDS):
            return NoCapacity(message)
    return None


def read_credentials(file: Path, profile: str) -> Mapping[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text(), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        # the error's message may contain a line of the file
        raise CredentialsError(
            f"{file} cannot be read as Verda's file of credentials: {type(error).__name__}"
        ) from None
    return parser[profile] if parser.has_section(profile) else {}


def id_in(answer: object, path: str) -> str:
    """Return the id in an answer to a creating call: plain text, sometimes in quotes, sometimes a field."""
    found = cast("Json", answer).get("id") if isinstance(answer, dict) else answer
    word = str(found or "").strip().strip('"')
    if not re.fullmatch(r"[\w-]+", word):
        raise ProviderFailed(f"Verda answered POST {path} without an id")
    return word


def speaks_of(text: str, words: Sequence[str]) -> bool:
    text = text.lower().replace("’", "'")
    return any(word in text for word in words)
