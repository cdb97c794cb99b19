"""`skyward warm NAME --for 2h`."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from skyward_core import cli
from skyward_core.ledger.ledger import Ledger
from tests.unit.cli.test_commands import Clock, FolderProvider, Skyward, clock, folder, ledger, open_named, skyward, url  # noqa: F401 - fixtures


def test_a_pool_in_use_is_kept_warm_when_it_is_left(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    open_named(ledger, clock, folder)
    words = "nightly (sky-named) is in use; it stays warm for 2.0 h when the last process has left it\n"
    assert skyward("warm nightly --for 2h") == words
    found: Mapping[str, Any] = json.loads(skyward("warm nightly --for 90m --json"))
    assert found == {
        "name": "nightly",
        "pool": "sky-named",
        "state": "in use",
        "warm_until": None,
        "keep_warm_seconds": 5400,
    }


def test_a_name_without_a_pool_is_an_error(skyward: Skyward, ledger: Ledger) -> None:
    assert "no pool with the name 'nonesuch'" in skyward("warm nonesuch --for 2h", code=cli.FAILED)


@pytest.mark.parametrize("time", ["2", "0h", "-1h", "2 weeks", "h", "nan h", "nanh", "1e99d"])
def test_what_is_no_duration_is_refused(time: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["warm", "nightly", "--for", time])
    assert caught.value.code == 2
    assert "duration such as" in capsys.readouterr().err.replace("\n", " ")
