"""Tags where there is no place for them: one word of a process's environment, for providers whose machines are processes, and a part of a name.

The variable is there from the creating call on, is inherited by all that a node starts, and cannot be lost with a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import cast

from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Tags

TAGS_VARIABLE = "SKYWARD_TAGS"


def to_word(tags: Tags) -> str:
    r"""Return tags as JSON in one word of ASCII, with neither space nor line break: what a line of `grep` and a shell's list of words can carry.

    >>> to_word({"skyward-owner": "Jo Doe@box"})
    '{"skyward-owner":"Jo\\u0020Doe@box"}'
    """
    return json.dumps(dict(tags), separators=(",", ":")).replace(" ", r"\u0020")


def from_word(word: str, pool_id: str, rank: int) -> dict[str, str]:
    """Return the tags that a process carries. Pool and rank, which it carries beside its word, count more than that and are all that is left without it."""
    return {**_parse(word), POOL_TAG: pool_id, RANK_TAG: str(rank)}


def of_machine(tags: Tags, rank: int) -> dict[str, str]:
    """Return the tags of one machine of a launch: those of the call, with its own rank."""
    return {**tags, RANK_TAG: str(rank)}


def launch_word(tags: Tags) -> str:
    """Return eight letters and digits that tell a launch from all others of its pool, whose tokens begin alike: for names."""
    return hashlib.sha256(tags[LAUNCH_TAG].encode()).hexdigest()[:8]


def _parse(word: str) -> Mapping[str, str]:
    """Read the word; nothing if it is none: a call on the node may have set the variable to anything, and a listing must not fail of it."""
    try:
        read: object = json.loads(word)
    except ValueError:
        return {}
    if not isinstance(read, dict):
        return {}
    return {name: value for name, value in cast("dict[str, object]", read).items() if isinstance(value, str)}
