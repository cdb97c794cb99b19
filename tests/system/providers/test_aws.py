"""AWS: the contract of every cloud, and behaviour of EC2 alone."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
from skyward_core.providers.aws import account, offers, prices, region_offers
from skyward_core.providers.aws import instances as aws_instances
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, Provider, Sale, load
from skyward_core.providers.ssh_keys import host_key, our_key
from tests.providers.aws import OFFER, SECRET, T4, at_once, cloud, every_type, make, of_type  # noqa: F401 - fixtures
from tests.providers.contract import POOL, STARTUP, Hands, ProviderContract, tags
from tests.providers.fake_aws import ACCOUNT, OUR_ADDRESS, FakeAWS

SPOT = OFFER.model_copy(update={"is_spot": True, "price_per_hour": 0.2})


class TestAWS(ProviderContract):
    variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")

    @pytest.fixture
    def hands(self, cloud: FakeAWS) -> Hands:
        def provider(**fields: Any) -> Provider:
            return make(cloud, **fields)

        def strangers() -> None:
            cloud.backend().run_instances(
                "ami-12c6146b",
                7,
                None,
                [],
                instance_type="t3.micro",
                is_instance_type_default=False,
                tags={"instance": {"skyward": "no", "Name": "theirs"}},
            )

        def over() -> None:
            cloud.is_out, cloud.creates_left = False, None

        def lag() -> None:
            cloud.hidden_listings = 2

        return Hands(
            provider=provider,
            want=T4,
            secrets=(SECRET,),
            alive=cloud.alive,
            refuse_credentials=lambda: setattr(cloud, "is_refusing", True),
            no_capacity=lambda: cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=99),
            quota=lambda: cloud.fail("RunInstances", "VcpuLimitExceeded", times=99),
            outage=lambda: setattr(cloud, "is_out", True),
            outage_over=over,
            lose_create_answer=lambda: cloud.fail("RunInstances", is_done=True),
            fail_create_after=lambda count: setattr(cloud, "creates_left", count),
            throttle=lambda: cloud.fail("DescribeInstances", "RequestLimitExceeded", 503),
            stop=lambda machine: cloud.put(machine, "stopped", "Client.UserInitiatedShutdown"),
            preempt=lambda machine: cloud.put(machine, "terminated", "Server.SpotInstanceTermination"),
            strangers=strangers,
        )


ZONES = [f"us-east-1{letter}" for letter in "abcdef"]


def zones_asked(cloud: FakeAWS) -> list[str]:
    return [cloud.subnet_zone(request) for request in cloud.requests if request.action == "RunInstances"]


def user_data(parameters: dict[str, Any]) -> bytes:
    return base64.b64decode(parameters["UserData"])


def groups(cloud: FakeAWS, region: str = "us-east-1") -> list[Any]:
    return [group for group in cloud.backend(region).describe_security_groups() if group.name == "skyward-ssh"]


def cidrs(cloud: FakeAWS) -> set[str]:
    (group,) = groups(cloud)
    return {
        rule.ip_range[word]
        for rule in group.ingress_rules
        if rule.from_port is not None
        for word in ("CidrIp", "CidrIpv6")
        if rule.ip_range.get(word)
    }


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
    """The input is AWS's own descriptions of its types."""
    machine = offers.machine_of(every_type()[name], "us-east-1")
    assert machine is not None
    offer = machine[0]
    assert (offer.accelerators, offer.accelerator, offer.accelerator_memory_gb, offer.form_factor) == chips


@pytest.mark.parametrize("name", ["g6f.xlarge", "gr6f.4xlarge", "dl2q.24xlarge", "vt1.3xlarge", "f2.6xlarge"])
def test_parts_of_a_chip_and_unknown_chips_are_not_offered(name: str) -> None:
    """If it were offered, it would count as a machine without chips."""
    assert offers.machine_of(every_type()[name], "us-east-1") is None


def test_requirements_for_a_chip_match_each_type_that_has_it() -> None:
    """It covers all types of AWS with whole GPUs or Neuron devices."""
    found = 0
    for kind in every_type().values():
        if kind.get("GpuInfo") or kind.get("NeuronInfo"):
            machine = offers.machine_of(kind, "us-east-1")
            if machine is None:
                assert kind["InstanceType"].split(".")[0] in ("g6f", "gr6f")
                continue
            offer = machine[0]
            requested = parse(f"{offer.accelerators}x{offer.accelerator}-{offer.accelerator_memory_gb:g}GB")
            assert matches(offer, Requirements(accelerator=requested)) is None
            assert any(kind["InstanceType"].startswith(family.rstrip("*")) for family in region_offers.ACCELERATED)
            found += 1
    assert found > 60


def test_the_disk_and_the_public_address_are_counted(cloud: FakeAWS) -> None:
    """A listed machine has these extras too; its price tag has only the machine's own price. $0.08 per GB and month,
    $0.005 an hour (price pages, 2026-11-22).
    """
    provider = make(cloud, disk_gb=450)
    (offer,) = (offer for offer in provider.offers(T4) if not offer.is_spot)
    assert [(extra.name, extra.usd_per_hour, bool(extra.source), extra.checked) for extra in offer.extras_per_hour] == [
        ("disk", 0.05, True, "2026-11-22"),
        ("public IPv4", 0.005, True, "2026-11-22"),
    ]
    assert (offer.price_per_hour, round(offer.total_per_hour, 6)) == (0.526, 0.581)
    (machine,) = provider.launch(offer, 1, tags(), STARTUP)
    assert (machine.price_per_hour, machine.extras_per_hour) == (0.526, offer.extras_per_hour)
    private = make(cloud, disk_gb=8, use_private_ip=True, ssh_cidr="10.0.0.0/8")
    assert [(extra.name, extra.usd_per_hour) for extra in next(iter(private.offers(T4))).extras_per_hour] == [
        ("disk", 0.011111)
    ]


def test_without_the_right_to_read_the_price_list_our_table_is_used(cloud: FakeAWS) -> None:
    """It has prices of us-east-1, which are an estimate elsewhere. A type that it lacks is not sold on demand."""
    cloud.list_prices = None
    (offer,) = make(cloud).offers(T4)
    assert offer.price_per_hour == prices.PRICES["g4dn.xlarge"] == 0.526
    (offer,) = make(cloud, region="eu-west-1").offers(T4)
    assert (offer.region, offer.price_per_hour) == ("eu-west-1", 0.526)
    assert make(cloud).offers(Requirements(instance_type="r7i.large")) == []


def test_spot_is_offered_at_the_present_price_of_each_zone(cloud: FakeAWS) -> None:
    """Older prices and Local Zones are left out; the offer also has the on-demand price."""
    cloud.spot = {
        ("g4dn.xlarge", "us-east-1a"): 0.3,
        ("g4dn.xlarge", "us-east-1c"): 0.2,
        ("g4dn.xlarge", "us-east-1-atl-2a"): 0.1,
    }
    spot = [offer for offer in make(cloud).offers(T4) if offer.is_spot]
    assert [(offer.price_per_hour, offer.on_demand_price_per_hour) for offer in spot] == [(0.2, 0.526), (0.3, 0.526)]
    (parameters,) = {
        json.dumps({name: value for name, value in parameters.items() if name.startswith("Product")})
        for parameters in cloud.parameters("DescribeSpotPriceHistory")
    }
    assert json.loads(parameters) == {"ProductDescription.1": "Linux/UNIX"}


def test_types_that_cannot_run_linux_are_not_offered(cloud: FakeAWS) -> None:
    """Macs have processors of their own."""
    cloud.list_prices = {("us-east-1", "mac2.metal"): 0.65}
    assert make(cloud).offers(Requirements(instance_type="mac2.metal")) == []


def test_chips_without_an_image_of_aws_are_offered_only_with_ami(cloud: FakeAWS) -> None:
    """AWS's images have no driver for V100s any more."""
    cloud.list_prices = None
    want = Requirements(accelerator=parse("V100-32GB"))
    assert make(cloud).offers(want) == []
    assert [offer.instance_type for offer in make(cloud, ami="ami-1").offers(want)] == ["p3dn.24xlarge"]


def take_subnets(cloud: FakeAWS, region: str) -> None:
    for subnet in cloud.backend(region).describe_subnets():
        cloud.backend(region).delete_subnet(subnet.id)


BOTH = ("us-west-2", "us-east-1")


@pytest.mark.parametrize(("code", "status"), [("AuthFailure", 401), ("Unavailable", 503), ("", 0)])
def test_a_region_that_does_not_answer_is_left_out_with_a_warning(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture, code: str, status: int
) -> None:
    """The account has not enabled it, it has an outage, or it has no subnet for machines."""
    if code:
        cloud.fail("*", code, status, times=999, when=lambda request: request.region == "us-west-2")
    else:
        take_subnets(cloud, "us-west-2")
    provider = make(cloud, region=BOTH)
    sold = provider.offers(T4)
    assert isinstance(sold, Sale)
    assert ({offer.region for offer in sold}, [*sold.unasked]) == ({"us-east-1"}, ["us-west-2"])
    assert "us-west-2 is left out: " in caplog.text
    assert (code or "create-default-vpc --region us-west-2") in caplog.text
    assert provider.account() == ACCOUNT


@pytest.mark.parametrize(
    ("code", "status", "error"), [("AuthFailure", 401, CredentialsError), ("Unavailable", 503, ProviderFailed)]
)
def test_a_region_that_does_not_answer_is_an_error_if_no_other_region_matches(
    cloud: FakeAWS, code: str, status: int, error: type[SkywardError]
) -> None:
    """If no region answers, the error names each of them."""
    cloud.list_prices = {("us-west-2", "g4dn.xlarge"): 0.6, ("us-east-1", "g4dn.12xlarge"): 3.9}
    cloud.fail("*", code, status, times=9999, when=lambda request: request.region == "us-west-2")
    provider = make(cloud, region=BOTH)
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
    cloud.fail("*", "AuthFailure", 401, times=9999, when=lambda request: request.region == "us-west-2")
    if not is_enabled:
        cloud.fail("DescribeRegions", "UnauthorizedOperation", 403, times=9999)
    provider = make(cloud, region=BOTH)
    with pytest.raises(CredentialsError, match="in us-west-2"):
        provider.instances("p1")
    with pytest.raises(CredentialsError, match="in us-west-2"):
        provider.terminate(["i-0123456789abcdef0"])


def test_a_recent_machine_that_aws_does_not_know_is_not_gone(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """`InvalidInstanceID.NotFound` occurs for seconds after RunInstances."""
    provider = make(cloud)
    (machine,) = provider.launch(provider.offers(T4)[0], 1, tags(), STARTUP)
    cloud.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=1)
    with pytest.raises(ProviderFailed, match=rf"does not know {machine.id} yet"):
        provider.terminate([machine.id])
    assert provider == make(cloud)
    provider.terminate([machine.id])
    assert cloud.alive() == set()
    provider.terminate(["i-0123456789abcdef0"])
    for later_seconds, is_refused in ((50.0, True), (61.0, False)):
        clock = SimpleNamespace(monotonic=lambda later=later_seconds: time.monotonic() + later)
        monkeypatch.setattr(aws_instances, "time", clock)
        cloud.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=1)
        with pytest.raises(ProviderFailed) if is_refused else contextlib.nullcontext():
            provider.terminate([machine.id])


def test_without_the_right_to_read_spot_prices_only_on_demand_is_offered(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the missing right; any other refusal of the credentials is raised."""
    cloud.spot = {("g4dn.xlarge", "us-east-1a"): 0.2}
    cloud.fail("DescribeSpotPriceHistory", "UnauthorizedOperation", 403)
    assert [offer.is_spot for offer in make(cloud).offers(T4)] == [False]
    assert "us-east-1 is offered on demand only: the credentials lack ec2:DescribeSpotPriceHistory" in caplog.text
    cloud.fail("DescribeSpotPriceHistory", "ExpiredToken", 403)
    with pytest.raises(CredentialsError):
        make(cloud).offers(T4)


def test_the_creating_call_has_all_parameters(cloud: FakeAWS) -> None:
    """All machines or none are created."""
    make(cloud, instance_profile="trainer").offers(T4)
    cloud.fail("RunInstances", "InvalidParameterValue", times=1)
    with pytest.raises(sky.BadRequest):
        make(cloud, instance_profile="trainer").launch(OFFER, 3, tags(), STARTUP)
    (parameters,) = cloud.parameters("RunInstances")
    assert (parameters["MinCount"], parameters["MaxCount"]) == ("3", "3")
    assert parameters["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert parameters["MetadataOptions.HttpTokens"] == "required"
    assert parameters["IamInstanceProfile.Name"] == "trainer"
    assert parameters["NetworkInterface.1.AssociatePublicIpAddress"] == "true"
    disk = {
        name.rpartition(".")[2]: value for name, value in parameters.items() if name.startswith("BlockDeviceMapping.1.")
    }
    assert disk == {"DeviceName": "/dev/sda1", "VolumeSize": "100", "VolumeType": "gp3", "DeleteOnTermination": "true"}
    assert {parameters[f"TagSpecification.{n}.ResourceType"] for n in (1, 2, 3)} == {
        "instance",
        "volume",
        "network-interface",
    }
    assert not [
        name
        for name in parameters
        if name.startswith(("KeyName", "CreditSpecification", "InstanceMarketOptions", "TagSpecification.4"))
    ]
    assert cloud.alive() == set()


def test_a_sold_out_zone_is_tried_once(cloud: FakeAWS) -> None:
    """Its answer is a 500, which the SDK would retry. The next zone creates all machines, or none."""
    cloud.fail(
        "RunInstances",
        "InsufficientInstanceCapacity",
        500,
        times=9,
        when=lambda request: cloud.subnet_zone(request) < "us-east-1c",
    )
    launched = make(cloud).launch(OFFER, 2, tags(), STARTUP)
    assert len(launched) == 2
    assert zones_asked(cloud) == ["us-east-1a", "us-east-1b", "us-east-1c"]
    assert len({parameters["ClientToken"] for parameters in cloud.parameters("RunInstances")}) == 3


def test_the_error_names_the_answers_of_all_zones(cloud: FakeAWS) -> None:
    """Its code comes from a zone that sells the type at all."""
    cloud.fail("RunInstances", "Unsupported", times=9, when=lambda request: cloud.subnet_zone(request) != "us-east-1c")
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=9)
    with pytest.raises(
        NoCapacity, match=r"us-east-1c \(subnet-\w+\): InsufficientInstanceCapacity, us-east-1d"
    ) as caught:
        make(cloud).launch(OFFER, 1, tags(), STARTUP)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert zones_asked(cloud) == ZONES


def test_after_a_quota_error_no_other_zone_is_tried(cloud: FakeAWS) -> None:
    """The quota holds for the whole region."""
    cloud.fail("RunInstances", "VcpuLimitExceeded", times=9)
    with pytest.raises(QuotaExceeded):
        make(cloud).launch(OFFER, 1, tags(), STARTUP)
    assert zones_asked(cloud) == ["us-east-1a"]


def test_a_call_with_a_lost_answer_is_sent_again_with_its_token(cloud: FakeAWS) -> None:
    """EC2 answers the second call with the machines of the first."""
    cloud.fail("RunInstances", is_done=True)
    launched = make(cloud).launch(OFFER, 2, tags(), STARTUP)
    assert {instance.id for instance in launched} == cloud.alive()
    assert len(launched) == 2
    first, second = cloud.parameters("RunInstances")
    assert first == second
    assert len(first["ClientToken"]) <= 64


def test_after_lost_answers_the_machines_are_looked_for(cloud: FakeAWS) -> None:
    """They are found by the tag of the launch, and by the token."""
    cloud.fail("RunInstances", is_done=True)
    cloud.fail("RunInstances", "InternalError", 500, times=9)
    launched = make(cloud).launch(OFFER, 2, tags(), STARTUP)
    assert {instance.id for instance in launched} == cloud.alive()
    assert sorted(instance.rank for instance in launched) == [0, 1]


def test_the_user_data_has_the_host_key_and_our_key(cloud: FakeAWS) -> None:
    """A client with our key can derive the machine's host key."""
    (machine,) = make(cloud).launch(OFFER, 1, tags(), STARTUP)
    key = our_key()
    config = json.loads(user_data(cloud.parameters("RunInstances")[0]).decode().removeprefix("#cloud-config\n"))
    assert config["ssh_authorized_keys"] == [key.public]
    assert config["ssh_keys"]["ed25519_public"] == host_key(tags()[LAUNCH_TAG], key).public
    assert "id=$(cat /var/lib/cloud/data/instance-id)" in config["runcmd"][0][2]
    assert STARTUP in config["runcmd"][0][2]
    assert machine.directory is not None
    assert machine.directory.endswith(f"/instances/{machine.id}")
    assert machine.ip is not None
    assert machine.ip.startswith("198.51.100.")
    assert machine.endpoint == sky.Endpoint(
        host=machine.ip,
        port=22,
        user="root",
        key=str(key.path),
        host_key=host_key(tags()[LAUNCH_TAG], key).public,
        known_hosts="/dev/null",
        config="/dev/null",
    )
    assert make(cloud).instances(POOL)[0].endpoint == machine.endpoint


def test_long_user_data_is_compressed(cloud: FakeAWS) -> None:
    """EC2 takes 16 KiB. A longer text is refused before anything is created."""
    long = STARTUP + "".join(f"echo line {n}\n" for n in range(3000))
    make(cloud).launch(OFFER, 1, tags(), long)
    sent = user_data(cloud.parameters("RunInstances")[0])
    assert len(sent) <= 16 * 1024
    assert gzip.decompress(sent).startswith(b"#cloud-config\n")
    noise = "# " + "".join(hashlib.sha256(bytes(str(n), "ascii")).hexdigest() for n in range(1000))
    with pytest.raises(sky.BadRequest, match="16384 bytes"):
        make(cloud).launch(OFFER, 1, tags(launch="L1"), noise)
    assert len(cloud.parameters("RunInstances")) == 1


def test_a_disk_is_no_smaller_than_its_image(cloud: FakeAWS) -> None:
    """AWS would refuse it."""
    for disk_gb, offer in ((10, of_type("trn1.2xlarge", accelerator="Trainium1")), (500, OFFER)):
        make(cloud, disk_gb=disk_gb).launch(offer, 1, tags(launch=f"L{disk_gb}"), STARTUP)
    assert [parameters["BlockDeviceMapping.1.Ebs.VolumeSize"] for parameters in cloud.parameters("RunInstances")] == [
        "120",
        "500",
    ]


def test_the_users_own_image_is_used(cloud: FakeAWS) -> None:
    """The latest image of AWS is not looked up. An unknown image is refused."""
    make(cloud, ami="ami-0b0700000000000x8").launch(OFFER, 1, tags(), STARTUP)
    assert cloud.parameters("GetParameter") == []
    assert cloud.parameters("RunInstances")[0]["ImageId"] == "ami-0b0700000000000x8"
    with pytest.raises(sky.BadRequest, match="InvalidAMIID"):
        make(cloud, ami="ami-none").launch(OFFER, 1, tags(launch="L1"), STARTUP)


def test_machines_accept_connections_only_from_this_client_and_each_other(cloud: FakeAWS) -> None:
    """The security group of all pools is created once."""
    make(cloud).launch(OFFER, 1, tags(), STARTUP)
    make(cloud).launch(OFFER, 1, tags(launch="L1"), STARTUP)
    (group,) = groups(cloud)
    assert cidrs(cloud) == {f"{OUR_ADDRESS}/32"}
    assert [
        pair["GroupId"] for rule in group.ingress_rules for pair in ([rule.source_group] if rule.source_group else [])
    ] == [group.id]
    assert {parameters["NetworkInterface.1.SecurityGroupId.1"] for parameters in cloud.parameters("RunInstances")} == {
        group.id
    }
    assert len(cloud.parameters("AuthorizeSecurityGroupIngress")) == 2


def test_each_client_address_has_its_own_rule(cloud: FakeAWS) -> None:
    """No rule is widened, and no rule of another client is removed."""
    make(cloud).launch(OFFER, 1, tags(), STARTUP)
    cloud.address = "198.51.100.200"
    make(cloud).launch(OFFER, 1, tags(launch="L1"), STARTUP)
    make(cloud, ssh_cidr="192.0.2.0/24").launch(OFFER, 1, tags(launch="L2"), STARTUP)
    make(cloud, ssh_cidr="2001:db8::/64").launch(OFFER, 1, tags(launch="L3"), STARTUP)
    assert cidrs(cloud) == {f"{OUR_ADDRESS}/32", "198.51.100.200/32", "192.0.2.0/24", "2001:db8::/64"}
    assert len([request for request in cloud.requests if request.service == "checkip"]) == 2


@pytest.mark.parametrize("address", ["<html>", "", "203.0.113.7, 203.0.113.8"])
def test_without_our_public_address_no_port_is_opened(cloud: FakeAWS, address: str) -> None:
    """The error names the remedy."""
    cloud.address = address
    with pytest.raises(ProviderFailed, match="ssh_cidr="):
        make(cloud).launch(OFFER, 1, tags(), STARTUP)
    assert cloud.parameters("RunInstances") == []
    assert groups(cloud) == []


def test_private_machines_have_no_public_address(cloud: FakeAWS) -> None:
    """Logins use the private address, from the given network."""
    (machine,) = make(cloud, use_private_ip=True, ssh_cidr="10.0.0.0/8").launch(OFFER, 1, tags(), STARTUP)
    assert machine.ip is None
    assert machine.endpoint is not None
    assert machine.endpoint.host == machine.private_ip
    assert cloud.parameters("RunInstances")[0]["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
    assert cidrs(cloud) == {"10.0.0.0/8"}


def test_machines_are_put_into_the_given_subnets(cloud: FakeAWS) -> None:
    """An unknown subnet is an error."""
    subnets = {subnet.availability_zone: subnet.id for subnet in cloud.backend().describe_subnets()}
    make(cloud, subnet_ids=(subnets["us-east-1d"],)).launch(OFFER, 1, tags(), STARTUP)
    assert zones_asked(cloud) == ["us-east-1d"]
    with pytest.raises(sky.BadRequest, match="subnet-00000000"):
        make(cloud, subnet_ids=(subnets["us-east-1d"], "subnet-00000000")).launch(OFFER, 1, tags(launch="L1"), STARTUP)


def test_a_region_without_a_default_vpc_is_refused_with_advice(cloud: FakeAWS) -> None:
    """It is refused before anything is created."""
    for subnet in cloud.backend().describe_subnets():
        cloud.backend().delete_subnet(subnet.id)
    with pytest.raises(sky.BadRequest, match="subnet_ids="):
        make(cloud).launch(OFFER, 1, tags(), STARTUP)
    with pytest.raises(NoCapacity, match="subnet_ids=") as caught:  # another region may have one
        make(cloud, region=("us-east-1", "us-west-2")).launch(OFFER, 1, tags(), STARTUP)
    assert caught.value.code == "VPCIdNotSpecified"


def test_launch_waits_until_a_machine_has_an_address(cloud: FakeAWS) -> None:
    """Listings first lack the machine, then its address; `instances` reports it without one."""
    cloud.hidden_listings, cloud.pending_listings = 2, 3
    (machine,) = make(cloud).launch(OFFER, 1, tags(), STARTUP)
    assert machine.endpoint is not None
    assert len(cloud.parameters("DescribeInstances")) == 6
    cloud.hidden_listings = 0
    cloud.fail("DescribeInstances", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed):
        make(cloud).launch(OFFER, 1, tags(launch="L1"), STARTUP)
    cloud.faults.clear()
    new = [instance for instance in make(cloud).instances(POOL) if instance.tags[LAUNCH_TAG] == "L1"]
    assert [(instance.state, instance.endpoint) for instance in new] == [(InstanceState.PENDING, None)]


def test_a_machine_without_an_address_is_terminated(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens at the deadline; no machine is left."""
    cloud.pending_listings = 10**9
    monkeypatch.setattr(aws_instances, "ADDRESS_SECONDS", 0.05)
    with pytest.raises(ProviderFailed, match="no address"):
        make(cloud).launch(OFFER, 2, tags(), STARTUP)
    assert cloud.alive() == set()


def test_a_listing_tolerates_malformed_tags(cloud: FakeAWS) -> None:
    """The machine must still be found and terminated."""
    (machine,) = make(cloud).launch(OFFER, 1, tags(), STARTUP)
    cloud.machine(machine.id).add_tags({RANK_TAG: "first", aws_launch.PRICE_TAG: "much"})
    cloud.backend().delete_tags([machine.id], {LAUNCH_TAG: None})
    (listed,) = make(cloud).instances(POOL)
    assert (listed.id, listed.rank, listed.price_per_hour, listed.endpoint) == (machine.id, 0, 0.0, None)


def test_a_pattern_does_not_match_other_pools(cloud: FakeAWS) -> None:
    """EC2's filters have wildcards."""
    make(cloud).launch(OFFER, 1, tags(), STARTUP)
    assert make(cloud).instances("sky-contract-*") == []


def test_a_machine_that_cannot_be_terminated_does_not_keep_others(cloud: FakeAWS) -> None:
    """The error names its id. The region fails the whole call because of it."""
    launched = [instance.id for instance in make(cloud).launch(OFFER, 3, tags(), STARTUP)]
    cloud.fail(
        "TerminateInstances",
        "OperationNotPermitted",
        times=9,
        when=lambda request: launched[1] in request.parameters.values(),
    )
    with pytest.raises(InstancesLeft) as caught:
        make(cloud).terminate(launched)
    assert caught.value.ids == (launched[1],)
    assert cloud.alive() == {launched[1]}


def test_a_region_with_an_outage_reports_its_machines_as_left(cloud: FakeAWS) -> None:
    """Machines that the other region has terminated are not among them."""
    both = make(cloud, region=("us-east-1", "eu-west-1"))
    east = both.launch(OFFER, 1, tags(), STARTUP)
    west = both.launch(of_type("g4dn.xlarge", "eu-west-1"), 1, tags(first_rank=1, launch="L1"), STARTUP)
    cloud.fail("TerminateInstances", "Unavailable", 503, times=99, when=lambda request: request.region == "eu-west-1")
    with pytest.raises(InstancesLeft) as caught:
        both.terminate([east[0].id, west[0].id])
    assert caught.value.ids == (west[0].id,)
    assert cloud.alive() == {west[0].id}
    cloud.fail("DescribeInstances", "Unavailable", 503, times=99, when=lambda request: request.region == "eu-west-1")
    with pytest.raises(ProviderFailed):
        both.instances(POOL)


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
    assert account.meaning(code, status) is kind


def test_a_secret_is_removed_from_an_error_message(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """SignatureDoesNotMatch repeats the signed request, with the session token."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "FwoGZXIvYXdzEBYaDHsession")
    cloud.fail(
        "DescribeInstances",
        "SignatureDoesNotMatch",
        403,
        message="the string was 'x-amz-security-token:FwoGZXIvYXdzEBYaDHsession'",
    )
    with pytest.raises(CredentialsError, match=r"x-amz-security-token:\*\*\*") as caught:
        make(cloud).instances(POOL)
    assert caught.value.__cause__ is None
    assert caught.value.code == "SignatureDoesNotMatch"


def test_without_the_sdk_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 is an extra."""
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(sky.BadRequest, match=r"skyward-core\[aws\]"):
        sky.AWS().instances(POOL)


def test_credentials_come_from_the_profile(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The profile's file has precedence over the environment."""
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = AKIALABORATORY\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert make(cloud, profile="lab").account() == ACCOUNT
    with pytest.raises(CredentialsError):
        make(cloud, profile="other").account()


@pytest.mark.parametrize(
    "fields",
    [
        {"region": "us-east-1a"},
        {"region": ("us-east-1", "us-east-1")},
        {"ssh_cidr": "here"},
        {"use_private_ip": True},
        {"access_key_id": "AKIAIOSFODNN7EXAMPLE"},
        {"ami": "ami-1", "region": ("us-east-1", "us-west-2")},
        {"disk_gb": 1},
        {"zone": "us-east-1a"},
    ],
)
def test_contradictory_fields_are_refused(fields: dict[str, Any]) -> None:
    """They are refused at construction."""
    with pytest.raises(sky.BadRequest):
        load({"name": "aws", **fields})


def test_launch_returns_the_others_if_one_machine_ends(cloud: FakeAWS) -> None:
    """Fewer machines than requested are no error."""
    cloud.pending_listings = 2

    def end_one() -> None:
        cloud.put(min(cloud.alive()), "terminated", "Server.InternalError")
        cloud.on_listing = lambda: None

    cloud.on_listing = end_one
    launched = make(cloud).launch(OFFER, 3, tags(), STARTUP)
    assert len(launched) == 2
    assert {instance.id for instance in launched} == cloud.alive()


def test_machines_of_another_call_are_not_taken_for_those_of_a_lost_one(cloud: FakeAWS) -> None:
    """The same launch is tried on demand, then as spot: only machines of the lost call count."""
    cloud.spot = {("g4dn.xlarge", "us-east-1a"): 0.2}
    (there,) = make(cloud).launch(OFFER, 1, tags(), STARTUP)
    cloud.fail("CreateFleet", "InternalError", 500, times=99)
    with pytest.raises(ProviderFailed, match="0 of 1 machines are listed"):
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert cloud.alive() == {there.id}


def test_an_unreadable_answer_is_an_outage(cloud: FakeAWS) -> None:
    """It may be a page of a proxy, or of a broken server."""
    cloud.fail("DescribeInstances", body="<html>502 Bad Gateway", status=502, times=99)
    with pytest.raises(ProviderFailed):
        make(cloud).instances(POOL)
