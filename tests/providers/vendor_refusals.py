"""The refusals of four clouds, from what their vendors have published: `vendor_refusals.json`.

Each row is one refusal of one call that our code makes: status, code, a body of its shape, what our code makes of it, and
the file and commit in the vendor's repository that has it. Without a source it is known from other programs, issues or
reports only, or the fakes made it up; no vendor file that we could read has it. Collected on 2026-11-30.

The fakes play no refusal of a call that is not here (`is_known`). The unit tests compare `means` with our classifiers.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """One refusal. `call`: method and path, with `{id}`, or "any". `means`: the class of our error, or "gone"."""

    cloud: str
    call: str
    status: int
    code: str
    body: Any
    means: str
    source: str

    def is_of(self, method: str, path: str) -> bool:
        """Return whether this call may be refused in this way."""
        if self.call == "any":
            return True
        verb, _, pattern = self.call.partition(" ")
        return verb == method and re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(pattern)), path) is not None


@cache
def refusals(cloud: str) -> tuple[Refusal, ...]:
    """Return the refusals of one cloud."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return tuple(Refusal(**row) for row in rows if row["cloud"] == cloud)


def is_known(cloud: str, method: str, path: str, status: int, body: Any) -> bool:
    """Return whether a cloud's call may be refused with this status and code. An outage has no schema."""
    if status >= 500:
        return True
    code = code_of(body)
    return any(
        each.is_of(method, path) and each.status == status and each.code in ("", code) for each in refusals(cloud)
    )


def code_of(body: Any) -> str:
    """Return the machine-readable word of a refusal; "" if it has none."""
    if not isinstance(body, dict):
        return ""
    return next((str(body[name]) for name in ("code", "id", "error") if isinstance(body.get(name), str)), "")
