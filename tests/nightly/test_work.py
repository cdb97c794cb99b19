"""The work of a pool: in the ledger, the receipt, the tags of the machines, and the sums of costs."""

import json
from dataclasses import replace

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.providers.tagging import work_tags
from tests.unit.test_work import TRAIN, tags


def test_a_pool_records_its_work_before_anything_is_rented(capsys: pytest.CaptureFixture[str]) -> None:
    recorded: list[sky.SkywardEvent] = []
    pool = sky.ComputePool(provider=sky.Local(price_per_hour=36), display="quiet", on_event=recorded.append, work=TRAIN)
    assert (pool.id, pool.work) == ("", TRAIN)
    with pool:
        assert recorded[0] == sky.InfraCreating(pool.id, TRAIN)
        its_tags = tags() >> pool
        with sky.PoolUse(pool, replace(TRAIN, task="a"), is_alone=False) as use:
            use.run(tags())
        assert cli.main(["ps", "--json"]) == 0
        (row,) = (row for row in json.loads(capsys.readouterr().out) if row["pool"] == pool.id)
        assert row["work"] == TRAIN.labels()
        assert cli.main(["ps"]) == 0
        assert str(TRAIN) in capsys.readouterr().out
    assert {name: value for name, value in its_tags.items() if name.startswith("skyward-work-")} == work_tags(TRAIN)
    assert pool.receipt is not None
    assert pool.receipt["pool_id"] == pool.id
    assert pool.receipt["work"] == TRAIN.labels()
    assert cli.main(["cost", "--by", "task", "--json"]) == 0
    rows = {row["key"]: row["cost_usd"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["airflow:nightly/a"] == use.cost > 0
    assert rows["airflow:nightly/a"] + rows["airflow:nightly/train"] == pytest.approx(pool.cost, abs=1e-6)
