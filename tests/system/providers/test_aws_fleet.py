"""AWS: spot machines from EC2 Fleet, placement groups and EFA."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import CredentialsError, NoCapacity, ProviderFailed
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.aws import cluster, offers
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.aws.account import AwsAccount
from skyward_core.providers.base import CREATED_TAG, POOL_TAG
from tests.providers.aws import SPOT, T4, at_once, cloud, make, of_type  # noqa: F401 - fixtures
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import FakeAWS
from tests.providers.fake_fleet import Group
from tests.providers.hosted import Hosting
from tests.system.providers.test_aws import SECRET
from tests.system.providers.test_end_to_end import HostedAWS, where
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

A, B, C = "us-east-1a", "us-east-1b", "us-east-1c"
NONE_LEFT = ("InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request.")
TOGETHER = of_type("g6.8xlarge", accelerator="L4", price_per_hour=2.0, on_demand_price_per_hour=2.014, nodes=2)
"""A type with one EFA."""


@pytest.fixture
def account(cloud: FakeAWS) -> Iterator[AwsAccount]:
    with AwsAccount(None, cloud.url, None) as request:
        yield request


def now() -> datetime:
    """Return the present time. The product reads its own clock, and a run of all tests takes longer than some of these
    ages.
    """
    return datetime.now(UTC)


def spot(cloud: FakeAWS, **prices: float) -> None:
    """Set the spot prices of a g4dn.xlarge by the letter of the zone."""
    cloud.spot = {("g4dn.xlarge", f"us-east-1{letter}"): price for letter, price in prices.items()}


def requested_pools(cloud: FakeAWS) -> list[set[tuple[str, str]]]:
    """Return the types and zones of each requested fleet."""
    return [
        {(name, zone) for name, zone, _, _ in cloud.fleets._pools(parameters, "us-east-1")}
        for parameters in cloud.parameters("CreateFleet")
    ]


def zones_of(cloud: FakeAWS, launched: list[Instance]) -> set[str]:
    return {cloud.machine(instance.id)._placement.zone for instance in launched}


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
    assert offers.spread(prices, share) == sold


def test_an_offer_lists_equivalent_types(cloud: FakeAWS) -> None:
    """They have the same chips, match the requirements, and cost at most the price in some zone."""
    cloud.spot = {
        ("g4dn.xlarge", A): 0.2,
        ("g4dn.2xlarge", B): 0.19,
        ("g4dn.4xlarge", A): 0.5,
        ("g4dn.12xlarge", A): 0.1,
        ("g5.xlarge", A): 0.1,
        ("g4dn.8xlarge", C): 0.2,
    }
    want = Requirements(accelerator=parse("T4"))
    sold = {(offer.instance_type, offer.is_spot): offer for offer in make(cloud).offers(want)}
    assert sold["g4dn.xlarge", True].or_types == ("g4dn.2xlarge", "g4dn.8xlarge")
    assert sold["g4dn.2xlarge", True].or_types == ()
    assert sold["g4dn.4xlarge", True].or_types == ("g4dn.2xlarge", "g4dn.8xlarge", "g4dn.xlarge")
    assert sold["g4dn.12xlarge", True].or_types == ()
    assert sold["g4dn.xlarge", False].or_types == ()
    larger = {
        offer.instance_type: offer
        for offer in make(cloud).offers(want.model_copy(update={"vcpus": 16}))
        if offer.is_spot
    }
    assert larger["g4dn.4xlarge"].or_types == ("g4dn.8xlarge",)
    assert [offer.or_types for offer in make(cloud).offers(T4) if offer.is_spot] == [()]


def test_an_offer_lists_only_the_cheapest_equivalent_types() -> None:
    """The fleet names each of them in each zone."""
    sold = [of_type(f"c{n}.xlarge", is_spot=True, price_per_hour=1.0) for n in range(20)]
    prices = {offer.instance_type: {1.0 - n / 100} for n, offer in enumerate(sold)}
    found = offers.with_others(sold, prices, {})
    assert found[0].or_types == tuple(f"c{n}.xlarge" for n in range(19, 11, -1))
    assert found[19].or_types == tuple(f"c{n}.xlarge" for n in range(18, 10, -1))


def test_a_fleet_names_all_spot_pools_at_or_below_the_price(cloud: FakeAWS) -> None:
    """EC2 chooses among them in one call: all machines or none, one zone, one type."""
    cloud.spot = {
        ("g4dn.xlarge", A): 0.2,
        ("g4dn.xlarge", B): 0.18,
        ("g4dn.xlarge", C): 0.21,
        ("g4dn.2xlarge", C): 0.2,
        ("g4dn.2xlarge", A): 0.3,
    }
    offer = SPOT.model_copy(update={"or_types": ("g4dn.2xlarge",)})
    launched = make(cloud, ami="ami-0b0700000000000x8").launch(offer, 3, tags(first_rank=2), STARTUP)
    assert cloud.parameters("RunInstances") == []
    assert requested_pools(cloud) == [{("g4dn.xlarge", A), ("g4dn.xlarge", B), ("g4dn.2xlarge", C)}]
    (parameters,) = cloud.parameters("CreateFleet")
    assert (parameters["Type"], parameters["TargetCapacitySpecification.TotalTargetCapacity"]) == ("instant", "3")
    assert parameters["TargetCapacitySpecification.DefaultTargetCapacityType"] == "spot"
    assert {name.partition(".")[2]: value for name, value in parameters.items() if name.startswith("SpotOptions.")} == {
        "AllocationStrategy": "price-capacity-optimized",
        "InstanceInterruptionBehavior": "terminate",
        "SingleInstanceType": "true",
        "SingleAvailabilityZone": "true",
        "MinTargetCapacity": "3",
    }
    assert not [name for name in parameters if "MaxPrice" in name]
    (template,) = cloud.parameters("CreateLaunchTemplate")
    data = {name.partition(".")[2]: value for name, value in template.items() if name.startswith("LaunchTemplateData.")}
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["MetadataOptions.HttpTokens"] == "required"
    assert data["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert data["NetworkInterface.1.AssociatePublicIpAddress"] == "true"
    assert (
        STARTUP
        in json.loads(base64.b64decode(data["UserData"]).decode().removeprefix("#cloud-config\n"))["runcmd"][0][2]
    )
    assert not [
        name
        for name in data
        if name.startswith(("InstanceType", "InstanceMarketOptions", "Placement", "NetworkInterface.1.SubnetId"))
    ]
    assert zones_of(cloud, launched) == {B}
    assert sorted(instance.rank for instance in launched) == [2, 3, 4]
    cloud.fleets.refusals["*", "*"] = NONE_LEFT
    with pytest.raises(NoCapacity):
        make(cloud, instance_profile="trainer").launch(offer, 1, tags(launch="L1"), STARTUP)
    assert cloud.parameters("CreateLaunchTemplate")[-1]["LaunchTemplateData.IamInstanceProfile.Name"] == "trainer"


def test_burstable_spot_types_get_standard_credits(cloud: FakeAWS) -> None:
    """Types with CPU credits have a template of their own, because AWS refuses the parameter for others."""
    cloud.spot = {("t3.large", A): 0.03, ("m7i.large", A): 0.02, ("t3a.large", A): 0.04}
    offer = of_type(
        "t3.large", accelerator=None, is_spot=True, price_per_hour=0.05, or_types=("m7i.large", "t3a.large")
    )
    make(cloud).launch(offer, 1, tags(), STARTUP)
    assert {
        parameters.get("LaunchTemplateData.CreditSpecification.CpuCredits")
        for parameters in cloud.parameters("CreateLaunchTemplate")
    } == {"standard", None}
    (parameters,) = cloud.parameters("CreateFleet")
    templates = {name: template for name, _, _, template in cloud.fleets._pools(parameters, "us-east-1")}
    assert templates["t3.large"] == templates["t3a.large"] != templates["m7i.large"]
    del cloud.spot["m7i.large", A]
    make(cloud).launch(offer, 1, tags(launch="L1"), STARTUP)
    assert (
        cloud.parameters("CreateLaunchTemplate")[-1]["LaunchTemplateData.CreditSpecification.CpuCredits"] == "standard"
    )


def test_zones_above_the_offered_price_are_not_requested(cloud: FakeAWS) -> None:
    """If all zones have become dearer, the error is NoCapacity. No request is sent and nothing is left."""
    spot(cloud, a=0.21, b=0.3)
    with pytest.raises(NoCapacity) as caught:
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert caught.value.code == "SpotPriceTooHigh"
    assert [request.action for request in cloud.requests if request.action.startswith(("Create", "Run"))] == []


def test_templates_are_deleted_after_every_launch(cloud: FakeAWS) -> None:
    """They contain the user data of machines."""
    spot(cloud, a=0.2)
    make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert cloud.fleets.templates == {}
    cloud.fleets.refusals["*", "*"] = NONE_LEFT
    with pytest.raises(NoCapacity):
        make(cloud).launch(SPOT, 1, tags(launch="L1"), STARTUP)
    assert cloud.fleets.templates == {}
    cloud.fail("CreateFleet", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        make(cloud).launch(SPOT, 1, tags(launch="L2"), STARTUP)
    assert cloud.fleets.templates == {}
    assert len({parameters["LaunchTemplateName"] for parameters in cloud.parameters("CreateLaunchTemplate")}) == 3


def test_the_error_names_the_codes_of_all_pools_that_were_tried(cloud: FakeAWS) -> None:
    """The answer has status 200 and no machine. Its code is from a pool that sells such machines."""
    spot(cloud, a=0.18, b=0.19, c=0.2)
    cloud.fleets.refusals = {("g4dn.xlarge", A): ("Unsupported", "no such type"), ("g4dn.xlarge", B): NONE_LEFT}
    cloud.fleets.untried = {("g4dn.xlarge", C)}
    with pytest.raises(
        NoCapacity,
        match=r"us-east-1a \(subnet-\w+\): Unsupported, g4dn.xlarge in us-east-1b \(subnet-\w+\): InsufficientInst",
    ) as caught:
        make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert C not in str(caught.value)
    assert cloud.alive() == set()
    assert len(cloud.parameters("CreateFleet")) == 1


def test_too_few_machines_are_terminated(cloud: FakeAWS) -> None:
    """It must be all or none: machines of an incomplete fleet are terminated before another try."""
    spot(cloud, a=0.2)
    cloud.fleets.short_of = 1
    with pytest.raises(NoCapacity, match="only 2 of 3 machines were created") as caught:
        make(cloud).launch(SPOT, 3, tags(), STARTUP)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert cloud.alive() == set()


def test_too_few_machines_that_cannot_be_terminated_are_an_outage(cloud: FakeAWS) -> None:
    """They must not count as gone: their tags find them."""
    spot(cloud, a=0.2)
    cloud.fleets.short_of = 1
    cloud.fail("TerminateInstances", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="could not be terminated"):
        make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert {instance.id for instance in make(cloud).instances(POOL)} == cloud.alive() != set()


def test_a_fleet_request_with_a_lost_answer_is_repeated_with_its_token(cloud: FakeAWS) -> None:
    """EC2 answers with the machines of the first request."""
    spot(cloud, a=0.2)
    cloud.fail("CreateFleet", is_done=True)
    launched = make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert {instance.id for instance in launched} == cloud.alive()
    assert len(launched) == 2
    first, second = cloud.parameters("CreateFleet")
    assert first == second


def test_a_fleet_that_is_not_found_is_an_outage(cloud: FakeAWS) -> None:
    """Machines may still appear, so it is no lack of capacity."""
    spot(cloud, a=0.2)
    cloud.fail("CreateFleet", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="0 of 1 machines are listed"):
        make(cloud).launch(SPOT, 1, tags(), STARTUP)


def test_the_real_price_is_written_as_a_tag(cloud: FakeAWS) -> None:
    """The creating call has the offered price, which is the maximum; one more call writes the real price."""
    spot(cloud, a=0.2, b=0.15)
    launched = make(cloud).launch(SPOT, 3, tags(), STARTUP)
    (parameters,) = cloud.parameters("CreateFleet")
    assert "0.2" in [value for name, value in parameters.items() if name.startswith("TagSpecification.1.")]
    assert {instance.price_per_hour for instance in (*launched, *make(cloud).instances(POOL))} == {0.15}
    (parameters,) = cloud.parameters("CreateTags")
    assert parameters["Tag.1.Key"] == aws_launch.PRICE_TAG
    spot(cloud, a=0.2)
    make(cloud).launch(SPOT, 1, tags(launch="L1"), STARTUP)
    assert len(cloud.parameters("CreateTags")) == 1  # the real price is the offered one


def test_ranks_differ_before_they_are_written_as_tags(cloud: FakeAWS) -> None:
    """The client was killed after the fleet came, or may not write tags."""
    spot(cloud, a=0.2)
    cloud.fleets.is_split = True
    cloud.fail("CreateTags", "UnauthorizedOperation", 403, times=9)
    launched = make(cloud).launch(SPOT, 4, tags(), STARTUP)
    listed = {instance.id: instance.rank for instance in make(cloud).instances(POOL)}
    assert sorted(listed.values()) == [0, 1, 2, 3]
    assert (
        listed
        == {instance.id: instance.rank for instance in launched}
        == {instance.id: instance.rank for instance in make(cloud).instances()}
    )
    cloud.put(launched[0].id, "terminated")
    assert {instance.id: instance.rank for instance in make(cloud).instances(POOL)}.items() < listed.items()


def offers_of_both_markets(cloud: FakeAWS, offer: Offer) -> list[Offer]:
    """Return an offer on demand, and the same as spot."""
    cloud.spot |= {(offer.instance_type, A): 1.0, (offer.instance_type, B): 0.9}
    return [offer, offer.model_copy(update={"is_spot": True, "price_per_hour": 1.0})]


def launch_parameters(cloud: FakeAWS) -> dict[str, str]:
    """Return the parameters of the last launch, by either call."""
    request = [one for one in cloud.requests if one.action in ("RunInstances", "CreateLaunchTemplate")][-1]
    return {name.removeprefix("LaunchTemplateData."): value for name, value in request.parameters.items()}


@pytest.mark.parametrize("market", [0, 1])
def test_machines_that_work_together_share_efa_and_a_placement_group(
    cloud: FakeAWS, market: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The group belongs to the pool and the zone, and has the pool's tags."""
    caplog.set_level(logging.INFO)
    offer = offers_of_both_markets(cloud, TOGETHER)[market]
    launched = make(cloud).launch(offer, 2, tags(), STARTUP)
    (zone,) = zones_of(cloud, launched)
    assert list(cloud.fleets.groups) == [("us-east-1", f"skyward-{POOL}-{zone}")]
    (group,) = cloud.fleets.groups.values()
    assert group.machines == {instance.id for instance in launched}
    assert (group.tags[POOL_TAG], group.tags[CREATED_TAG]) == (POOL, tags()[CREATED_TAG])
    assert launch_parameters(cloud)["NetworkInterface.1.InterfaceType"] == "efa"
    assert "g6.8xlarge gets 1 of its 1 EFA interfaces" in caplog.text
    (parameters,) = cloud.parameters("AuthorizeSecurityGroupEgress")
    assert (parameters["IpPermissions.1.IpProtocol"], parameters["IpPermissions.1.Groups.1.GroupId"]) == (
        "-1",
        parameters["GroupId"],
    )


def test_a_machine_in_another_zone_than_its_pool_is_refused(cloud: FakeAWS) -> None:
    """EFA works only within a zone."""
    make(cloud).launch(TOGETHER, 1, tags(), STARTUP)
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=99)
    with pytest.raises(NoCapacity):
        make(cloud).launch(TOGETHER, 1, tags(first_rank=1, launch="L1"), STARTUP)
    assert {cloud.subnet_zone(request) for request in cloud.requests if request.action == "RunInstances"} == {A}
    elsewhere = next(subnet.id for subnet in cloud.backend().describe_subnets() if subnet.availability_zone == B)
    with pytest.raises(NoCapacity, match="us-east-1a"):
        make(cloud, subnet_ids=(elsewhere,)).launch(TOGETHER, 1, tags(first_rank=1, launch="L2"), STARTUP)


@pytest.mark.parametrize("market", [0, 1])
def test_private_machines_have_an_interface_for_each_card(cloud: FakeAWS, market: int) -> None:
    """They have no public address, which AWS would not give them."""
    offer = offers_of_both_markets(cloud, of_type("p4d.24xlarge", accelerator="A100", nodes=2))[market]
    launched = make(cloud, use_private_ip=True, ssh_cidr="10.0.0.0/8").launch(offer, 2, tags(), STARTUP)
    parameters = launch_parameters(cloud)
    assert [parameters[f"NetworkInterface.{n}.InterfaceType"] for n in range(1, 5)] == [
        "efa",
        "efa-only",
        "efa-only",
        "efa-only",
    ]
    assert not [name for name in parameters if name.endswith("AssociatePublicIpAddress")]
    assert [instance.ip for instance in launched] == [None, None]


def test_the_log_names_the_missing_efa_interfaces_of_public_machines(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the remedy too."""
    caplog.set_level(logging.INFO)
    make(cloud).launch(of_type("p4d.24xlarge", accelerator="A100", nodes=2), 2, tags(), STARTUP)
    assert (
        "p4d.24xlarge gets 1 of its 4 EFA interfaces; machines with a public address have one network interface: use_private_ip=True"
        in caplog.text
    )
    assert "NetworkInterface.2.DeviceIndex" not in launch_parameters(cloud)


def test_groups_of_zones_without_machines_are_deleted(cloud: FakeAWS) -> None:
    """On demand this happens zone after zone. If no zone has a machine all groups are deleted."""
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500)
    launched = make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    assert zones_of(cloud, launched) == {B}
    assert list(cloud.fleets.groups) == [("us-east-1", f"skyward-{POOL}-{B}")]
    make(cloud).terminate([instance.id for instance in launched])
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=99)
    with pytest.raises(NoCapacity):
        make(cloud).launch(TOGETHER, 2, tags(launch="L1"), STARTUP)
    assert cloud.fleets.groups == {}


def leave(cloud: FakeAWS, age: timedelta, name: str) -> None:
    """Create a template and a placement group of a pool, of this age."""
    made = {POOL_TAG: f"sky-{name}", CREATED_TAG: str(int((now() - age).timestamp()))}
    parameters = {
        f"TagSpecification.1.Tag.{n}.{part}": text
        for n, pair in enumerate(made.items(), 1)
        for part, text in zip(("Key", "Value"), pair, strict=True)
    }
    cloud.fleets.templates["us-east-1", f"skyward-{name}"] = parameters
    cloud.fleets.groups["us-east-1", f"skyward-{name}-{A}"] = Group(made)


def left(cloud: FakeAWS) -> set[str]:
    return {name for _, name in (*cloud.fleets.templates, *cloud.fleets.groups)}


OLD, YOUNG = timedelta(hours=2), timedelta(minutes=50)


def test_old_resources_of_launches_are_deleted(cloud: FakeAWS, account: AwsAccount) -> None:
    """All pages are read; resources of present launches stay. A dry run reports the same and deletes nothing."""
    for n in range(4):
        leave(cloud, OLD, f"old{n}")
    leave(cloud, YOUNG, "young")
    cloud.fleets.groups["us-east-1", "theirs"] = Group({"Name": "theirs"})
    expected = {f"launch template skyward-old{n} in us-east-1" for n in range(4)} | {
        f"placement group skyward-old{n}-{A} in us-east-1" for n in range(4)
    }
    assert set(aws_launch.prune_launches(account, "us-east-1", now(), is_dry_run=True)) == expected
    assert len(left(cloud)) == 11
    assert set(aws_launch.prune_launches(account, "us-east-1", now())) == expected
    assert left(cloud) == {"skyward-young", f"skyward-young-{A}", "theirs"}
    assert aws_launch.prune_launches(account, "us-east-1", now()) == []


def test_prune_deletes_resources_of_all_regions(cloud: FakeAWS) -> None:
    """The call is the provider's own method."""
    leave(cloud, OLD, "old")
    cloud.fleets.groups["eu-west-1", "skyward-west"] = Group(
        {POOL_TAG: "sky-west", CREATED_TAG: str(int((now() - OLD).timestamp()))}
    )
    both = make(cloud, region=("us-east-1", "eu-west-1"))
    would_go = both.prune(now(), is_dry_run=True)
    assert sorted(would_go) == [
        "launch template skyward-old in us-east-1",
        f"placement group skyward-old-{A} in us-east-1",
        "placement group skyward-west in eu-west-1",
    ]
    assert len(left(cloud)) == 3
    assert both.prune(now(), is_dry_run=False) == would_go
    assert left(cloud) == set()


def test_a_group_that_is_in_use_stays(cloud: FakeAWS, account: AwsAccount) -> None:
    """It is deleted when its machines are terminated, at any age."""
    launched = make(cloud).launch(TOGETHER, 2, tags() | {CREATED_TAG: str(int((now() - OLD).timestamp()))}, STARTUP)
    for is_dry_run in (True, False):
        assert aws_launch.prune_launches(account, "us-east-1", now(), is_dry_run=is_dry_run) == []
    for instance in launched:
        cloud.put(instance.id, "shutting-down")
    assert aws_launch.prune_launches(account, "us-east-1", now(), is_dry_run=True) == []
    for instance in launched:
        cloud.put(instance.id, "terminated")
    for is_dry_run in (True, False):
        assert aws_launch.prune_launches(account, "us-east-1", now(), is_dry_run=is_dry_run) == [
            f"placement group skyward-{POOL}-{A} in us-east-1"
        ]


def test_an_outage_is_not_reported_as_nothing_to_delete(cloud: FakeAWS, account: AwsAccount) -> None:
    """If the right to list is missing, no resource can be ours. After an outage the state is unknown."""
    leave(cloud, OLD, "old")
    cloud.fail("DescribePlacementGroups", "UnauthorizedOperation", 403)
    assert aws_launch.prune_launches(account, "us-east-1", now()) == []
    cloud.fail("DescribePlacementGroups", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        aws_launch.prune_launches(account, "us-east-1", now())
    cloud.faults.clear()
    cloud.is_refusing = True
    with pytest.raises(CredentialsError):
        aws_launch.prune_launches(account, "us-east-1", now())


def test_a_launch_deletes_old_groups_of_earlier_pools(cloud: FakeAWS) -> None:
    """It makes one listing and deletes a few at a time; a failure does not stop the launch."""
    leave(cloud, YOUNG, "young")
    for n in range(cluster.MOST_TIDIED + 2):
        leave(cloud, OLD, f"old{n}")
    make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    assert len(cloud.parameters("DescribePlacementGroups")) == 1
    groups = {name for _, name in cloud.fleets.groups}
    assert {f"skyward-young-{A}", f"skyward-{POOL}-{A}"} <= groups
    assert len(groups) == 2 + 2
    cloud.fail("DescribePlacementGroups", "InternalError", 500, times=99)
    assert len(make(cloud).launch(TOGETHER, 2, tags("sky-other", launch="L1"), STARTUP)) == 2


def test_a_resource_that_cannot_be_deleted_does_not_keep_others(cloud: FakeAWS, account: AwsAccount) -> None:
    """Its error is raised at the end."""
    for n in range(2):
        leave(cloud, OLD, f"old{n}")
    cloud.fail("DeleteLaunchTemplate", "InvalidParameterValue")
    with pytest.raises(sky.BadRequest, match="delete_launch_template"):
        aws_launch.prune_launches(account, "us-east-1", now())
    assert left(cloud) == {"skyward-old0"}


def test_an_outage_is_not_a_missing_right(cloud: FakeAWS) -> None:
    """It is raised before anything is created."""
    cloud.fail("CreatePlacementGroup", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    assert cloud.alive() == set()


def test_after_lost_answers_the_machines_of_the_fleet_are_looked_for(cloud: FakeAWS) -> None:
    """They are found by a tag that only they have."""
    spot(cloud, a=0.2, b=0.19)
    cloud.fail("CreateFleet", is_done=True)
    cloud.fail("CreateFleet", "InternalError", 500, times=9)
    launched = make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert {instance.id for instance in launched} == cloud.alive()
    assert [(instance.rank, instance.price_per_hour) for instance in launched] == [(0, 0.19), (1, 0.19)]


def test_a_pool_runs_on_a_fleet(fleet: Fleet, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The spot machines have an equivalent type and come from separate calls. No machine and no template is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    hosting = Hosting(fleet, mirror.configure)
    try:
        with HostedAWS(hosting) as cloud:
            for name, value in {
                "ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
                "SECRET_ACCESS_KEY": SECRET,
                "ENDPOINT_URL": cloud.url,
            }.items():
                monkeypatch.setenv(f"AWS_{name}", value)
            cloud.fleets.is_split = True
            cloud.spot = {("c7i.xlarge", A): 0.05, ("c7i.2xlarge", B): 0.049}
            provider = sky.AWS(ssh_cidr="203.0.113.0/24")
            with sky.ComputePool(
                provider=provider, nodes=2, cpu=4, spot="always", image=sky.Image(), display="log"
            ) as pool:
                nodes = pool.lease.nodes
                assert [(node.rank, node.instance.instance_type, node.instance.price_per_hour) for node in nodes] == [
                    (0, "c7i.2xlarge", 0.049),
                    (1, "c7i.2xlarge", 0.049),
                ]
                assert {node.instance.id for node in nodes} == cloud.alive()
                assert sorted(where() @ pool) == sorted(host.name for host in hosting.hosts.values())
            assert cloud.alive() == set()
            assert cloud.fleets.templates == {}
            assert pool.receipt["left"] == []
    finally:
        hosting.close()
