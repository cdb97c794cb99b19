"""Tags where a provider has none: in one word of a process's environment, or in a name (`TagName`).

The variable is set by the creating call, all processes of a node inherit it, and no lost file can lose it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
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
from skyward_core.shown_text import visible_logger
from skyward_core.work import Work

TAGS_VARIABLE = "SKYWARD_TAGS"

MORE_TAGS = "SKYWARD_MORE_TAGS"
"""Variable of a container's environment with the tags that do not fit into its name."""
MARK = "skyward"
FIELDS = {"l": LAUNCH_TAG, "c": CREATED_TAG, "e": EXPIRES_TAG, "p": PROCESS_TAG, "o": OWNER_TAG, "t": TYPE_TAG}
"""Letters of a name's words, the most important first."""
WORK_VALUE_CHARACTERS = 120
"""AWS takes 256 in a value (docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions).

Other clouds escape characters, which takes more room.
"""
MACHINE = re.compile(r"(?P<pool>.+)-(?P<rank>[0-9]{1,9})")
RANK = re.compile(r"[0-9]{1,9}")

_log = visible_logger("skyward")


def to_word(tags: Tags) -> str:
    r"""Return tags as JSON in one word of ASCII, without spaces or line breaks, safe for `grep` and shell word lists.

    >>> to_word({"skyward-owner": "Jo Doe@box"})
    '{"skyward-owner":"Jo\\u0020Doe@box"}'
    """
    return json.dumps(dict(tags), separators=(",", ":")).replace(" ", r"\u0020")


def from_word(word: str, pool_id: str, rank: int) -> dict[str, str]:
    """Return the tags of a process.

    Its own pool and rank override those of the word, and are the only tags if the word is missing.
    """
    return {**_parse(word), POOL_TAG: _storable(pool_id), RANK_TAG: str(rank)}


def rank_in(text: str, instance_id: str) -> int:
    """Return the rank in a machine's tags; 0, with a warning, for what is no rank: a listing must not fail.

    >>> rank_in("3", "local-1")
    3
    """
    if RANK.fullmatch(text):
        return int(text)
    if text:
        _warn_once(instance_id, "rank", text)
    return 0


def price_in(text: str, default: float, instance_id: str) -> float:
    """Return the price in a machine's tags, in USD per hour; the default, with a warning, for what is no price.

    It is only shown. Bills have the price of the request.

    >>> price_in("1.5", 0.0, "local-1")
    1.5
    """
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if math.isfinite(price) and price >= 0:
        return price
    _warn_once(instance_id, "price per hour", text)
    return default


@functools.cache
def _warn_once(instance_id: str, what: str, text: str) -> None:
    """Warn of what cannot be read; once, because a pool that ends is listed many times."""
    _log.warning("%s: its tags have %r in the place of its %s; it is listed without it", instance_id, text[:80], what)


def _storable(text: str) -> str:
    """Return a text without halves of surrogate pairs, which stand for bytes that are no UTF-8."""
    return text.encode(errors="replace").decode()


def work_tags(work: Work) -> dict[str, str]:
    """Return what a pool is for as tags, cut to the length that clouds accept.

    Characters that not all services of AWS accept become "_".

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
    """Return eight letters and digits that identify a launch within its pool, for names.

    Tokens of a pool begin alike, so this is a hash.
    """
    return hashlib.sha256(tags[LAUNCH_TAG].encode()).hexdigest()[:8]


def to_codes(text: str, plain: str) -> str:
    """Return a text in which bytes outside `plain`, a set as in regular expressions, are codes such as "_2e".

    >>> to_codes("Jo.Doe", "A-Za-z")
    'Jo_2eDoe'
    """
    return re.sub(f"[^{plain}]", lambda match: "".join(f"_{byte:02x}" for byte in match[0].encode()), text)


def from_codes(word: str) -> str:
    """Return the text that `to_codes` has written, for any `plain`.

    Unreadable codes become a replacement character, because a listing must not fail.
    """
    return re.sub(
        r"(?:_[0-9a-f]{2})+", lambda match: bytes.fromhex(match[0].replace("_", "")).decode(errors="replace"), word
    )


@dataclass(frozen=True, slots=True)
class TagName:
    """Tags in the one name or label that a machine has. Tags that do not fit go into its environment.

    "skyward<separator><pool>-<rank><separator>l<launch><separator>c<created>...": unique, because a rank is launched
    once with a token, and the same each time. Pool, rank and launch are always in it: machines are found by them.

    Args:
        separator: stands between the words. `escape` never returns it.
        characters: longest name.
        called: its name in messages, "a name of RunPod".
        escape: writes a value with the characters that the cloud accepts.
        unescape: the inverse of `escape`.
    """

    separator: str
    characters: int
    called: str
    escape: Callable[[str], str]
    unescape: Callable[[str], str]

    def machine(self, tags: Tags) -> str:
        """Return the word with pool and rank."""
        return f"{self.escape(tags[POOL_TAG])}-{tags[RANK_TAG]}"

    def pack(self, tags: Tags) -> tuple[str, dict[str, str]]:
        """Return the name for these tags, and the environment with those that do not fit into it.

        Raises BadRequest if the pool's name is too long.
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
        """Return the tags of a machine with this name and environment; None if the name is not one of ours."""
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
    """Read the word; return no tags for an invalid one.

    A call on the node may have changed the variable, and a listing must not fail.
    """
    try:
        read: object = json.loads(word)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(read, dict):
        return {}
    items = cast("dict[str, object]", read).items()
    return {_storable(name): _storable(value) for name, value in items if isinstance(value, str)}
