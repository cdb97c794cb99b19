"""One session of a pool: which end wins when two threads end it in different ways, and the message at the program's
end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.session import session
from tests.conftest import RecordedEvents


def test_a_pool_that_must_end_at_the_end_of_its_opening_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The money is used up between the last machine and the last line of `start`.

    Otherwise `open` would return a pool that ends a second later.
    """
    used_up = sky.BudgetExceeded("the money is used up", "team")

    def limits(_limit: object, _renewal: object, give_up: Any, _log: object) -> Any:
        return SimpleNamespace(start=lambda: None, end=lambda: give_up(used_up))

    monkeypatch.setattr(session, "OpeningLimits", limits)
    recorded = RecordedEvents()
    pool = sky.ComputePool(provider=sky.Local(), display="quiet", on_event=recorded)
    with pytest.raises(sky.BudgetExceeded, match="the money is used up"):
        pool.open()
    (created,) = recorded.of(sky.InfraCreating)
    assert sky.Local().instances(created.pool_id) == []
