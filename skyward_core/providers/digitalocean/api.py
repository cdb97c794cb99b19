"""DigitalOcean's REST API: the token, listings, and what its refusals mean."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyward_core.errors import (
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    SkywardError,
)
from skyward_core.machines.offers import Offer
from skyward_core.providers._http import Advice, Api, Classify, Found, Row, rows_of

API_URL = "https://api.digitalocean.com"
TOKEN_VARIABLES = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN")
URL_VARIABLE = "DIGITALOCEAN_API_URL"
PER_PAGE = 200
LISTING_TRIES = 5
REFUSALS: Mapping[type[SkywardError], tuple[str, ...]] = {
    # seen on 2026-08-16: "creating this/these droplet(s) will exceed your GPU limit", also where no droplet exists
    QuotaExceeded: ("droplet limit", "gpu limit"),
    NoCapacity: (
        "not available in this region",
        "region is not available",
        "temporarily unavailable",
        "not currently available",
        "size is unavailable",
        "at capacity",
        "insufficient capacity",
        "sold out",
    ),
}
"""Parts of the message separate capacity, quota and mistakes of the request, which share a status (422) and a code."""
MISTAKES = ("invalid", "only valid hostname", "tag names", "too long", "too many", "can't be blank", "unknown field")
"""Parts of the messages about a wrong creating call, as the API and its description word them."""
TOKENS_PAGE = "https://cloud.digitalocean.com/account/api/tokens"
LIMITS_PAGE = "https://cloud.digitalocean.com/account/team/droplet_limit_increase"
"""Where limits are raised (github.com/OpenRouterLabs/spawn/issues/3059, 2026-03-27)."""


def find_token() -> Found:
    """Return the token of the environment, else of doctl. Raises CredentialsError."""
    for variable in TOKEN_VARIABLES:
        if token := os.environ.get(variable):
            return Found(token, f"the variable {variable}")
    home = Path(
        "~/Library/Application Support"
        if sys.platform == "darwin"
        else os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    ).expanduser()
    file = home / "doctl" / "config.yaml"
    try:
        token = doctl_token(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        token = ""
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{file} cannot be read: {error}") from error
    if not token:
        raise CredentialsError(
            f"no token for DigitalOcean: set {TOKEN_VARIABLES[0]} (or {TOKEN_VARIABLES[1]}), or log in with `doctl auth"
            " init`"
        )
    return Found(token, f"the file {file}")


def doctl_token(config: str) -> str:
    """Return the token of doctl's current context from the text of its config.yaml; "" if there is none.

    Two lines matter, so no YAML parser is needed.
    """
    lines = dict(re.findall(r"^([\w-]+): *[\"']?([^\"'\s]+)[\"']? *$", config, re.MULTILINE))
    context = lines.get("context", "default")
    if context == "default":
        return lines.get("access-token", "")
    found = re.search(
        rf"^auth-contexts:\s*\n(?:[ \t]+.*\n)*?[ \t]+{re.escape(context)}: *[\"']?([^\"'\s]+)", config, re.MULTILINE
    )
    return found[1] if found else ""


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of a token from this source."""
    return Advice(
        key=f"The token of {source} is refused: make another at {TOKENS_PAGE}",
        rights=(
            f"The token of {source} lacks a scope: docs/clouds/digitalocean.md lists them, and {TOKENS_PAGE} sets them"
        ),
        quota=(
            "A new account may rent no GPU until it has paid an invoice or $50 in advance: ask for a higher limit at"
            f" {LIMITS_PAGE}"
        ),
        capacity="Try again later, another region or another size (`skyward offers`)",
    )


def refusal_of(offer: Offer) -> Classify:
    """Return the classifier for a creating call.

    An unknown text is taken for a lack of capacity, so that the next offer is tried. If several offers
    are refused with it, the request is wrong (`NoCapacity.mistake`).
    """

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        text = str(body.get("message", "")).lower()
        known = meaning_of(status, body, message)
        if known is not None or status != 422 or any(part in text for part in MISTAKES):
            return known
        error = NoCapacity(message)
        for name in (offer.instance_type, offer.region):
            text = text.replace(name, "...")
        error.mistake = " ".join(re.sub(r"\S*[0-9]\S*", "...", text).split())
        return error

    return meaning


def meaning_of(status: int, body: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal beside its status."""
    if status != 422:
        return None
    text = str(body.get("message", "")).lower()
    for kind, parts in REFUSALS.items():
        if any(part in text for part in parts):
            return kind(message)
    attributes = body.get("error_attributes")
    return NoCapacity(message) if isinstance(attributes, dict) and "available_regions" in attributes else None


def says_missing(body: Row) -> bool:
    return body.get("id") == "not_found" and isinstance(body.get("message"), str)


def reset_of(headers: Mapping[str, str]) -> float | None:
    """Return when the hourly limit has room again.

    Only bursts come with Retry-After. If requests remain, another limit has refused the request.
    """
    reset = headers.get("ratelimit-reset", "").strip()
    if headers.get("ratelimit-remaining", "0").strip() != "0" or not re.fullmatch("[0-9]{1,12}", reset):
        return None
    return float(reset)


def droplets(api: Api, *, is_gpu: bool) -> list[Row]:
    """Return the account's droplets with GPUs, or those without: no listing has both.

    A filter by tag cannot be combined with that.
    """
    return pages(api, "/v2/droplets", "droplets", type="gpus" if is_gpu else None)


def pages(api: Api, path: str, kind: str, **query: Any) -> list[Row]:
    """Return all pages of a listing. Read it again if its length changed meanwhile.

    Otherwise a row that moves to a page that was already read would seem to be gone.
    """
    for _ in range(LISTING_TRIES):
        rows: list[Row] = []
        totals: set[int | None] = set()
        page, is_more = 0, True
        while is_more:
            page += 1
            answer = api.request("GET", path, query={**query, "per_page": PER_PAGE, "page": page})
            rows += rows_of(answer, kind, f"DigitalOcean answered GET {path}")
            totals.add((answer.get("meta") or {}).get("total"))
            is_more = "next" in ((answer.get("links") or {}).get("pages") or {})
        if len(totals) == 1:
            return rows
    raise ProviderFailed(f"DigitalOcean's listing {path} changes while it is read")
