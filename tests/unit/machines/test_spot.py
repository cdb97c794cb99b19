"""Spot strategies: their spellings, their meaning, and the split of nodes."""

import json
import pickle

import pytest

from skyward_core.errors import BadRequest
from skyward_core.machines.spot import Spot, from_json, parse, split, to_json

STRATEGIES = [
    Spot.Always(),
    Spot.Always(retries=0, interval=0.5),
    Spot.IfAvailable(),
    Spot.Never,
    Spot.Percent(0.8),
    Spot.Percent(1.0),
]


@pytest.mark.parametrize(
    ("like", "meant"),
    [
        ("always", Spot.Always(retries=10, interval=1.0)),
        ("if-available", Spot.IfAvailable()),
        ("never", Spot.Never),
        (0.8, Spot.Percent(0.8)),
        (1.0, Spot.Always()),
        (1, Spot.Always()),
        (Spot.Percent(1.0), Spot.Percent(1.0)),
        (Spot.Never, Spot.Never),
    ],
)
def test_a_shortcut_means_its_strategy(like, meant):
    """Each spelling of the reference is read as its strategy; a strategy is read as itself."""
    assert parse(like) == meant


@pytest.mark.parametrize(
    ("like", "advice"),
    [
        ("allways", '"always"'),
        ("if_available", '"if-available"'),
        ("Never", '"never"'),
        ("", '"'),
        (0.0, '"never"'),
        (80, "did you mean 0.8?"),
        (100, "did you mean 1?"),
        (101, "0.8 for at least 80 %"),
        (1.5, "0.015"),
        (-0.5, "0.8 for at least 80 %"),
        (float("nan"), "0.8 for at least 80 %"),
        (True, "'always'"),
        (False, "'never'"),
        (None, '"if-available"'),
        (Spot.IfAvailable, "Spot.Always()"),
    ],
)
def test_an_invalid_value_is_refused_with_the_nearest_spelling(like, advice):
    """A value that is not a strategy raises BadRequest, and the message names a valid one."""
    with pytest.raises(BadRequest) as caught:
        parse(like)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Spot.Always(retries=-1),
        lambda: Spot.Always(retries=1.5),
        lambda: Spot.Always(retries=True),
        lambda: Spot.Always(interval=True),
        lambda: Spot.Always(interval=float("nan")),
        lambda: Spot.Always(interval=-1),
        lambda: Spot.Always(interval=float("inf")),
        lambda: Spot.Percent(0),
        lambda: Spot.Percent(1.01),
        lambda: Spot.Percent(share=True),
        lambda: Spot.Percent("0.8"),
    ],
)
def test_impossible_numbers_are_refused(build):
    """A strategy cannot have an invalid number."""
    with pytest.raises(BadRequest):
        build()


def test_the_message_says_which_number_is_impossible():
    """It has the field, its value and what it must be."""
    with pytest.raises(BadRequest, match="retries=-1 must be a whole number, 0 or more"):
        Spot.Always(retries=-1)


def test_never_can_be_used_with_and_without_a_call():
    """`Spot.Never` is used without a call. A call returns the same."""
    assert Spot.Never() == Spot.Never
    assert Spot.Never()() == parse("never")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_strategy_survives_json_and_pickle(strategy):
    """It comes back equal, and it hashes."""
    assert from_json(json.loads(json.dumps(to_json(strategy)))) == strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert len({strategy, from_json(to_json(strategy))}) == 1


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_strategy_is_frozen(strategy):
    """A strategy cannot be changed or get new fields."""
    for name in ("retries", "share", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(strategy, name, 3)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "alway"},
        {"kind": "never", "retries": 1},
        {"kind": "percent"},
        {"kind": "percent", "share": 3},
        [],
        "sometimes",
    ],
)
def test_foreign_json_is_refused(data):
    """JSON that is not from a strategy raises BadRequest."""
    with pytest.raises(BadRequest):
        from_json(data)


def test_the_nearest_kind_is_named():
    """Also if no kind is near, because there are only four."""
    for kind, nearest in (("alway", "always"), ("percentage", "percent"), ("xyz", "")):
        with pytest.raises(BadRequest, match=f'"{nearest}'):
            from_json({"kind": kind})


def test_the_smallest_numbers_are_allowed():
    """No further try, no pause before it, and all machines."""
    assert (Spot.Always(retries=0, interval=0).retries, Spot.Percent(1).share) == (0, 1)


def test_json_may_have_a_shortcut():
    """A configuration file may have "if-available" or 0.8 in place of the long form."""
    assert from_json("if-available") == Spot.IfAvailable()
    assert from_json(0.8) == Spot.Percent(0.8)


@pytest.mark.parametrize(
    ("strategy", "nodes", "spot_sold", "on_demand", "spot"),
    [
        (None, 4, True, 0, 4),
        (None, 4, False, 4, 0),
        (Spot.Always(), 4, True, 0, 4),
        (Spot.IfAvailable(), 4, True, 0, 4),
        (Spot.IfAvailable(), 4, False, 4, 0),
        (Spot.Never, 4, True, 4, 0),
        (Spot.Never, 4, False, 4, 0),
        (Spot.Percent(0.8), 1, True, 0, 1),
        (Spot.Percent(0.8), 4, True, 0, 4),
        (Spot.Percent(0.8), 5, True, 1, 4),
        (Spot.Percent(0.8), 10, True, 2, 8),
        (Spot.Percent(0.8), 11, True, 2, 9),
        (Spot.Percent(0.5), 3, True, 1, 2),
        (Spot.Percent(0.1), 30, True, 27, 3),
        (Spot.Percent(0.07), 100, True, 93, 7),
        (Spot.Percent(1e-05), 3, True, 2, 1),
        (Spot.Percent(1.0), 3, True, 0, 3),
    ],
)
def test_nodes_are_split(strategy, nodes, spot_sold, on_demand, spot):
    """The on-demand part is first. A share is rounded up to whole machines, and 10 % of 30 are 3."""
    assert split(strategy, nodes, spot_sold) == (on_demand, spot)


@pytest.mark.parametrize("strategy", [Spot.Always(), Spot.Percent(0.1)])
def test_required_spot_that_is_not_sold_is_refused(strategy):
    """BadRequest names the alternative."""
    with pytest.raises(BadRequest, match=r"sold.*if-available.*never"):
        split(strategy, 2, spot_sold=False)


def test_a_pool_of_no_nodes_is_refused():
    """A split needs at least one node."""
    with pytest.raises(BadRequest, match="at least 1"):
        split(None, 0, spot_sold=True)
