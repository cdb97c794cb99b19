"""Pools on each cloud's fake, which rents out hosts of the test bed.

A pool uses only data of the provider. It opens, runs, loses a machine, and ends. Afterwards all written data is
searched for credentials.
"""

from __future__ import annotations

import time

import pytest

import skyward_core as sky
from skyward_core.machines.offers import Requirements, rank
from skyward_core.providers.base import CREATED_TAG
from skyward_core.provisioning.guard import guard_script
from tests.conftest import wait_until
from tests.providers.contract import tags
from tests.system.providers.test_end_to_end import (  # noqa: F401 - fixtures
    Rented,
    rented,
)
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

REQUIREMENTS = Requirements(vcpus=4)
LEASE_SECONDS = 15

pytestmark = [pytest.mark.timeout(400)]  # a minute on an idle machine


def test_a_machine_ends_itself_without_its_client(rented: Rented, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease expires and its guard runs the end command."""
    provider = rented.provider
    offer = rank(provider.offers(REQUIREMENTS), REQUIREMENTS)[0]
    (instance,) = provider.launch(
        offer,
        1,
        {**tags(), CREATED_TAG: str(int(time.time()))},
        guard_script(LEASE_SECONDS, None, type(provider).end_command),
    )
    host = rented.hosting.hosts[instance.id]
    wait_until(lambda: not host.is_up, "the machine to end itself", seconds=120)
    states = {found.id: found.state for found in provider.instances(instance.pool_id)}
    assert states.get(instance.id) in (None, sky.InstanceState.STOPPING)
    provider.terminate([instance.id])
    assert rented.alive() == set()
