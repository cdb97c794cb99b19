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
from skyward_core.providers._http import Api, Classify, Row, field_of, rows_of

URL = "https://api.runpod.io"
REST_URL = "https://rest.runpod.io"
"""URL of version 1 of the REST API. It was to end on 2026-11-15; a failed request costs nothing."""
CONSOLE = "https://console.runpod.io/pods?id="
SOLD_OUT = re.compile("availab|capacit|stock|suppl|resource|instance|machine|host|sold|again")
"""Words of a refusal that may mean that nothing is left. RunPod does not document its wording."""


def find_key() -> str:
    """Return the key of the user's environment, or of RunPod's tools.

    Its Python package writes `[default] api_key`, runpodctl `apikey`.
    """
    if key := os.environ.get("RUNPOD_API_KEY", "").strip():
        return key
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
            return key.strip()
    raise CredentialsError(
        "there is no key for RunPod: set RUNPOD_API_KEY, write it to ~/.runpod/config.toml, or give api_key="
    )


def says_missing(body: Row) -> bool:
    """Return whether a body is a problem document (RFC 9457) about a missing object, as RunPod sends them."""
    return body.get("status") in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE) and isinstance(body.get("title"), str)


def meaning_of(status: int, _: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal beside the usual one. 402 is a lack of money, or the account's spending limit."""
    return QuotaExceeded(message) if status == HTTPStatus.PAYMENT_REQUIRED else None


def refusal_of(offer: Offer) -> Classify:
    """Return the classifier for a creating call.

    400 is a broken rule or a lack of stock, without a code that separates them. 403 means that this cloud is closed to
    us.
    """

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN):
            return meaning_of(status, body, message)
        error = NoCapacity(message)
        if status == HTTPStatus.BAD_REQUEST:
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
