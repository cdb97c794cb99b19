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
"""Where version 1 of the REST API is; its day was to be 2026-11-15, and it costs nothing to ask."""
CONSOLE = "https://console.runpod.io/pods?id="
SOLD_OUT = re.compile("availab|capacit|stock|suppl|resource|instance|machine|host|sold|again")
"""Words of a refusal that may mean that there is none left: how RunPod says so is documented nowhere."""


def find_key() -> str:
    """The key of the user's environment, or the one of RunPod's tools: its Python package writes `[default] api_key`,
    runpodctl `apikey`.
    """
    if key := os.environ.get("RUNPOD_API_KEY", "").strip():
        return key
    place = Path("~/.runpod/config.toml").expanduser()
    try:
        config = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # its message may hold a line of it
        raise CredentialsError(
            f"RUNPOD_API_KEY is not set, and {place} cannot be read: {type(error).__name__}"
        ) from None
    default = config.get("default")
    told = [cast("Row", default).get("api_key")] if isinstance(default, dict) else []
    told += [config.get(name) for name in ("apikey", "apiKey")]
    for key in told:
        if isinstance(key, str) and key.strip():
            return key.strip()
    raise CredentialsError(
        "there is no key for RunPod: set RUNPOD_API_KEY, write it to ~/.runpod/config.toml, or give api_key="
    )


def says_missing(body: Row) -> bool:
    """A problem document (RFC 9457), as all of RunPod's refusals are."""
    return body.get("status") in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE) and isinstance(body.get("title"), str)


def meaning_of(status: int, _: Row, message: str) -> SkywardError | None:
    """What a refusal means, besides what it means everywhere: 402 is no money, or the account's limit of it."""
    return QuotaExceeded(message) if status == HTTPStatus.PAYMENT_REQUIRED else None


def refusal_of(offer: Offer) -> Classify:
    """The same for a creating call: 400 is a broken rule or that nothing is left, which no code tells apart, and 403
    that this cloud is not for us.
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
    """What a refusal says without the names of this offer and without numbers, so that others can say the same; "" if
    it speaks of what there is to rent.
    """
    text = detail.casefold()
    for name in (offer.instance_type, offer.instance_type.rpartition(" x")[0], offer.region):
        text = text.replace(name.casefold(), "...") if name else text
    return "" if SOLD_OUT.search(text) else " ".join(re.sub(r"\S*[0-9]\S*", "...", text).split())


def rows_at(api: Api, path: str, name: str, query: Row) -> list[Row]:
    return rows_of(api.ask("GET", path, query=query), name, f"RunPod answered GET {path}")


def thing_at(api: Api, path: str, query: Row | None = None) -> Row | None:
    """One thing of RunPod's, None if there is no such thing."""
    answer = api.ask("GET", path, query=query, missing_is_none=True)
    if answer is not None:
        field_of(answer, "id", str, f"RunPod answered GET {path}")
    return answer


def all_pods(api: Api) -> Iterator[Row]:
    """All pods of the account. The list came in one piece at first, and comes in pages since autumn 2026."""
    cursor: str | None = None
    seen: set[str | None] = set()
    while cursor not in seen:
        seen.add(cursor)
        answer = api.ask("GET", "/v2/pods", query={"cursor": cursor})
        yield from rows_of(answer, "pods", "RunPod answered GET /v2/pods")
        pages: Row = answer.get("pagination") or {}
        cursor = pages.get("nextCursor")
        if cursor is None and not pages.get("hasNextPage"):
            return
    raise ProviderFailed("RunPod's list of pods goes round in circles")


def path_of(pod: str) -> str:
    return f"/v2/pods/{quote(pod, safe='')}"


def networked_data_centers(api: Api) -> set[str]:
    """The data centres with a private network."""
    return {row["id"] for row in rows_at(api, "/v2/catalog/datacenters", "dataCenters", {}) if row.get("globalNetwork")}
