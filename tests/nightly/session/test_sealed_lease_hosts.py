"""Another machine attaches over SSH by the id of a pool, with the ledger and the secret and nothing else.

Run as a program, this file is the process on that machine: its home is empty.
"""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from tests.conftest import RecordedEvents
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.rental import Cloud

REPOSITORY = Path(__file__).parents[3]
SECRET = base64.b64encode(b"s" * 32).decode()

pytestmark = [pytest.mark.timeout(400)]


@sky.compute
def doubled(number: int) -> int:
    return 2 * number


def on_another_machine(home: Path, pool_id: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run this file with an empty home and these variables."""
    home.mkdir()
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "DO_NOT_TRACK": "1", **variables}
    argv = [sys.executable, "-m", "tests.nightly.session.test_sealed_lease_hosts", pool_id]
    return subprocess.run(argv, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=200)


def test_ledger_and_secret_are_enough(
    fleet: Fleet, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The key of the machines comes out of the ledger, is in memory only, and in no event, log or receipt. Without the
    secret, or with a lease that was altered, nothing is tried. The row goes with the pool.
    """
    monkeypatch.setenv("SKYWARD_SECRET_KEY", SECRET)
    cloud, recorded = Cloud(fleet, prepare=mirror.configure), RecordedEvents()
    url = default_url()
    with sky.ComputePool(
        provider=cloud.provider(), display="quiet", provision_timeout=180, on_event=recorded
    ) as pool, Ledger(url) as ledger:  # fmt: skip
        assert ledger.sealed_lease(pool.id) is None
        call = pool.start_detached(doubled(4))
        assert call.result(60) == 8
        call.forget()
        there = on_another_machine(tmp_path / "a", pool.id, SKYWARD_LEDGER=url, SKYWARD_SECRET_KEY=SECRET)
        assert there.returncode == 0, there.stderr
        assert json.loads(there.stdout) == {"doubled": 42, "key": "in memory", "head": pool.lease.nodes[0].instance.id}
        refused = on_another_machine(tmp_path / "b", pool.id, SKYWARD_LEDGER=url)
        assert refused.returncode == 1
        assert "CredentialsError" in refused.stderr
        assert "Set SKYWARD_SECRET_KEY to the same key where the pool is opened and here" in refused.stderr
        row = ledger.sealed_lease(pool.id)
        assert row is not None
        ledger.seal_lease(pool.id, row.lease_json.replace('"rank":0', '"rank":1'), row.sealed)
        with pytest.raises(sky.LeaseTampered):
            sky.ComputePool.attach(pool.id)
        key = fleet.key_path.read_text().splitlines()[2]
        shown = [there.stdout, there.stderr, refused.stderr, caplog.text, *map(repr, recorded.events)]
        assert not any(secret in text for secret in (SECRET, key) for text in shown)
    with Ledger(url) as ledger:
        assert ledger.sealed_lease(pool.id) is None
    assert SECRET not in json.dumps(pool.receipt)
    cloud.close()


def main(pool_id: str) -> None:
    """Attach by the id, run a call, and print what was there."""
    with sky.ComputePool.attach(pool_id) as pool:
        (node,) = pool.lease.nodes
        assert node.instance.endpoint is not None
        where = "in memory" if os.readlink(str(node.instance.endpoint.key)).startswith("/memfd:") else "on disk"
        print(json.dumps({"doubled": doubled(21) >> pool, "key": where, "head": node.instance.id}))


if __name__ == "__main__":
    main(sys.argv[1])
