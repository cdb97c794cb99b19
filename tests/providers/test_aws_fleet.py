"""AWS: spot machines from EC2 Fleet, placement groups and EFA."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import CredentialsError, NoCapacity, ProviderFailed, QuotaExceeded, RateLimited, SkywardError
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements, matches
from skyward_core.providers.aws import cluster, offers
from skyward_core.providers.aws import fleet as aws_fleet
from skyward_core.providers.aws import instances as aws_instances
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.aws.account import AwsAccount
from skyward_core.providers.base import CREATED_TAG, LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.spec import PoolSpec
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import FakeAWS
from tests.providers.fake_fleet import UNTRIED, Group
from tests.providers.hosted import Hosting
from tests.providers.test_aws import OFFER, SECRET, SPOT, T4, every_type, make, of_type
from tests.providers.test_end_to_end import HostedAWS, where
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

pytestmark = pytest.mark.slow

A, B, C = "us-east-1a", "us-east-1b", "us-east-1c"
NONE_LEFT = ("InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request.")
TOGETHER = of_type("g6.8xlarge", accelerator="L4", price_per_hour=2.0, on_demand_price_per_hour=2.014, nodes=2)
"""A type with one EFA."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0)
    monkeypatch.setattr(aws_launch, "AGAIN_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(aws_instances, "FIRST_LOOK_SECONDS", 0.0)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAWS]:
    with FakeAWS() as fake:
        for name in (
            "AWS_SESSION_TOKEN",
            "AWS_PROFILE",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_CONFIG_FILE",
            "AWS_SHARED_CREDENTIALS_FILE",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
        yield fake


@pytest.fixture
def account(cloud: FakeAWS) -> Iterator[AwsAccount]:
    with AwsAccount(None, cloud.url, None) as asked:
        yield asked


def now() -> datetime:
    """Return the time as of this call: the product reads its own clock too, and a run of all tests takes longer than
    some of these ages.
    """
    return datetime.now(UTC)


def spot(cloud: FakeAWS, **prices: float) -> None:
    """Set the spot prices of a g4dn.xlarge by the letter of the zone."""
    cloud.spot = {("g4dn.xlarge", f"us-east-1{letter}"): price for letter, price in prices.items()}


def pools_asked(cloud: FakeAWS) -> list[set[tuple[str, str]]]:
    """Return of each fleet the types and zones."""
    return [
        {(name, zone) for name, zone, _, _ in cloud.fleets._pools(words, "us-east-1")}
        for words in cloud.words("CreateFleet")
    ]


def own_tags(cloud: FakeAWS, machine_id: str) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in cloud.machine(machine_id).get_tags()}


def zones_of(cloud: FakeAWS, launched: list[Instance]) -> set[str]:
    return {cloud.machine(instance.id)._placement.zone for instance in launched}


# ── what is offered ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prices", "share", "sold"),
    [
        ([], 0.1, []),
        ([0.2], 0.1, [0.2]),
        ([0.22, 0.2, 0.2], 0.1, [0.22]),
        ([0.2, 0.21, 0.221, 0.23], 0.1, [0.21, 0.23]),
        ([0.2, 0.21, 0.22, 0.23, 0.24], 0.1, [0.22, 0.24]),
        ([0.2, 0.21], 0.0, [0.2, 0.21]),
        ([1.0, 5.0, 21.9], 30.0, [21.9]),
    ],
)
def test_pools_of_about_one_price_are_sold_together(prices: list[float], share: float, sold: list[float]) -> None:
    """At the price of the dearest: what is paid is never more than what was offered.

    Counted from the cheapest one, so that no chain of small steps gets dear.
    """
    assert offers.spread(prices, share) == sold


def test_zones_of_about_one_price_are_one_offer(cloud: FakeAWS) -> None:
    """How near they must be is the user's to say; dearer ones are further offers."""
    spot(cloud, a=0.2, b=0.21, c=0.3)
    sold = [offer.price_per_hour for offer in make(cloud).offers(T4) if offer.is_spot]
    assert sold == [0.21, 0.3]
    assert [offer.price_per_hour for offer in make(cloud, spot_spread=1.0).offers(T4) if offer.is_spot] == [0.3]
    assert [offer.price_per_hour for offer in make(cloud, spot_spread=0).offers(T4) if offer.is_spot] == [
        0.2,
        0.21,
        0.3,
    ]
    with pytest.raises(ValueError, match="spot_spread"):
        make(cloud, spot_spread=-0.1)


def test_other_types_that_do_as_well_are_told(cloud: FakeAWS) -> None:
    """The same chips, what was asked for of the rest, and for no more money somewhere; on demand there is one type, and
    with `machine=` too.
    """
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


def test_a_type_of_another_processor_does_not_stand_for_one(cloud: FakeAWS) -> None:
    """It needs another image."""
    cloud.spot = {("c7i.xlarge", A): 0.1, ("c7g.xlarge", A): 0.05, ("m7i.xlarge", A): 0.06}
    sold = {offer.instance_type: offer.or_types for offer in make(cloud).offers(Requirements(vcpus=4)) if offer.is_spot}
    assert sold == {"c7i.xlarge": ("m7i.xlarge",), "c7g.xlarge": (), "m7i.xlarge": ()}


def test_with_efa_no_type_without_it_stands_for_one(cloud: FakeAWS) -> None:
    """What runs over all machines chooses one network for them; a machine that is alone has none to choose."""
    cloud.spot = {("g6.8xlarge", A): 1.0, ("g6.16xlarge", A): 0.9, ("g6.4xlarge", A): 0.8}
    for nodes, others in ((2, ("g6.16xlarge",)), (1, ("g6.4xlarge", "g6.16xlarge"))):
        sold = {
            offer.instance_type: offer
            for offer in make(cloud).offers(Requirements(accelerator=parse("L4"), nodes=nodes))
            if offer.is_spot
        }
        assert (sold["g6.8xlarge"].or_types, sold["g6.8xlarge"].nodes) == (others, nodes)


def test_few_types_stand_for_one() -> None:
    """The cheapest: each is asked for in each zone."""
    sold = [of_type(f"c{n}.xlarge", is_spot=True, price_per_hour=1.0) for n in range(20)]
    prices = {offer.instance_type: {1.0 - n / 100} for n, offer in enumerate(sold)}
    found = offers.with_others(sold, prices, {})
    assert found[0].or_types == tuple(f"c{n}.xlarge" for n in range(19, 11, -1))
    assert found[19].or_types == tuple(f"c{n}.xlarge" for n in range(18, 10, -1))


def test_how_many_work_together_is_in_the_wish() -> None:
    """And no reason to refuse an offer."""
    want = PoolSpec(nodes=3).requirements
    assert want.nodes == 3
    assert matches(OFFER, want) is None


# ── how a fleet is asked for ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_fleet_is_asked_for_all_pools_that_cost_no_more(cloud: FakeAWS) -> None:
    """In one call, of which EC2 chooses; all machines or none, in one zone and of one type; gone when they power
    off.
    """
    cloud.spot = {
        ("g4dn.xlarge", A): 0.2,
        ("g4dn.xlarge", B): 0.18,
        ("g4dn.xlarge", C): 0.21,
        ("g4dn.2xlarge", C): 0.2,
        ("g4dn.2xlarge", A): 0.3,
    }
    offer = SPOT.model_copy(update={"or_types": ("g4dn.2xlarge",)})
    launched = make(cloud, ami="ami-0b0700000000000x8").launch(offer, 3, tags(first_rank=2), STARTUP)
    assert cloud.words("RunInstances") == []
    assert pools_asked(cloud) == [{("g4dn.xlarge", A), ("g4dn.xlarge", B), ("g4dn.2xlarge", C)}]
    (words,) = cloud.words("CreateFleet")
    assert (words["Type"], words["TargetCapacitySpecification.TotalTargetCapacity"]) == ("instant", "3")
    assert words["TargetCapacitySpecification.DefaultTargetCapacityType"] == "spot"
    assert {name.partition(".")[2]: value for name, value in words.items() if name.startswith("SpotOptions.")} == {
        "AllocationStrategy": "price-capacity-optimized",
        "InstanceInterruptionBehavior": "terminate",
        "SingleInstanceType": "true",
        "SingleAvailabilityZone": "true",
        "MinTargetCapacity": "3",
    }
    assert not [name for name in words if "MaxPrice" in name]
    (template,) = cloud.words("CreateLaunchTemplate")
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
    assert cloud.words("CreateLaunchTemplate")[-1]["LaunchTemplateData.IamInstanceProfile.Name"] == "trainer"


def test_spot_machines_use_no_more_cpu_than_is_in_their_price(cloud: FakeAWS) -> None:
    """Types with CPU credits have a template of their own: for others AWS refuses the word."""
    cloud.spot = {("t3.large", A): 0.03, ("m7i.large", A): 0.02, ("t3a.large", A): 0.04}
    offer = of_type(
        "t3.large", accelerator=None, is_spot=True, price_per_hour=0.05, or_types=("m7i.large", "t3a.large")
    )
    make(cloud).launch(offer, 1, tags(), STARTUP)
    assert {
        words.get("LaunchTemplateData.CreditSpecification.CpuCredits") for words in cloud.words("CreateLaunchTemplate")
    } == {"standard", None}
    (words,) = cloud.words("CreateFleet")
    templates = {name: template for name, _, _, template in cloud.fleets._pools(words, "us-east-1")}
    assert templates["t3.large"] == templates["t3a.large"] != templates["m7i.large"]
    del cloud.spot["m7i.large", A]
    make(cloud).launch(offer, 1, tags(launch="L1"), STARTUP)
    assert cloud.words("CreateLaunchTemplate")[-1]["LaunchTemplateData.CreditSpecification.CpuCredits"] == "standard"


def test_spot_machines_are_told_as_what_they_are(cloud: FakeAWS) -> None:
    """With the tags of the creating call, their real type and price; a listing tells the same."""
    cloud.spot = {("g4dn.xlarge", A): 0.2, ("g4dn.2xlarge", C): 0.15}
    launched = make(cloud).launch(SPOT.model_copy(update={"or_types": ("g4dn.2xlarge",)}), 2, tags(), STARTUP)
    listed = sorted(make(cloud).instances(POOL), key=lambda instance: instance.rank)
    assert listed == launched
    for instance in launched:
        assert (instance.instance_type, instance.is_spot) == ("g4dn.2xlarge", True)
        assert (instance.price_per_hour, instance.on_demand_price_per_hour) == (0.15, 0.526)
        assert {name: instance.tags.get(name) for name in tags()} == {**tags(), RANK_TAG: str(instance.rank)}
        assert instance.endpoint is not None


def test_each_thing_is_tagged_by_the_one_that_can(cloud: FakeAWS) -> None:
    """Machines and disks by the fleet, interfaces by the template; a tag that both say may stand for the other's."""
    spot(cloud, a=0.2)
    make(cloud).launch(SPOT, 1, tags(), STARTUP)
    said = {
        action: {
            (name.partition("TagSpecification")[0], value)
            for name, value in cloud.words(action)[0].items()
            if name.endswith("ResourceType")
        }
        for action in ("CreateFleet", "CreateLaunchTemplate")
    }
    assert said["CreateFleet"] == {("", "instance"), ("", "volume")}
    assert said["CreateLaunchTemplate"] == {("", "launch-template"), ("LaunchTemplateData.", "network-interface")}
    for words in (cloud.words("CreateFleet")[0], cloud.words("CreateLaunchTemplate")[0]):
        kinds = {name.removesuffix("ResourceType") for name in words if name.endswith("ResourceType")}
        pools = {name for name, value in words.items() if value == POOL_TAG}
        assert {kind for kind in kinds if any(name.startswith(kind) for name in pools)} == kinds


def test_dearer_zones_are_not_asked(cloud: FakeAWS) -> None:
    """The bill counts the offer's price; what has become dearer since it was made is no capacity, and nothing is left
    or asked.
    """
    spot(cloud, a=0.21, b=0.3)
    with pytest.raises(NoCapacity) as caught:
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert caught.value.code == "SpotPriceTooHigh"
    assert [asked.action for asked in cloud.asked if asked.action.startswith(("Create", "Run"))] == []


def test_a_zone_is_asked_for_once(cloud: FakeAWS) -> None:
    """EC2 refuses the same pool twice: of two subnets in a zone it is the one with more addresses left."""
    spot(cloud, a=0.2)
    vpc = cloud.backend().describe_subnets()[0].vpc_id
    small = cloud.backend().create_subnet(vpc, "172.31.192.0/24", A).id
    large = next(
        subnet.id
        for subnet in cloud.backend().describe_subnets()
        if subnet.availability_zone == A and subnet.id != small
    )
    (machine,) = make(cloud, subnet_ids=(small, large)).launch(SPOT, 1, tags(), STARTUP)
    assert cloud.machine(machine.id).subnet_id == large
    (machine,) = make(cloud, subnet_ids=(small,)).launch(SPOT, 1, tags(launch="L1"), STARTUP)
    assert cloud.machine(machine.id).subnet_id == small


# ── templates ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_templates_do_not_outlive_a_launch(cloud: FakeAWS) -> None:
    """Whatever becomes of it: it holds the user data of machines."""
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
    assert len({words["LaunchTemplateName"] for words in cloud.words("CreateLaunchTemplate")}) == 3


def test_a_template_that_cannot_be_deleted_is_in_nobodys_way(
    cloud: FakeAWS, account: AwsAccount, caplog: pytest.LogCaptureFixture
) -> None:
    """The machines are there; it is taken away later."""
    spot(cloud, a=0.2)
    cloud.fail("DeleteLaunchTemplate", "UnauthorizedOperation", 403)
    assert len(make(cloud).launch(SPOT, 1, tags(), STARTUP)) == 1
    assert "deleted later" in caplog.text
    ((_, name),) = cloud.fleets.templates
    assert name.startswith("skyward-")
    assert aws_launch.prune_launches(account, "us-east-1", now()) == [f"launch template {name} in us-east-1"]
    assert cloud.fleets.templates == {}


def test_a_template_of_the_same_launch_is_taken(cloud: FakeAWS) -> None:
    """A client was killed between making and deleting it: its name says what is in it."""
    spot(cloud, a=0.2)
    cloud.fail("DeleteLaunchTemplate", "InternalError", 500, times=9)
    first = make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert len(cloud.fleets.templates) == 1
    cloud.faults.clear()
    cloud.fleets._answers = {
        token: told
        for token, told in cloud.fleets._answers.items()
        if token in {one["ClientToken"] for one in cloud.words("CreateFleet")}
    }
    assert [instance.id for instance in make(cloud).launch(SPOT, 1, tags(), STARTUP)] == [
        instance.id for instance in first
    ]
    assert cloud.fleets.templates == {}
    assert len(cloud.alive()) == 1


def test_a_template_that_cannot_be_made_is_told(cloud: FakeAWS) -> None:
    """Nothing is asked for then."""
    spot(cloud, a=0.2)
    cloud.fail("CreateLaunchTemplate", "UnauthorizedOperation", 403)
    with pytest.raises(CredentialsError, match="create_launch_template"):
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert cloud.words("CreateFleet") == []


# ── what EC2 answers ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_all_pools_have_said_is_told(cloud: FakeAWS) -> None:
    """With status 200 and no machine; those that were not tried are left out, and the code is of one that sells such
    machines at all.
    """
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
    assert len(cloud.words("CreateFleet")) == 1


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded"], QuotaExceeded),
        (["InsufficientInstanceCapacity", "UnauthorizedOperation"], CredentialsError),
        (["AuthFailure.ServiceLinkedRoleCreationNotPermitted"], CredentialsError),
        (["InvalidParameterValue", "InsufficientInstanceCapacity"], NoCapacity),
        (["InternalError", "InsufficientInstanceCapacity"], NoCapacity),
        (["InvalidParameterValue", "InternalError"], ProviderFailed),
        (["InvalidAMIID.NotFound"], sky.BadRequest),
        (["SpotMaxPriceTooLow"], NoCapacity),
        ([UNTRIED[0]], NoCapacity),
        ([], NoCapacity),
    ],
)
def test_a_fleets_errors_say_what_to_do_next(codes: list[str], kind: type[SkywardError]) -> None:
    """They have no status beside them; what is true of all pools comes first."""
    error = aws_fleet._why_none([{"ErrorCode": code, "ErrorMessage": "why"} for code in codes], [], "1 x it")
    assert type(error) is kind
    assert error.code in (*codes, UNTRIED[0])


def test_throttling_that_hides_in_an_answer_is_waited_out(cloud: FakeAWS) -> None:
    """It is no lack of machines. The answer to its token stands, so another token is used."""
    spot(cloud, a=0.2, b=0.2)
    cloud.fleets.refusals = {
        ("g4dn.xlarge", A): NONE_LEFT,
        ("g4dn.xlarge", B): ("RequestLimitExceeded", "Request limit exceeded."),
    }

    def mend() -> Iterator[None]:
        yield
        cloud.fleets.refusals.clear()
        while True:
            yield

    steps = mend()
    answer = cloud.fleets._create_fleet

    def then(*words: Any) -> Any:
        told = answer(*words)
        next(steps)
        return told

    cloud.fleets._create_fleet = then  # type: ignore[method-assign]
    assert len(make(cloud).launch(SPOT, 1, tags(), STARTUP)) == 1
    tokens = [words["ClientToken"] for words in cloud.words("CreateFleet")]
    assert len(tokens) == len(set(tokens)) == 3
    assert max(map(len, tokens)) <= 64


def test_throttling_for_ever_is_told_as_such(cloud: FakeAWS) -> None:
    """Nothing was made, and nobody has said that there is nothing."""
    spot(cloud, a=0.2)
    cloud.fleets.refusals["*", "*"] = ("RequestLimitExceeded", "Request limit exceeded.")
    with pytest.raises(RateLimited):
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert cloud.fleets.templates == {}


def test_too_few_machines_are_given_back(cloud: FakeAWS) -> None:
    """It was all or nothing; whatever came in spite of that is on its way out before anybody tries elsewhere."""
    spot(cloud, a=0.2)
    cloud.fleets.short_of = 1
    with pytest.raises(NoCapacity, match="only 2 of 3 machines were created") as caught:
        make(cloud).launch(SPOT, 3, tags(), STARTUP)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert cloud.alive() == set()


def test_too_few_machines_that_stay_are_no_lack_of_capacity(cloud: FakeAWS) -> None:
    """Nobody may take them for gone: they are found, and ended, by their tags."""
    spot(cloud, a=0.2)
    cloud.fleets.short_of = 1
    cloud.fail("TerminateInstances", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="could not be terminated"):
        make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert {instance.id for instance in make(cloud).instances(POOL)} == cloud.alive() != set()


def test_a_fleet_whose_answer_is_lost_is_asked_for_again_with_its_token(cloud: FakeAWS) -> None:
    """EC2 answers with the machines of the first time."""
    spot(cloud, a=0.2)
    cloud.fail("CreateFleet", is_done=True)
    launched = make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert {instance.id for instance in launched} == cloud.alive()
    assert len(launched) == 2
    first, second = cloud.words("CreateFleet")
    assert first == second


def test_a_fleet_that_goes_on_failing_is_looked_for(cloud: FakeAWS) -> None:
    """By the tag that only its machines have; they are told like any other."""
    spot(cloud, a=0.2, b=0.19)
    cloud.fail("CreateFleet", is_done=True)
    cloud.fail("CreateFleet", "InternalError", 500, times=9)
    launched = make(cloud).launch(SPOT, 2, tags(), STARTUP)
    assert {instance.id for instance in launched} == cloud.alive()
    assert [(instance.rank, instance.price_per_hour) for instance in launched] == [(0, 0.19), (1, 0.19)]


def test_a_fleet_that_was_not_made_is_an_outage(cloud: FakeAWS) -> None:
    """Machines may come up later: it says nothing of the capacity."""
    spot(cloud, a=0.2)
    cloud.fail("CreateFleet", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="0 of 1 machines are listed"):
        make(cloud).launch(SPOT, 1, tags(), STARTUP)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [("MaxFleetCountExceeded", 400, QuotaExceeded), ("UnauthorizedOperation", 403, CredentialsError)],
)
def test_a_refusal_of_the_call_is_told_as_it_is(
    cloud: FakeAWS, code: str, status: int, kind: type[SkywardError]
) -> None:
    """Once: it is not about one pool."""
    spot(cloud, a=0.2)
    cloud.fail("CreateFleet", code, status, times=99)
    with pytest.raises(kind):
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert len(cloud.words("CreateFleet")) == 1
    assert cloud.fleets.templates == {}


# ── which machine is which, and what it costs ────────────────────────────────────────────────────────────────────────


def test_what_is_paid_is_told(cloud: FakeAWS) -> None:
    """The creating call has the price that was offered, the most that it can be; one call writes down the real one."""
    spot(cloud, a=0.2, b=0.15)
    launched = make(cloud).launch(SPOT, 3, tags(), STARTUP)
    (words,) = cloud.words("CreateFleet")
    assert "0.2" in [value for name, value in words.items() if name.startswith("TagSpecification.1.")]
    assert {instance.price_per_hour for instance in (*launched, *make(cloud).instances(POOL))} == {0.15}
    (words,) = cloud.words("CreateTags")
    assert words["Tag.1.Key"] == aws_launch.PRICE_TAG
    spot(cloud, a=0.2)
    make(cloud).launch(SPOT, 1, tags(launch="L1"), STARTUP)
    assert len(cloud.words("CreateTags")) == 1  # nothing else to say


def test_without_the_right_to_say_so_the_price_that_was_offered_stands(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """And is told by everybody."""
    spot(cloud, a=0.2, b=0.15)
    cloud.fail("CreateTags", "UnauthorizedOperation", 403, times=9)
    (machine,) = make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert [instance.price_per_hour for instance in (machine, *make(cloud).instances(POOL))] == [0.2, 0.2]
    assert "the price that was offered" in caplog.text


def test_machines_of_several_calls_have_ranks_of_their_own(cloud: FakeAWS) -> None:
    """EC2 counts within one call, and a fleet may be many: the places are written down, and hold when a machine is
    gone.
    """
    spot(cloud, a=0.2)
    cloud.fleets.is_split = True
    launched = make(cloud).launch(SPOT, 4, tags(first_rank=3), STARTUP)
    assert [instance.rank for instance in launched] == [3, 4, 5, 6]
    listed = {instance.id: instance.rank for instance in make(cloud).instances(POOL)}
    assert listed == {instance.id: instance.rank for instance in launched}
    assert all(instance.tags[RANK_TAG] == str(instance.rank) for instance in launched)
    del cloud.backend().reservations[next(iter(cloud.backend().reservations))]
    left = {instance.id: instance.rank for instance in make(cloud).instances(POOL)}
    assert len(left) == 3
    assert left.items() <= listed.items()


def test_ranks_are_told_apart_before_they_are_written_down(cloud: FakeAWS) -> None:
    """A client was killed after the fleet had come, or may not write: whoever lists the machines finds the same ranks
    each time, and no rank twice.
    """
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


def listed(name: str, index: int, place: str = "", launch: str = "L") -> dict[str, Any]:
    pairs = {LAUNCH_TAG: launch, aws_fleet.PLACE_TAG: place}
    return {
        "InstanceId": name,
        "AmiLaunchIndex": index,
        "Tags": [{"Key": key, "Value": value} for key, value in pairs.items() if value],
    }


@pytest.mark.parametrize(
    ("machines", "places"),
    [
        ([("a", 0), ("b", 1), ("c", 2)], {"a": 0, "b": 1, "c": 2}),
        ([("a", 2), ("c", 2), ("b", 2)], {"a": 2, "b": 0, "c": 1}),
        ([("a", 0), ("b", 0), ("c", 1)], {"a": 0, "b": 2, "c": 1}),
        ([("a", 0), ("b", 0, "0")], {"a": 1, "b": 0}),
        ([("a", 5, "1"), ("b", 1), ("c", 0, "1")], {"a": 1, "b": 2, "c": 0}),
        ([("a", 0, "first"), ("b", 0, "-1")], {"a": 0, "b": 1}),
        ([("a", 0, "", "L1"), ("b", 0, "", "L2")], {"a": 0, "b": 0}),
        ([("a", 0, "", ""), ("b", 0, "", "")], {"a": 0, "b": 0}),
        ([], {}),
    ],
)
def test_no_place_is_told_twice(machines: list[tuple[Any, ...]], places: dict[str, int]) -> None:
    """A tag counts most, then what EC2 says, then the order of the ids; each launch counts for itself."""
    for order in (machines, machines[::-1]):
        found = {
            machine["InstanceId"]: machine["AmiLaunchIndex"]
            for machine in aws_fleet.ranked([listed(*machine) for machine in order])
        }
        assert found == places


# ── placement groups and EFA ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("g4dn.xlarge", []),
        ("g6.8xlarge", [0]),
        ("p4d.24xlarge", [0, 1, 2, 3]),
        ("p5.48xlarge", list(range(32))),
        ("p6-b300.48xlarge", list(range(1, 17))),
        ("c7i.xlarge", []),
    ],
)
def test_which_cards_have_efa_is_told_by_aws(name: str, cards: list[int]) -> None:
    """By its own descriptions of its types."""
    assert cluster.efa_cards(every_type()[name]) == cards
    assert cluster.has_efa(every_type()[name]) == bool(cards)


def test_machines_that_have_no_public_address_get_all_efa_interfaces() -> None:
    """The first card carries IP besides, the others nothing else; a first card without EFA is a plain one.

    The word for public addresses is not said.
    """
    first, *others = cluster.interfaces("sg-1", [0, 1, 2], is_public=False)
    assert first == {
        "DeviceIndex": 0,
        "NetworkCardIndex": 0,
        "InterfaceType": "efa",
        "Groups": ["sg-1"],
        "DeleteOnTermination": True,
    }
    assert [(one["NetworkCardIndex"], one["InterfaceType"], one["DeviceIndex"], one["Groups"]) for one in others] == [
        (1, "efa-only", 1, ["sg-1"]),
        (2, "efa-only", 1, ["sg-1"]),
    ]
    first, *others = cluster.interfaces("sg-1", [1, 2], is_public=False)
    assert first == {"DeviceIndex": 0, "Groups": ["sg-1"], "DeleteOnTermination": True}
    assert [one["NetworkCardIndex"] for one in others] == [1, 2]


def test_machines_with_a_public_address_have_one_interface() -> None:
    """AWS gives none otherwise. A first card without EFA carries none then."""
    (one,) = cluster.interfaces("sg-1", [0, 1, 2], is_public=True)
    assert (one["InterfaceType"], one["AssociatePublicIpAddress"]) == ("efa", True)
    (one,) = cluster.interfaces("sg-1", [1, 2], is_public=True)
    assert ("InterfaceType" in one, one["AssociatePublicIpAddress"]) == (False, True)


def launches(cloud: FakeAWS, offer: Offer) -> list[Offer]:
    """Return an offer on demand, and as spot."""
    cloud.spot |= {(offer.instance_type, A): 1.0, (offer.instance_type, B): 0.9}
    return [offer, offer.model_copy(update={"is_spot": True, "price_per_hour": 1.0})]


def asked_of(cloud: FakeAWS) -> dict[str, str]:
    """Return with which words the last launch was made, whichever way."""
    asked = [one for one in cloud.asked if one.action in ("RunInstances", "CreateLaunchTemplate")][-1]
    return {name.removeprefix("LaunchTemplateData."): value for name, value in asked.words.items()}


@pytest.mark.parametrize("market", [0, 1])
def test_machines_that_work_together_are_near_each_other(
    cloud: FakeAWS, market: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With EFA, a placement group of the pool and the zone that carries the pool's tags, and a security group that lets
    them through both ways.
    """
    caplog.set_level(logging.INFO)
    offer = launches(cloud, TOGETHER)[market]
    launched = make(cloud).launch(offer, 2, tags(), STARTUP)
    (zone,) = zones_of(cloud, launched)
    assert list(cloud.fleets.groups) == [("us-east-1", f"skyward-{POOL}-{zone}")]
    (group,) = cloud.fleets.groups.values()
    assert group.machines == {instance.id for instance in launched}
    assert (group.tags[POOL_TAG], group.tags[CREATED_TAG]) == (POOL, tags()[CREATED_TAG])
    assert asked_of(cloud)["NetworkInterface.1.InterfaceType"] == "efa"
    assert "g6.8xlarge gets 1 of its 1 EFA interfaces" in caplog.text
    (words,) = cloud.words("AuthorizeSecurityGroupEgress")
    assert (words["IpPermissions.1.IpProtocol"], words["IpPermissions.1.Groups.1.GroupId"]) == ("-1", words["GroupId"])


@pytest.mark.parametrize("market", [0, 1])
def test_a_machine_that_is_alone_has_neither(cloud: FakeAWS, market: int) -> None:
    """Nor has one of a type without EFA, whose capacity matters more."""
    for offer, count in ((TOGETHER.model_copy(update={"nodes": 1}), 1), (OFFER.model_copy(update={"nodes": 4}), 4)):
        make(cloud).launch(launches(cloud, offer)[market], count, tags(launch=f"L{count}"), STARTUP)
        assert not [name for name in asked_of(cloud) if name.endswith(("InterfaceType", "GroupName"))]
    assert cloud.fleets.groups == {}
    assert cloud.words("AuthorizeSecurityGroupEgress") == []
    assert cloud.words("DescribePlacementGroups") == []


@pytest.mark.parametrize("market", [0, 1])
def test_one_machine_more_joins_the_others(cloud: FakeAWS, market: int) -> None:
    """What replaces a lost machine, or the spot part of a pool: beside the others, in their group, with EFA as they
    have it.
    """
    offer = launches(cloud, TOGETHER)[market]
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
    assert asked_of(cloud)["NetworkInterface.1.InterfaceType"] == "efa"


def test_several_of_one_launch_work_together(cloud: FakeAWS) -> None:
    """Whatever the offer was asked for."""
    make(cloud).launch(TOGETHER.model_copy(update={"nodes": 1}), 2, tags(), STARTUP)
    assert asked_of(cloud)["NetworkInterface.1.InterfaceType"] == "efa"
    assert len(cloud.fleets.groups) == 1


def test_beside_the_others_or_not_at_all(cloud: FakeAWS) -> None:
    """EFA reaches no other zone."""
    make(cloud).launch(TOGETHER, 1, tags(), STARTUP)
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=99)
    with pytest.raises(NoCapacity):
        make(cloud).launch(TOGETHER, 1, tags(first_rank=1, launch="L1"), STARTUP)
    assert {cloud.subnet_zone(asked) for asked in cloud.asked if asked.action == "RunInstances"} == {A}
    elsewhere = next(subnet.id for subnet in cloud.backend().describe_subnets() if subnet.availability_zone == B)
    with pytest.raises(NoCapacity, match="us-east-1a"):
        make(cloud, subnet_ids=(elsewhere,)).launch(TOGETHER, 1, tags(first_rank=1, launch="L2"), STARTUP)


@pytest.mark.parametrize("market", [0, 1])
def test_private_machines_have_an_interface_a_card(cloud: FakeAWS, market: int) -> None:
    """And no public address, which AWS would not give them."""
    offer = launches(cloud, of_type("p4d.24xlarge", accelerator="A100", nodes=2))[market]
    launched = make(cloud, use_private_ip=True, ssh_cidr="10.0.0.0/8").launch(offer, 2, tags(), STARTUP)
    words = asked_of(cloud)
    assert [words[f"NetworkInterface.{n}.InterfaceType"] for n in range(1, 5)] == [
        "efa",
        "efa-only",
        "efa-only",
        "efa-only",
    ]
    assert not [name for name in words if name.endswith("AssociatePublicIpAddress")]
    assert [instance.ip for instance in launched] == [None, None]


def test_public_machines_say_what_they_do_without(cloud: FakeAWS, caplog: pytest.LogCaptureFixture) -> None:
    """And how to have it."""
    caplog.set_level(logging.INFO)
    make(cloud).launch(of_type("p4d.24xlarge", accelerator="A100", nodes=2), 2, tags(), STARTUP)
    assert (
        "p4d.24xlarge gets 1 of its 4 EFA interfaces; machines with a public address have one network interface: use_private_ip=True"
        in caplog.text
    )
    assert "NetworkInterface.2.DeviceIndex" not in asked_of(cloud)


def test_each_zone_has_a_group_and_a_template_of_its_own(cloud: FakeAWS) -> None:
    """For machines keep a group in their zone; those that were not needed are taken away."""
    spot_offer = launches(cloud, TOGETHER)[1]
    launched = make(cloud).launch(spot_offer, 2, tags(), STARTUP)
    assert zones_of(cloud, launched) == {B}
    assert len(cloud.words("CreatePlacementGroup")) == len(cloud.words("CreateLaunchTemplate")) == 2
    assert list(cloud.fleets.groups) == [("us-east-1", f"skyward-{POOL}-{B}")]
    assert cloud.fleets.templates == {}


def test_groups_of_zones_that_have_no_machines_are_taken_away(cloud: FakeAWS) -> None:
    """On demand, zone after zone; and all of them, when nothing came of it."""
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500)
    launched = make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    assert zones_of(cloud, launched) == {B}
    assert list(cloud.fleets.groups) == [("us-east-1", f"skyward-{POOL}-{B}")]
    make(cloud).terminate([instance.id for instance in launched])
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=99)
    with pytest.raises(NoCapacity):
        make(cloud).launch(TOGETHER, 2, tags(launch="L1"), STARTUP)
    assert cloud.fleets.groups == {}


def test_groups_are_left_while_nobody_knows_where_machines_are(cloud: FakeAWS) -> None:
    """The answer was lost, or does not tell: they are taken away when they are old."""
    offer = launches(cloud, TOGETHER)[1]
    cloud.fleets.says_no_zone = True
    make(cloud).launch(offer, 2, tags(), STARTUP)
    assert len(cloud.fleets.groups) == 2
    assert cloud.words("DeletePlacementGroup") == []


@pytest.mark.parametrize("market", [0, 1])
@pytest.mark.parametrize(
    ("action", "word"), [("CreatePlacementGroup", "GroupName"), ("AuthorizeSecurityGroupEgress", "InterfaceType")]
)
def test_without_the_right_machines_come_without_it(
    cloud: FakeAWS, market: int, action: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A slower network is told in the log; no machines would be worse."""
    offer = launches(cloud, TOGETHER)[market]
    cloud.fail(action, "UnauthorizedOperation", 403, times=99)
    assert len(make(cloud).launch(offer, 2, tags(), STARTUP)) == 2
    assert not [name for name in asked_of(cloud) if name.endswith(word)]
    assert "UnauthorizedOperation" in caplog.text


def test_an_outage_is_not_taken_for_a_missing_right(cloud: FakeAWS) -> None:
    """It is raised before anything is made."""
    cloud.fail("CreatePlacementGroup", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    assert cloud.alive() == set()


def test_what_is_there_already_is_taken(cloud: FakeAWS) -> None:
    """Group and rule, from a launch before or from somebody who was quicker."""
    cloud.fail("AuthorizeSecurityGroupEgress", "InvalidPermission.Duplicate", is_done=True)
    cloud.fleets.groups["us-east-1", f"skyward-{POOL}-{A}"] = Group({POOL_TAG: POOL})
    launched = make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    (group,) = cloud.fleets.groups.values()
    assert group.machines == {instance.id for instance in launched}


# ── what launches leave ──────────────────────────────────────────────────────────────────────────────────────────────


def leave(cloud: FakeAWS, age: timedelta, name: str) -> None:
    """Leave a template and a placement group of a pool, so old."""
    made = {POOL_TAG: f"sky-{name}", CREATED_TAG: str(int((now() - age).timestamp()))}
    words = {
        f"TagSpecification.1.Tag.{n}.{part}": text
        for n, pair in enumerate(made.items(), 1)
        for part, text in zip(("Key", "Value"), pair, strict=True)
    }
    cloud.fleets.templates["us-east-1", f"skyward-{name}"] = words
    cloud.fleets.groups["us-east-1", f"skyward-{name}-{A}"] = Group(made)


def left(cloud: FakeAWS) -> set[str]:
    return {name for _, name in (*cloud.fleets.templates, *cloud.fleets.groups)}


OLD, YOUNG = timedelta(hours=2), timedelta(minutes=50)


def test_what_is_old_is_taken_away(cloud: FakeAWS, account: AwsAccount) -> None:
    """All pages of it, and nothing that a launch may be about; a dry run says the same and does nothing."""
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


def test_a_sweep_takes_away_what_all_regions_have(cloud: FakeAWS) -> None:
    """By the provider's own verb."""
    leave(cloud, OLD, "old")
    cloud.fleets.groups["eu-west-1", "skyward-west"] = Group(
        {POOL_TAG: "sky-west", CREATED_TAG: str(int((now() - OLD).timestamp()))}
    )
    both = make(cloud, region=("us-east-1", "eu-west-1"))
    told = both.prune(now(), is_dry_run=True)
    assert sorted(told) == [
        "launch template skyward-old in us-east-1",
        f"placement group skyward-old-{A} in us-east-1",
        "placement group skyward-west in eu-west-1",
    ]
    assert len(left(cloud)) == 3
    assert both.prune(now(), is_dry_run=False) == told
    assert left(cloud) == set()


def test_a_group_that_is_in_use_stays(cloud: FakeAWS, account: AwsAccount) -> None:
    """Until its machines are terminated, however old it is."""
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


def test_one_that_cannot_be_taken_away_keeps_no_other(cloud: FakeAWS, account: AwsAccount) -> None:
    """It is told in the end."""
    for n in range(2):
        leave(cloud, OLD, f"old{n}")
    cloud.fail("DeleteLaunchTemplate", "InvalidParameterValue")
    with pytest.raises(sky.BadRequest, match="delete_launch_template"):
        aws_launch.prune_launches(account, "us-east-1", now())
    assert left(cloud) == {"skyward-old0"}


def test_an_outage_is_no_cleanliness(cloud: FakeAWS, account: AwsAccount) -> None:
    """Without the right to look there is nothing of ours; without an answer nobody knows."""
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


def test_the_next_launch_takes_away_what_earlier_pools_have_left(cloud: FakeAWS) -> None:
    """With one listing, a few at a time; whatever is in the way of it is in the way of nobody."""
    leave(cloud, YOUNG, "young")
    for n in range(cluster.MOST_TIDIED + 2):
        leave(cloud, OLD, f"old{n}")
    make(cloud).launch(TOGETHER, 2, tags(), STARTUP)
    assert len(cloud.words("DescribePlacementGroups")) == 1
    groups = {name for _, name in cloud.fleets.groups}
    assert {f"skyward-young-{A}", f"skyward-{POOL}-{A}"} <= groups
    assert len(groups) == 2 + 2
    cloud.fail("DescribePlacementGroups", "InternalError", 500, times=99)
    assert len(make(cloud).launch(TOGETHER, 2, tags("sky-other", launch="L1"), STARTUP)) == 2


# ── killed in between ────────────────────────────────────────────────────────────────────────────────────────────────


class Killed(BaseException):
    """The process is gone: nothing after this runs."""


STEPS = ["CreateLaunchTemplate", "CreateFleet", "DescribeInstances", "CreateTags"]


@pytest.mark.parametrize("step", STEPS)
def test_a_client_killed_at_any_step_leaves_nothing_that_is_not_found(
    cloud: FakeAWS, account: AwsAccount, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines by their tags, with ranks of their own and at no price too low; the rest when it is old."""
    spot(cloud, a=0.2, b=0.15)
    cloud.fleets.is_split = True
    ask: Callable[..., Any] = AwsAccount.ask
    pages: Callable[..., Any] = AwsAccount.pages
    is_over: list[bool] = []

    def die(operation: str, words: dict[str, Any]) -> None:
        if is_over:
            raise Killed
        if operation.replace("_", "") == step.lower() and not (
            step == "DescribeInstances" and not cloud.words("CreateFleet")
        ):
            is_over.append(True)
            if step != "DescribeInstances":
                (ask if operation != "describe_instances" else pages)(account, "us-east-1", "ec2", operation, **words)
            raise Killed

    def dying_ask(self: AwsAccount, region: str, service: str, operation: str, **words: Any) -> Any:
        if self is not account:
            die(operation, {name: word for name, word in words.items() if name != "once"})
        return ask(self, region, service, operation, **words)

    def dying_pages(self: AwsAccount, region: str, service: str, operation: str, what: str, **words: Any) -> Any:
        if self is not account:
            die(operation, words)
        return pages(self, region, service, operation, what, **words)

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


# ── end to end ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_lives_on_a_fleet(fleet: Fleet, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spot machines of another type than the first choice, from calls of their own; nothing is left, no template
    either.
    """
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
