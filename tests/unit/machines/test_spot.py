"""Spot strategies: their spellings, their meaning, and the split of nodes."""

import json
import pickle

import pytest

from skyward_core.errors import BadRequest
from skyward_core.machines.spot import Spot, from_json, parse, split, to_json

STRATEGIES = [
    Spot.Always(),
    Spot.Always(retries=0, interval=0),
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
        (1, Spot.Always()),
        (1.0, Spot.Always()),
        (Spot.Percent(1.0), Spot.Percent(1.0)),
        (Spot.Never(), Spot.Never),
    ],
)
def test_a_shortcut_means_its_strategy(like, meant):
    """A strategy is read as itself; `Spot.Never` may be called. JSON may have a shortcut, too."""
    assert parse(like) == meant
    if isinstance(like, int | float | str):
        assert from_json(like) == meant


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
        (float("nan"), "0.8 for at least 80 %"),
        (True, "'always'"),
        (False, "'never'"),
        (None, '"if-available"'),
        (Spot.IfAvailable, "Spot.Always()"),
    ],
)
def test_an_invalid_value_is_refused_with_the_nearest_spelling(like, advice):
    with pytest.raises(BadRequest) as caught:
        parse(like)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (Spot.Always, {"retries": -1}, "retries=-1: write a whole number, 0 or more"),
        (Spot.Always, {"retries": 1.5}, "retries"),
        (Spot.Always, {"retries": True}, "retries"),
        (Spot.Always, {"interval": True}, "interval"),
        (Spot.Always, {"interval": -1}, "interval"),
        (Spot.Always, {"interval": float("inf")}, "interval"),
        (Spot.Percent, {"share": 0}, "spot=0 asks for no spot machine"),
        (Spot.Percent, {"share": 1.01}, "spot=1.01 is more than all machines"),
        (Spot.Percent, {"share": True}, "share"),
        (Spot.Percent, {"share": "0.8"}, "share"),
    ],
)
def test_the_message_says_which_number_is_impossible(kind, fields, words):
    with pytest.raises(BadRequest, match=words):
        kind(**fields)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_strategy_is_a_frozen_value(strategy):
    """It survives JSON and pickle, and hashes."""
    assert from_json(json.loads(json.dumps(to_json(strategy)))) == strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert len({strategy, from_json(to_json(strategy))}) == 1
    for name in ("retries", "share", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(strategy, name, 3)


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        ({}, ""),
        ({"kind": "alway"}, "always"),
        ({"kind": "percentage"}, "percent"),
        ({"kind": "never", "retries": 1}, ""),
        ({"kind": "percent"}, ""),
        ({"kind": "percent", "share": 3}, ""),
        ([], ""),
        ("sometimes", ""),
    ],
)
def test_foreign_json_is_refused_with_the_nearest_kind(data, nearest):
    with pytest.raises(BadRequest, match=f'"{nearest}' if nearest else None):
        from_json(data)


@pytest.mark.parametrize(
    ("strategy", "nodes", "spot_sold", "on_demand", "spot"),
    [
        (None, 4, True, 0, 4),
        (None, 4, False, 4, 0),
        (Spot.Percent(0.8), 1, True, 0, 1),
        (Spot.Percent(0.8), 5, True, 1, 4),
        (Spot.Percent(0.8), 11, True, 2, 9),
        (Spot.Percent(0.5), 3, True, 1, 2),
        (Spot.Percent(0.1), 30, True, 27, 3),
        (Spot.Percent(0.07), 100, True, 93, 7),
        (Spot.Percent(1e-05), 3, True, 2, 1),
        (Spot.Percent(1.0), 3, True, 0, 3),
    ],
)
def test_nodes_are_split(strategy, nodes, spot_sold, on_demand, spot):
    """A share is rounded up to whole machines, and 10 % of 30 are 3. `tests/unit/test_seed_tables.py` has the others."""
    assert split(strategy, nodes, spot_sold) == (on_demand, spot)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(BadRequest, match=r"sold.*if-available.*never"):
        split(Spot.Percent(0.1), 2, spot_sold=False)
    with pytest.raises(BadRequest, match="at least 1"):
        split(None, 0, spot_sold=True)
