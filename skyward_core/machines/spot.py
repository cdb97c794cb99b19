"""How much of a pool runs on spot machines: they are cheaper, and the provider may preempt them."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from skyward_core.errors import BadRequest, meant
from skyward_core.written_numbers import LONGEST_SECONDS, MOST_RETRIES, number, shown, whole


@dataclass(frozen=True, slots=True)
class Always:
    """Only spot machines. If none is free, try again `retries` times, `interval` seconds apart, before giving up."""

    retries: int = 10
    interval: float = 1.0

    def __post_init__(self) -> None:
        whole(self.retries, "retries", f"a whole number, 0 or more, at most {MOST_RETRIES}", least=0, most=MOST_RETRIES)
        what = f"a number of seconds, 0 or more, at most {LONGEST_SECONDS:.0f}"
        number(self.interval, "interval", what, least=0, most=LONGEST_SECONDS, is_text_read=False)


@dataclass(frozen=True, slots=True)
class IfAvailable:
    """Spot machines; on-demand ones if spot is not sold or none is free."""


@dataclass(frozen=True, slots=True)
class Never:
    """Only on-demand machines."""

    def __call__(self) -> "Never":
        """Return itself, so that `Spot.Never()` means `Spot.Never`."""
        return self


@dataclass(frozen=True, slots=True)
class Percent:
    """At least this share of the machines, above 0 and up to 1, is spot; the rest is on demand."""

    share: float

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 < self.share <= 1:
            raise BadRequest(f"spot={shown(self.share)} {_advice(self.share)}")


type Strategy = Always | IfAvailable | Never | Percent

type SpotLike = str | float | Strategy
"""A strategy, "always", "if-available", "never", or the share that must be spot (0.8: at least 80 %)."""


class Spot:
    """The strategies under one name.

    >>> Spot.Percent(0.8)
    Percent(share=0.8)
    """

    Always = Always
    IfAvailable = IfAvailable
    Never = Never()
    Percent = Percent


def parse(like: SpotLike) -> Strategy:
    """Return the strategy for a value. 1.0 is `Always()`: all machines are spot, with its retries.

    Raises BadRequest, with the nearest valid spelling.
    """
    match like:
        case Always() | IfAvailable() | Never() | Percent():
            return like
        case str():
            return _parse_name(like)
        case bool():
            raise BadRequest(f'spot={like}: write spot={"always" if like else "never"!r}, or "if-available"')
        case int() | float():
            return Always() if like == 1 else Percent(like)
        case _:
            raise BadRequest(
                f'spot={shown(like)} is not a strategy: write "always", "if-available", "never", a share such as'
                " 0.8, or Spot.Always()"
            )


def split(strategy: Strategy | None, nodes: int, spot_sold: bool) -> tuple[int, int]:
    """Return the numbers of on-demand and of spot machines; the lowest ranks are on demand.

    `None` (no strategy was given) and IfAvailable mean spot if it is sold, else on demand. A share is rounded up to
    whole machines. Raises BadRequest if spot is required but not sold.
    """
    if nodes < 1:
        raise BadRequest(f"nodes={nodes}: a pool has at least 1")
    match strategy:
        case Never():
            return nodes, 0
        case None | IfAvailable():
            return (0, nodes) if spot_sold else (nodes, 0)
        case Always() | Percent() if not spot_sold:
            raise BadRequest(
                f'no spot machine that fits is sold here, and {strategy} requires it: try spot="if-available" or'
                ' spot="never"'
            )
        case Always():
            return 0, nodes
        case Percent(share):
            # by the decimal digits: with binary floats 0.1 x 30 is a little more than 3
            spot = math.ceil(Fraction(str(share)) * nodes)
            return nodes - spot, spot


def to_json(strategy: Strategy) -> dict[str, Any]:
    """Return plain data that `from_json` reads: the kind, and the fields of the strategy."""
    return {"kind": _KIND_OF[type(strategy)], **asdict(strategy)}


def from_json(data: object) -> Strategy:
    """Return the strategy that `to_json` wrote; the shortcuts of `parse` are read too. Raises BadRequest."""
    if not isinstance(data, dict):
        return parse(data)  # pyright: ignore[reportArgumentType] - parse refuses other types
    fields: dict[str, Any] = {**data}
    kind = str(fields.pop("kind", ""))
    if kind not in KINDS:
        kinds = ", ".join(f'"{one}"' for one in KINDS)
        raise BadRequest(f"a spot strategy has a kind; {kind!r} is not one: write one of {kinds}")
    try:
        return KINDS[kind](**fields)
    except TypeError as error:
        raise BadRequest(f"the spot strategy {kind!r} does not have these fields: {error}") from error


def _parse_name(name: str) -> Strategy:
    if name not in _NAMED:
        near = meant(name, _NAMED)
        hint = f'did you mean "{near}"? ' if near else ""
        raise BadRequest(
            f'spot={shown(name)} is not a strategy: {hint}Write "always", "if-available", "never", a share such'
            " as 0.8, or Spot.Always()"
        )
    return _NAMED[name]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _advice(share: object) -> str:
    if isinstance(share, int | float) and share == 0:
        return 'asks for no spot machine: did you mean "never"?'
    if isinstance(share, int | float) and 1 < share <= 100:
        return f"is more than all machines: did you mean {share / 100:g}?"
    return "must be a share above 0 and up to 1: 0.8 for at least 80 %"


_NAMED: dict[str, Strategy] = {"always": Always(), "if-available": IfAvailable(), "never": Never()}
KINDS: dict[str, Any] = {"always": Always, "if-available": IfAvailable, "never": Never, "percent": Percent}
_KIND_OF = {strategy: kind for kind, strategy in KINDS.items()}
