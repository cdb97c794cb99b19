"""AWS: offers, launches and listings in many variations, a client that is killed, and kept images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import CredentialsError, NoCapacity, ProviderFailed, QuotaExceeded, SkywardError
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Requirements
from skyward_core.providers.aws import account as aws_account
from skyward_core.providers.aws import images
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.aws.account import AwsAccount
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, IMAGE_TAG, OWNER_TAG, STARTED_FROM_TAG
from tests.providers.aws import OFFER, SPOT, T4, at_once, cloud, make, of_type  # noqa: F401 - fixtures
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import IMAGES, FakeAWS
from tests.providers.fake_fleet import UNTRIED
from tests.providers.fake_images import Image, Snapshot
from tests.system.providers.test_aws import BOTH
from tests.system.providers.test_aws_fleet import (  # noqa: F401 - a fixture
    OLD,
    TOGETHER,
    A,
    B,
    C,
    account,
    launch_parameters,
    left,
    now,
    offers_of_both_markets,
    spot,
    zones_of,
)
from tests.system.providers.test_aws_images import HASH, OURS, UBUNTU, launch, started_from
from tests.system.providers.test_aws_images import make as make_any


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
    """It holds for the pool's provider, and for the reaper and a sweep, which have no memory."""
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
        ("terminated", "Client.InternalError", sky.BadRequest, "InternalError"),
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
    monkeypatch.setattr(aws_account, "PAGE", 5)
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


def test_a_type_with_another_processor_is_not_equivalent(cloud: FakeAWS) -> None:
    """It needs another image."""
    cloud.spot = {("c7i.xlarge", A): 0.1, ("c7g.xlarge", A): 0.05, ("m7i.xlarge", A): 0.06}
    sold = {offer.instance_type: offer.or_types for offer in make(cloud).offers(Requirements(vcpus=4)) if offer.is_spot}
    assert sold == {"c7i.xlarge": ("m7i.xlarge",), "c7g.xlarge": (), "m7i.xlarge": ()}


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded"], QuotaExceeded),
        (["InsufficientInstanceCapacity", "UnauthorizedOperation"], CredentialsError),
        (["InvalidParameterValue", "InsufficientInstanceCapacity"], NoCapacity),
        (["InvalidParameterValue", "InternalError"], ProviderFailed),
        ([UNTRIED[0]], NoCapacity),
    ],
)
def test_a_fleets_error_codes_determine_the_error(cloud: FakeAWS, codes: list[str], kind: type[SkywardError]) -> None:
    """They have no HTTP status; errors that hold for all pools come first."""
    spot(cloud, a=0.18, b=0.19)
    zones = [("g4dn.xlarge", A), ("g4dn.xlarge", B)]
    cloud.fleets.untried = set(zones)
    for zone, code in zip(zones, codes, strict=False):
        cloud.fleets.untried.discard(zone)
        cloud.fleets.refusals[zone] = (code, "why")
    with pytest.raises(SkywardError) as caught:
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert type(caught.value) is kind
    assert caught.value.code in (*codes, UNTRIED[0])


@pytest.mark.parametrize("market", [0, 1])
def test_a_single_machine_has_neither_efa_nor_a_placement_group(cloud: FakeAWS, market: int) -> None:
    """A type without EFA has neither of them, because capacity matters more."""
    for offer, count in ((TOGETHER.model_copy(update={"nodes": 1}), 1), (OFFER.model_copy(update={"nodes": 4}), 4)):
        make(cloud).launch(offers_of_both_markets(cloud, offer)[market], count, tags(launch=f"L{count}"), STARTUP)
        assert not [name for name in launch_parameters(cloud) if name.endswith(("InterfaceType", "GroupName"))]
    assert cloud.fleets.groups == {}
    assert cloud.parameters("AuthorizeSecurityGroupEgress") == []
    assert cloud.parameters("DescribePlacementGroups") == []


@pytest.mark.parametrize("market", [0, 1])
def test_an_additional_machine_joins_the_others(cloud: FakeAWS, market: int) -> None:
    """A replacement, or the spot part of a pool, is in the same zone and group, with EFA."""
    offer = offers_of_both_markets(cloud, TOGETHER)[market]
    first = make(cloud).launch(offer, 1, tags(), STARTUP)
    (zone,) = zones_of(cloud, first)
    cloud.spot = {(offer.instance_type, name): 0.5 for name in (A, B, C)}
    later = [
        instance
        for launch in ("L1", "L2")
        for instance in make(cloud).launch(offer, 1, tags(first_rank=1, launch=launch), STARTUP)
    ]
    assert zones_of(cloud, [*first, *later]) == {zone}
    (group,) = cloud.fleets.groups.values()
    assert len(group.machines) == 3
    assert launch_parameters(cloud)["NetworkInterface.1.InterfaceType"] == "efa"


@pytest.mark.parametrize("market", [0, 1])
@pytest.mark.parametrize(
    ("action", "word"), [("CreatePlacementGroup", "GroupName"), ("AuthorizeSecurityGroupEgress", "InterfaceType")]
)
def test_without_the_right_machines_start_without_efa_or_group(
    cloud: FakeAWS, market: int, action: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is logged. A slower network is better than no machines."""
    offer = offers_of_both_markets(cloud, TOGETHER)[market]
    cloud.fail(action, "UnauthorizedOperation", 403, times=99)
    assert len(make(cloud).launch(offer, 2, tags(), STARTUP)) == 2
    assert not [name for name in launch_parameters(cloud) if name.endswith(word)]
    assert "UnauthorizedOperation" in caplog.text


class Killed(BaseException):
    """The process has died: no later code runs."""


STEPS = ["CreateLaunchTemplate", "CreateFleet", "DescribeInstances", "CreateTags"]


@pytest.mark.parametrize("step", STEPS)
def test_all_resources_of_a_killed_client_can_be_found(
    cloud: FakeAWS, account: AwsAccount, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is killed at any step. Machines are found by their tags, with unique ranks and no price too low."""
    spot(cloud, a=0.2, b=0.15)
    cloud.fleets.is_split = True
    ask: Callable[..., Any] = AwsAccount.ask
    pages: Callable[..., Any] = AwsAccount.pages
    is_over: list[bool] = []

    def die(operation: str, parameters: dict[str, Any]) -> None:
        if is_over:
            raise Killed
        if operation.replace("_", "") == step.lower() and not (
            step == "DescribeInstances" and not cloud.parameters("CreateFleet")
        ):
            is_over.append(True)
            if step != "DescribeInstances":
                (ask if operation != "describe_instances" else pages)(
                    account, "us-east-1", "ec2", operation, **parameters
                )
            raise Killed

    def dying_ask(self: AwsAccount, region: str, service: str, operation: str, **parameters: Any) -> Any:
        if self is not account:
            die(operation, {name: word for name, word in parameters.items() if name != "once"})
        return ask(self, region, service, operation, **parameters)

    def dying_pages(self: AwsAccount, region: str, service: str, operation: str, what: str, **parameters: Any) -> Any:
        if self is not account:
            die(operation, parameters)
        return pages(self, region, service, operation, what, **parameters)

    with monkeypatch.context() as patch:
        patch.setattr(AwsAccount, "ask", dying_ask)
        patch.setattr(AwsAccount, "pages", dying_pages)
        with pytest.raises(Killed):
            make(cloud).launch(SPOT, 3, tags() | {CREATED_TAG: str(int((now() - OLD).timestamp()))}, STARTUP)
    assert is_over
    there = make(cloud).instances(POOL)
    assert {instance.id for instance in there} == cloud.alive()
    assert sorted(instance.rank for instance in there) == ([] if step == "CreateLaunchTemplate" else [0, 1, 2])
    assert {instance.price_per_hour for instance in there} <= ({0.15, 0.2} if step == "CreateTags" else {0.2})
    make(cloud).terminate([instance.id for instance in there])
    assert cloud.alive() == set()
    aws_launch.prune_launches(account, "us-east-1", now())
    assert left(cloud) == set()


def tags_of(image: Image | Snapshot) -> dict[str, str]:
    return {
        name: value for name, value in image.tags.items() if name not in ("Name", CREATED_TAG, EXPIRES_TAG, OWNER_TAG)
    }


def test_an_image_of_a_machine_is_created_and_the_next_machine_starts_from_it(cloud: FakeAWS) -> None:
    """Image and snapshot are tagged in the creating call, without a reboot."""
    cloud.images.hidden_listings = 2
    first = launch(make_any())
    assert started_from(cloud) == [UBUNTU]
    assert STARTED_FROM_TAG not in first.tags
    image_id = make_any().keep_image(first, HASH)
    (image,) = cloud.images.images.values()
    assert (image.id, image.machine, image.state) == (image_id, first.id, "pending")
    (snapshot,) = cloud.images.snapshots.values()
    assert tags_of(image) == tags_of(snapshot) == OURS
    assert image.tags == snapshot.tags
    assert len(cloud.parameters("DescribeSnapshots")) == 3
    cloud.images.finish()
    second = launch(make_any(), token="L1")
    assert started_from(cloud) == [UBUNTU, image_id]
    assert second.tags[STARTED_FROM_TAG] == image_id
    assert {listed.id: listed.tags.get(STARTED_FROM_TAG) for listed in make_any().instances()} == {
        first.id: None,
        second.id: image_id,
    }
    assert make_any().keep_image(second, HASH) is None
    assert len(cloud.parameters("CreateImage")) == 1


@pytest.mark.parametrize(
    ("different", "state", "gb", "region"),
    [
        ({IMAGE_TAG: "ba9876543210"}, "available", 100, "us-east-1"),
        ({images.BASE_TAG: "ami-0b0700000000000a4"}, "available", 100, "us-east-1"),
        ({}, "pending", 100, "us-east-1"),
        ({}, "failed", 100, "us-east-1"),
        ({}, "available", 500, "us-east-1"),
        ({}, "available", 100, "us-west-2"),
    ],
    ids=["packages", "base", "pending", "failed", "larger", "region"],
)
def test_an_image_that_does_not_fit_is_not_used(
    cloud: FakeAWS, different: dict[str, str], state: str, gb: int, region: str
) -> None:
    """It has other packages, another base image, a larger disk or another region, or it is not available."""
    cloud.images.add(OURS | different, state=state, gb=gb, region=region)
    launch(make_any())
    assert started_from(cloud) == [UBUNTU]


@pytest.mark.parametrize("state", ["pending", "available"])
def test_an_existing_or_pending_image_is_not_created_again(cloud: FakeAWS, state: str) -> None:
    """Another pool has begun earlier."""
    machine = launch(make_any())
    cloud.images.add(OURS, state=state)
    assert make_any().keep_image(machine, HASH) is None
    assert cloud.parameters("CreateImage") == []
