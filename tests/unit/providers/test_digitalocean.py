"""DigitalOcean: the contract of all providers, with GPUs and without, and its peculiarities.

The fake is tests/providers/fake_digitalocean.py.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import skyward_core as sky
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
)
from skyward_core.ledger.journal import price_of
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.base import (
    CREATED_TAG,
    EXPIRES_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    PROCESS_TAG,
    RANK_TAG,
    load,
)
from skyward_core.providers.digitalocean import (
    DigitalOcean,
    doctl_token,
    image_of,
    name_of,
    state_of,
    to_offers,
    to_tags,
)
from skyward_core.providers.tagging import launch_word
from skyward_core.providers.userdata import host_key, our_key
from skyward_core.provisioning.candidates import ask, candidates
from tests.providers.contract import POOL, STARTUP, Make, RestContract, cheapest, tags
from tests.providers.fake_digitalocean import (
    OVER_GPU_LIMIT,
    OVER_LIMIT,
    REGIONS,
    SIZES,
    SOLD_OUT,
    TEAM,
    TOKEN,
    FakeDigitalOcean,
    boot_of,
    size,
    unprocessable,
)
from tests.providers.http_fake import Reply
from tests.providers.in_process import Clock, Install

NODE_TOKEN = "dop_v1_n0den0den0den0den0de"
CPU = Requirements(instance_type="s-2vcpu-4gb")
GPU = Requirements(accelerator=sky.accelerators.parse("H100"))


@pytest.fixture
def cloud(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDigitalOcean:
    for name in ("DIGITALOCEAN_ACCESS_TOKEN", "DIGITALOCEAN_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIGITALOCEAN_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    in_process(fake := FakeDigitalOcean())
    return fake


@pytest.fixture
def make(cloud: FakeDigitalOcean) -> Make:
    return lambda **fields: DigitalOcean(endpoint_url=cloud.url, **fields)


class TestDigitalOcean(RestContract):
    want, secrets, ending = CPU, (TOKEN, NODE_TOKEN), ("DELETE", "/v2/droplets")
    variables = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN")
    explicit = {"token": TOKEN, "node_token": NODE_TOKEN}


class TestDigitalOceanWithGPUs(TestDigitalOcean):
    """They have a listing of their own."""

    want = GPU


def test_sizes_become_offers(make: Make) -> None:
    """The API lists VRAM for all GPUs together, and memory in MiB. The figures are those of the fact sheet."""
    offers = {(offer.instance_type, offer.region): offer for offer in make(region=None).offers(Requirements())}
    eight = offers["gpu-h100x8-640gb", "nyc1"]
    assert (eight.accelerator, eight.accelerators, eight.accelerator_memory_gb, eight.vcpus) == ("H100", 8, 80, 160)
    assert eight.memory_gb == pytest.approx(2061.6, abs=0.1)
    assert (eight.price_per_hour, eight.on_demand_price_per_hour, eight.is_spot) == (35.28, 35.28, False)
    chips = {offer.accelerator for offer in offers.values()}
    sold = {slug for slug, _ in offers}  # not if it is retired, has no price, or is "available" in no region
    assert not sold & {"s-8vcpu-retired", "s-priceless", "gpu-h200x1-141gb", "gpu-quantumx1"}
    assert chips == {None, "H100", "L40S", "MI300X", "MI350X", "MI355X", "RTX 4000 Ada", "RTX 6000 Ada"}


def test_a_spot_size_becomes_a_spot_offer() -> None:
    """Its on-demand price is that of the slug without the suffix, even if that size cannot be ordered."""
    spot = [offer for offer in to_offers(SIZES) if offer.is_spot]
    assert [
        (offer.instance_type, offer.region, offer.price_per_hour, offer.on_demand_price_per_hour) for offer in spot
    ] == [("gpu-mi350x1-288gb", "ric1", 2.46, 5.75), ("gpu-mi355x8-2304gb", "mem1", 23.76, 52.0)]
    alone = to_offers([size("gpu-b300x1-288gb-lc-spot", 1, 1, 11.19, ["nyc1"], (1, "nvidia_b300", 288))])
    assert [(offer.instance_type, offer.is_spot, offer.on_demand_price_per_hour) for offer in alone] == [
        ("gpu-b300x1-288gb-lc", True, None)
    ]


def test_a_spot_machine_is_created_and_listed_as_spot(cloud: FakeDigitalOcean, make: Make) -> None:
    provider = make(region="ric1")
    (offer,) = provider.offers(Requirements())
    (launched,) = provider.launch(offer, 1, tags(), STARTUP)
    assert [droplet.size["slug"] for droplet in cloud.droplets.values()] == ["gpu-mi350x1-288gb-spot"]
    for one in (launched, *provider.instances(POOL)):
        assert (one.is_spot, one.instance_type, one.price_per_hour) == (True, "gpu-mi350x1-288gb", 2.46)


def test_one_several_or_all_regions_can_be_used(make: Make) -> None:
    every = set(REGIONS) - {"atl1", "nyc2"}
    for region, regions in (("nyc1", {"nyc1"}), (("tor1", "ams3"), {"tor1", "ams3"}), (None, every), ("sfo9", set())):
        assert {offer.region for offer in make(region=region).offers(Requirements())} == regions
    assert make().region is None


def test_a_machine_has_two_gigabytes_unless_less_is_required(make: Make) -> None:
    """A requirement may set less memory, or name a size."""
    small = "s-1vcpu-512mb-10gb"
    for want, is_sold in (({}, False), ({"memory_gb": 0.5}, True), ({"instance_type": small}, True)):
        assert (small in {offer.instance_type for offer in make().offers(Requirements(**want))}) == is_sold


def test_the_minimum_charge_is_the_greater_of_a_minute_and_a_cent(make: Make) -> None:
    """Price page, 2026-05: 60 s or $0.01, whichever is higher."""
    offers = {offer.instance_type: offer for offer in make(region=("nyc1", "tor1")).offers(Requirements())}
    small, large = (price_of(offers[slug], make()).cost(1) for slug in ("s-2vcpu-4gb", "gpu-h100x8-640gb"))
    assert small == Decimal("0.01")
    assert large == price_of(offers["gpu-h100x8-640gb"], make()).cost(60) > Decimal("0.3")


def test_one_call_creates_up_to_ten_machines(cloud: FakeDigitalOcean, make: Make) -> None:
    """A single machine is requested by `name`, several by a list."""
    provider = make()
    launched = provider.launch(cheapest(provider, CPU), 21, tags(first_rank=5), STARTUP)
    bodies = [request.body for request in cloud.asked("POST", "/v2/droplets")]
    assert [len(body.get("names", [])) for body in bodies] == [10, 10, 0]
    assert bodies[2]["name"] == f"{POOL}-25-{launch_word(tags())}"
    assert [instance.rank for instance in launched] == list(range(5, 26))
    assert {droplet.id: droplet.name for droplet in cloud.droplets.values()} == {
        int(instance.id): f"{POOL}-{instance.rank}-{launch_word(tags())}" for instance in launched
    }


def test_the_machine_gets_its_host_key_our_key_and_the_startup_script(cloud: FakeDigitalOcean, make: Make) -> None:
    """They are in cloud-init's user data. The endpoint has the same host key. The droplet's id names the directory."""
    provider = make()
    (launched,) = provider.launch(cheapest(provider, CPU), 1, tags(), STARTUP)
    (droplet,) = cloud.droplets.values()
    key = our_key()
    host = host_key(tags()[LAUNCH_TAG], key)
    config = json.loads(droplet.order["user_data"].partition("\n")[2])
    assert config["ssh_keys"]["ed25519_public"] == host.public
    private = load_ssh_private_key(config["ssh_keys"]["ed25519_private"].encode(), None)
    assert private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() == host.public
    assert config["ssh_authorized_keys"] == [key.public]
    assert STARTUP in boot_of(droplet.order)
    assert "/var/lib/cloud/data/instance-id" in boot_of(droplet.order)
    for instance in (launched, *provider.instances(POOL)):
        assert instance.endpoint is not None
        assert instance.endpoint.host == instance.ip == f"198.51.{droplet.id >> 8 & 255}.{droplet.id & 255}"
        assert (instance.endpoint.user, instance.endpoint.port) == ("root", 22)
        assert instance.private_ip is not None
        assert instance.private_ip.startswith("10.116.")
        assert instance.endpoint.key == str(key.path)
        assert instance.endpoint.host_key == host.public
        assert instance.directory == f"/root/.cache/skyward/instances/{droplet.id}"
        assert provider.console_url(instance) == f"https://cloud.digitalocean.com/droplets/{droplet.id}"


def test_image_and_network_can_be_chosen(cloud: FakeDigitalOcean, make: Make) -> None:
    """The id of an image is sent as a number. The network is omitted unless it is configured."""
    with pytest.raises(ValueError, match="name that region with region="):
        make(vpc_uuid="760e09ef-dc84-11e8-981e-3cfdfeaae000")
    provider = make(image="42", region="nyc1", vpc_uuid="760e09ef-dc84-11e8-981e-3cfdfeaae000")
    provider.launch(cheapest(provider, CPU), 1, tags(), STARTUP)
    make().launch(cheapest(provider, CPU), 1, tags(launch="L2"), STARTUP)
    first, second = (droplet.order for droplet in cloud.droplets.values())
    assert (first["image"], first["vpc_uuid"]) == (42, "760e09ef-dc84-11e8-981e-3cfdfeaae000")
    assert second["image"] == "ubuntu-24-04-x64"
    assert "vpc_uuid" not in second


def test_our_key_is_registered_once_and_named_by_its_fingerprint(cloud: FakeDigitalOcean, make: Make) -> None:
    """Otherwise DigitalOcean would send a root password by e-mail. The second launch finds that the key exists."""
    provider = make()
    for token in ("L1", "L2"):
        provider.launch(cheapest(provider, CPU), 1, tags(launch=token), STARTUP)
    (fingerprint,) = cloud.keys
    assert all(droplet.order["ssh_keys"] == [fingerprint] for droplet in cloud.droplets.values())
    assert cloud.keys[fingerprint] == our_key().public
    assert cloud.mails == []
    assert cloud.asked("GET", "/v2/account/keys") == []


ODD = {
    POOL_TAG: "sky-0123456789ab",
    RANK_TAG: "0",
    LAUNCH_TAG: "0123456789abcdef0123456789abcdef",
    OWNER_TAG: "Jörg Müller@DESKTOP-Ü7.example.org",
    PROCESS_TAG: "6dd0a5ce-9d1f-4a5a-8a6f-0b9a3b1f7a11.4026531836.4711:99/boot_id",
    CREATED_TAG: "1790000000",
    EXPIRES_TAG: "",
}


def test_tags_are_preserved(cloud: FakeDigitalOcean, make: Make) -> None:
    """Any content and length is preserved. The fake refuses characters that DigitalOcean does not allow in a tag."""
    provider = make()
    for token, owner in (("L1", ODD[OWNER_TAG]), ("L2", "ü" * 300)):
        given = {**ODD, LAUNCH_TAG: token, OWNER_TAG: owner}
        (launched,) = provider.launch(cheapest(provider, CPU), 1, given, STARTUP)
        listed = {instance.id: instance.tags for instance in provider.instances(ODD[POOL_TAG])}
        assert listed[launched.id] == given
    assert all("skyward" in droplet.order["tags"] for droplet in cloud.droplets.values())


def test_a_machine_without_tags_is_found_by_its_name(cloud: FakeDigitalOcean, make: Make) -> None:
    """Only its own pool finds it. A pool with a similar name does not. It has no endpoint until it has an address."""
    provider = make()
    cloud.slow = 3
    found = cloud.add(name_of(tags(), 4), SIZES[1], {"region": "nyc1", "image": 42, "tags": to_tags(tags())})
    (listed,) = provider.instances(POOL)
    assert (listed.id, listed.rank, listed.state, listed.endpoint, listed.tags) == (
        str(found.id),
        4,
        InstanceState.PENDING,
        None,
        {POOL_TAG: POOL, RANK_TAG: "4"},
    )
    assert provider.instances(POOL[:-1]) == provider.instances() == []


@pytest.mark.parametrize("rank", ["first", "²", "9" * 200])
def test_a_rank_that_somebody_else_has_set_makes_no_listing_fail(
    cloud: FakeDigitalOcean, make: Make, rank: str
) -> None:
    """All droplets are listed, that one with rank 0: it must still be found and destroyed."""
    provider = make()
    (launched,) = provider.launch(cheapest(provider, CPU), 1, tags(first_rank=1), STARTUP)
    order = {"region": "nyc1", "image": 42, "tags": to_tags({POOL_TAG: POOL, RANK_TAG: rank})}
    found = cloud.add("any-name", SIZES[1], order)
    found.looks = 9
    assert {one.id: one.rank for one in provider.instances()} == {launched.id: 1, str(found.id): 0}


def test_each_status_has_a_state() -> None:
    """No status means GONE, because a listed machine is billed. An unknown status does not mean RUNNING."""
    words = {"new": "PENDING", "active": "RUNNING", "off": "STOPPING", "archive": "STOPPING", "migrating": "PENDING"}
    assert {word: state_of({"status": word}).name for word in words} == words


def test_the_image_fits_the_size() -> None:
    row = {"provider": "digitalocean", "instance_type": "x", "region": "nyc1", "price_per_hour": 1}
    for image, chips in {
        "ubuntu-24-04-x64": [(None, 0)],
        "gpu-h100x1-base": [("H100", 1), ("RTX 4000 Ada", 1)],
        "gpu-h100x8-base": [("H200", 8)],
        "gpu-amd-base": [("MI300X", 1), ("MI355X", 8)],
    }.items():
        for chip, count in chips:
            offer = Offer(**row, vcpus=1, memory_gb=1, accelerator=chip, accelerators=count)
            assert image_of(offer) == image


def test_both_listings_are_read_without_a_filter(cloud: FakeDigitalOcean, make: Make) -> None:
    """The default listing has no GPU droplets, and it is not documented whether a filter by tag includes them."""
    provider = make()
    provider.launch(cheapest(provider, GPU), 1, tags(), STARTUP)
    provider.launch(cheapest(provider, CPU), 1, tags(first_rank=1, launch="L2"), STARTUP)
    assert [instance.rank for instance in provider.instances(POOL)] == [0, 1]
    assert not [request for request in cloud.asked("GET", "/v2/droplets$") if "tag_name" in request.query]


def test_a_listing_that_changes_between_pages_loses_no_machine(cloud: FakeDigitalOcean, make: Make) -> None:
    """If a row of the first page is deleted, a row of the second moves to a page that was already read."""
    provider = make()
    for _ in range(200):
        cloud.add("web", SIZES[1], {"region": "nyc1", "image": 42, "tags": []})
    (launched,) = provider.launch(cheapest(provider, CPU), 1, tags(), STARTUP)
    cloud.shrinking = 1
    assert [instance.id for instance in provider.instances(POOL)] == [launched.id]
    for _ in range(200):
        cloud.add("web", SIZES[1], {"region": "nyc1", "image": 42, "tags": []})
    cloud.shrinking = 10**6
    with pytest.raises(ProviderFailed, match="changes while it is read"):
        provider.instances(POOL)


def test_machines_of_other_regions_are_listed_too(cloud: FakeDigitalOcean, make: Make) -> None:
    """`region` limits only offers, because a teardown must find all machines."""
    elsewhere = make(region="tor1")
    elsewhere.launch(cheapest(elsewhere, CPU), 1, tags(), STARTUP)
    assert [instance.region for instance in make(region="ams3").instances(POOL)] == ["tor1"]


def test_machines_with_an_errored_creation_are_destroyed(cloud: FakeDigitalOcean, make: Make) -> None:
    """They are not part of the result."""
    provider = make()
    cloud.errored = 2
    launched = provider.launch(cheapest(provider, GPU), 5, tags(), STARTUP)
    assert [instance.rank for instance in launched] == [2, 3, 4]
    assert {int(instance.id) for instance in launched} == set(cloud.droplets)


def test_errored_machines_that_cannot_be_destroyed_are_not_reported_as_no_capacity(
    cloud: FakeDigitalOcean, make: Make
) -> None:
    """They may be billed, and NoCapacity would mean that no machine is left."""
    provider = make()
    offer = cheapest(provider, CPU)
    cloud.errored = 1
    cloud.fail("DELETE", "/v2/droplets", unprocessable("Droplet already has a pending event."), times=10**6)
    with pytest.raises(ProviderFailed, match="pending event"):
        provider.launch(offer, 1, tags(), STARTUP)
    cloud.errored = 1
    (launched,) = provider.launch(offer, 2, tags(launch="L2"), STARTUP)
    assert launched.rank == 1
    assert len(provider.instances(POOL)) == len(cloud.droplets) == 3


def test_a_machine_without_an_address_is_destroyed_after_the_limit(cloud: FakeDigitalOcean, make: Make) -> None:
    provider = make()
    cloud.slow = 10**6
    with pytest.raises(NoCapacity, match="no address within"):
        provider.launch(cheapest(provider, CPU), 2, tags(), STARTUP)
    assert not cloud.droplets


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (SOLD_OUT, NoCapacity),
        (unprocessable("Droplets of this size are temporarily unavailable due to capacity"), NoCapacity),
        (unprocessable("Something new", error_attributes={"available_regions": ["tor1"]}), NoCapacity),
        *(
            (unprocessable(text), NoCapacity)
            for text in (
                "The nyc1 region is at capacity for this size",
                "Insufficient capacity for the requested GPU",
                "GPU Droplets are sold out.",
                "Something new",
            )
        ),
        (OVER_LIMIT, QuotaExceeded),
        (OVER_GPU_LIMIT, QuotaExceeded),
        (unprocessable("You specified an invalid image for Droplet creation."), BadRequest),
    ],
)
def test_the_message_distinguishes_capacity_quota_and_validation(
    cloud: FakeDigitalOcean, make: Make, reply: Reply, kind: type[Exception]
) -> None:
    provider = make()
    offer = cheapest(provider, CPU)
    cloud.fail("POST", "/v2/droplets", reply)
    with pytest.raises(kind) as caught:
        provider.launch(offer, 1, tags(), STARTUP)
    assert type(caught.value) is kind
    assert caught.value.code == "unprocessable_entity"
    assert len(cloud.asked("POST", "/v2/droplets")) == 1


def test_an_account_without_gpus_is_told_where_to_ask(cloud: FakeDigitalOcean, make: Make) -> None:
    """New accounts have none. Machines without GPU are not concerned."""
    provider = make()
    cloud.gpu_limit = 0
    with pytest.raises(QuotaExceeded, match=r"cloud\.digitalocean\.com/account/team/droplet_limit_increase"):
        provider.launch(cheapest(provider, GPU), 1, tags(), STARTUP)
    assert provider.launch(cheapest(provider, CPU), 1, tags(launch="L2"), STARTUP)


def test_an_unknown_refusal_of_several_offers_is_a_mistake_of_the_request(cloud: FakeDigitalOcean, make: Make) -> None:
    """One may be about capacity. The texts are compared without the names of the offer, and without numbers."""
    provider = make()
    cloud.fail("POST", "/v2/droplets", unprocessable("s-2vcpu-4gb in nyc1 does not go with 7 of this"))
    cloud.fail("POST", "/v2/droplets", unprocessable("gpu-4000adax1-20gb in tor1 does not go with 9 of this"))
    mistakes = set[str]()
    for want in (CPU, Requirements(instance_type="gpu-4000adax1-20gb")):
        offer = cheapest(provider, want)
        offer = offer.model_copy(update={"region": "nyc1" if want is CPU else "tor1"})
        with pytest.raises(NoCapacity) as caught:
            provider.launch(offer, 1, tags(), STARTUP)
        mistakes.add(caught.value.mistake)
    assert mistakes == {"... in ... does not go with ... of this"}
    cloud.fail("POST", "/v2/droplets", SOLD_OUT)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(cheapest(provider, CPU), 1, tags(launch="L2"), STARTUP)
    assert caught.value.mistake == ""


def test_regions_that_sell_the_size_are_known_beyond_the_configured_one(make: Make) -> None:
    (answer,) = ask([make(region="ams3")], GPU)
    _, (refused,) = candidates(sky.PoolSpec.of(accelerator="H100"), [answer])
    assert "digitalocean sells it now in nyc1, tor1: write one of them as region=" in refused.message
    assert {offer.region for offer in answer.offers} == {"ams3"}


def test_a_lost_answer_without_a_listing_is_an_unknown_outcome(cloud: FakeDigitalOcean, make: Make) -> None:
    """A droplet may appear in the listing later, so the error must not deny its existence."""
    provider = make()
    offer = cheapest(provider, CPU)
    cloud.hidden = 2
    cloud.fail("POST", "/v2/droplets", is_done=True)
    with pytest.raises(ProviderFailed) as caught:
        provider.launch(offer, 1, tags(), STARTUP)
    assert not isinstance(caught.value, RateLimited)
    found = [provider.instances(POOL) for _ in range(3)]
    assert [len(each) for each in found] == [0, 1, 1]
    assert provider.listing_lag_seconds > 0


def test_the_hourly_limit_is_waited_out(cloud: FakeDigitalOcean, make: Make, clock: Clock) -> None:
    """The error has no Retry-After."""
    clock.start = 1790000000.0
    cloud.fail(
        "GET",
        "/v2/account",
        Reply(429, {"id": "too_many_requests"}, {"ratelimit-remaining": "0", "ratelimit-reset": "1790000021"}),
    )
    make().account()
    assert clock.pauses == [21.0]


def test_a_machine_that_cannot_be_destroyed_does_not_keep_others(cloud: FakeDigitalOcean, make: Make) -> None:
    """All are tried, and the error names those that are left."""
    provider = make()
    ids = [instance.id for instance in provider.launch(cheapest(provider, CPU), 4, tags(), STARTUP)]
    cloud.fail("DELETE", f"/v2/droplets/{ids[1]}", unprocessable("Droplet already has a pending event."))
    with pytest.raises(InstancesLeft) as caught:
        provider.terminate(ids)
    assert caught.value.ids == (ids[1],)
    assert set(cloud.droplets) == {int(ids[1])}


def test_an_outage_delays_terminate_only_for_a_limited_time(cloud: FakeDigitalOcean, make: Make) -> None:
    """After the first deletions have used the time, each of the others is tried once."""
    cloud.is_out = True
    ids = [str(number) for number in range(1000, 1064)]
    with pytest.raises(InstancesLeft) as caught:
        make().terminate(ids)
    assert sorted(caught.value.ids) == ids
    often = [machine_id for machine_id in ids if len(cloud.asked("DELETE", f"/v2/droplets/{machine_id}")) > 1]
    assert 1 <= len(often) <= 16


def test_without_a_node_token_a_machine_powers_off(cloud: FakeDigitalOcean, make: Make, tmp_path: Path) -> None:
    """The machine has no other credential."""
    provider = make(token=TOKEN)
    provider.launch(cheapest(provider, CPU), 1, tags(), STARTUP)
    (droplet,) = cloud.droplets.values()
    assert "\npoweroff\n" in boot_of(droplet.order)
    assert TOKEN not in droplet.order["user_data"]
    assert "api.digitalocean.com" not in droplet.order["user_data"]


def test_the_node_token_is_in_no_error_message(cloud: FakeDigitalOcean, make: Make) -> None:
    """An answer may quote the request, and pydantic may quote the value."""
    provider = make(node_token=NODE_TOKEN)
    cloud.fail("POST", "/v2/droplets", unprocessable(f"what is this: {NODE_TOKEN} of {TOKEN}"))
    with pytest.raises(NoCapacity) as caught:
        provider.launch(cheapest(provider, CPU), 1, tags(), STARTUP)
    assert "dop_v1" not in str(caught.value)
    with pytest.raises(BadRequest) as caught:
        load({"name": "digitalocean", "node_token": [NODE_TOKEN]})
    assert NODE_TOKEN not in str(caught.value)


def test_the_token_comes_from_the_field_a_variable_or_doctls_file(
    cloud: FakeDigitalOcean, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The field has precedence, then the variables in their order, then doctl's file."""
    provider = make()
    monkeypatch.setenv("DIGITALOCEAN_TOKEN", "wrong")
    monkeypatch.setenv("DIGITALOCEAN_ACCESS_TOKEN", TOKEN)
    assert make(token=TOKEN).account() == TEAM
    with pytest.raises(CredentialsError):
        provider.account()
    monkeypatch.delenv("DIGITALOCEAN_TOKEN")
    assert provider.account() == TEAM
    monkeypatch.delenv("DIGITALOCEAN_ACCESS_TOKEN")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(CredentialsError, match="DIGITALOCEAN_TOKEN"):
        provider.account()
    (tmp_path / "doctl").mkdir()
    (tmp_path / "doctl/config.yaml").write_text(f"access-token: {TOKEN}\noutput: text\n")
    assert provider.account() == TEAM
    (tmp_path / "doctl/config.yaml").write_bytes(b"\xff")
    with pytest.raises(CredentialsError, match="cannot be read"):
        provider.account()


def test_doctls_current_context_is_used() -> None:
    """The token of another context may belong to another account."""
    config = "access-token: first\nauth-contexts:\n  home: second\n  work: third\ncompute:\n  work: no\ncontext: {}\noutput: text\n"
    assert doctl_token(config.format("default")) == "first"
    assert doctl_token(config.format("work")) == "third"
    assert doctl_token(config.format("home")) == "second"
    assert doctl_token(config.format("gone")) == ""
    assert doctl_token("access-token: 'quoted'\n") == "quoted"
    assert doctl_token('access-token: ""\n') == doctl_token("") == ""


def test_the_url_can_come_from_the_variable_of_digitaloceans_tools(
    cloud: FakeDigitalOcean, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGITALOCEAN_API_URL", cloud.url + "/")
    assert DigitalOcean().account() == TEAM


def test_the_python_blocks_of_the_docs_run() -> None:
    """They are in docs/clouds/digitalocean.md."""
    page = Path(__file__).parents[3] / "docs/clouds/digitalocean.md"
    for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(page).examples():
        example.evaluate()


def test_machines_of_a_lost_answer_are_looked_up_and_not_requested_again(cloud: FakeDigitalOcean, make: Make) -> None:
    """Machines with the requested names belong to the launch."""
    provider = make()
    offer = cheapest(provider, GPU)
    cloud.fail("POST", "/v2/droplets", is_done=True)
    assert [instance.rank for instance in provider.launch(offer, 3, tags(), STARTUP)] == [0, 1, 2]
    assert len(cloud.asked("POST", "/v2/droplets")) == 1
    assert len(cloud.droplets) == 3


def test_machines_created_before_a_refusal_are_returned(cloud: FakeDigitalOcean, make: Make) -> None:
    """The second call of two is refused: ten machines exist, and no further call is made."""
    provider = make()
    offer = cheapest(provider, CPU)
    cloud.stock = 15
    assert len(provider.launch(offer, 25, tags(), STARTUP)) == 10
    assert len(cloud.asked("POST", "/v2/droplets")) == 2


def test_a_single_refused_deletion_is_no_credentials_error(cloud: FakeDigitalOcean, make: Make) -> None:
    provider = make()
    ids = [instance.id for instance in provider.launch(cheapest(provider, CPU), 2, tags(), STARTUP)]
    cloud.fail(
        "DELETE",
        f"/v2/droplets/{ids[0]}",
        Reply(403, {"id": "forbidden", "message": "You are not authorized to perform this operation"}),
    )
    with pytest.raises(InstancesLeft, match="not authorized"):
        provider.terminate(ids)
    assert set(cloud.droplets) == {int(ids[0])}
