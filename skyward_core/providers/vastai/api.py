"""Vast.ai's REST API: the key, listings, and what its answers and refusals mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from skyward_core.errors import (
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.providers._http import Api, Classify, Row, rows_of

URL = "https://console.vast.ai"
CONSOLE = "https://cloud.vast.ai/instances/"
LISTING, USER = "/api/v1/instances/", "/api/v0/users/current/"
LISTING_ROWS = 25
"""The most that one page of a listing tells."""
GONE_CODES = frozenset({"no_such_ask", "invalid_price"})
"""An ask that is not there any more, and a bid that has been outbid since the search."""
GONE_TEXTS = ("no_such_ask", "not available")
QUOTA_CODES = frozenset({"insufficient_credit", "insufficient_credits"})
QUOTA_TEXTS = ("credit", "balance", "spending limit")
"""Where a refusal has no code of its own ("invalid_args" for everything)."""
SEARCH_QUOTA = "search_quota_exceeded"


class SearchedTooMuch(RateLimited):
    """The rows of a day are used up; they come back at midnight UTC, which is not waited for."""


def find_key() -> str:
    """The key of the user's environment, or the one of Vast's own tools. Raises CredentialsError."""
    if key := os.environ.get("VAST_API_KEY", "").strip():
        return key
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    for place in (config / "vastai" / "vast_api_key", Path("~/.vast_api_key").expanduser()):
        try:
            if key := place.read_text().strip():
                return key
        except OSError:
            continue
    raise CredentialsError("there is no key for Vast.ai: set VAST_API_KEY, run `vastai set api-key`, or give api_key=")


def classify_and_note(left: list[int] | None) -> Classify:
    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if left is not None and body.get("new_contract"):
            left.append(int(body["new_contract"]))
        return _meaning(status, body, message)

    return meaning


def _meaning(status: int, body: Row, message: str) -> SkywardError | None:
    """What a refusal means, by its status and code, and by its text where the code says nothing."""
    code, told = str(body.get("error") or ""), str(body.get("msg") or body.get("message") or "").casefold()
    if code == SEARCH_QUOTA:
        return SearchedTooMuch(f"{message}; searches are free again at midnight UTC")
    if status in (401, 429) or status >= 500:
        return None
    if status == 402 or code in QUOTA_CODES or any(text in told for text in QUOTA_TEXTS):
        return QuotaExceeded(message)
    if status in (404, 410) or code in GONE_CODES or any(text in told for text in GONE_TEXTS):
        return NoCapacity(message)
    return None


def says_missing(body: Row) -> bool:
    return bool(re.fullmatch("no_such_[a-z]+|[a-z]+_not_found", str(body.get("error"))))


def contract_of(answer: Any, left: list[int]) -> int:
    """The id of what was created. A call that did not succeed may have made one nevertheless, which goes to `left`."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    contract = body.get("new_contract")
    if body.get("success") and contract:
        return int(contract)
    if contract:
        left.append(int(contract))
    if not body.get("error") and not body.get("msg"):
        fields = (
            f"an object with {', '.join(map(repr, body)) or 'nothing'}" if isinstance(answer, dict) else "no object"
        )
        # not what is in them: one may be a key
        raise ProviderFailed(f"Vast.ai does not say what it has created: {fields}")
    message = f"Vast.ai did not rent it: {reason_in(body)}"
    raise (_meaning(200, body, message) or NoCapacity(message)).coded(str(body.get("error") or "success: false"))


def all_containers(api: Api) -> Iterator[Row]:
    """All containers of the account."""
    token: str | None = None
    seen: set[str | None] = set()
    while token not in seen:
        seen.add(token)
        answer = api.ask("GET", LISTING, query={"limit": LISTING_ROWS, "after_token": token})
        yield from rows_of(answer, "instances", f"Vast.ai answered GET {LISTING}")
        token = answer.get("next_token") or None
        if token is None:
            return
    raise ProviderFailed("Vast.ai's listing goes round in circles")


def reason_in(answer: object) -> str:
    """What an answer says in words; of its other fields one may be a key."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    return f"{body.get('error')}: {body.get('msg')}"
