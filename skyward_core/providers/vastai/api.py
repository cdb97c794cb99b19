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
from skyward_core.providers._http import Advice, Api, Classify, Found, Row, rows_of

URL = "https://console.vast.ai"
CONSOLE = "https://cloud.vast.ai/instances/"
LISTING, USER = "/api/v1/instances/", "/api/v0/users/current/"
LISTING_ROWS = 25
"""The most rows of one page of a listing."""
GONE_CODES = frozenset({"no_such_ask", "invalid_price"})
"""An offer that does not exist any more, and a bid that was outbid since the search."""
GONE_TEXTS = ("no_such_ask", "not available")
QUOTA_CODES = frozenset({"insufficient_credit", "insufficient_credits", "spend_rate_limit"})
QUOTA_TEXTS = ("credit", "balance", "spending limit", "spend rate", "spend_rate")
"""Texts of refusals whose code is "invalid_args", which Vast.ai uses for everything."""
KEYS_PAGE = "https://cloud.vast.ai/manage-keys/"
BILLING_PAGE = "https://cloud.vast.ai/billing/"
SEARCH_QUOTA = "search_quota_exceeded"


class SearchedTooMuch(RateLimited):
    """The daily quota of rows is used up. It is renewed at midnight UTC, and no request waits for that."""


def find_key() -> Found:
    """Return the key of the user's environment, or of Vast.ai's own tools. Raises CredentialsError."""
    if key := os.environ.get("VAST_API_KEY", "").strip():
        return Found(key, "the variable VAST_API_KEY")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    for file in (config / "vastai" / "vast_api_key", Path("~/.vast_api_key").expanduser()):
        try:
            if key := file.read_text(encoding="utf-8").strip():
                return Found(key, f"the file {file}")
        except (OSError, UnicodeDecodeError):
            continue
    raise CredentialsError("there is no key for Vast.ai: set VAST_API_KEY, run `vastai set api-key`, or give api_key=")


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of a key from this source."""
    return Advice(
        key=f"The key of {source} is refused: make another at {KEYS_PAGE}",
        rights=(
            f"The key of {source} may not do this: give it instance_read, instance_write, user_read and misc at"
            f" {KEYS_PAGE}"
        ),
        quota=(
            f"Add credit at {BILLING_PAGE}. A new account may spend only so much in an hour: rent fewer or cheaper"
            " machines, or ask Vast.ai's support for a higher limit"
        ),
        capacity="Try again later, another country or another GPU (`skyward offers`)",
    )


def classify_and_note(unwanted: list[int] | None) -> Classify:
    """Return the classifier of refusals. It adds containers that a refusal names to `unwanted`."""

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if unwanted is not None and body.get("new_contract"):
            unwanted.append(int(body["new_contract"]))
        return _meaning(status, body, message)

    return meaning


def _meaning(status: int, body: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal by its status and code, or by its text where the code says nothing."""
    code, text = str(body.get("error") or ""), str(body.get("msg") or body.get("message") or "").casefold()
    if code == SEARCH_QUOTA:
        return SearchedTooMuch(f"{message}; searches are free again at midnight UTC")
    if code in QUOTA_CODES:
        return QuotaExceeded(message)
    if status in (401, 429) or status >= 500:
        return None
    if status == 402 or any(part in text for part in QUOTA_TEXTS):
        return QuotaExceeded(message)
    if status in (404, 410) or code in GONE_CODES or any(part in text for part in GONE_TEXTS):
        return NoCapacity(message)
    return None


def says_missing(body: Row) -> bool:
    return bool(re.fullmatch("no_such_[a-z]+|[a-z]+_not_found", str(body.get("error"))))


def contract_of(answer: Any, unwanted: list[int]) -> int:
    """Return the id of the created container. If a failed call created one nevertheless, add it to `unwanted`."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    contract = body.get("new_contract")
    if body.get("success") and contract:
        return int(contract)
    if contract:
        unwanted.append(int(contract))
    if not body.get("error") and not body.get("msg"):
        fields = (
            f"an object with {', '.join(map(repr, body)) or 'nothing'}" if isinstance(answer, dict) else "no object"
        )
        # names only: one of the values may be a key
        raise ProviderFailed(f"Vast.ai's answer lacks the id of the new container: {fields}")
    message = f"Vast.ai refused to rent: {reason_in(body)}"
    error = _meaning(200, body, message) or NoCapacity(message)
    raise error.coded(str(body.get("error") or "success: false")).advised(advice_of("").about(error, 200))


def all_containers(api: Api) -> Iterator[Row]:
    """Yield all containers of the account."""
    token: str | None = None
    seen: set[str | None] = set()
    while token not in seen:
        seen.add(token)
        answer = api.request("GET", LISTING, query={"limit": LISTING_ROWS, "after_token": token})
        yield from rows_of(answer, "instances", f"Vast.ai answered GET {LISTING}")
        token = answer.get("next_token") or None
        if token is None:
            return
    raise ProviderFailed("the pages of Vast.ai's listing repeat")


def reason_in(answer: object) -> str:
    """Return the reason in an answer. Its other fields are left out, because one may be a key."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    return f"{body.get('error')}: {body.get('msg')}"
