"""AWS: the contract of every cloud, offers, launches on demand, listings and errors.

Of what botocore itself does with a request (signing, repeating), tests/system/providers/test_aws.py has the tests.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import (
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Requirements, matches
from skyward_core.providers import aws, aws_account, aws_launch, aws_offers
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, Sale, load
from skyward_core.providers.userdata import host_key, our_key
from tests import live_checks
from tests.providers.aws import KEY_ID, OFFER, SECRET, SPOT, T4, cloud, make_aws, of_type  # noqa: F401 - a fixture
from tests.providers.contract import POOL, STARTUP, Cloud, Make, ProviderContract, tags
from tests.providers.fake_aws import ACCOUNT, IMAGES, OUR_ADDRESS, FakeAWS, every_type
from tests.providers.http_fake import Reply
from tests.providers.in_process import Clock

BOTH = ("us-west-2", "us-east-1")
ZONES = [f"us-east-1{letter}" for letter in "abcdef"]
UBUNTU = "ami-0b0700000000000x8"


class TestAWS(ProviderContract):
    want, secrets = T4, (SECRET,)
    variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
    explicit = {"access_key_id": KEY_ID, "secret_access_key": SECRET}

    @pytest.fixture
    def make(self) -> Make:
        return make_aws

    def test_throttled_requests_are_repeated(self, cloud: Cloud, make: Make, offer: sky.Offer) -> None:
        """The SDK does that: tests/system/providers/test_aws.py. Its last refusal is RateLimited."""
        cloud.throttle()
        with pytest.raises(RateLimited):
            make().instances(POOL)


def launch(offer: sky.Offer = OFFER, count: int = 1, token: str = "L0", **fields: Any) -> list[sky.Instance]:
    return make_aws(**fields).launch(offer, count, tags(launch=token), STARTUP)


def zone_of(call: dict[str, Any]) -> str:
    return call["NetworkInterfaces"][0]["SubnetId"].removeprefix("subnet-")


def zones_asked(cloud: FakeAWS) -> list[str]:
    return [zone_of(call) for call in cloud.parameters("RunInstances")]


def sold(want: Requirements, **fields: Any) -> dict[str, float]:
    return {offer.instance_type: offer.price_per_hour for offer in make_aws(**fields).offers(want)}


def cidrs(cloud: FakeAWS) -> set[str]:
    """Return who may log in, by the only security group."""
    (rules,) = cloud.rules.values()
    return {
        one.get("CidrIp") or one["CidrIpv6"]
        for rule in rules
        for one in (*rule.get("IpRanges", []), *rule.get("Ipv6Ranges", []))
    }


# ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("g4dn.12xlarge", (4, "T4", 16, None)),
        ("g6.xlarge", (1, "L4", 24, None)),
        ("p3dn.24xlarge", (8, "V100", 32, "SXM")),
        ("p4d.24xlarge", (8, "A100", 40, "SXM")),
        ("p4de.24xlarge", (8, "A100", 80, "SXM")),
        ("trn1.32xlarge", (16, "Trainium1", 32, None)),
        ("inf2.48xlarge", (12, "Inferentia2", 32, None)),
        ("c7i.xlarge", (0, None, None, None)),
    ],
)
def test_a_chip_has_its_catalogue_name_and_memory(name: str, chips: tuple[Any, ...]) -> None:
    machine = aws_offers.machine_of(every_type()[name], "us-east-1")
    assert machine is not None
    offer = machine[0]
    assert (offer.accelerators, offer.accelerator, offer.accelerator_memory_gb, offer.form_factor) == chips


@pytest.mark.parametrize("name", ["g6f.xlarge", "gr6f.4xlarge", "dl2q.24xlarge", "vt1.3xlarge", "f2.6xlarge"])
def test_parts_of_a_chip_and_unknown_chips_are_not_offered(name: str) -> None:
    """If it were offered, it would count as a machine without chips."""
    assert aws_offers.machine_of(every_type()[name], "us-east-1") is None


def test_requirements_for_a_chip_match_each_type_that_has_it() -> None:
    """It covers all types of AWS with whole GPUs or Neuron devices."""
    found = 0
    for kind in every_type().values():
        if kind.get("GpuInfo") or kind.get("NeuronInfo"):
            machine = aws_offers.machine_of(kind, "us-east-1")
            if machine is None:
                assert kind["InstanceType"].split(".")[0] in ("g6f", "gr6f")
                continue
            offer = machine[0]
            requested = parse(f"{offer.accelerators}x{offer.accelerator}-{offer.accelerator_memory_gb:g}GB")
            assert matches(offer, Requirements(accelerator=requested)) is None
            assert any(kind["InstanceType"].startswith(family.rstrip("*")) for family in aws.ACCELERATED)
            found += 1
    assert found > 60


def test_the_disk_and_the_public_address_are_counted(cloud: FakeAWS) -> None:
    """A listed machine has these extras too; its price tag has only the machine's own price. $0.08 per GB and month,
    $0.005 an hour (price pages, 2026-11-22).
    """
    (offer,) = (offer for offer in make_aws(disk_gb=450).offers(T4) if not offer.is_spot)
    assert [(extra.name, extra.usd_per_hour, bool(extra.source), extra.checked) for extra in offer.extras_per_hour] == [
        ("disk", 0.05, True, "2026-11-22"),
        ("public IPv4", 0.005, True, "2026-11-22"),
    ]
    assert (offer.price_per_hour, round(offer.total_per_hour, 6)) == (0.526, 0.581)
    (machine,) = launch(offer, disk_gb=450)
    assert (machine.price_per_hour, machine.extras_per_hour) == (0.526, offer.extras_per_hour)
    (private,) = make_aws(disk_gb=8, use_private_ip=True, ssh_cidr="10.0.0.0/8").offers(T4)
    assert [(extra.name, extra.usd_per_hour) for extra in private.extras_per_hour] == [("disk", 0.011111)]


def test_prices_come_from_the_price_list(cloud: FakeAWS) -> None:
    """All pages are read, only for the region itself: Local Zones cost more."""
    names = {"g4dn.xlarge": 0.5, "g4dn.2xlarge": 0.7, "g4dn.4xlarge": 0.9}
    cloud.list_prices = {("eu-west-1", "g4dn.xlarge"): 0.6} | {
        ("us-east-1", name): cost for name, cost in names.items()
    }
    assert sold(Requirements(accelerator=parse("T4"))) == names
    assert sold(Requirements(vcpus=4)) == names


def test_without_the_right_to_read_the_price_list_our_table_is_used(cloud: FakeAWS) -> None:
    """It has prices of us-east-1, which are an estimate elsewhere. A type that it lacks is not sold on demand."""
    cloud.list_prices = None
    assert sold(T4) == sold(T4, region="eu-west-1") == {"g4dn.xlarge": aws_offers.PRICES["g4dn.xlarge"]}
    assert sold(Requirements(instance_type="r7i.large")) == {}


def test_spot_is_offered_at_the_present_price_of_each_zone(cloud: FakeAWS) -> None:
    """Older prices and Local Zones are left out; the offer also has the on-demand price."""
    cloud.spot = {
        ("g4dn.xlarge", f"us-east-1{zone}"): price for zone, price in (("a", 0.3), ("c", 0.2), ("-atl-2a", 0.1))
    }
    spot = [offer for offer in make_aws().offers(T4) if offer.is_spot]
    assert [(offer.price_per_hour, offer.on_demand_price_per_hour) for offer in spot] == [(0.2, 0.526), (0.3, 0.526)]


def test_without_the_right_to_read_spot_prices_only_on_demand_is_offered(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the missing right; any other refusal of the credentials is raised."""
    cloud.spot = {("g4dn.xlarge", "us-east-1a"): 0.2}
    cloud.fail("DescribeSpotPriceHistory", "UnauthorizedOperation", 403)
    assert [offer.is_spot for offer in make_aws().offers(T4)] == [False]
    assert "us-east-1 is offered on demand only: the credentials lack ec2:DescribeSpotPriceHistory" in caplog.text
    cloud.fail("DescribeSpotPriceHistory", "ExpiredToken", 403)
    with pytest.raises(CredentialsError):
        make_aws().offers(T4)


@pytest.mark.parametrize(
    ("requested", "names"),
    [
        ({}, {"t4g.small", "m7i.large"}),
        ({"vcpus": 2, "nodes": 2}, {"t4g.small", "m7i.large"}),
        ({"memory_gb": 0.5}, {"t4g.nano", "t3.micro", "t4g.small", "m7i.large"}),
        ({"instance_type": "t4g.nano"}, {"t4g.nano"}),
        ({"architecture": "arm64"}, {"t4g.small"}),
        ({"architecture": "x86_64"}, {"m7i.large"}),
        ({"instance_type": "mac2.metal"}, set()),  # Macs have processors of their own
    ],
)
def test_an_offer_has_enough_memory_for_a_node_and_the_processor_of_its_type(
    cloud: FakeAWS, requested: dict[str, Any], names: set[str]
) -> None:
    """Enough is 2 GB; smaller machines are offered for a smaller requirement, or for a named type."""
    costs = {"t4g.nano": 0.0042, "t3.micro": 0.01, "t4g.small": 0.017, "m7i.large": 0.1, "mac2.metal": 0.65}
    cloud.list_prices = {("us-east-1", name): price for name, price in costs.items()}
    found = make_aws().offers(Requirements(**requested))
    assert {offer.instance_type for offer in found} == names
    assert all((offer.architecture == "arm64") == offer.instance_type.startswith("t4g") for offer in found)


def test_chips_without_an_image_of_aws_are_offered_only_with_ami(cloud: FakeAWS) -> None:
    """AWS's images have no driver for V100s any more."""
    cloud.list_prices = None
    want = Requirements(accelerator=parse("V100-32GB"))
    assert sold(want) == {}
    assert list(sold(want, ami="ami-1")) == ["p3dn.24xlarge"]


# ── regions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def fail_west(cloud: FakeAWS, action: str, code: str, status: int) -> None:
    cloud.fail(action, code, status, times=9999, when=lambda request: request.region == "us-west-2")


@pytest.mark.parametrize(("code", "status"), [("AuthFailure", 401), ("Unavailable", 503), ("", 0)])
def test_a_region_that_does_not_answer_is_left_out_with_a_warning(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture, code: str, status: int
) -> None:
    """The account has not enabled it, it has an outage, or it has no subnet for machines."""
    if code:
        fail_west(cloud, "*", code, status)
    else:
        cloud.without_subnets = {"us-west-2"}
    found = make_aws(region=BOTH).offers(T4)
    assert isinstance(found, Sale)
    assert ({offer.region for offer in found}, [*found.unasked]) == ({"us-east-1"}, ["us-west-2"])
    assert "us-west-2 is left out: " in caplog.text
    assert (code or "create-default-vpc --region us-west-2") in caplog.text
    assert make_aws(region=BOTH).account() == ACCOUNT


@pytest.mark.parametrize(
    ("code", "status", "error"), [("AuthFailure", 401, CredentialsError), ("Unavailable", 503, ProviderFailed)]
)
def test_a_region_that_does_not_answer_is_an_error_if_no_other_region_matches(
    cloud: FakeAWS, code: str, status: int, error: type[SkywardError]
) -> None:
    """If no region answers, the error names each of them."""
    cloud.list_prices = {("us-west-2", "g4dn.xlarge"): 0.6, ("us-east-1", "g4dn.12xlarge"): 3.9}
    fail_west(cloud, "*", code, status)
    provider = make_aws(region=BOTH)
    with pytest.raises(error, match="in us-west-2") as caught:
        provider.offers(T4)
    assert caught.value.code == code
    cloud.is_refusing = True
    for verb in (lambda: provider.offers(T4), provider.account):
        with pytest.raises(SkywardError, match=r"in us-west-2.*; .*in us-east-1"):
            verb()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_region_that_refuses_the_credentials_does_not_count_as_empty(cloud: FakeAWS, *, is_enabled: bool) -> None:
    """It is enabled, or its state is unknown: it may have machines."""
    fail_west(cloud, "*", "AuthFailure", 401)
    if not is_enabled:
        cloud.fail("DescribeRegions", "UnauthorizedOperation", 403, times=9999)
    for verb in (lambda: make_aws(region=BOTH).instances("p1"), lambda: make_aws(region=BOTH).terminate(["i-012"])):
        with pytest.raises(CredentialsError, match="in us-west-2"):
            verb()


def test_a_region_that_is_not_enabled_does_not_hide_that_a_pool_is_gone(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds for the pool's provider, and for the reaper and a sweep, which have no memory."""
    cloud.not_enabled = {"us-west-2"}
    provider = make_aws(region=BOTH)
    (machine,) = provider.launch(provider.offers(T4)[0], 1, tags(), STARTUP)
    assert [found.id for found in provider.instances(machine.pool_id)] == [machine.id]
    assert [found.id for found in make_aws(region=BOTH).instances()] == [machine.id]
    provider.terminate([machine.id, "i-0123456789abcdef0"])
    assert (provider.instances(machine.pool_id), cloud.alive()) == ([], set())
    assert "us-west-2 is not enabled in the AWS account" in caplog.text


def test_a_region_with_an_outage_reports_its_machines_as_left(cloud: FakeAWS) -> None:
    """An id does not contain its region, so each region is called. Machines of the other region are terminated."""
    both = make_aws(region=BOTH)
    east = both.launch(OFFER, 2, tags(), STARTUP)
    west = both.launch(of_type("g4dn.xlarge", "us-west-2"), 1, tags(first_rank=2, launch="L1"), STARTUP)
    assert [machine.region for machine in both.instances(POOL)] == ["us-west-2", "us-east-1", "us-east-1"]
    assert {machine.id for machine in make_aws().instances(POOL)} == {machine.id for machine in east}
    fail_west(cloud, "TerminateInstances", "Unavailable", 503)
    with pytest.raises(InstancesLeft) as caught:
        both.terminate([machine.id for machine in (*east, *west)])
    assert caught.value.ids == (west[0].id,)
    assert cloud.alive() == {west[0].id}
    fail_west(cloud, "DescribeInstances", "Unavailable", 503)
    with pytest.raises(ProviderFailed):
        both.instances(POOL)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_creating_call_has_all_parameters(cloud: FakeAWS) -> None:
    """All machines or none are created."""
    cloud.fail("RunInstances", "InvalidParameterValue")
    with pytest.raises(sky.BadRequest):
        launch(count=3, instance_profile="trainer")
    (call,) = cloud.parameters("RunInstances")
    assert (call["MinCount"], call["MaxCount"]) == (3, 3)
    assert call["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert call["MetadataOptions"]["HttpTokens"] == "required"
    assert call["IamInstanceProfile"] == {"Name": "trainer"}
    assert [one["AssociatePublicIpAddress"] for one in call["NetworkInterfaces"]] == [True]
    ebs = {"VolumeSize": 100, "VolumeType": "gp3", "DeleteOnTermination": True}
    assert call["BlockDeviceMappings"] == [{"DeviceName": "/dev/sda1", "Ebs": ebs}]
    kinds = [one["ResourceType"] for one in call["TagSpecifications"]]
    assert sorted(kinds) == ["instance", "network-interface", "volume"]
    assert not {"KeyName", "CreditSpecification", "InstanceMarketOptions"} & call.keys()
    assert cloud.alive() == set()


def test_a_sold_out_zone_is_followed_by_the_next(cloud: FakeAWS) -> None:
    """It creates all machines, or none."""
    full = {"us-east-1a", "us-east-1b"}
    cloud.fail(
        "RunInstances",
        "InsufficientInstanceCapacity",
        500,
        times=9,
        when=lambda request: zone_of(request.parameters) in full,
    )
    assert len(launch(count=2)) == 2
    assert zones_asked(cloud) == ZONES[:3]
    assert len({call["ClientToken"] for call in cloud.parameters("RunInstances")}) == 3


def test_the_error_names_the_answers_of_all_zones(cloud: FakeAWS) -> None:
    """Its code comes from a zone that sells the type at all."""
    cloud.fail("RunInstances", "Unsupported", times=9, when=lambda request: zone_of(request.parameters) != ZONES[2])
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=9)
    message = r"us-east-1c \(subnet-[\w-]+\): InsufficientInstanceCapacity, us-east-1d"
    with pytest.raises(NoCapacity, match=message) as caught:
        launch()
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert zones_asked(cloud) == ZONES


def test_after_a_quota_error_no_other_zone_is_tried(cloud: FakeAWS) -> None:
    """The quota holds for the whole region."""
    cloud.quota()
    with pytest.raises(QuotaExceeded):
        launch()
    assert zones_asked(cloud) == ZONES[:1]


@pytest.mark.parametrize("failures", [0, 9])
def test_machines_of_a_lost_answer_are_found(cloud: FakeAWS, failures: int) -> None:
    """The call is sent again with its token: EC2 answers with the machines of the first. If it stays without an answer,
    they are found by the tag of the launch and by the token.
    """
    cloud.lose_create_answer()
    cloud.fail("RunInstances", "InternalError", 500, times=failures)
    launched = launch(count=2)
    assert {instance.id for instance in launched} == cloud.alive()
    assert sorted(instance.rank for instance in launched) == [0, 1]
    first, second, *_ = cloud.parameters("RunInstances")
    assert first == second


def test_machines_of_another_call_are_not_taken_for_those_of_a_lost_one(cloud: FakeAWS) -> None:
    """The same launch is tried on demand, then as spot: only machines of the lost call count."""
    cloud.spot = {("g4dn.xlarge", "us-east-1a"): 0.2}
    (there,) = launch()
    cloud.fail("CreateFleet", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="0 of 1 machines are listed"):
        launch(SPOT)
    assert cloud.alive() == {there.id}


def test_the_user_data_has_the_host_key_and_our_key(cloud: FakeAWS) -> None:
    """A client with our key can derive the machine's host key."""
    (machine,) = launch()
    key = our_key()
    data = base64.b64decode(cloud.parameters("RunInstances")[0]["UserData"]).decode()
    config = json.loads(data.removeprefix("#cloud-config\n"))
    public = host_key(machine.tags[LAUNCH_TAG], key).public
    assert config["ssh_authorized_keys"] == [key.public]
    assert config["ssh_keys"]["ed25519_public"] == public
    assert "id=$(cat /var/lib/cloud/data/instance-id)" in config["runcmd"][0][2]
    assert STARTUP in config["runcmd"][0][2]
    assert machine.directory is not None and machine.directory.endswith(f"/instances/{machine.id}")
    assert machine.ip is not None and machine.ip.startswith("198.51.100.")
    assert machine.endpoint == sky.Endpoint(
        host=machine.ip,
        port=22,
        user="root",
        key=str(key.path),
        host_key=public,
        known_hosts="/dev/null",
        config="/dev/null",
    )
    assert make_aws().instances(POOL)[0].endpoint == machine.endpoint


def test_long_user_data_is_compressed(cloud: FakeAWS) -> None:
    """EC2 takes 16 KiB. A longer text is refused before anything is created."""
    long = STARTUP + "".join(f"echo line {n}\n" for n in range(3000))
    make_aws().launch(OFFER, 1, tags(), long)
    sent = base64.b64decode(cloud.parameters("RunInstances")[0]["UserData"])
    assert len(sent) <= 16 * 1024
    assert gzip.decompress(sent).startswith(b"#cloud-config\n")
    noise = "# " + "".join(hashlib.sha256(bytes(str(n), "ascii")).hexdigest() for n in range(1000))
    with pytest.raises(sky.BadRequest, match="16384 bytes"):
        make_aws().launch(OFFER, 1, tags(launch="L1"), noise)
    assert len(cloud.parameters("RunInstances")) == 1


@pytest.mark.parametrize(
    ("offer", "parameter", "disk_gb", "credit"),
    [
        (OFFER, "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04", 100, None),
        (of_type("trn1.2xlarge", accelerator="Trainium1"), "neuron/dlami/base/ubuntu-24.04", 120, None),
        (of_type("c7i.xlarge", accelerator=None), "canonical/ubuntu/server/24.04/stable/current/amd64", 100, None),
        (of_type("c8g.4xlarge", accelerator=None), "canonical/ubuntu/server/24.04/stable/current/arm64", 100, None),
        (of_type("t3.large", accelerator=None), "canonical", 100, "standard"),
        (of_type("t4g.large", accelerator=None), "canonical", 100, "standard"),
    ],
    ids=lambda value: getattr(value, "instance_type", str(value)),
)
def test_image_disk_and_credits_fit_the_type(
    cloud: FakeAWS, offer: sky.Offer, parameter: str, disk_gb: int, credit: str | None
) -> None:
    """The image is AWS's latest. A disk is no smaller than its image. AWS would bill CPU of T3, T3a and T4g beyond
    their credits.
    """
    launch(offer)
    (name,) = (words["Name"] for words in cloud.parameters("GetParameter"))
    assert name.startswith(f"/aws/service/{parameter}")
    (call,) = cloud.parameters("RunInstances")
    assert call["ImageId"] == IMAGES[name.removeprefix("/aws/service/")][0]
    assert call["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == disk_gb
    assert call.get("CreditSpecification", {}).get("CpuCredits") == credit


def test_the_users_own_image_and_disk_are_used(cloud: FakeAWS) -> None:
    """The latest image of AWS is not looked up. An unknown image is refused."""
    launch(ami=UBUNTU, disk_gb=500)
    assert cloud.parameters("GetParameter") == []
    (call,) = cloud.parameters("RunInstances")
    assert (call["ImageId"], call["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]) == (UBUNTU, 500)
    with pytest.raises(sky.BadRequest, match="InvalidAMIID"):
        launch(ami="ami-none", token="L1")


def test_each_client_address_has_its_own_rule(cloud: FakeAWS) -> None:
    """Machines accept connections only from clients and each other. The security group of all pools is created once; no
    rule is widened, and no rule of another client is removed.
    """
    launch()
    launch(token="L1")
    assert cidrs(cloud) == {f"{OUR_ADDRESS}/32"}
    (group,) = {call["NetworkInterfaces"][0]["Groups"][0] for call in cloud.parameters("RunInstances")}
    ((_, rules),) = cloud.rules.items()
    assert [pair["GroupId"] for rule in rules for pair in rule.get("UserIdGroupPairs", [])] == [group]
    assert len(cloud.parameters("AuthorizeSecurityGroupIngress")) == 2
    cloud.checkip.caller = "198.51.100.200"
    launch(token="L2")
    for token, cidr in (("L3", "192.0.2.0/24"), ("L4", "2001:db8::/64")):
        launch(token=token, ssh_cidr=cidr)
    assert cidrs(cloud) == {f"{OUR_ADDRESS}/32", "198.51.100.200/32", "192.0.2.0/24", "2001:db8::/64"}
    assert len(cloud.checkip.requests) == 3


@pytest.mark.parametrize("address", ["<html>", "", "203.0.113.7, 203.0.113.8"])
def test_without_our_public_address_no_port_is_opened(cloud: FakeAWS, address: str) -> None:
    """The error names the remedy."""
    cloud.checkip.fail("GET", "/checkip", Reply(200, address, is_text=True))
    with pytest.raises(ProviderFailed, match="ssh_cidr="):
        launch()
    assert cloud.parameters("RunInstances") == []
    assert cloud.rules == {}


def test_private_machines_have_no_public_address(cloud: FakeAWS) -> None:
    """Logins use the private address, from the given network."""
    (machine,) = launch(use_private_ip=True, ssh_cidr="10.0.0.0/8")
    assert machine.ip is None
    assert machine.endpoint is not None
    assert machine.endpoint.host == machine.private_ip
    assert cloud.parameters("RunInstances")[0]["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False
    assert cidrs(cloud) == {"10.0.0.0/8"}


def test_machines_are_put_into_the_given_subnets(cloud: FakeAWS) -> None:
    """An unknown subnet is an error."""
    launch(subnet_ids=("subnet-us-east-1d",))
    assert zones_asked(cloud) == ["us-east-1d"]
    with pytest.raises(sky.BadRequest, match="subnet-00000000"):
        launch(token="L1", subnet_ids=("subnet-us-east-1d", "subnet-00000000"))


def test_a_region_without_a_default_vpc_is_refused_with_advice(cloud: FakeAWS) -> None:
    """It is refused before anything is created."""
    cloud.without_subnets = {"us-east-1"}
    with pytest.raises(sky.BadRequest, match="subnet_ids="):
        launch()
    with pytest.raises(NoCapacity, match="subnet_ids=") as caught:  # another region may have one
        launch(region=BOTH)
    assert caught.value.code == "VPCIdNotSpecified"
    assert cloud.parameters("RunInstances") == []


def test_launch_waits_until_a_machine_has_an_address(cloud: FakeAWS) -> None:
    """Listings first lack the machine, then its address; `instances` reports it without one."""
    cloud.hidden_listings, cloud.pending_listings = 2, 3
    (machine,) = launch()
    assert machine.endpoint is not None
    assert len(cloud.parameters("DescribeInstances")) == 6
    cloud.hidden_listings = 0
    cloud.fail("DescribeInstances", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        launch(token="L1")
    cloud.faults.clear()
    new = [instance for instance in make_aws().instances(POOL) if instance.tags[LAUNCH_TAG] == "L1"]
    assert [(instance.state, instance.endpoint) for instance in new] == [(InstanceState.PENDING, None)]


def test_a_machine_without_an_address_is_terminated(cloud: FakeAWS) -> None:
    """It happens at the deadline; no machine is left."""
    cloud.pending_listings = 10**9
    with pytest.raises(ProviderFailed, match="no address"):
        launch(count=2)
    assert cloud.alive() == set()


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
    cloud.on_listing = lambda: [cloud.put(machine, state, code) for machine in cloud.alive()]
    with pytest.raises(error) as caught:
        launch()
    assert caught.value.code == word
    assert cloud.alive() == set()


def test_launch_returns_the_others_if_one_machine_ends(cloud: FakeAWS) -> None:
    """Fewer machines than requested are no error."""
    cloud.pending_listings = 2
    end_one: list[Callable[[], object]] = [lambda: cloud.put(min(cloud.alive()), "terminated", "Server.InternalError")]
    cloud.on_listing = lambda: end_one.pop()() if end_one else None
    launched = launch(count=3)
    assert len(launched) == 2
    assert {instance.id for instance in launched} == cloud.alive()


# ── listing and termination ──────────────────────────────────────────────────────────────────────────────────────────


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
    (machine,) = launch()
    cloud.put(machine.id, word)
    cloud.machine(machine.id).pending = 1
    assert [instance.state for instance in make_aws().instances(POOL)] == ([] if state is None else [state])


@pytest.mark.parametrize(("rank", "price"), [("first", "much"), ("²", "inf"), ("9" * 200, "nan")])
def test_a_listing_tolerates_malformed_tags(cloud: FakeAWS, rank: str, price: str) -> None:
    """The machine must still be found and terminated. A pattern matches no other pool: EC2's filters have wildcards."""
    (machine,) = launch()
    its = cloud.machine(machine.id).tags
    its |= {RANK_TAG: rank, aws_launch.PRICE_TAG: price}
    del its[LAUNCH_TAG]
    (listed,) = make_aws().instances(POOL)
    assert (listed.id, listed.rank, listed.price_per_hour, listed.endpoint) == (machine.id, 0, 0.0, None)
    assert make_aws().instances("sky-contract-*") == []


def test_a_machine_that_cannot_be_terminated_does_not_keep_others(cloud: FakeAWS) -> None:
    """The error names its id. The region fails the whole call because of it."""
    launched = [instance.id for instance in launch(count=3)]
    cloud.fail(
        "TerminateInstances",
        "OperationNotPermitted",
        times=9,
        when=lambda request: launched[1] in request.parameters["InstanceIds"],
    )
    with pytest.raises(InstancesLeft) as caught:
        make_aws().terminate(launched)
    assert caught.value.ids == (launched[1],)
    assert cloud.alive() == {launched[1]}


def test_a_recent_machine_that_aws_does_not_know_is_not_gone(cloud: FakeAWS, clock: Clock) -> None:
    """`InvalidInstanceID.NotFound` occurs for seconds after RunInstances, and counts after a minute."""
    provider = make_aws()
    (machine,) = provider.launch(OFFER, 1, tags(), STARTUP)
    for later_seconds in (0.0, 50.0):
        clock.passed += later_seconds
        cloud.fail("TerminateInstances", "InvalidInstanceID.NotFound")
        with pytest.raises(ProviderFailed, match=rf"does not know {machine.id} yet"):
            provider.terminate([machine.id])
    assert provider == make_aws()
    clock.passed += 11
    cloud.fail("TerminateInstances", "InvalidInstanceID.NotFound")
    provider.terminate([machine.id])
    assert cloud.alive() == {machine.id}
    provider.terminate([machine.id])
    assert cloud.alive() == set()


# ── errors and settings ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, NoCapacity),
        ("Unsupported", 400, NoCapacity),
        ("VcpuLimitExceeded", 400, QuotaExceeded),
        ("AuthFailure", 401, CredentialsError),
        ("UnauthorizedOperation", 403, CredentialsError),
        ("ExpiredToken", 403, CredentialsError),
        ("RequestLimitExceeded", 503, RateLimited),
        ("", 429, RateLimited),
        ("Unavailable", 503, ProviderFailed),
        ("InvalidParameterValue", 400, sky.BadRequest),
    ],
)
def test_an_error_code_determines_the_error(code: str, status: int, kind: type[SkywardError]) -> None:
    """The HTTP status does not matter: no capacity is a 500."""
    assert aws_account.meaning(code, status) is kind


@pytest.mark.parametrize(
    ("instance_type", "is_spot", "code"),
    [
        ("c7i.xlarge", False, "L-1216C47A"),
        ("g6e.xlarge", False, "L-DB2E81BA"),
        ("gr6.4xlarge", False, "L-DB2E81BA"),
        ("p6-b200.48xlarge", False, "L-417A185B"),
        ("trn1.2xlarge", False, "L-2C3B7624"),
        ("inf2.xlarge", True, "L-B5D1601B"),
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p5en.48xlarge", True, "L-C4BD4855"),
        ("p6-b300.48xlarge", True, ""),
        ("t4g.small", True, "L-34B43A08"),
        ("x2idn.metal", False, ""),
    ],
)
def test_a_type_counts_against_a_quota(instance_type: str, is_spot: bool, code: str) -> None:
    """The codes are those of Service Quotas (fact sheet, 1.10). Each type with chips has one on demand."""
    assert aws_account.quota_of(instance_type, is_spot=is_spot)[0] == code
    chips = [name for name, kind in every_type().items() if kind.get("GpuInfo") or kind.get("NeuronInfo")]
    assert [name for name in chips if not aws_account.quota_of(name, is_spot=False)[0]] == []


def test_a_quota_error_names_the_quota_and_the_page_of_the_console(cloud: FakeAWS) -> None:
    cloud.quota()
    page = r"https://us-east-1\.console\.aws\.amazon\.com/servicequotas/home/services/ec2/quotas/L-DB2E81BA$"
    with pytest.raises(QuotaExceeded, match=rf"The quota is L-DB2E81BA, Running On-Demand G and VT .* {page}"):
        launch()
    cloud.faults.clear()
    cloud.fail("RunInstances", "VolumeLimitExceeded")
    with pytest.raises(QuotaExceeded, match=r"services/ec2/quotas$"):
        launch(token="L1")


@pytest.mark.parametrize("offer", [OFFER, SPOT], ids=["on demand", "spot"])
def test_the_refusal_of_a_free_plan_is_named(cloud: FakeAWS, offer: sky.Offer) -> None:
    """It is no mistake in the request: the account must be upgraded. Another type might be allowed."""
    cloud.is_on_free_plan = True
    cloud.spot = {("g4dn.xlarge", zone): 0.2 for zone in ZONES}
    with pytest.raises(QuotaExceeded, match=r"on AWS's free plan, .* upgrade it") as caught:
        launch(offer)
    assert "L-DB2E81BA" not in str(caught.value)
    assert launch(of_type("t3.micro"), token="L1")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("AuthFailure", "of the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are refused"),
        ("UnauthorizedOperation", "lack this right: docs/clouds/aws.md has the policy"),
    ],
)
def test_refused_credentials_are_named_by_their_source(cloud: FakeAWS, code: str, text: str) -> None:
    """Never by their content."""
    cloud.fail("RunInstances", code, 403)
    with pytest.raises(CredentialsError, match=text) as caught:
        launch()
    assert SECRET not in str(caught.value) and KEY_ID not in str(caught.value)
    cloud.fail("DescribeInstances", "AuthFailure", 401)
    with pytest.raises(CredentialsError, match="of access_key_id= and secret_access_key= are refused"):
        make_aws(access_key_id=KEY_ID, secret_access_key=SECRET).instances(POOL)


# ── the policy of the documentation ──────────────────────────────────────────────────────────────────────────────────

PAGE = Path(__file__).parents[3] / "docs/clouds/aws.md"
NOT_CALLED = {
    "iam:CreateServiceLinkedRole": "EC2 does it for the caller, with the first spot machine of an account",
    "iam:PassRole": "EC2 checks it for instance_profile=",
    "ssm:ResumeSession": "AWS's plugin calls it",
    "ssmmessages:OpenDataChannel": "AWS's plugin calls it",
}
IAM_PREFIXES = {"service-quotas": "servicequotas"}
"""Of services whose rights have another name than their API."""
ALWAYS_ALLOWED = {"sts:GetCallerIdentity"}
"""AWS: "No permissions are required to perform this operation"."""


def policy() -> list[dict[str, Any]]:
    """Return the statements of the policy in the documentation, each field as a list."""
    (block,) = re.findall(r"```json\n(\{\n  \"Version.*?)```", PAGE.read_text(), re.DOTALL)
    statements = json.loads(block)["Statement"]
    for one in statements:
        for field in ("Action", "Resource"):
            one[field] = [one[field]] if isinstance(one[field], str) else one[field]
    return statements


def called() -> set[str]:
    """Return the actions that the code of the provider calls, as IAM names them."""
    session = botocore.session.get_session()
    found: set[str] = set()
    for file in (*Path(aws.__file__).parent.glob("aws*.py"), Path(live_checks.__file__)):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name not in ("ask", "pages") or not isinstance(node, ast.Call):
                continue
            words = [part.value for part in node.args[1:3] if isinstance(part, ast.Constant)]  # behind the region
            assert len(words) == 2, f"{file.name}:{node.lineno}: service and operation must be written here"
            service, operation = map(str, words)
            names = session.get_service_model(service).operation_names
            (action,) = (one for one in names if xform_name(one) == operation)
            found.add(f"{IAM_PREFIXES.get(service, service)}:{action}")
    return found


def test_the_policy_has_exactly_the_actions_that_the_code_calls() -> None:
    """A right too few stops a launch, and a right too many is none of least privilege. It fits into a managed policy."""
    allowed = [action for one in policy() for action in one["Action"]]
    assert set(allowed) == (called() - ALWAYS_ALLOWED) | NOT_CALLED.keys()
    assert {"ec2:RunInstances", "ec2:TerminateInstances", "ssm:StartSession", "pricing:GetProducts"} <= called()
    assert len("".join(re.findall(r"```json\n(\{\n.*?)```", PAGE.read_text(), re.DOTALL)[0].split())) <= 6144
    assert {one["Effect"] for one in policy()} == {"Allow"}


def allows(action: str, resource: str, tags_of_request: dict[str, str], tags_of_resource: dict[str, str]) -> bool:
    """Return whether the policy allows an action on a resource, such as "instance": conditions on tags only."""
    there = {"aws:RequestTag": tags_of_request, "aws:ResourceTag": tags_of_resource}
    for one in policy():
        resources = [part for part in one["Resource"] if part == "*" or f":{resource}/" in part]
        if action not in one["Action"] or not resources:
            continue
        for operator, conditions in one.get("Condition", {}).items():
            for key, wanted in conditions.items():
                kind, _, tag = key.partition("/")
                value = there.get(kind, {}).get(tag)
                if operator == "Null" and value is None:
                    break
                if operator == "StringEquals" and value not in ([wanted] if isinstance(wanted, str) else wanted):
                    break
            else:
                continue
            break
        else:
            return True
    return False


def test_the_tag_conditions_of_the_policy_hold_for_the_calls_of_the_code(cloud: FakeAWS) -> None:
    """All resources that a launch creates have the tags that the policy wants, and the machines of others do not."""
    cloud.spot = {("g6.8xlarge", zone): 0.2 for zone in ZONES}
    several = of_type("g6.8xlarge")
    launch(several, 2)
    launch(several.model_copy(update={"is_spot": True, "price_per_hour": 0.2}), 2, "L1")
    created = ("RunInstances", "CreateLaunchTemplate", "CreatePlacementGroup", "CreateSecurityGroup")
    specs = [
        (action, spec["ResourceType"], {tag["Key"]: tag["Value"] for tag in spec["Tags"]})
        for action in created
        for call in cloud.parameters(action)
        for spec in call["TagSpecifications"]
    ] + [
        ("RunInstances", spec["ResourceType"], {tag["Key"]: tag["Value"] for tag in spec["Tags"]})
        for fleet in cloud.parameters("CreateFleet")
        for spec in fleet["TagSpecifications"]
    ]
    assert {kind for _, kind, _ in specs} >= {"instance", "volume", "network-interface", "launch-template"}
    for action, kind, its in specs:
        assert allows(f"ec2:{action}", kind, its, {}), (action, kind)
        assert not allows(f"ec2:{action}", kind, {"team": "x"}, {}), (action, kind)
    (machine, *_) = cloud.machines.values()
    for action in ("TerminateInstances", "CreateTags", "CreateImage"):
        assert allows(f"ec2:{action}", "instance", {}, machine.tags)
        assert not allows(f"ec2:{action}", "instance", {}, {"Name": "somebody's"})


def test_a_secret_is_removed_from_an_error_message(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """SignatureDoesNotMatch repeats the signed request, with the session token."""
    token = "FwoGZXIvYXdzEBYaDHsession"
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    message = f"the string was 'x-amz-security-token:{token}'"
    cloud.fail("DescribeInstances", "SignatureDoesNotMatch", 403, message=message)
    with pytest.raises(CredentialsError, match=r"x-amz-security-token:\*\*\*") as caught:
        make_aws().instances(POOL)
    assert caught.value.__cause__ is None
    assert caught.value.code == "SignatureDoesNotMatch"


def test_without_the_sdk_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 is an extra."""
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(sky.BadRequest, match="pip install boto3"):
        sky.AWS().instances(POOL)


def test_credentials_come_from_the_profile(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The profile's file has precedence over the environment."""
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = AKIALABORATORY\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert make_aws(profile="lab").account() == ACCOUNT
    with pytest.raises(CredentialsError):
        make_aws(profile="other").account()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"region": "us-east-1a"}, ""),
        ({"region": ("us-east-1", "us-east-1")}, ""),
        ({"ssh_cidr": "here"}, ""),
        ({"use_private_ip": True}, ""),
        ({"access_key_id": KEY_ID}, ""),
        ({"ami": "ami-1", "region": BOTH}, ""),
        ({"disk_gb": 1}, ""),
        ({"zone": "us-east-1a"}, ""),
        ({"use_ssm": True, "access_key_id": KEY_ID, "secret_access_key": SECRET}, "environment or a profile"),
        ({"use_ssm": True, "ssh_cidr": "203.0.113.0/24"}, "opens no port"),
    ],
)
def test_contradictory_fields_are_refused(fields: dict[str, Any], reason: str) -> None:
    """They are refused at construction, and the message has no secret."""
    with pytest.raises(sky.BadRequest, match=reason or ".") as caught:
        load({"name": "aws", **fields})
    assert SECRET not in str(caught.value)
