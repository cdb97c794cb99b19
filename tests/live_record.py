"""Answers of a real cloud as they came, for fixtures: without secrets, persons and addresses. Read them before a commit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from unittest import mock

import httpx

from skyward_core.providers._http import SECRET_FIELD
from skyward_core.providers.aws_account import AwsAccount
from skyward_core.wire.masking import spellings

PRIVATE_FIELD = re.compile(
    r"(.*[_-])?(user_?data|env|extra_env|script|onstart|args|email|username|name_?on.*|first_?name|last_?name|address)",
    re.IGNORECASE,
)
"""Names of fields whose values are about a person, or hold our boot script."""
EMAIL, IPV4 = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"), re.compile(r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b")
PUBLIC_KEY = re.compile(r"(ssh-[a-z0-9-]+|ecdsa-[a-z0-9-]+) [A-Za-z0-9+/=]+")
SECRET_VARIABLES = re.compile(r"(AWS|DIGITALOCEAN|VERDA|DATACRUNCH|VAST|RUNPOD)_.*(KEY|TOKEN|SECRET|ID)(_ID)?")


def cleaned(content: object, secrets: Iterable[str] = ()) -> object:
    """Return JSON content without what must not be published. Numbers and the clouds' own words stay."""
    if isinstance(content, dict):
        fields = cast("dict[str, object]", content).items()
        return {name: "***" if _is_private(name, value) else cleaned(value, secrets) for name, value in fields}
    if isinstance(content, list):
        return [cleaned(each, secrets) for each in cast("list[object]", content)]
    if not isinstance(content, str):
        return content
    for secret in secrets:
        content = content.replace(secret, "***")
    text = PUBLIC_KEY.sub(r"\1 AAAA", EMAIL.sub("jo@example.org", content))
    return IPV4.sub("203.0.113.7", text)


def _is_private(name: str, value: object) -> bool:
    return bool(SECRET_FIELD.fullmatch(name) or PRIVATE_FIELD.fullmatch(name)) and value not in (None, "", [], {})


def secrets_here() -> list[str]:
    """Return the credentials of the clouds' variables, in all spellings, the longest first."""
    values = [value for name, value in os.environ.items() if SECRET_VARIABLES.fullmatch(name) and value]
    return sorted({spelling for value in values for spelling in spellings(value)}, key=len, reverse=True)


class Recorder:
    """Keeps each answer while it is entered, and writes them at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: list[dict[str, object]] = []
        self._patches = [
            mock.patch.object(
                httpx.HTTPTransport, "handle_request", self._over_http(httpx.HTTPTransport.handle_request)
            ),
            mock.patch.object(AwsAccount, "ask", self._of_aws(AwsAccount.ask)),
            mock.patch.object(AwsAccount, "pages", self._of_aws(AwsAccount.pages)),
        ]

    def __enter__(self) -> Self:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for patch in self._patches:
            patch.stop()
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file.touch(mode=0o600)  # what a cloud says of an account
        text = json.dumps(cleaned(json.loads(json.dumps(self._rows, default=str)), secrets_here()), indent=1)
        self._file.write_text(text + "\n")

    def _over_http(self, send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
        def recorded(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            response = send(transport, request)
            content = response.read()
            try:
                body: object = json.loads(content) if content else None
            except ValueError:
                body = content.decode(errors="replace")[:2000]
            path = request.url.raw_path.decode()
            self._rows.append({"request": f"{request.method} {path}", "status": response.status_code, "body": body})
            return response

        return recorded

    def _of_aws(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(account: AwsAccount, region: str, service: str, operation: str, *more: Any, **words: Any) -> Any:
            row: dict[str, object] = {"request": f"{service} {operation} in {region}"}
            self._rows.append(row)
            try:
                row["body"] = answer = ask(account, region, service, operation, *more, **words)
            except Exception as error:
                row["error"] = str(error)
                raise
            return answer

        return recorded
