"""Each number of the public face, with what Python's own readers would take or answer with an error of their own."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.accelerators import neuron
from skyward_core.cli import values
from skyward_core.written_numbers import number, whole, whole_of_digits
from tests.pool.local import double

HUGE, LONGER = 10**400, 10**5000
NO_NUMBERS = {
    "huge": HUGE, "huge below zero": -HUGE, "longer than Python shows": LONGER, "below zero": -1, "NaN": math.nan,
    "infinity": math.inf, "boolean": True, "digit of another script": "٣", "text of a huge number": "1e400",
    "text of thousands of digits": "9" * 5000,
}  # fmt: skip
FIELDS = (
    "nodes cpu spot timeout max_lifetime lease_seconds retries max_cost max_hourly_cost concurrency provision_timeout"
    " keep_warm scale_up_after scale_down_after run_max_cost"
)


def pool(**keywords: Any) -> sky.ComputePool:
    return sky.ComputePool(provider=sky.Local(), display="quiet", **keywords)


PLACES: dict[str, Callable[[Any], object]] = {
    **{f"pool {name}": lambda given, name=name: pool(**{name: given}) for name in FIELDS.split()},
    "pool nodes, the most": lambda given: pool(nodes=(1, given)),
    "pool memory": lambda given: pool(memory=given if isinstance(given, int) else f"{given}GB"),
    "call timeout": lambda given: double(1).timeout(given),
    "spot retries": lambda given: sky.Spot.Always(retries=given),
    "spot interval": lambda given: sky.Spot.Always(interval=given),
    "spot share": lambda given: sky.Spot.Percent(given),
    "spot from a file": lambda given: pool(spot={"kind": "percent", "share": given}),
    "result_ttl": lambda given: pool().start_detached(double(1), result_ttl=given),
    "scale wait_seconds": lambda given: pool().scale(1, wait_seconds=given),
    "attach timeout_seconds": lambda given: sky.ComputePool.attach("sky-1", timeout_seconds=given),
    "detach lease_seconds": lambda given: pool().detach(given),
    "accelerator count": lambda given: sky.Accelerator("A100", count=given),
    "accelerator memory_gb": lambda given: sky.Accelerator("A100", memory_gb=given),
    "accelerator memory": lambda given: sky.Accelerator("A100", memory=given),
    "accelerator in words": lambda given: pool(accelerator=f"A100:{given}" if isinstance(given, str) else given),
    "offers max_price_per_hour": lambda given: sky.offers("local", max_price_per_hour=given),
    "offers max_age_seconds": lambda given: sky.offers("local", max_age_seconds=given),
    "sweep min_age_seconds": lambda given: sky.sweep([], min_age_seconds=given),
    "price of Local": lambda given: sky.Local(price_per_hour=given),
    "port of Hosts": lambda given: sky.Hosts("gpu-1", port=given),
    "disk of AWS": lambda given: sky.AWS(disk_gb=given),
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_number_is_refused_in_our_words(place: str, kind: str) -> None:
    with pytest.raises(sky.BadRequest) as caught:
        PLACES[place](NO_NUMBERS[kind])
    assert "Exceeds the limit" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", FIELDS.removesuffix(" run_max_cost").split())
@pytest.mark.parametrize("text", ["٣", "1e400", "9" * 5000, "NaN", "Infinity", "true", "-1"])
def test_a_number_of_the_environment_is_checked_as_an_argument(name: str, text: str) -> None:
    fields = sky.Settings.read({f"SKYWARD_{name.upper()}": text, "SKYWARD_CONFIG": "/dev/null"}).fields
    with pytest.raises(sky.BadRequest):
        sky.PoolSpec.of(**fields)


@pytest.mark.parametrize(
    "read", [values.count, values.port, values.seconds, values.duration, values.price, values.usd, values.days]
)
@pytest.mark.parametrize("text", ["٣", "٣d", "1e400", "9" * 5000, "nan", "inf", "-1", "", "true"])
def test_a_number_of_a_command_is_checked(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(typer.BadParameter):
        read(text)


@pytest.mark.parametrize("text", ["٣", "0-٣", "9" * 5000, "0-999999999", "3-1"])
def test_numbers_of_cores_are_checked(text: str) -> None:
    with pytest.raises(sky.BadRequest, match="names no NeuronCores"):
        neuron._read(text)  # pyright: ignore[reportPrivateUsage]


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.decimals()))
def test_a_number_is_finite_and_within_its_bounds_or_refused(value: object) -> None:
    for read in (number, whole):
        try:
            checked = read(value, "x", "a number", least=1, most=100)
        except sky.BadRequest as error:
            assert str(error).startswith("x=")
        else:
            assert 1 <= checked <= 100


def test_a_text_of_digits_is_read_up_to_a_bound() -> None:
    assert (whole_of_digits("012"), whole_of_digits("9" * 9), whole_of_digits("9" * 5000)) == (12, 999_999_999, 10**9)
