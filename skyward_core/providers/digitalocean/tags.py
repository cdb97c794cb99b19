"""Names and tags of droplets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import batched

from skyward_core.providers._http import Row
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Tags
from skyward_core.providers.tagging import from_codes, launch_word, of_machine, to_codes

TAG = "skyward"
"""On every machine, for firewalls and for people.

Our own tags are beside it, in as many tags `skyward:1-2:...` as they need.
"""
TAG_CHARACTERS = 255
TAG_PART = re.compile(rf"{TAG}:([0-9]{{1,2}})-([0-9]{{1,2}}):([a-z0-9:_-]*)")


def name_of(tags: Tags, rank: int) -> str:
    """Return the unique name of a machine of a launch, the same each time, of letters, digits and "-"."""
    return f"{_word(tags[POOL_TAG])}-{rank}-{launch_word(tags)}"


def to_tags(tags: Tags) -> list[str]:
    """Return our tags as DigitalOcean's, which have up to 255 letters, digits, ":", "-" and "_".

    Capitals are codes too, because a listed tag has the capitals of its first use in the account.
    """
    text = ":".join(f"{_escaped(name)}:{_escaped(value)}" for name, value in tags.items())
    parts = ["".join(part) for part in batched(text, TAG_CHARACTERS - len(f"{TAG}:99-99:"))]
    return [TAG, *(f"{TAG}:{number}-{len(parts)}:{part}" for number, part in enumerate(parts, 1))]


def from_tags(listed: Iterable[str]) -> dict[str, str]:
    """Return our tags from those of a droplet; none unless all parts are present and name a pool."""
    found = [match for tag in listed if (match := TAG_PART.fullmatch(tag.lower()))]
    parts = {int(match[1]): match[3] for match in found}
    if not found or sorted(parts) != list(range(1, int(found[0][2]) + 1)):
        return {}
    words = "".join(parts[number] for number in sorted(parts)).split(":")
    tags = {from_codes(name): from_codes(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    return tags if POOL_TAG in tags else {}


def tags_of(row: Row, pool_id: str | None = None) -> dict[str, str]:
    """Return the tags of one machine, with its own rank; none if it is not ours.

    A machine without our tags belongs to `pool_id` if its name has the form that only this pool uses. Its tags may be
    late.
    """
    if tags := from_tags(row.get("tags") or ()):
        found = (
            re.fullmatch(rf"{re.escape(_word(tags[POOL_TAG]))}-([0-9]+)-{launch_word(tags)}", row["name"])
            if LAUNCH_TAG in tags
            else None
        )
        return of_machine(tags, int(found[1])) if found else tags
    found = re.fullmatch(rf"{re.escape(_word(pool_id))}-([0-9]+)-[a-z0-9]{{1,8}}", row["name"]) if pool_id else None
    return {POOL_TAG: pool_id, RANK_TAG: found[1]} if found and pool_id else {}


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _escaped(text: str) -> str:
    return to_codes(text, "a-z0-9-")
