"""Tags where there is no place for them: one word of a process's environment, for providers whose machines are
processes, and a name (`TagName`).

The variable is there from the creating call on, is inherited by all that a node starts, and cannot be lost with a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from skyward_core.errors import BadRequest
from skyward_core.providers.base import (
    CREATED_TAG,
    EXPIRES_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    PROCESS_TAG,
    RANK_TAG,
    TYPE_TAG,
    WORK_TAG,
    Tags,
)
from skyward_core.work import Work

TAGS_VARIABLE = "SKYWARD_TAGS"

MORE_TAGS = "SKYWARD_MORE_TAGS"
"""The variable of a container's environment with the tags that had no room in its name."""
MARK = "skyward"
FIELDS = {"l": LAUNCH_TAG, "c": CREATED_TAG, "e": EXPIRES_TAG, "p": PROCESS_TAG, "o": OWNER_TAG, "t": TYPE_TAG}
"""Letters of a name's words, the most important first."""
WORK_VALUE_CHARACTERS = 120
"""AWS takes 256 in a value (docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions); others write
it in longer codes.
"""
MACHINE = re.compile(r"(?P<pool>.+)-(?P<rank>[0-9]+)")


def to_word(tags: Tags) -> str:
    r"""Return tags as JSON in one word of ASCII, with neither space nor line break: what a line of `grep` and a shell's
    list of words can carry.

    >>> to_word({"skyward-owner": "Jo Doe@box"})
    '{"skyward-owner":"Jo\\u0020Doe@box"}'
    """
    return json.dumps(dict(tags), separators=(",", ":")).replace(" ", r"\u0020")


def from_word(word: str, pool_id: str, rank: int) -> dict[str, str]:
    """Return the tags that a process carries.

    Pool and rank, which it carries beside its word, count more than that and are all that is left without it.
    """
    return {**_parse(word), POOL_TAG: pool_id, RANK_TAG: str(rank)}


def work_tags(work: Work) -> dict[str, str]:
    """Return what a pool is for as tags: cut to what clouds take, with the characters that all services of AWS take in
    the place of others.

    >>> work_tags(Work(task="train", attempt="2", partition="a|b"))
    {'skyward-work-task': 'train', 'skyward-work-attempt': '2', 'skyward-work-partition': 'a_b'}
    """
    return {
        f"{WORK_TAG}{name.replace('_', '-')}": re.sub(r"[^\w .:/=+@-]", "_", value)[:WORK_VALUE_CHARACTERS].strip()
        or "_"
        for name, value in work.labels().items()
    }


def of_machine(tags: Tags, rank: int) -> dict[str, str]:
    """Return the tags of one machine of a launch: those of the call, with its own rank."""
    return {**tags, RANK_TAG: str(rank)}


def launch_word(tags: Tags) -> str:
    """Return eight letters and digits that tell a launch from all others of its pool, whose tokens begin alike: for
    names.
    """
    return hashlib.sha256(tags[LAUNCH_TAG].encode()).hexdigest()[:8]


def to_codes(text: str, plain: str) -> str:
    r"""Return a text with the characters `plain` alone, a set as regular expressions write it, and each other one's
    bytes as "_2e".

    >>> to_codes("Jo.Doe", "A-Za-z")
    'Jo_2eDoe'
    """
    return re.sub(f"[^{plain}]", lambda match: "".join(f"_{byte:02x}" for byte in match[0].encode()), text)


def from_codes(word: str) -> str:
    """Return the text that `to_codes` has written, whatever was plain there; what cannot be read is a question mark,
    for a listing must not fail of it.
    """
    return re.sub(
        r"(?:_[0-9a-f]{2})+", lambda match: bytes.fromhex(match[0].replace("_", "")).decode(errors="replace"), word
    )


@dataclass(frozen=True, slots=True)
class TagName:
    """How a cloud without tags carries them: in the one name or label that a machine has, as far as there is room, and
    the rest in its environment.

    "skyward<separator><pool>-<rank><separator>l<launch><separator>c<created>...": unique, for a rank is launched once
    with a token, and the same whenever it is made. Pool, rank and launch are always in it: they are what a machine is
    found by.

    Args:
        separator: stands between the words; what `escape` returns never has it.
        characters: how long a name may be.
        called: what it is called in a message, "a name of RunPod".
        escape: writes a value with the characters that the cloud lets through.
        unescape: the way back.
    """

    separator: str
    characters: int
    called: str
    escape: Callable[[str], str]
    unescape: Callable[[str], str]

    def machine(self, tags: Tags) -> str:
        """Return the word that tells pool and rank."""
        return f"{self.escape(tags[POOL_TAG])}-{tags[RANK_TAG]}"

    def pack(self, tags: Tags) -> tuple[str, dict[str, str]]:
        """Return the name that carries these tags, and the environment with those that it has no room for.

        Raises BadRequest for a pool's name too long.
        """
        name = self.separator.join((MARK, self.machine(tags), f"l{self.escape(tags[LAUNCH_TAG])}"))
        if len(name) > self.characters:
            raise BadRequest(f"pool {tags[POOL_TAG]!r}: the name is too long for {self.called}")
        rest = {tag: value for tag, value in tags.items() if tag not in (POOL_TAG, RANK_TAG, LAUNCH_TAG)}
        for letter, tag in FIELDS.items():
            word = f"{self.separator}{letter}{self.escape(rest[tag])}" if tag in rest else ""
            if word and len(name) + len(word) <= self.characters:
                name += word
                del rest[tag]
        return name, {MORE_TAGS: to_word(rest)} if rest else {}

    def unpack(self, name: object, environment: Mapping[str, Any]) -> dict[str, str] | None:
        """Return the tags of a machine with this name and environment, as a cloud tells them; None if the name is none
        of ours.
        """
        mark, *words = str(name or "").split(self.separator)
        machine = MACHINE.fullmatch(words[0]) if words else None
        fields = {FIELDS[word[0]]: self.unescape(word[1:]) for word in words[1:] if word[:1] in FIELDS}
        if mark != MARK or machine is None or LAUNCH_TAG not in fields:
            return None
        return {
            **from_word(str(environment.get(MORE_TAGS) or ""), self.unescape(machine["pool"]), int(machine["rank"])),
            **fields,
        }


def _parse(word: str) -> Mapping[str, str]:
    """Read the word; nothing if it is none: a call on the node may have set the variable to anything, and a listing
    must not fail of it.
    """
    try:
        read: object = json.loads(word)
    except ValueError:
        return {}
    if not isinstance(read, dict):
        return {}
    return {name: value for name, value in cast("dict[str, object]", read).items() if isinstance(value, str)}
