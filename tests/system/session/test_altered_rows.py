"""A process that would keep a named pool, and finds that somebody has altered its row of the ledger."""

import logging
from pathlib import Path

import pytest
from sqlalchemy import text

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from tests.pool.named import assert_nothing_left, double, machines_of, name, pool_of  # noqa: F401 - a fixture
from tests.providers.http_fake import FakeCloud
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(240)]


def alter(pool_id: str, column: str, value: str) -> None:
    wanted = text(f"UPDATE skyward_pools SET {column} = :value WHERE id = :id")
    with Ledger(default_url()) as ledger, ledger._database.write() as connection:
        connection.execute(wanted, {"value": value, "id": pool_id})


def test_a_process_does_not_keep_a_pool_with_the_provider_of_an_altered_row(
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its calls go on, it sends no credentials to the address, and it keeps the pool once the row is right again."""
    caplog.set_level(logging.WARNING, logger="skyward")
    monkeypatch.setenv("DIGITALOCEAN_TOKEN", "a-token-of-the-team")
    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    with FakeCloud() as listener:
        alter(first.id, "provider_json", f'{{"name": "digitalocean", "endpoint_url": "{listener.url}"}}')
        first.close()
        wait_until(lambda: "at another provider than those of this process: digitalocean" in caplog.text, "a refusal")
        assert double(5) >> second == 10
        assert listener.requests == []
    alter(first.id, "provider_json", '{"name": "local", "price_per_hour": 0.0}')
    second.close()
    assert_nothing_left(second, ids)


def test_a_process_keeps_a_pool_as_its_own_spec_says(name: str, tmp_path: Path) -> None:
    """An altered spec in the row decides neither commands, packages and variables of new nodes, nor anything else."""
    proof = tmp_path / "proof"
    first, second = pool_of(name, nodes=2).open(), pool_of(name, nodes=2).open()
    ids = machines_of(first)
    hers = f'{{"image": {{"lock": "{proof}", "env": {{"HERS": "1"}}}}, "nodes": 2, "provider": {{"name": "hosts"}}}}'
    alter(first.id, "spec_json", hers)
    first.close()
    lost = second.lease.nodes[1].instance.id
    sky.Local().terminate([lost])
    wait_until(lambda: lost not in machines_of(second) and len(machines_of(second)) == 2, "another node")
    ids |= machines_of(second)
    assert variable("HERS") @ second == ("", "")
    second.close()
    assert_nothing_left(second, ids)


@sky.compute
def variable(name: str) -> str:
    import os

    return os.environ.get(name, "")
