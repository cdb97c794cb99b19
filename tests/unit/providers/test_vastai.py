"""Vast.ai: the contract of all providers, and the peculiarities of a market of containers."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest, CredentialsError, InstancesLeft, NoCapacity, ProviderFailed, RateLimited
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers import userdata as ssh_keys
from skyward_core.providers import vastai
from skyward_core.providers.base import EXPIRES_TAG, LAUNCH_TAG, load
from skyward_core.providers.tagging import MORE_TAGS
from skyward_core.providers.vastai import MAIN, UNPACKED, VastAI, environment_of, joined
from skyward_core.providers.vastai_schedule import WEEK_SECONDS, first_run, path_of
from tests.providers.contract import POOL, STARTUP, Make, RestContract, tags
from tests.providers.contract import cheapest as cheapest_of
from tests.providers.fake_vastai import GONE, KEY, SPENT, FakeVast, ask, refusal
from tests.providers.http_fake import Reply
from tests.providers.in_process import Clock, Install

RTX_4090 = Requirements(accelerator=sky.accelerators.parse("RTX 4090"))


@pytest.fixture
def fake(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeVast:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    in_process(fake := FakeVast())
    monkeypatch.setenv("VAST_URL", fake.url)
    monkeypatch.setenv("VAST_API_KEY", KEY)
    fake.sell(*(ask(number) for number in range(101, 107)))
    fake.sell(
        ask(201, "H100 SXM", 8, 19.2, gpu_ram=81559, geolocation="Sweden, SE"),
        ask(202, "GTX 1070", 1, 0.05, gpu_ram=8192),
    )
    return fake


class TestVastAI(RestContract):
    want, secrets, variables = RTX_4090, (KEY,), ("VAST_API_KEY",)
    explicit = {"api_key": KEY}
    ending = ("DELETE", "/api/v0/instances/")

    @pytest.fixture
    def cloud(self, fake: FakeVast) -> FakeVast:
        return fake

    @pytest.fixture
    def make(self) -> Make:
        return VastAI


def cheapest(want: Requirements = RTX_4090, *, is_spot: bool = False, provider: VastAI | None = None) -> Offer:
    return cheapest_of(provider or VastAI(), want, is_spot=is_spot)


def rented(fake: FakeVast) -> list[int]:
    """Return the ids of the tried offers of the market, in order."""
    return [int(request.path.split("/")[4]) for request in fake.asked("PUT", "/api/v0/asks/")]


def test_traffic_and_disk_are_counted_at_the_hosts_prices(fake: FakeVast) -> None:
    """Traffic is an estimate. A class has the highest extra costs of its machines."""
    there = {"geolocation": "Quebec, CA"}
    costs = {"inet_down_cost": 0.002, "inet_up_cost": 0.01, "storage_cost": 0.18, **there}
    fake.sell(
        ask(91, price=0.30, **costs),
        ask(92, price=0.30, **there),
        ask(93, price=0.29, **{**costs, "inet_down_cost": 0.1}),
        ask(94, price=0.20, **costs),
    )
    provider = VastAI(region="CA", disk_gb=40, traffic_down_gb_per_hour=5, traffic_up_gb_per_hour=1)
    offers = [offer for offer in provider.offers(RTX_4090) if not offer.is_spot]
    assert [
        (offer.price_per_hour, [(extra.name, extra.usd_per_hour) for extra in offer.extras_per_hour])
        for offer in offers
    ] == [(0.20, [("traffic", 0.02)]), (0.30, [("traffic", 0.02)]), (0.29, [("traffic", 0.51)])]
    bid = cheapest(is_spot=True, provider=provider)
    assert [(extra.name, extra.usd_per_hour) for extra in bid.extras_per_hour] == [("disk", 0.01), ("traffic", 0.02)]
    machines = provider.launch(offers[1], 4, tags(), STARTUP)
    assert sorted(rented(fake)) == [91, 92, 94]
    assert len(machines) == 3


def test_a_country_has_one_name(fake: FakeVast) -> None:
    """A listing may have "California, United States", and an offer "Texas, US"."""
    there = {"price": 0.1, "gpu_name": "RTX A5000"}
    fake.sell(
        ask(71, geolocation="California, United States", **there),
        ask(72, geolocation="Texas, US", **there),
        ask(73, geolocation="Ohio, Narnia", **there),
    )
    want = Requirements(accelerator=sky.accelerators.parse("RTX A5000"))
    assert {offer.region for offer in VastAI().offers(want)} == {"US", "Narnia"}
    offers = [offer for offer in VastAI(region="US").offers(want) if not offer.is_spot]
    assert [offer.region for offer in offers] == ["US"]
    assert fake.asked("POST", "/api/v0/bundles/")[-1].body["geolocation"] == {
        "in": ["US", "United States", "United States of America"]
    }
    machines = VastAI(region="US").launch(offers[0], 2, tags(), STARTUP)
    assert sorted(rented(fake)) == [71, 72]
    assert {machine.region for machine in machines} == {"US"}


@pytest.mark.parametrize(
    ("settings", "needed", "asked"),
    [
        ({}, None, {"gte": 12.4}),  # the container's image, by its name
        ({}, 12.8, {"gte": 12.8}),
        ({"image": "ubuntu:24.04"}, None, None),
        ({"min_cuda": 12.0}, 12.8, {"gte": 12.0}),
    ],
)
def test_cuda_has_the_version_that_the_image_needs(
    fake: FakeVast, settings: dict[str, Any], needed: float | None, asked: object
) -> None:
    """It is in the first search and in the search of the launch. A setting overrides it."""
    want = RTX_4090.model_copy(update={"min_cuda": needed})
    offer = cheapest(want, provider=VastAI(**settings))
    VastAI(**settings).launch(offer, 1, tags(), STARTUP)
    assert {str(request.body.get("cuda_max_good")) for request in fake.asked("POST", "/api/v0/bundles/")} == {
        str(asked)
    }


def test_a_search_has_the_requirements_in_the_units_of_the_market(fake: FakeVast) -> None:
    """It holds on demand and for bids. Chips have the market's names."""
    VastAI(region=("US", "CA"), disk_gb=100, min_hours_left=2).offers(
        Requirements(accelerator=sky.accelerators.parse("2xA100"), max_price_per_hour=3)
    )
    on_demand, bids = (request.body for request in fake.asked("POST"))
    assert on_demand == {
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "external": {"eq": False},
        "verified": {"eq": True},
        "reliability2": {"gte": 0.98},
        "direct_port_count": {"gte": 2},
        "inet_down": {"gte": 200.0},
        "disk_space": {"gte": 100},
        "duration": {"gte": 7200.0},
        "cuda_max_good": {"gte": 12.4},
        "gpu_name": {"in": ["A100", "A100 PCIE", "A100 SXM4", "A100X"]},
        "num_gpus": {"gte": 2},
        "geolocation": {"in": ["US", "CA", "Canada", "United States", "United States of America"]},
        "dph_total": {"lte": 3.0},
        "type": "on-demand",
        "order": [["dph_total", "asc"]],
        "limit": 64,
        "allocated_storage": 100,
    }
    assert bids["type"] == "bid"
    assert (bids["min_bid"], bids["order"]) == ({"lte": 3.0}, [["min_bid", "asc"]])
    assert "dph_total" not in bids


def test_a_search_has_a_single_form_factor_and_no_cuda_for_amd(fake: FakeVast) -> None:
    VastAI().offers(Requirements(accelerator=sky.accelerators.parse("H100-NVL")))
    VastAI(verified_only=False).offers(Requirements(accelerator=sky.accelerators.parse("MI300X")))
    VastAI().offers(Requirements(instance_type="InstinctMI300Xx8"))
    nvl, _, amd, _, type_of_amd, _ = (request.body for request in fake.asked("POST"))
    assert nvl["gpu_name"] == {"in": ["H100", "H100 NVL"]}
    assert amd["gpu_name"] == {"in": ["InstinctMI300X", "MI300X"]}
    assert not amd.keys() & {"cuda_max_good", "verified"}
    assert (type_of_amd["gpu_name"], type_of_amd["num_gpus"]) == ({"eq": "InstinctMI300X"}, {"eq": 8})
    assert "cuda_max_good" not in type_of_amd


@pytest.mark.parametrize(
    ("listed", "chip", "memory_gb", "instance_type"),
    [
        (("RTX 4090", 24564), "RTX 4090", 24, "RTX_4090x2"),
        (("A100 SXM4", 40960), "A100", 40, "A100_SXM4_40GBx2"),
        (("A100 PCIE", 81920), "A100", 80, "A100_PCIE_80GBx2"),
        (("H100 NVL", 95830), "H100", 94, "H100_NVLx2"),
        (("RTX PRO 6000 Max-Q", 97887), "RTX PRO 6000", 96, "RTX_PRO_6000_Max-Qx2"),
        (("Q RTX 8000", 49152), "Quadro RTX 8000", 48, "Q_RTX_8000x2"),
        (("InstinctMI100", 32752), "MI100", 32, "InstinctMI100x2"),
    ],
)
def test_offers_have_the_catalogues_names_and_launches_the_markets(
    fake: FakeVast, listed: tuple[str, int], chip: str, memory_gb: float, instance_type: str
) -> None:
    """The market's name can be derived from the class's name."""
    fake.asks.clear()
    fake.sell(ask(1, listed[0], 2, 1.0, gpu_ram=listed[1]))
    (offer,) = [offer for offer in VastAI().offers(Requirements()) if not offer.is_spot]
    assert (offer.accelerator, offer.accelerator_memory_gb, offer.instance_type) == (chip, memory_gb, instance_type)
    assert [offer.instance_type for offer in VastAI().offers(Requirements(instance_type=instance_type))] == [
        instance_type
    ] * 2
    (machine,) = VastAI().launch(offer, 1, tags(), STARTUP)
    assert machine.instance_type == instance_type


def test_an_unknown_chip_or_a_missing_price_is_not_offered(fake: FakeVast) -> None:
    """An invalid class of machines is not offered either."""
    fake.asks.clear()
    fake.sell(ask(1, "GTX 1070"), ask(2, price=0.0))
    assert VastAI().offers(Requirements()) == []
    assert VastAI().offers(Requirements(instance_type="g5.xlarge")) == []


def test_a_bid_is_a_separate_offer(fake: FakeVast) -> None:
    """It is slightly above the lowest bid, with the price on demand if that is known."""
    fake.asks.clear()
    fake.sell(
        ask(1, price=0.4, min_bid=0.15),
        ask(2, price=0.5, min_bid=0.6),
        ask(3, price=0.7, min_bid=0.16, geolocation="Sweden, SE"),
    )
    spot = [offer for offer in VastAI().offers(RTX_4090) if offer.is_spot]
    assert [(offer.price_per_hour, offer.on_demand_price_per_hour, offer.region) for offer in spot] == [
        (pytest.approx(0.165), 0.4, "US"),
        (pytest.approx(0.176), 0.7, "SE"),
    ]
    spot = [offer for offer in VastAI(bid_margin=2).offers(RTX_4090) if offer.is_spot]
    assert [offer.region for offer in spot] == ["SE"]


def test_all_pages_of_a_search_are_read(fake: FakeVast) -> None:
    """One search returns at most 64 rows."""
    fake.asks.clear()
    fake.sell(*(ask(number, price=0.2 + number / 1000) for number in range(1, 151)))
    prices = {offer.price_per_hour for offer in VastAI().offers(RTX_4090) if not offer.is_spot}
    assert len(prices) == 150
    assert [request.body["dph_total"] for request in fake.asked("POST") if "dph_total" in request.body] == [
        {"gte": 0.264},
        {"gte": 0.327},
    ]
    fake.sell(*(ask(number, price=0.2 + number / 1000) for number in range(151, 600)))
    fake.requests.clear()
    VastAI().offers(RTX_4090)
    assert len(fake.asked("POST")) == 8


def test_results_that_do_not_match_the_search_are_filtered(fake: FakeVast) -> None:
    """The market has returned dearer and worse machines than requested."""
    fake.is_sloppy = True
    fake.asks.clear()
    bad: tuple[dict[str, Any], ...] = (
        {"reliability2": 0.9},
        {"inet_down": 10},
        {"direct_port_count": 0},
        {"disk_space": 8},
        {"duration": 60},
        {"cuda_max_good": 11.8},
    )
    fake.sell(*(ask(number, **fields) for number, fields in enumerate(bad, 1)), ask(50, price=9.0), ask(60))
    want = Requirements(accelerator=RTX_4090.accelerator, max_price_per_hour=1)
    assert [offer.price_per_hour for offer in VastAI().offers(want) if not offer.is_spot] == [0.35]
    VastAI().launch(cheapest(want), 1, tags(), STARTUP)
    assert rented(fake) == [60]


def test_the_quota_of_searches_is_not_waited_out(fake: FakeVast) -> None:
    """It is renewed at midnight, so the error is raised at once."""
    body = {"success": False, "error": "search_quota_exceeded", "msg": "Daily search quota exceeded"}
    fake.fail("POST", "/api/v0/bundles/", Reply(429, body), times=100)
    with pytest.raises(RateLimited, match="midnight") as caught:
        VastAI().offers(RTX_4090)
    assert caught.value.code == "search_quota_exceeded"
    assert len(fake.asked("POST")) == 1


def test_the_parameters_of_the_creating_call(fake: FakeVast) -> None:
    """Our script is the container's entrypoint, port 22 is mapped, and there is no queueing and no price."""
    (machine,) = VastAI(image="pytorch/pytorch:2.5.1", disk_gb=64).launch(cheapest(), 1, tags(), STARTUP)
    (request,) = fake.asked("PUT")
    body = request.body
    env = body.pop("env")
    assert body == {
        "client_id": "me",
        "image": "pytorch/pytorch:2.5.1",
        "disk": 64,
        "label": fake.containers[int(machine.id)]["label"],
        "runtype": "args",
        "user": "root",
        "onstart": "/bin/sh",
        "args": ["-c", MAIN.format(UNPACKED)],
        "target_state": "running",
        "cancel_unavail": True,
    }
    assert env["-p 22:22"] == "1"
    assert len(env) > 10 and max(map(len, env.values())) <= 240  # the schema allows 256 characters
    script = gzip.decompress(base64.b64decode(joined(env, "SKYWARD_BOOT"))).decode()
    assert STARTUP in script
    key = ssh_keys.our_key()
    host = ssh_keys.host_key(tags()[LAUNCH_TAG], key)
    assert key.public in script and host.public in script
    assert machine.endpoint is not None
    assert (machine.endpoint.host, machine.endpoint.port) == ("198.51.100.7", 20000 + int(machine.id) % 1000)
    assert (machine.endpoint.user, machine.endpoint.key, machine.endpoint.host_key) == (
        "root",
        str(key.path),
        host.public,
    )
    assert machine.directory == f"/root/.cache/skyward/instances/{POOL}-0"
    assert f"id=$(printf %s {POOL}-0)\n" in script  # its id is known before


@pytest.mark.parametrize("length", [0, 1, 239, 240, 241, 9600])
def test_long_values_of_the_environment_are_split_and_joined(length: int) -> None:
    """Also tags that have no room in the label."""
    boot, more = "b" * length, "".join(chr(65 + number % 26) for number in range(length))
    environment = environment_of(boot, {MORE_TAGS: more})
    assert (joined(environment, "SKYWARD_BOOT"), joined(environment, MORE_TAGS)) == (boot, more)
    assert all(len(value) <= 240 for value in environment.values())


def test_a_script_that_vast_would_refuse_is_refused_before(fake: FakeVast) -> None:
    """Before anything is rented, with the reason."""
    words = " ".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(1200))
    with pytest.raises(BadRequest, match=r"an environment at Vast\.ai has 32768 characters at most"):
        VastAI().launch(cheapest(), 1, tags(), f"#!/bin/sh\n: {words}\n")
    assert fake.asked("PUT") == []


def test_each_machine_uses_another_offer(fake: FakeVast) -> None:
    """The next offer is used if one is gone, for any form of that error. Ranks and labels stay."""
    fake.refused |= {101: GONE, 103: Reply(410, {"success": False, "error": "no_such_ask", "msg": "gone"})}
    fake.refused[104] = Reply(400, {"success": False, "error": "invalid_args", "msg": "error 400/3467: no_such_ask"})
    machines = VastAI().launch(cheapest(), 3, tags(first_rank=5), STARTUP)
    assert rented(fake) == [101, 102, 103, 104, 105, 106]
    assert [machine.rank for machine in machines] == [5, 6, 7]
    assert len({machine.id for machine in machines}) == 3


def test_the_number_of_tried_offers_is_limited(fake: FakeVast) -> None:
    fake.sell(*(ask(number) for number in range(300, 330)))
    fake.fail("PUT", "/api/v0/asks/", GONE, times=100)
    with pytest.raises(NoCapacity) as caught:
        VastAI().launch(cheapest(), 2, tags(), STARTUP)
    assert caught.value.code == "no_such_ask"
    assert len(rented(fake)) == 6


def test_no_machine_above_the_offers_price_is_rented(fake: FakeVast) -> None:
    """The limit is the offer's price, which is used for the cost, plus a tolerance."""
    offer = cheapest()
    fake.asks.clear()
    fake.sell(
        ask(1, price=0.356),
        ask(2, price=0.36),
        ask(3, cpu_cores_effective=8.0),
        ask(4, cpu_ram=256000),
        ask(5, geolocation="Sweden, SE"),
        ask(6, gpus=2),
    )
    with pytest.raises(NoCapacity):
        VastAI().launch(offer, 4, tags(), STARTUP)
    (machine,) = VastAI(price_tolerance=0.02).launch(offer, 4, tags(), STARTUP)
    assert rented(fake) == [1]
    assert machine.price_per_hour == 0.356
    fake.sell(ask(1, price=0.356))
    assert len(VastAI(price_tolerance=0.1).launch(offer, 4, tags(launch="L2"), STARTUP)) == 2


def test_several_machines_come_from_one_cluster_if_possible(fake: FakeVast) -> None:
    """The cheapest cluster, or machine, that has enough offers is used. For one machine the cheapest offer is used."""
    fake.sell(
        ask(301, price=0.351, cluster_id=7),
        ask(302, price=0.352, cluster_id=7),
        ask(303, price=0.351, machine_id=9),
        ask(304, price=0.353, machine_id=9),
    )
    offer = cheapest()
    provider = VastAI(price_tolerance=0.02)
    provider.launch(offer, 2, tags(), STARTUP)
    provider.launch(offer, 2, tags(launch="L2"), STARTUP)
    provider.launch(offer, 1, tags(launch="L3"), STARTUP)
    assert rented(fake) == [301, 302, 303, 304, 101]


def test_a_spot_machine_is_a_bid_at_the_offers_price(fake: FakeVast) -> None:
    """Without a price it would be on demand. An offer is skipped if its lowest bid is above the price."""
    offer = cheapest(is_spot=True)
    bid = offer.price_per_hour
    assert bid == pytest.approx(0.175 * 1.1)
    fake.asks[101] |= {"min_bid": 0.2}
    fake.refused[102] = Reply(
        400, {"success": False, "error": "invalid_price", "msg": "error 400/3513: bid is below the minimum"}
    )
    (machine,) = VastAI().launch(offer, 1, tags(), STARTUP)
    assert rented(fake) == [102, 103]
    assert [request.body["price"] for request in fake.asked("PUT")] == [bid, bid]
    assert (machine.is_spot, machine.price_per_hour, machine.on_demand_price_per_hour) == (True, bid, None)
    assert fake.asked("POST")[-1].body["type"] == "bid"


@pytest.mark.parametrize("status", [200, 400, 503])
def test_a_container_of_a_refused_call_is_destroyed(fake: FakeVast, status: int) -> None:
    """A failed bid leaves a stopped container, which is billed."""
    fake.refused[101] = Reply(status, {"success": False, "error": "no_such_ask", "msg": "outbid", "new_contract": 0})
    machines = VastAI().launch(cheapest(is_spot=True), 1, tags(), STARTUP) if status != 503 else []
    if status == 503:
        with pytest.raises(ProviderFailed):
            VastAI().launch(cheapest(is_spot=True), 1, tags(), STARTUP)
    assert {str(contract) for contract in fake.containers} == {machine.id for machine in machines}
    assert len(fake.asked("DELETE")) == 1


def test_creating_calls_have_a_minimum_distance(fake: FakeVast, clock: Clock) -> None:
    """Vast.ai refuses calls that come sooner."""
    VastAI().launch(cheapest(), 3, tags(), STARTUP)
    assert clock.pauses[:3] == [0.0, vastai.CREATE_SECONDS, vastai.CREATE_SECONDS]
    assert vastai.CREATE_SECONDS > 4


def test_a_creating_call_that_came_too_early_is_repeated_late_enough(fake: FakeVast, clock: Clock) -> None:
    """Vast.ai wants 4.5 s between two, and punishes an earlier one. The next call keeps the distance to the last try."""
    fake.fail("PUT", "/api/v0/asks/", fake.too_many, times=2)
    VastAI().launch(cheapest(), 2, tags(), STARTUP)
    assert clock.pauses[:4] == [0.0, 4.5, 9.0, vastai.CREATE_SECONDS]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refusal(404, "", "Invalid user key"), "make another at"),
        (refusal(404, "auth_error", "Session expired. Please log in again."), "make another at"),
        (refusal(401, "auth_error", "API key lacks the api.instances route access"), "give it instance_read"),
    ],
)
def test_a_refused_key_is_known_by_its_words(fake: FakeVast, reply: Reply, words: str) -> None:
    """Some calls refuse it with 404, and all refuse a right with 401."""
    offer = cheapest()
    for verb in (lambda: VastAI().launch(offer, 1, tags(), STARTUP), lambda: VastAI().terminate(["30000001"])):
        fake.fail("PUT", "/api/v0/asks/", reply)
        fake.fail("DELETE", "/api/v0/instances/", reply, times=2)
        with pytest.raises(CredentialsError, match=words):
            verb()
        fake.faults.clear()


def test_an_account_of_a_host_may_not_rent_others_machines(fake: FakeVast) -> None:
    """Its 403 is no missing right of the key."""
    words = "Offer 101 is not your own. Hosts can only rent their own machines"
    fake.fail("PUT", "/api/v0/asks/", refusal(403, "invalid_args", words))
    with pytest.raises(BadRequest, match="Hosts can only rent"):
        VastAI().launch(cheapest(), 1, tags(), STARTUP)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, {"success": False, "new_contract": 1}),
        refusal(400, "invalid_args", "error 400/3467: Invalid args: the host is blacklisted"),
        refusal(404, "invalid_args", "No ask by id 101 is available."),
    ],
    ids=["stopped", "blacklisted", "gone"],
)
def test_an_offer_that_cannot_be_had_is_not_the_last_one(fake: FakeVast, reply: Reply) -> None:
    """Vast.ai may create the container nevertheless, and stop it: it is destroyed."""
    fake.refused[101] = reply
    (machine,) = VastAI().launch(cheapest(), 1, tags(), STARTUP)
    assert (rented(fake), fake.alive()) == ([101, 102], {machine.id})


@pytest.mark.parametrize(
    ("user", "quotas"),
    [
        ({"credit": 12.5, "balance": 0}, {"credit in USD": 12.5}),
        ({"credit": 0, "balance": 7.0}, {"balance in USD": 7.0}),
        ({"credit": 0, "balance": 0}, {"credit in USD": 0.0}),
    ],
)
def test_the_money_of_an_account_is_its_credit_or_its_balance(
    fake: FakeVast, user: dict[str, Any], quotas: dict[str, float]
) -> None:
    """By the schema `balance` is what was paid, and `credit` was given; other programs show `credit`."""
    fake.fail("GET", "/api/v0/users/current/", Reply(200, {"id": 4711, **user}))
    assert VastAI().quotas() == quotas


@pytest.mark.parametrize(
    "reply", [SPENT, refusal(429, "spend_rate_limit", "slow down"), refusal(400, "invalid_args", "Spend rate limit")]
)
def test_the_spend_rate_limit_is_a_quota(fake: FakeVast, reply: Reply) -> None:
    """Another offer does not help, and waiting does not either. The error says what does."""
    fake.fail("PUT", "/api/v0/asks/", reply, times=99)
    with pytest.raises(sky.QuotaExceeded, match=r"ask Vast\.ai's support for a higher limit"):
        VastAI().launch(cheapest(), 1, tags(), STARTUP)
    assert len(fake.asked("PUT")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {
            "actual_status": "created",
            "status_msg": "Error response from daemon: failed to create task: OCI runtime create failed: runc",
        },
        {"actual_status": "loading", "status_msg": "manifest unknown: manifest tagged by 12.4.1 is not found"},
        {"actual_status": "exited", "status_msg": "exit 1"},
    ],
)
def test_a_failed_container_is_destroyed_and_the_next_host_is_tried(fake: FakeVast, fields: dict[str, str]) -> None:
    """A noticeable share of hosts fails."""
    fake.broken |= {101: fields, 102: fields}
    machines = VastAI().launch(cheapest(), 2, tags(), STARTUP)
    assert rented(fake) == [101, 102, 103, 104]
    assert [machine.rank for machine in machines] == [0, 1]
    assert {str(contract) for contract in fake.containers} == {machine.id for machine in machines}


def test_an_unknown_outcome_is_not_reported_as_no_capacity(fake: FakeVast) -> None:
    """NoCapacity means that no machine was created."""
    fake.broken[101] = {"actual_status": "exited"}
    fake.refused[102] = Reply(503, "upstream", is_text=True)
    with pytest.raises(ProviderFailed, match="503"):
        VastAI().launch(cheapest(), 2, tags(), STARTUP)
    assert fake.containers == {}
    fake.asks = {103: fake.asks[103]}
    fake.broken[103] = {"actual_status": "exited"}
    fake.refuses_bulk = Reply(400, {"error": "invalid_args", "msg": "invalid request format"})
    fake.undying = {fake.next_contract + 1}
    with pytest.raises(ProviderFailed, match="did not destroy"):
        VastAI().launch(cheapest(), 1, tags(launch="L2"), STARTUP)
    assert len(fake.containers) == 1


def test_a_container_that_loads_for_too_long_is_destroyed(fake: FakeVast, clock: Clock) -> None:
    """The other containers are returned."""
    fake.broken[102] = {"actual_status": "loading", "status_msg": "Pulling fs layer"}
    (machine,) = VastAI().launch(cheapest(), 2, tags(), STARTUP)
    assert machine.rank == 0
    assert {str(contract) for contract in fake.containers} == {machine.id}


def test_a_machine_that_disappears_during_the_wait_ends_the_launch(
    fake: FakeVast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two listings lack it after one that had it."""
    fake.hidden = 2
    listings: list[int] = []
    listing = vastai.all_containers

    def vanishing(api: Any) -> Iterator[Any]:
        listings.append(len(rows := list(listing(api))))
        if rows and len(rented(fake)) == 1:
            fake.containers.clear()
        yield from rows

    monkeypatch.setattr(vastai, "all_containers", vanishing)
    with pytest.raises(NoCapacity) as caught:
        VastAI().launch(cheapest(), 1, tags(), STARTUP)
    assert caught.value.code == "gone"
    assert rented(fake) == [101]
    assert listings == [0, 0, 1, 0, 0]
    assert fake.containers == {}


# ── ends that Vast.ai carries out ────────────────────────────────────────────────────────────────────────────────────


def test_vast_destroys_a_stopped_container_at_the_first_full_hour_after_the_hard_end(fake: FakeVast) -> None:
    """It was outbid, and no program of ours runs any more. A job whose start is in an hour runs at its beginning."""
    expires = 1_790_003_700  # five minutes past an hour
    machine, other = VastAI(schedule_end=True).launch(cheapest(), 2, {**tags(), EXPIRES_TAG: str(expires)}, STARTUP)
    fake.preempt(machine.id)
    fake.run_jobs(expires)
    assert fake.alive() == {machine.id, other.id}
    fake.run_jobs(first_run(expires))
    assert (fake.alive(), first_run(expires)) == (set(), 1_790_006_400)


def test_the_jobs_of_destroyed_containers_are_removed(fake: FakeVast) -> None:
    """Also of one that failed in the launch. Those of others stay, and so does that of a container that is left."""
    fake.jobs[7] = {"id": 7, "api_endpoint": "/api/v0/instances/reboot/30000001/", "request_method": "PUT"}
    fake.broken[101] = {"actual_status": "exited"}
    provider = VastAI(schedule_end=True)
    gone, left = provider.launch(cheapest(), 2, {**tags(), EXPIRES_TAG: "1790003700"}, STARTUP)
    assert {job["api_endpoint"] for job in fake.jobs.values()} == {
        "/api/v0/instances/reboot/30000001/",
        path_of(int(gone.id)),
        path_of(int(left.id)),
    }
    fake.undying.add(int(left.id))
    fake.refuses_bulk = Reply(410, {"error": "gone"})
    with pytest.raises(InstancesLeft):
        provider.terminate([gone.id, left.id])
    assert [job["api_endpoint"] for job in fake.jobs.values()] == [
        "/api/v0/instances/reboot/30000001/",
        path_of(int(left.id)),
    ]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refusal(400, "invalid_args", "DELETE cannot be scheduled"), BadRequest),
        (Reply(200, {"success": False, "error": "invalid_args", "msg": "no"}), ProviderFailed),
        (Reply(200, "accepted", is_text=True), ProviderFailed),
    ],
)
def test_a_container_without_the_scheduled_end_is_not_kept(
    fake: FakeVast, reply: Reply, error: type[Exception]
) -> None:
    """What was asked for is a machine that Vast.ai ends; the error names the setting."""
    fake.refuses_jobs = reply
    with pytest.raises(error, match="schedule_end"):
        VastAI(schedule_end=True).launch(cheapest(), 2, {**tags(), EXPIRES_TAG: "1790003700"}, STARTUP)
    assert fake.alive() == set()


def test_the_bill_of_a_stopped_container_ends_with_the_setting(fake: FakeVast) -> None:
    assert "until `skyward sweep --yes` deletes it" in VastAI().stopped_spot()
    assert "until Vast.ai destroys it, at the first full hour" in VastAI(schedule_end=True).stopped_spot()


def test_a_job_whose_answer_was_lost_exists(fake: FakeVast) -> None:
    """The request is repeated, and refused: the first one has made the job."""
    lost = Reply(502, "<html>Bad Gateway</html>", is_text=True)
    fake.fail("POST", "/api/v0/commands/schedule_job/", lost, is_done=True)
    (machine,) = VastAI(schedule_end=True).launch(cheapest(), 1, {**tags(), EXPIRES_TAG: "1790003700"}, STARTUP)
    assert (fake.alive(), len(fake.jobs)) == ({machine.id}, 1)


def test_a_scheduled_end_needs_a_hard_end(fake: FakeVast) -> None:
    with pytest.raises(BadRequest, match="max_lifetime or max_cost"):
        VastAI(schedule_end=True).launch(cheapest(), 1, tags(), STARTUP)
    assert rented(fake) == []


def test_a_destroyed_container_is_gone_also_if_its_job_cannot_be_removed(fake: FakeVast) -> None:
    """The job ends within a week, and does nothing until then."""
    provider = VastAI(schedule_end=True)
    (machine,) = provider.launch(cheapest(), 1, {**tags(), EXPIRES_TAG: "1790003700"}, STARTUP)
    fake.fail("GET", "/api/v0/commands/schedule_job/", Reply(200, {"results": "none"}))
    provider.terminate([machine.id])
    assert (fake.alive(), len(fake.jobs)) == (set(), 1)
    (job,) = fake.jobs.values()
    assert job["end_time"] - job["start_time"] == WEEK_SECONDS


def test_each_status_has_a_state(fake: FakeVast) -> None:
    """Outbid, stopped and broken containers are STOPPING; an unknown status is PENDING."""
    (machine,) = VastAI().launch(cheapest(), 1, tags(), STARTUP)
    launched = fake.containers[int(machine.id)]
    error, outbid = {"status_msg": "Error: no space left"}, {"intended_status": "stopped"}
    for state, rows in {
        InstanceState.PENDING: [
            *({"actual_status": word} for word in (None, "loading", "rebooting", "a word of tomorrow")),
            {"actual_status": "created", "cur_state": "stopped"},
        ],
        InstanceState.RUNNING: [{"actual_status": "running"}, {"actual_status": "running", **error}],
        InstanceState.STOPPING: [
            *({"actual_status": word} for word in ("stopped", "exited", "offline", "unknown", "frozen")),
            {"actual_status": "created", **error},
            {"actual_status": "running", **outbid},
            {"actual_status": "running", "cur_state": "unloaded"},
            {"actual_status": None, "cur_state": "stopped", "next_state": "stopped", **outbid},
        ],
    }.items():
        for fields in rows:
            fake.containers[int(machine.id)] = {**launched, **fields}
            assert [found.state for found in VastAI().instances(POOL)] == [state], fields


def test_many_are_destroyed_in_one_call(fake: FakeVast) -> None:
    machines = VastAI().launch(cheapest(), 3, tags(), STARTUP)
    VastAI().terminate([machine.id for machine in machines])
    assert [request.path for request in fake.asked("DELETE")] == ["/api/v0/instances/"]


@pytest.mark.parametrize(
    "reply",
    [
        Reply(400, {"error": "invalid_args", "msg": "invalid request format"}),
        Reply(403, {"success": False, "error": "auth_error", "msg": "this key may not destroy several"}),
        Reply(404, {"error": "instances_not_found", "msg": "Instances not found."}),
        Reply(404, "<html>Not Found</html>", is_text=True),
        Reply(410, {"detail": "this endpoint was removed"}),
        Reply(200, {"success": False, "msg": "one of them is busy"}),
    ],
    ids=lambda reply: str(reply.status),
)
def test_if_a_common_deletion_is_refused_each_container_is_tried(fake: FakeVast, reply: Reply) -> None:
    """Whatever the reason. All are tried, and the error names those that are left."""
    first, second, third = VastAI().launch(cheapest(), 3, tags(), STARTUP)
    fake.refuses_bulk = reply
    fake.undying = {int(second.id)}
    with pytest.raises(InstancesLeft) as caught:
        VastAI().terminate([first.id, second.id, third.id, "29000000"])
    assert caught.value.ids == (second.id,)
    assert {str(contract) for contract in fake.containers} == {second.id}


def write_to(home: Path, place: str) -> None:
    (home / place).parent.mkdir(parents=True, exist_ok=True)
    (home / place).write_text(f"{KEY}\n")


@pytest.mark.parametrize(
    ("place", "config"),
    [(".config/vastai/vast_api_key", None), ("elsewhere/vastai/vast_api_key", "elsewhere"), (".vast_api_key", None)],
)
def test_the_key_can_be_in_the_files_of_vasts_tools(
    fake: FakeVast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, config: str | None
) -> None:
    monkeypatch.delenv("VAST_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if config is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / config))
    write_to(tmp_path, place)
    assert VastAI().account() == "user 4711"


def test_a_file_of_vasts_tools_that_is_no_text_has_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VAST_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / ".vast_api_key").write_bytes(b"caf\xe9")
    with pytest.raises(CredentialsError, match="no key for Vast"):
        VastAI().account()


@pytest.mark.parametrize(
    "fields", [{"region": "us"}, {"region": ("US", "Europe")}, {"disk_gb": 4}, {"min_reliability": 98}]
)
def test_invalid_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        load({"name": "vastai", **fields})


def test_volumes_are_refused_with_an_alternative(fake: FakeVast) -> None:
    (machine,) = VastAI().launch(cheapest(), 1, tags(), STARTUP)
    assert set(VastAI.refuses) == {"volume", "mig", "private network"}
    assert VastAI().console_url(machine) == "https://cloud.vast.ai/instances/"
    assert json.loads(json.dumps(VastAI(region="SE").to_json())) == {"name": "vastai", "region": "SE"}


def test_a_launch_creates_nothing_after_its_pool_was_torn_down(fake: FakeVast, clock: Clock) -> None:
    """Another process has torn it down. Containers with an address are returned. Other containers are not replaced."""
    fake.broken |= {102: {"actual_status": "loading"}, 103: {"actual_status": "loading"}}
    fake.broken[104] = {"actual_status": "exited"}
    offer = cheapest()

    def given_back() -> None:
        for contract in [
            contract
            for contract, row in fake.containers.items()
            if row["actual_status"] == "loading" and fake.steps[contract] > 4
        ]:
            VastAI().terminate([str(contract)])

    clock.on_sleep = given_back
    machines = VastAI().launch(offer, 4, tags(), STARTUP)
    assert rented(fake) == [101, 102, 103, 104]
    assert {str(contract) for contract in fake.containers} == {machine.id for machine in machines}
    assert len(machines) == 1


def test_a_container_of_a_lost_answer_is_found_by_its_label(fake: FakeVast) -> None:
    """The listing is late. The same rank of another launch of the pool does not match."""
    (older,) = VastAI().launch(cheapest(), 1, tags(launch="sky-contract-1"), STARTUP)
    fake.hidden = 2
    fake.fail("PUT", "/api/v0/asks/", None, is_done=True)
    first, second = VastAI().launch(cheapest(), 2, tags(launch="sky-contract-2"), STARTUP)
    assert len({older.id, first.id, second.id}) == 3 == len(fake.containers)
    assert (first.rank, second.rank) == (0, 1)


def test_a_listing_with_repeated_pages_is_a_failure(fake: FakeVast) -> None:
    fake.fail("GET", "/api/v1/instances/", Reply(200, {"instances": [], "next_token": "again"}), times=100)
    with pytest.raises(ProviderFailed, match="repeat"):
        VastAI().instances()


def test_an_empty_answer_is_an_unknown_outcome(fake: FakeVast) -> None:
    """It has neither an id nor an error: the container is looked up, and the call is not repeated."""
    fake.refused[101] = Reply(200, {"success": True})
    with pytest.raises(ProviderFailed):
        VastAI().launch(cheapest(), 1, tags(), STARTUP)
    assert rented(fake) == [101]
