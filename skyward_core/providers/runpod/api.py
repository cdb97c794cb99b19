"""RunPod's REST API: the key, listings, and what its answers and refusals mean."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import cast
from urllib.parse import quote

from skyward_core.errors import (
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    SkywardError,
)
from skyward_core.machines.offers import Offer
from skyward_core.providers._http import Advice, Api, Classify, Found, Row, field_of, rows_of

URL = "https://api.runpod.io"
CONSOLE = "https://console.runpod.io/pods?id="
KEYS_PAGE = "https://www.console.runpod.io/user/settings"
"""Where keys are made and get their rights (docs.runpod.io/get-started/api-keys)."""
BILLING_PAGE = "https://www.console.runpod.io/user/billing"
CAPACITY = "Try again later, another data centre or another GPU (`skyward offers`)"
SOLD_OUT = re.compile("availab|capacit|stock|suppl|resource|instance|machine|host|sold|again")
"""Words of a refusal that may mean that nothing is left. RunPod does not document its wording."""


def find_key() -> Found:
    """Return the key of the user's environment, or of RunPod's tools.

    Its Python package writes `[default] api_key`, runpodctl `apikey`.
    """
    if key := os.environ.get("RUNPOD_API_KEY", "").strip():
        return Found(key, "the variable RUNPOD_API_KEY")
    file = Path("~/.runpod/config.toml").expanduser()
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # the error's message may contain a line of the file
        raise CredentialsError(
            f"RUNPOD_API_KEY is not set, and {file} cannot be read: {type(error).__name__}"
        ) from None
    default = config.get("default")
    keys = [cast("Row", default).get("api_key")] if isinstance(default, dict) else []
    keys += [config.get(name) for name in ("apikey", "apiKey")]
    for key in keys:
        if isinstance(key, str) and key.strip():
            return Found(key.strip(), f"the file {file}")
    raise CredentialsError(
        "there is no key for RunPod: set RUNPOD_API_KEY, write it to ~/.runpod/config.toml, or give api_key="
    )


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of a key from this source."""
    return Advice(
        key=f"The key of {source} is refused: make another at {KEYS_PAGE}",
        rights=f"The key of {source} may not do this: give it read and write access to pods at {KEYS_PAGE}",
        quota=f"Add credit at {BILLING_PAGE}; RunPod's support raises the spending limit",
        capacity=CAPACITY,
    )


def says_missing(body: Row) -> bool:
    """Return whether a body is a problem document (RFC 9457) about a missing object, as RunPod sends them."""
    return body.get("status") in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE) and isinstance(body.get("title"), str)


def meaning_of(status: int, _: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal beside the usual one. 402 is a lack of money, or the account's spending limit."""
    return QuotaExceeded(message) if status == HTTPStatus.PAYMENT_REQUIRED else None


def refusal_of(offer: Offer) -> Classify:
    """Return the classifier for a creating call.

    400 is a broken rule or a lack of stock, without a code that separates them. 403 is a valid key without the right
    (docs.runpod.io, "Migrate from API v1"), and no lack of stock: every other offer would be refused with it.
    """

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if status != HTTPStatus.BAD_REQUEST:
            return meaning_of(status, body, message)
        error = NoCapacity(message)
        error.mistake = _mistake(str(body.get("detail") or ""), offer)
        return error

    return meaning


def _mistake(detail: str, offer: Offer) -> str:
    """Return the text of a refusal without the offer's names and without numbers; "" if it is about stock.

    So refusals of several offers can be compared.
    """
    text = detail.casefold()
    for name in (offer.instance_type, offer.instance_type.rpartition(" x")[0], offer.region):
        text = text.replace(name.casefold(), "...") if name else text
    return "" if SOLD_OUT.search(text) else " ".join(re.sub(r"\S*[0-9]\S*", "...", text).split())


def rows_at(api: Api, path: str, name: str, query: Row) -> list[Row]:
    return rows_of(api.request("GET", path, query=query), name, f"RunPod answered GET {path}")


def thing_at(api: Api, path: str, query: Row | None = None) -> Row | None:
    """Return an object of RunPod's; None if it does not exist."""
    answer = api.request("GET", path, query=query, missing_is_none=True)
    if answer is not None:
        field_of(answer, "id", str, f"RunPod answered GET {path}")
    return answer


def all_pods(api: Api) -> Iterator[Row]:
    """Yield all pods of the account. The list was one document at first, and has pages since autumn 2026."""
    cursor: str | None = None
    seen: set[str | None] = set()
    while cursor not in seen:
        seen.add(cursor)
        answer = api.request("GET", "/v2/pods", query={"cursor": cursor})
        yield from rows_of(answer, "pods", "RunPod answered GET /v2/pods")
        pages: Row = answer.get("pagination") or {}
        cursor = pages.get("nextCursor")
        if cursor is None and not pages.get("hasNextPage"):
            return
    raise ProviderFailed("the pages of RunPod's list of pods repeat")


def path_of(pod: str) -> str:
    return f"/v2/pods/{quote(pod, safe='')}"


def networked_data_centers(api: Api) -> set[str]:
    """Return the data centres with a private network."""
    return {row["id"] for row in rows_at(api, "/v2/catalog/datacenters", "dataCenters", {}) if row.get("globalNetwork")}
