"""Names and tags of Verda's machines and scripts."""

from __future__ import annotations

import re
import time

from skyward_core.errors import (
    BadRequest,
)
from skyward_core.providers.base import CREATED_TAG, POOL_TAG, RANK_TAG, WORK_TAG, Tags
from skyward_core.providers.tagging import launch_word
from skyward_core.providers.verda.api import Json

TAG_CHARACTERS, MOST_TAGS = 127, 10
NAME = re.compile(r"(?P<pool>.+)-(?P<rank>\d+)-(?P<launch>[a-z0-9]{1,8})")
SCRIPT_NAME = re.compile(r"skyward-(?P<pool>.+)-(?P<launch>[a-z0-9]{1,8})-(?P<made>\d+)")


def tags_of(machine: Json) -> dict[str, str] | None:
    """Return the tags of a machine of ours; None for others.

    A machine that Verda has not tagged is recognised by name and description together.
    """
    tags = {str(tag["key"]): _read(str(tag.get("value") or "")) for tag in machine.get("tags") or ()}
    if POOL_TAG in tags and tags.get(RANK_TAG, "").isdecimal():
        return tags
    match = NAME.fullmatch(machine["hostname"])
    if match is None or machine.get("description") != description_of(machine["hostname"]):
        return None
    return {**tags, POOL_TAG: match["pool"], RANK_TAG: match["rank"]}


def to_tags(tags: Tags) -> list[Json]:
    """Return tags in Verda's format.

    Values have only letters, digits, "." and "-", because Verda documents no other characters.
    """
    words = {
        key: re.sub(r"[^A-Za-z0-9.-]", _escaped, value) for key, value in tags.items() if not key.startswith(WORK_TAG)
    }
    if len(words) < MOST_TAGS and (
        work := " ".join(
            f"{key.removeprefix(WORK_TAG)}:{value}" for key, value in tags.items() if key.startswith(WORK_TAG)
        )
    ):
        # one tag for all, cut to fit: it is for people, and the ledger has everything
        words[WORK_TAG.rstrip("-")] = _cut(work)
    long = [key for key, word in words.items() if len(word) > TAG_CHARACTERS]
    if long or len(words) > MOST_TAGS:
        raise BadRequest(
            f"Verda takes {MOST_TAGS} tags of {TAG_CHARACTERS} characters for a machine at most:"
            f" {', '.join(long or words)} is too much"
        )
    return [{"key": key, "value": word} for key, word in words.items()]


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"_{byte:02x}" for byte in found[0].encode())


def _cut(text: str) -> str:
    """Return the longest beginning of a text that fits, without half a code."""
    word = ""
    for character in text:
        code = re.sub(r"[^A-Za-z0-9.-]", _escaped, character)
        if len(word) + len(code) > TAG_CHARACTERS:
            break
        word += code
    return word


def _read(word: str) -> str:
    return re.sub(
        r"(?:_[0-9a-f]{2})+", lambda found: bytes.fromhex(found[0].replace("_", "")).decode(errors="replace"), word
    )


def name_of(tags: Tags, rank: int) -> str:
    """Return the name of a machine. It is set in the creating call, and finds the machine after a lost answer."""
    return f"{tags[POOL_TAG]}-{rank}-{launch_word(tags)}".lower()


def script_name_of(tags: Tags) -> str:
    return f"skyward-{tags[POOL_TAG]}-{launch_word(tags)}-{tags.get(CREATED_TAG, str(int(time.time())))}".lower()


def launch_of(name: str) -> tuple[str, str]:
    """Return the pool and the launch in a machine's name."""
    match = NAME.fullmatch(name)
    return (match["pool"], match["launch"]) if match else ("", "")


def description_of(name: str) -> str:
    return f"skyward {name}"
