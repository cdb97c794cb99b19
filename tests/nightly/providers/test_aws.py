"""AWS: the contract of every cloud, and behaviour of EC2 alone."""

from __future__ import annotations

from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import (
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Requirements
from skyward_core.providers.aws import account
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import IMAGES, FakeAWS
from tests.system.providers.test_aws import (  # noqa: F401 - fixtures
    BOTH,
    OFFER,
    T4,
    _at_once,
    cloud,
    make,
    of_type,
)


def test_prices_come_from_the_price_list(cloud: FakeAWS) -> None:
    """All pages are read, only for the region itself: Local Zones cost more."""
    cloud.list_prices = {
        ("us-east-1", "g4dn.xlarge"): 0.5,
        ("us-east-1", "g4dn.2xlarge"): 0.7,
        ("eu-west-1", "g4dn.xlarge"): 0.6,
    }
    sold = make(cloud).offers(Requirements(accelerator=parse("T4")))
    assert {offer.instance_type: offer.price_per_hour for offer in sold} == {"g4dn.xlarge": 0.5, "g4dn.2xlarge": 0.7}
    assert all(parameters["Filters"] for parameters in cloud.parameters("GetProducts"))
    sold = make(cloud).offers(Requirements(vcpus=4))
    assert {offer.instance_type: offer.price_per_hour for offer in sold} == {"g4dn.xlarge": 0.5, "g4dn.2xlarge": 0.7}


def test_a_region_that_is_not_enabled_does_not_hide_that_a_pool_is_gone(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds for the pool's provider, and for the reaper and a sweep, which have no memory. AWS reports the region's
    state.
    """
    cloud.not_enabled = {"us-west-2"}
    provider = make(cloud, region=BOTH)
    (machine,) = provider.launch(provider.offers(T4)[0], 1, tags(), STARTUP)
    assert [found.id for found in provider.instances(machine.pool_id)] == [machine.id]
    assert [found.id for found in make(cloud, region=BOTH).instances()] == [machine.id]
    provider.terminate([machine.id, "i-0123456789abcdef0"])
    assert (provider.instances(machine.pool_id), cloud.alive()) == ([], set())
    assert "us-west-2 is not enabled in the AWS account" in caplog.text


@pytest.mark.parametrize(
    ("requested", "names"),
    [
        ({}, {"t4g.small", "m7i.large"}),
        ({"vcpus": 2, "nodes": 2}, {"t4g.small", "m7i.large"}),
        ({"memory_gb": 0.5}, {"t4g.nano", "t3.micro", "t4g.small", "m7i.large"}),
        ({"instance_type": "t4g.nano"}, {"t4g.nano"}),
    ],
)
def test_without_a_memory_requirement_offers_have_enough_for_a_node(
    cloud: FakeAWS, requested: dict[str, Any], names: set[str]
) -> None:
    """It is 2 GB; smaller machines are offered for a smaller requirement, or for a named type."""
    cloud.list_prices = {
        ("us-east-1", name): price
        for name, price in (("t4g.nano", 0.0042), ("t3.micro", 0.01), ("t4g.small", 0.017), ("m7i.large", 0.1))
    }
    assert {offer.instance_type for offer in make(cloud).offers(Requirements(**requested))} == names


def test_an_offer_has_the_processor_of_its_type(cloud: FakeAWS) -> None:
    """The cheapest type may have another processor than the client; a requirement selects only its own."""
    cloud.list_prices = {("us-east-1", name): price for name, price in (("t4g.small", 0.017), ("m7i.large", 0.1))}
    assert {offer.instance_type: offer.architecture for offer in make(cloud).offers(Requirements())} == {
        "t4g.small": "arm64",
        "m7i.large": "x86_64",
    }
    for architecture, name in (("arm64", "t4g.small"), ("x86_64", "m7i.large")):
        assert {offer.instance_type for offer in make(cloud).offers(Requirements(architecture=architecture))} == {name}


@pytest.mark.parametrize("name", ["t2.large", "t3.large", "t3a.large", "t4g.large"])
def test_a_burstable_type_gets_standard_credits(cloud: FakeAWS, name: str) -> None:
    """AWS would bill CPU of T3, T3a and T4g beyond their credits. It holds with the user's own image too."""
    make(cloud).launch(of_type(name, accelerator=None), 1, tags(), STARTUP)
    make(cloud, ami="ami-0b0700000000000x8").launch(of_type(name, accelerator=None), 1, tags(launch="L1"), STARTUP)
    assert [parameters["CreditSpecification.CpuCredits"] for parameters in cloud.parameters("RunInstances")] == [
        "standard",
        "standard",
    ]


@pytest.mark.parametrize(
    ("name", "accelerator", "parameter"),
    [
        ("g4dn.xlarge", "T4", "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04"),
        ("g5g.xlarge", "T4g", "deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04"),
        ("trn1.2xlarge", "Trainium1", "neuron/dlami/base/ubuntu-24.04/latest/image_id"),
        ("inf2.xlarge", "Inferentia2", "neuron/dlami/base/ubuntu-24.04/latest/image_id"),
        ("c7i.xlarge", None, "canonical/ubuntu/server/24.04/stable/current/amd64"),
        ("c8g.4xlarge", None, "canonical/ubuntu/server/24.04/stable/current/arm64"),
    ],
)
def test_the_image_fits_the_chip_and_the_processor(
    cloud: FakeAWS, name: str, accelerator: str | None, parameter: str
) -> None:
    """Its id comes from AWS's parameter for the latest image."""
    make(cloud).launch(of_type(name, accelerator=accelerator), 1, tags(), STARTUP)
    (request,) = cloud.parameters("GetParameter")
    assert parameter in request["Name"]
    assert cloud.parameters("RunInstances")[0]["ImageId"] == IMAGES[request["Name"]]


@pytest.mark.parametrize(
    ("state", "code", "error", "word"),
    [
        ("terminated", "Server.InsufficientInstanceCapacity", NoCapacity, "InsufficientInstanceCapacity"),
        ("shutting-down", "Client.VolumeLimitExceeded", QuotaExceeded, "VolumeLimitExceeded"),
        ("terminated", "Server.SpotInstanceTermination", NoCapacity, "SpotInstanceTermination"),
        ("terminated", "Client.InternalError", sky.BadRequest, "InternalError"),
        ("terminated", "Server.InternalError", ProviderFailed, "InternalError"),
        ("stopped", "Server.SpotInstanceShutdown", NoCapacity, "SpotInstanceShutdown"),
    ],
)
def test_a_machine_that_ends_during_launch_is_reported_with_its_reason(
    cloud: FakeAWS, state: str, code: str, error: type[SkywardError], word: str
) -> None:
    """The error has AWS's code. A stopped machine is terminated, because its disk is billed."""
    cloud.pending_listings = 9
    cloud.on_listing = lambda: [cloud.put(machine, state, code) for machine in cloud.alive()] and None
    with pytest.raises(error) as caught:
        make(cloud).launch(OFFER, 1, tags(), STARTUP)
    assert caught.value.code == word
    assert cloud.alive() == set()


# ── listing and terminating ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("pending", InstanceState.PENDING),
        ("running", InstanceState.RUNNING),
        ("stopping", InstanceState.STOPPING),
        ("stopped", InstanceState.STOPPING),
        ("shutting-down", None),
        ("terminated", None),
        ("levitating", InstanceState.PENDING),
    ],
)
def test_a_state_is_reported_by_its_cost(cloud: FakeAWS, word: str, state: InstanceState | None) -> None:
    """A machine that is ending is not billed and never returns. A stopped machine is not gone."""
    (machine,) = make(cloud).launch(OFFER, 1, tags(), STARTUP)
    cloud.put(machine.id, word)
    assert [instance.state for instance in make(cloud).instances(POOL)] == ([] if state is None else [state])


def test_all_pages_of_a_listing_are_read(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven launches, five on each page."""
    monkeypatch.setattr(account, "PAGE", 5)
    for rank in range(7):
        make(cloud).launch(OFFER, 1, tags(first_rank=rank, launch=f"L{rank}"), STARTUP)
    assert sorted(instance.rank for instance in make(cloud).instances(POOL)) == list(range(7))


def test_machines_of_several_regions_are_listed_and_terminated(cloud: FakeAWS) -> None:
    """An id does not contain its region, so each region is called."""
    both = make(cloud, region=("us-east-1", "eu-west-1"))
    east = both.launch(OFFER, 2, tags(), STARTUP)
    west = both.launch(of_type("g4dn.xlarge", "eu-west-1"), 1, tags(first_rank=2, launch="L1"), STARTUP)
    ids = [instance.id for instance in (*east, *west)]
    assert {instance.id: instance.region for instance in both.instances(POOL)} == dict(
        zip(ids, ["us-east-1", "us-east-1", "eu-west-1"], strict=True)
    )
    assert {instance.id for instance in make(cloud).instances(POOL)} == set(ids[:2])
    both.terminate(ids)
    assert cloud.alive() == set()
