"""A value of a wrong type is refused in our own words: each field of each public type, with a value of each type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import SkywardError
from skyward_core.frozen import Frozen

THEIRS = re.compile(
    r"Input should be|instances are not allowed|validation error|pydantic|Frozen|unexpected keyword|positional argument"
    r"|has no attribute|not supported between|is not iterable|unhashable|NoneType|\b_[a-z]\w*|__\w+__| \[type="
)
"""Words of pydantic and Python, and names that a user never writes."""
VALUES: dict[str, Any] = {
    "float": 3.5,
    "text": "x y",
    "list": ["a", 1],
    "dict": {"a": 1},
    "true": True,
    "none": None,
    "bytes": b"x",
    "negative": -1,
    "time": "1h",
    "size": "8GB",
    "nan": float("nan"),
    "huge": 10**30,
    "class": int,
    "function": len,
    "object": object(),
}
NEEDED: dict[str, dict[str, Any]] = {
    "Hosts": {"addresses": ("h",)},
    "S3Volume": {"bucket": "bucket", "mount": "/data"},
}
KINDS = [
    kind
    for name in sorted(sky.__all__)
    if inspect.isclass(kind := getattr(sky, name)) and issubclass(kind, Frozen) and kind is not sky.Provider
]
FIELDS = [(kind, field) for kind in KINDS for field in kind.model_fields]


def refusal(make: Callable[[], object]) -> str:
    """Return the words of a refusal; "" if the value is accepted. Any other error fails the test."""
    try:
        make()
    except SkywardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=[f"{kind.__name__}.{field}" for kind, field in FIELDS])
def test_a_wrong_value_of_a_field_is_refused_in_our_words(kind: Any, field: str) -> None:
    needed = NEEDED.get(kind.__name__, {})
    words = {
        label: refusal(
            lambda value=value: (
                kind(**needed, **{field: value}) if field not in needed else kind(**{**needed, field: value})
            )
        )
        for label, value in VALUES.items()
    }
    assert any(words.values())
    assert {label: text for label, text in words.items() if THEIRS.search(text)} == {}


@pytest.mark.parametrize("field", sky.PoolSpec.model_fields)
def test_a_wrong_value_of_a_pool_is_refused_in_our_words(field: str) -> None:
    words = {
        label: refusal(lambda value=value: sky.ComputePool(**{"provider": sky.Local(), field: value}))
        for label, value in VALUES.items()
    }
    assert any(words.values())
    assert {label: text for label, text in words.items() if THEIRS.search(text)} == {}


@sky.compute
def twice(number: int) -> int:
    return 2 * number


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: sky.Image(pip="torch"), 'pip: write a list of texts, such as pip=["torch", "numpy==2.4"]'),
    (lambda: sky.ComputePool(memory=8), 'memory=8: write a text or None, such as memory="64GB"'),  # type: ignore[arg-type]
    (lambda: sky.ComputePool(timeout="1h"), "timeout='1h': write a number, such as timeout=3600"),  # type: ignore[arg-type]
    (lambda: sky.ComputePool(volume="/data"), 'such as volume=sky.S3Volume(bucket="name", mount="/data")'),  # type: ignore[arg-type]
    (lambda: sky.Hosts(["a", "b"]), 'write Hosts("a", "b"), or Hosts(*addresses)'),  # type: ignore[arg-type]
    (lambda: sky.AWS("us-east-1"), "AWS takes its values by name: write AWS(region=...)"),  # type: ignore[arg-type]
    (
        lambda: sky.ComputePool(sky.AWS(), "A100"),  # type: ignore[arg-type]
        "ComputePool takes its values by name: write ComputePool(provider=..., accelerator=...)",
    ),
    (lambda: sky.ComputePool(spec=sky.PoolSpec.of(nodes=2), nodes=3), "give spec=... or keywords, not both: nodes"),
]


@pytest.mark.parametrize(("make", "words"), MISTAKES)
def test_a_mistake_of_a_first_program_is_answered_with_what_to_write(make: Callable[[], object], words: str) -> None:
    with pytest.raises(sky.BadRequest, match=re.escape(words)):
        make()


def test_calls_are_sent_one_way() -> None:
    pool = sky.ComputePool(spec=sky.PoolSpec.of(nodes=2))
    assert pool.spec.nodes == 2
    with pytest.raises(TypeError, match=re.escape("pool.submit takes one call: write pool.submit(fn(x))")):
        pool.submit(twice, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("`sky.gather(*calls) >> pool`")):
        _ = [twice(1), twice(2)] >> pool  # type: ignore[operator]
