"""AWS: spot machines from EC2 Fleet, placement groups and EFA."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import CredentialsError, NoCapacity, ProviderFailed, QuotaExceeded, SkywardError
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers import aws_launch, aws_offers
from skyward_core.providers.aws_account import AwsAccount
from skyward_core.providers.base import CREATED_TAG, POOL_TAG
from tests.providers.aws import OFFER, SPOT, T4, cloud, make_aws, of_type  # noqa: F401 - a fixture
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import NO_SPOT_ROLE, NONE_LEFT, UNTRIED, AwsRequest, FakeAWS, pairs

A, B, C = "us-east-1a", "us-east-1b", "us-east-1c"
TOGETHER = of_type("g6.8xlarge", accelerator="L4", price_per_hour=2.0, on_demand_price_per_hour=2.014, nodes=2)
"""A type with one EFA."""
MANY_CARDS = of_type("p4d.24xlarge", accelerator="A100", nodes=2)
OLD, YOUNG = timedelta(hours=2), timedelta(minutes=50)


@pytest.fixture
def account(cloud: FakeAWS) -> Iterator[AwsAccount]:
    with AwsAccount(None, cloud.url, None) as request:
        yield request


def launch(
    offer: Offer = SPOT, count: int = 1, token: str = "L0", first_rank: int = 0, **fields: Any
) -> list[Instance]:
    return make_aws(**fields).launch(offer, count, tags(first_rank=first_rank, launch=token), STARTUP)


def ago(age: timedelta) -> str:
    return str(int((datetime.now(UTC) - age).timestamp()))


def spot(cloud: FakeAWS, **prices: float) -> None:
    """Set the spot prices of a g4dn.xlarge by the letter of the zone."""
    cloud.spot = {("g4dn.xlarge", f"us-east-1{letter}"): price for letter, price in prices.items()}


def templates(cloud: FakeAWS) -> list[dict[str, Any]]:
    return [call["LaunchTemplateData"] for call in cloud.parameters("CreateLaunchTemplate")]


def zones_of(cloud: FakeAWS, launched: Sequence[Instance]) -> set[str]:
    return {cloud.machine(instance.id).zone for instance in launched}


# ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prices", "share", "sold"),
    [
        ([], 0.1, []),
        ([0.22, 0.2, 0.2], 0.1, [0.22]),
        ([0.2, 0.21, 0.221, 0.23], 0.1, [0.21, 0.23]),
        ([0.2, 0.21], 0.0, [0.2, 0.21]),
    ],
)
def test_similar_spot_prices_become_one_price(prices: list[float], share: float, sold: list[float]) -> None:
    """The price is the highest of them, so the cost never exceeds the offer."""
    assert aws_offers.spread(prices, share) == sold


def test_an_offer_lists_equivalent_types(cloud: FakeAWS) -> None:
    """They have the same chips and processor, match the requirements, and cost at most the price in some zone."""
    cloud.spot = {
        ("g4dn.xlarge", A): 0.2,
        ("g4dn.2xlarge", B): 0.19,
        ("g4dn.4xlarge", A): 0.5,
        ("g4dn.12xlarge", A): 0.1,
        ("g5.xlarge", A): 0.1,
        ("g4dn.8xlarge", C): 0.2,
    }
    want = Requirements(accelerator=parse("T4"))
    sold = {(offer.instance_type, offer.is_spot): offer.or_types for offer in make_aws().offers(want)}
    assert sold["g4dn.xlarge", True] == ("g4dn.2xlarge", "g4dn.8xlarge")
    assert sold["g4dn.4xlarge", True] == ("g4dn.2xlarge", "g4dn.8xlarge", "g4dn.xlarge")
    assert sold["g4dn.2xlarge", True] == sold["g4dn.12xlarge", True] == sold["g4dn.xlarge", False] == ()
    larger = make_aws().offers(want.model_copy(update={"vcpus": 16}))
    assert {offer.instance_type: offer.or_types for offer in larger if offer.is_spot}["g4dn.4xlarge"] == (
        "g4dn.8xlarge",
    )
    assert [offer.or_types for offer in make_aws().offers(T4) if offer.is_spot] == [()]
    cloud.spot = {("c7i.xlarge", A): 0.1, ("c7g.xlarge", A): 0.05, ("m7i.xlarge", A): 0.06}
    found = make_aws().offers(Requirements(vcpus=4))
    assert {offer.instance_type: offer.or_types for offer in found if offer.is_spot} == {
        "c7i.xlarge": ("m7i.xlarge",),
        "c7g.xlarge": (),
        "m7i.xlarge": (),
    }


def test_an_offer_lists_only_the_cheapest_equivalent_types() -> None:
    """The fleet names each of them in each zone."""
    sold = [of_type(f"c{n}.xlarge", is_spot=True, price_per_hour=1.0) for n in range(20)]
    found = aws_offers.with_others(sold, {offer.instance_type: {1.0 - n / 100} for n, offer in enumerate(sold)}, {})
    assert found[0].or_types == tuple(f"c{n}.xlarge" for n in range(19, 11, -1))
    assert found[19].or_types == tuple(f"c{n}.xlarge" for n in range(18, 10, -1))


# ── fleets ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fleet_names_all_spot_pools_at_or_below_the_price(cloud: FakeAWS) -> None:
    """EC2 chooses among them in one call: all machines or none, one zone, one type."""
    spot(cloud, a=0.2, b=0.18, c=0.21)
    cloud.spot |= {("g4dn.2xlarge", C): 0.2, ("g4dn.2xlarge", A): 0.3}
    offer = SPOT.model_copy(update={"or_types": ("g4dn.2xlarge",)})
    launched = launch(offer, 3, first_rank=2, instance_profile="trainer")
    assert cloud.parameters("RunInstances") == []
    (call,) = cloud.parameters("CreateFleet")
    assert {(name, zone) for name, zone, _ in cloud.spot_pools(call)} == {
        ("g4dn.xlarge", A),
        ("g4dn.xlarge", B),
        ("g4dn.2xlarge", C),
    }
    assert (call["Type"], call["TargetCapacitySpecification"]["TotalTargetCapacity"]) == ("instant", 3)
    assert call["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "spot"
    assert call["SpotOptions"] == {
        "AllocationStrategy": "price-capacity-optimized",
        "InstanceInterruptionBehavior": "terminate",
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": 3,
    }
    assert "MaxPrice" not in str(call)
    (data,) = templates(cloud)
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"]
    assert data["NetworkInterfaces"][0]["AssociatePublicIpAddress"]
    assert data["IamInstanceProfile"] == {"Name": "trainer"}
    config = json.loads(base64.b64decode(data["UserData"]).decode().removeprefix("#cloud-config\n"))
    assert STARTUP in config["runcmd"][0][2]
    assert not {"InstanceType", "InstanceMarketOptions", "Placement"} & data.keys()
    assert "SubnetId" not in data["NetworkInterfaces"][0]
    assert zones_of(cloud, launched) == {B}
    assert sorted(instance.rank for instance in launched) == [2, 3, 4]


def test_burstable_spot_types_get_standard_credits(cloud: FakeAWS) -> None:
    """Types with CPU credits have a template of their own, because AWS refuses the parameter for others."""
    cloud.spot = {("t3.large", A): 0.03, ("m7i.large", A): 0.02, ("t3a.large", A): 0.04}
    others = ("m7i.large", "t3a.large")
    launch(of_type("t3.large", accelerator=None, is_spot=True, price_per_hour=0.05, or_types=others))
    credit = [data.get("CreditSpecification", {}).get("CpuCredits") for data in templates(cloud)]
    assert sorted(credit, key=str) == [None, "standard"]
    (call,) = cloud.parameters("CreateFleet")
    of = {name: template for name, _, template in cloud.spot_pools(call)}
    assert of["t3.large"] == of["t3a.large"] != of["m7i.large"]


def test_zones_above_the_offered_price_are_not_requested(cloud: FakeAWS) -> None:
    """If all zones have become dearer, the error is NoCapacity. No request is sent and nothing is left."""
    spot(cloud, a=0.21, b=0.3)
    with pytest.raises(NoCapacity) as caught:
        launch()
    assert caught.value.code == "SpotPriceTooHigh"
    assert [request.action for request in cloud.requests if request.action.startswith(("Create", "Run"))] == []


def test_templates_are_deleted_after_every_launch(cloud: FakeAWS) -> None:
    """They contain the user data of machines."""
    spot(cloud, a=0.2)
    launch()
    assert cloud.fleets.templates == {}
    cloud.fleets.refusals["*", "*"] = NONE_LEFT
    with pytest.raises(NoCapacity):
        launch(token="L1")
    assert cloud.fleets.templates == {}
    cloud.fail("CreateFleet", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="0 of 1 machines are listed"):  # machines may still appear
        launch(token="L2")
    assert cloud.fleets.templates == {}
    assert len({call["LaunchTemplateName"] for call in cloud.parameters("CreateLaunchTemplate")}) == 3


def test_the_error_names_the_codes_of_all_pools_that_were_tried(cloud: FakeAWS) -> None:
    """The answer has status 200 and no machine. Its code is from a pool that sells such machines."""
    spot(cloud, a=0.18, b=0.19, c=0.2)
    cloud.fleets.refusals = {("g4dn.xlarge", A): ("Unsupported", "no such type"), ("g4dn.xlarge", B): NONE_LEFT}
    cloud.fleets.untried = {("g4dn.xlarge", C)}
    both = r"us-east-1a \(subnet-[\w-]+\): Unsupported, g4dn.xlarge in us-east-1b \(subnet-[\w-]+\): InsufficientInst"
    with pytest.raises(NoCapacity, match=both) as caught:
        launch(count=2)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert C not in str(caught.value)
    assert cloud.alive() == set()
    assert len(cloud.parameters("CreateFleet")) == 1


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
    cloud.fleets.untried = set(zones[len(codes) :])
    cloud.fleets.refusals = {zone: (code, "why") for zone, code in zip(zones, codes, strict=False)}
    with pytest.raises(SkywardError) as caught:
        launch()
    assert type(caught.value) is kind
    assert caught.value.code in (*codes, UNTRIED[0])


def test_without_the_role_for_spot_the_error_is_about_spot_and_says_how_to_create_it(cloud: FakeAWS) -> None:
    """New accounts lack it. On-demand machines need none, so `is_about_spot`. All pools refuse, or the whole call."""
    spot(cloud, a=0.18, b=0.19)
    cloud.has_spot_role = False
    command = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
    for token in ("L1", "L2"):
        with pytest.raises(CredentialsError, match=command) as caught:
            launch(token=token)
        assert caught.value.is_about_spot
        cloud.fail("CreateFleet", NO_SPOT_ROLE[0], message=NO_SPOT_ROLE[1])
    cloud.faults.clear()
    cloud.fail("CreateFleet", "UnauthorizedOperation")
    with pytest.raises(CredentialsError, match=r"docs/clouds/aws\.md has the policy") as caught:
        launch(token="L3")
    assert not caught.value.is_about_spot
    assert cloud.fleets.templates == {}


def test_a_spot_quota_is_named(cloud: FakeAWS) -> None:
    spot(cloud, a=0.18)
    cloud.fleets.refusals = {("*", "*"): ("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")}
    with pytest.raises(QuotaExceeded, match=r"L-3819A6DF, All G and VT Spot .*/services/ec2/quotas/L-3819A6DF$"):
        launch()


def test_too_few_machines_are_terminated(cloud: FakeAWS) -> None:
    """It must be all or none. Machines that cannot be terminated must not count as gone: their tags find them."""
    spot(cloud, a=0.2)
    cloud.fleets.short_of = 1
    with pytest.raises(NoCapacity, match="only 2 of 3 machines were created") as caught:
        launch(count=3)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert cloud.alive() == set()
    cloud.fail("TerminateInstances", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="could not be terminated"):
        launch(count=2, token="L1")
    assert {instance.id for instance in make_aws().instances(POOL)} == cloud.alive() != set()


@pytest.mark.parametrize("failures", [0, 9])
def test_machines_of_a_fleet_with_a_lost_answer_are_found(cloud: FakeAWS, failures: int) -> None:
    """The request is repeated with its token: EC2 answers with the machines of the first. If it stays without an answer,
    they are found by a tag that only they have.
    """
    spot(cloud, a=0.2, b=0.19)
    cloud.fail("CreateFleet", is_done=True)
    cloud.fail("CreateFleet", "InternalError", 500, times=failures)
    launched = launch(count=2)
    assert {instance.id for instance in launched} == cloud.alive()
    assert [(instance.rank, instance.price_per_hour) for instance in launched] == [(0, 0.19), (1, 0.19)]
    first, second, *_ = cloud.parameters("CreateFleet")
    assert first == second


def test_the_real_price_is_written_as_a_tag(cloud: FakeAWS) -> None:
    """The creating call has the offered price, which is the maximum; one more call writes the real price."""
    spot(cloud, a=0.2, b=0.15)
    launched = launch(count=3)
    (call,) = cloud.parameters("CreateFleet")
    price = {"Key": aws_launch.PRICE_TAG, "Value": "0.2"}
    assert all(price in spec["Tags"] for spec in call["TagSpecifications"])
    assert {instance.price_per_hour for instance in (*launched, *make_aws().instances(POOL))} == {0.15}
    (call,) = cloud.parameters("CreateTags")
    assert call["Tags"] == [{"Key": aws_launch.PRICE_TAG, "Value": "0.15"}]
    spot(cloud, a=0.2)
    launch(token="L1")
    assert len(cloud.parameters("CreateTags")) == 1  # the real price is the offered one


def test_ranks_differ_before_they_are_written_as_tags(cloud: FakeAWS) -> None:
    """The client was killed after the fleet came, or may not write tags."""
    spot(cloud, a=0.2)
    cloud.fleets.is_split = True
    cloud.fail("CreateTags", "UnauthorizedOperation", 403, times=9)
    launched = {instance.id: instance.rank for instance in launch(count=4)}
    listed = {instance.id: instance.rank for instance in make_aws().instances(POOL)}
    assert sorted(listed.values()) == [0, 1, 2, 3]
    assert listed == launched == {instance.id: instance.rank for instance in make_aws().instances()}
    cloud.put(next(iter(launched)), "terminated")
    assert {instance.id: instance.rank for instance in make_aws().instances(POOL)}.items() < listed.items()


class Killed(BaseException):
    """The process has died: no later code runs."""


@pytest.mark.parametrize("step", ["CreateLaunchTemplate", "CreateFleet", "DescribeInstances", "CreateTags"])
def test_all_resources_of_a_killed_client_can_be_found(
    cloud: FakeAWS, account: AwsAccount, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a step. Machines are found by their tags, with unique ranks and no price too low."""
    spot(cloud, a=0.2, b=0.15)
    cloud.fleets.is_split = True
    answer, is_over = cloud.answer, False

    def dying(request: AwsRequest) -> dict[str, Any]:
        nonlocal is_over
        if is_over:
            raise Killed
        made = answer(request)
        is_over = request.action == step and (step != "DescribeInstances" or bool(cloud.parameters("CreateFleet")))
        if is_over:
            raise Killed
        return made

    with monkeypatch.context() as patch:
        patch.setattr(cloud, "answer", dying)
        with pytest.raises(Killed):
            make_aws().launch(SPOT, 3, tags() | {CREATED_TAG: ago(OLD)}, STARTUP)
    there = make_aws().instances(POOL)
    assert {instance.id for instance in there} == cloud.alive()
    assert sorted(instance.rank for instance in there) == ([] if step == "CreateLaunchTemplate" else [0, 1, 2])
    assert {instance.price_per_hour for instance in there} <= ({0.15, 0.2} if step == "CreateTags" else {0.2})
    make_aws().terminate([instance.id for instance in there])
    assert cloud.alive() == set()
    aws_launch.prune_launches(account, "us-east-1", datetime.now(UTC))
    assert left(cloud) == set()


# ── machines that work together ──────────────────────────────────────────────────────────────────────────────────────


def market_of(cloud: FakeAWS, offer: Offer, *, is_spot: bool) -> Offer:
    """Return an offer on demand, or the same as spot."""
    cloud.spot |= {(offer.instance_type, A): 1.0, (offer.instance_type, B): 0.9}
    return offer.model_copy(update={"is_spot": True, "price_per_hour": 1.0}) if is_spot else offer


def launch_parameters(cloud: FakeAWS) -> dict[str, Any]:
    """Return the parameters of the last launch, by either call."""
    request = [one for one in cloud.requests if one.action in ("RunInstances", "CreateLaunchTemplate")][-1]
    return request.parameters.get("LaunchTemplateData", request.parameters)


def interface_types(cloud: FakeAWS) -> list[str | None]:
    return [one.get("InterfaceType") for one in launch_parameters(cloud)["NetworkInterfaces"]]


@pytest.mark.parametrize("is_spot", [False, True])
def test_machines_that_work_together_share_efa_and_a_placement_group(
    cloud: FakeAWS, is_spot: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The group belongs to the pool and the zone, and has the pool's tags. A replacement joins it."""
    caplog.set_level(logging.INFO)
    offer = market_of(cloud, TOGETHER, is_spot=is_spot)
    launched = launch(offer, 2)
    (zone,) = zones_of(cloud, launched)
    ((key, its),) = cloud.fleets.groups.items()
    assert key == ("us-east-1", f"skyward-{POOL}-{zone}")
    assert (its[POOL_TAG], its[CREATED_TAG]) == (POOL, tags()[CREATED_TAG])
    assert interface_types(cloud) == ["efa"]
    assert "g6.8xlarge gets 1 of its 1 EFA interfaces" in caplog.text
    (egress,) = cloud.parameters("AuthorizeSecurityGroupEgress")
    assert egress["IpPermissions"] == [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": egress["GroupId"]}]}]
    cloud.spot = {(offer.instance_type, name): 0.5 for name in (A, B, C)}
    launched += launch(offer, 1, "L1", first_rank=1)
    assert zones_of(cloud, launched) == {zone}
    assert {cloud.machine(instance.id).group for instance in launched} == {key[1]}
    assert interface_types(cloud) == ["efa"]


@pytest.mark.parametrize("is_spot", [False, True])
def test_a_single_machine_has_neither_efa_nor_a_placement_group(cloud: FakeAWS, is_spot: bool) -> None:
    """A type without EFA has neither of them, because capacity matters more."""
    for offer, count in ((TOGETHER.model_copy(update={"nodes": 1}), 1), (OFFER.model_copy(update={"nodes": 4}), 4)):
        launch(market_of(cloud, offer, is_spot=is_spot), count, token=f"L{count}")
        assert interface_types(cloud) == [None]
        assert "Placement" not in launch_parameters(cloud)
    assert cloud.fleets.groups == {}
    assert cloud.parameters("AuthorizeSecurityGroupEgress") == cloud.parameters("DescribePlacementGroups") == []


@pytest.mark.parametrize("is_spot", [False, True])
@pytest.mark.parametrize("action", ["CreatePlacementGroup", "AuthorizeSecurityGroupEgress"])
def test_without_the_right_machines_start_without_efa_or_group(
    cloud: FakeAWS, is_spot: bool, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is logged. A slower network is better than no machines. An outage is not a missing right."""
    offer = market_of(cloud, TOGETHER, is_spot=is_spot)
    cloud.fail(action, "UnauthorizedOperation", 403, times=99)
    assert len(launch(offer, 2)) == 2
    assert ("Placement" in launch_parameters(cloud)) == (action != "CreatePlacementGroup")
    assert (interface_types(cloud) == ["efa"]) == (action == "CreatePlacementGroup")
    assert "UnauthorizedOperation" in caplog.text
    cloud.faults.clear()
    cloud.fail(action, "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        make_aws().launch(offer, 2, tags("sky-other", launch="L1"), STARTUP)
    assert len(cloud.alive()) == 2


def test_a_machine_in_another_zone_than_its_pool_is_refused(cloud: FakeAWS) -> None:
    """EFA works only within a zone."""
    launch(TOGETHER)
    cloud.no_capacity()
    with pytest.raises(NoCapacity):
        launch(TOGETHER, 1, "L1", first_rank=1)
    assert {call["NetworkInterfaces"][0]["SubnetId"] for call in cloud.parameters("RunInstances")} == {f"subnet-{A}"}
    with pytest.raises(NoCapacity, match="us-east-1a"):
        launch(TOGETHER, 1, "L2", first_rank=1, subnet_ids=(f"subnet-{B}",))


@pytest.mark.parametrize("is_spot", [False, True])
def test_private_machines_have_an_interface_for_each_card(cloud: FakeAWS, is_spot: bool) -> None:
    """They have no public address, which AWS would not give them."""
    offer = market_of(cloud, MANY_CARDS, is_spot=is_spot)
    launched = launch(offer, 2, use_private_ip=True, ssh_cidr="10.0.0.0/8")
    assert interface_types(cloud) == ["efa", "efa-only", "efa-only", "efa-only"]
    places = [(one["NetworkCardIndex"], one["DeviceIndex"]) for one in launch_parameters(cloud)["NetworkInterfaces"]]
    assert places == [(0, 0), (1, 0), (2, 0), (3, 0)]  # EC2 guide: device 0 of its card for an interface with EFA alone
    assert "AssociatePublicIpAddress" not in str(launch_parameters(cloud)["NetworkInterfaces"])
    assert [instance.ip for instance in launched] == [None, None]


def test_the_log_names_the_missing_efa_interfaces_of_public_machines(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the remedy too."""
    caplog.set_level(logging.INFO)
    launch(MANY_CARDS, 2)
    assert (
        "p4d.24xlarge gets 1 of its 4 EFA interfaces; machines with a public address have one network interface: use_private_ip=True"
        in caplog.text
    )
    assert interface_types(cloud) == ["efa"]


# ── what launches leave ──────────────────────────────────────────────────────────────────────────────────────────────


def leave(cloud: FakeAWS, age: timedelta, name: str, region: str = "us-east-1") -> None:
    """Create a template and a placement group of a pool, of this age."""
    made = {POOL_TAG: f"sky-{name}", CREATED_TAG: ago(age)}
    cloud.fleets.templates[region, f"skyward-{name}"] = {"TagSpecifications": [{"Tags": pairs(made)}]}
    cloud.fleets.groups[region, f"skyward-{name}-{A}"] = made


def left(cloud: FakeAWS) -> set[str]:
    return {name for _, name in (*cloud.fleets.templates, *cloud.fleets.groups)}


def test_prune_deletes_old_resources_of_launches(cloud: FakeAWS) -> None:
    """All pages and regions are read; resources of present launches stay. A dry run reports the same, deletes nothing."""
    for n in range(4):
        leave(cloud, OLD, f"old{n}")
    leave(cloud, OLD, "west", "eu-west-1")
    leave(cloud, YOUNG, "young")
    cloud.fleets.groups["us-east-1", "theirs"] = {"Name": "theirs"}
    expected = {
        text
        for name, region in (*((f"old{n}", "us-east-1") for n in range(4)), ("west", "eu-west-1"))
        for text in (f"launch template skyward-{name} in {region}", f"placement group skyward-{name}-{A} in {region}")
    }
    both = make_aws(region=("us-east-1", "eu-west-1"))
    assert set(both.prune(datetime.now(UTC), is_dry_run=True)) == expected
    assert len(left(cloud)) == 13
    assert set(both.prune(datetime.now(UTC), is_dry_run=False)) == expected
    assert left(cloud) == {"skyward-young", f"skyward-young-{A}", "theirs"}
    assert both.prune(datetime.now(UTC), is_dry_run=False) == []


def test_groups_of_zones_without_machines_are_deleted(cloud: FakeAWS) -> None:
    """On demand this happens zone after zone. If no zone has a machine all groups are deleted."""
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500)
    launched = launch(TOGETHER, 2)
    assert zones_of(cloud, launched) == {B}
    assert list(cloud.fleets.groups) == [("us-east-1", f"skyward-{POOL}-{B}")]
    make_aws().terminate([instance.id for instance in launched])
    cloud.no_capacity()
    with pytest.raises(NoCapacity):
        launch(TOGETHER, 2, "L1")
    assert cloud.fleets.groups == {}


def test_a_group_that_is_in_use_stays(cloud: FakeAWS, account: AwsAccount) -> None:
    """It is deleted when its machines are terminated, at any age."""
    launched = make_aws().launch(TOGETHER, 2, tags() | {CREATED_TAG: ago(OLD)}, STARTUP)

    def prune(*, is_dry_run: bool) -> list[str]:
        return aws_launch.prune_launches(account, "us-east-1", datetime.now(UTC), is_dry_run=is_dry_run)

    assert prune(is_dry_run=True) == prune(is_dry_run=False) == []
    for state in ("shutting-down", "terminated"):
        for instance in launched:
            cloud.put(instance.id, state)
        expected = [f"placement group skyward-{POOL}-{A} in us-east-1"] if state == "terminated" else []
        assert prune(is_dry_run=True) == expected
    assert prune(is_dry_run=False) == expected


def test_an_outage_is_not_reported_as_nothing_to_delete(cloud: FakeAWS, account: AwsAccount) -> None:
    """If the right to list is missing, no resource can be ours. After an outage the state is unknown. A resource that
    cannot be deleted does not keep others; its error is raised at the end.
    """
    for n in range(2):
        leave(cloud, OLD, f"old{n}")
    now = datetime.now(UTC)
    cloud.fail("DescribePlacementGroups", "UnauthorizedOperation", 403)
    assert aws_launch.prune_launches(account, "us-east-1", now) == []
    cloud.fail("DescribePlacementGroups", "InternalError", 500)
    with pytest.raises(ProviderFailed):
        aws_launch.prune_launches(account, "us-east-1", now)
    cloud.fail("DescribePlacementGroups", "AuthFailure", 401)
    with pytest.raises(CredentialsError):
        aws_launch.prune_launches(account, "us-east-1", now)
    cloud.fail("DeleteLaunchTemplate", "InvalidParameterValue")
    with pytest.raises(sky.BadRequest, match="delete_launch_template"):
        aws_launch.prune_launches(account, "us-east-1", now)
    assert left(cloud) == {"skyward-old0"}


def test_a_launch_deletes_old_groups_of_earlier_pools(cloud: FakeAWS) -> None:
    """It makes one listing and deletes a few at a time; a failure does not stop the launch."""
    leave(cloud, YOUNG, "young")
    for n in range(aws_launch.MOST_TIDIED + 2):
        leave(cloud, OLD, f"old{n}")
    launch(TOGETHER, 2)
    assert len(cloud.parameters("DescribePlacementGroups")) == 1
    groups = {name for _, name in cloud.fleets.groups}
    assert {f"skyward-young-{A}", f"skyward-{POOL}-{A}"} <= groups
    assert len(groups) == 2 + 2
    cloud.fail("DescribePlacementGroups", "InternalError", 500, times=99)
    assert len(make_aws().launch(TOGETHER, 2, tags("sky-other", launch="L1"), STARTUP)) == 2
