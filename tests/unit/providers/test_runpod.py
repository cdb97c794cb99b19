"""RunPod: the contract of all providers, and the peculiarities of its pods and its API."""

from __future__ import annotations

import base64
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.concurrency.threads import MOST_THREADS
from skyward_core.errors import BadRequest, CredentialsError, InstancesLeft, NoCapacity, ProviderFailed
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Offer, Requirements, matches, total_of
from skyward_core.providers import userdata
from skyward_core.providers import userdata as ssh_keys
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, load
from skyward_core.providers.runpod import STATES, RunPod
from skyward_core.provisioning.candidates import ask, candidates, none_left
from tests.providers.contract import POOL, STARTUP, Make, RestContract, tags
from tests.providers.contract import cheapest as cheapest_of
from tests.providers.fake_runpod import (
    HOST,
    KEY,
    NO_CAPACITY,
    SPECIFICATION,
    FakeRunPod,
    cpu,
    gpu,
    problem,
    validator,
)
from tests.providers.http_fake import Reply
from tests.providers.in_process import Install

RTX_4090 = Requirements(accelerator=sky.accelerators.parse("RTX 4090"))
CPUS = Requirements(instance_type="cpu3c-2-4")


@pytest.fixture
def fake(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunPod:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    in_process(fake := FakeRunPod())
    monkeypatch.setenv("RUNPOD_API_BASE_URL", fake.url)
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    fake.sell(
        gpu("NVIDIA GeForce RTX 4090", 24, 0.69, 0.34),
        gpu("NVIDIA H100 80GB HBM3", 80, 3.99, 2.69),
        gpu("NVIDIA A100 80GB PCIe", 80, 1.79, 1.19),
        gpu("AMD Instinct MI300X OAM", 192, 2.49),
        gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", 24, 0.5),
        gpu("NVIDIA GeForce RTX 3070", 8, None, 0.13),
        cpu("cpu3c", 2, 0.03),
    )
    return fake


class TestRunPod(RestContract):
    want, secrets, variables = RTX_4090, (KEY,), ("RUNPOD_API_KEY",)
    explicit = {"api_key": KEY}
    ending = ("DELETE", "/v2/pods")

    @pytest.fixture
    def cloud(self, fake: FakeRunPod) -> FakeRunPod:
        return fake

    @pytest.fixture
    def make(self) -> Make:
        return RunPod


def cheapest(want: Requirements = RTX_4090, provider: RunPod | None = None) -> Offer:
    return cheapest_of(provider or RunPod(), want)


def of(chip: str, provider: RunPod | None = None) -> list[Offer]:
    """Return the offers for a required chip."""
    want = Requirements(accelerator=sky.accelerators.parse(chip))
    return [offer for offer in (provider or RunPod()).offers(want) if matches(offer, want) is None]


def order(fake: FakeRunPod) -> dict[str, Any]:
    """Return the only creating call."""
    (request,) = fake.asked("POST", "/v2/pods")
    return request.body


def test_an_offer_is_a_number_of_gpus_of_a_type_in_a_data_centre(fake: FakeRunPod) -> None:
    """Its price is that of one GPU times the number. It has the CPUs and memory that the creating call will request."""
    offers = of("8xH100")
    assert [(offer.instance_type, offer.region) for offer in offers] == [
        ("NVIDIA H100 80GB HBM3 x8", place) for place in ("EU-RO-1", "US-TX-3")
    ]
    offer = offers[-1]
    assert (offer.price_per_hour, offer.on_demand_price_per_hour) == (pytest.approx(31.92), pytest.approx(31.92))
    assert (offer.accelerator, offer.accelerators, offer.accelerator_memory_gb, offer.form_factor) == (
        "H100",
        8,
        80,
        "SXM",
    )
    assert (offer.vcpus, offer.memory_gb) == (8 * 14, 8 * 90)
    assert not any(offer.is_spot for offer in RunPod(cloud=None).offers(Requirements()))


def test_only_the_required_number_of_gpus_is_offered(fake: FakeRunPod) -> None:
    """The stock is that of this number."""
    offers = of("3xRTX 4090")
    assert sorted({offer.accelerators for offer in offers}) == [3]
    (request,) = fake.asked("GET")
    assert request.query == {"include": "AVAILABILITY", "product": "POD", "count": "3", "cloud": "SECURE"}


def test_without_a_required_number_the_usual_ones_are_offered(fake: FakeRunPod) -> None:
    """There are no offers with more GPUs than a pod may have."""
    offers = RunPod(cloud="community").offers(Requirements())
    assert [offer.accelerators for offer in offers if offer.accelerator == "RTX 4090"] == [1, 2, 4]
    assert of("8xRTX 4090", RunPod(cloud="community")) == []


def test_community_machines_have_their_own_name_and_no_data_centre(fake: FakeRunPod) -> None:
    offers = of("4xRTX 4090", RunPod(cloud=None))
    assert [
        (offer.instance_type, offer.region, offer.price_per_hour) for offer in offers if offer.accelerators == 4
    ] == [
        ("NVIDIA GeForce RTX 4090 x4", "EU-RO-1", pytest.approx(2.76)),
        ("NVIDIA GeForce RTX 4090 x4", "US-TX-3", pytest.approx(2.76)),
        ("NVIDIA GeForce RTX 4090 x4 community", "any", pytest.approx(1.36)),
    ]


def test_a_type_without_stock_is_not_offered(fake: FakeRunPod) -> None:
    """The type may be out of stock everywhere or in one data centre."""
    fake.gpus["NVIDIA H100 80GB HBM3"]["availability"] = "NONE"
    fake.gpus["NVIDIA GeForce RTX 4090"]["dataCenters"][0]["availability"] = "NONE"
    offers = RunPod().offers(Requirements())
    assert {offer.region for offer in offers if "4090" in offer.instance_type} == {"US-TX-3"}
    assert not [offer for offer in offers if "H100" in offer.instance_type or "MIG" in offer.instance_type]


@pytest.mark.parametrize(
    ("name_at_runpod", "chip", "form_factor"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100", "SXM"),
        ("NVIDIA H100 PCIe", "H100", "PCIe"),
        ("NVIDIA H100 NVL", "H100", "NVL"),
        ("NVIDIA B200", "B200", None),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX 4080 SUPER", None),
        ("Tesla V100-SXM2-32GB", "V100", "SXM"),
    ],
)
def test_offers_have_the_catalogues_names_and_orders_runpods(
    fake: FakeRunPod, name_at_runpod: str, chip: str, form_factor: str | None
) -> None:
    """RunPod's own name can be derived from the type's name, in orders and in the listing."""
    fake.gpus.clear()
    fake.sell(gpu(name_at_runpod, 40, 1.0))
    offer = RunPod().offers(Requirements(instance_type=f"{name_at_runpod} x2"))[0]
    assert (offer.accelerator, offer.form_factor, offer.accelerators) == (chip, form_factor, 2)
    (machine,) = RunPod().launch(offer, 1, tags(), STARTUP)
    assert machine.instance_type == offer.instance_type
    assert {name: order(fake)["gpu"][name] for name in ("id", "count")} == {"id": name_at_runpod, "count": 2}


def test_machines_without_gpu_have_powers_of_two_as_numbers_of_cpus(fake: FakeRunPod) -> None:
    fake.sell(cpu("cpu5g", 4, 0.04, most=2), cpu("cpu9x", 2, None))
    offers = [offer for offer in RunPod().offers(Requirements()) if offer.accelerator is None]
    assert [
        (offer.instance_type, offer.region, offer.vcpus, offer.memory_gb, offer.price_per_hour) for offer in offers
    ] == [
        ("cpu3c-2-4", "EU-RO-1", 2, 4, pytest.approx(0.06)),
        ("cpu3c-4-8", "EU-RO-1", 4, 8, pytest.approx(0.12)),
        ("cpu3c-8-16", "EU-RO-1", 8, 16, pytest.approx(0.24)),
        ("cpu5g-2-8", "EU-RO-1", 2, 8, pytest.approx(0.08)),
    ]
    assert not [offer for offer in RunPod(cloud="community").offers(Requirements()) if offer.accelerator is None]


def test_only_configured_data_centres_are_offered(fake: FakeRunPod) -> None:
    assert {offer.region for offer in RunPod(region="US-TX-3").offers(RTX_4090)} == {"US-TX-3"}
    assert {offer.region for offer in RunPod(region=("US-TX-3", "EU-RO-1"), cloud=None).offers(RTX_4090)} == {
        "US-TX-3",
        "EU-RO-1",
    }
    assert RunPod(region="XX-1").offers(Requirements()) == []


def test_the_parameters_of_the_creating_call(fake: FakeRunPod) -> None:
    """Our script replaces the image's entrypoint."""
    (machine,) = RunPod(disk_gb=64, registry="reg1").launch(cheapest(), 1, tags(), STARTUP)
    body = order(fake)
    env = body.pop("env")
    assert json.loads(body.pop("args")) == {"entrypoint": ["/bin/sh", "-c"], "cmd": [userdata.UNPACKED]}
    assert body == {
        "name": fake.pods[machine.id]["name"],
        "image": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        "disk": 64,
        "ports": ["22/tcp"],
        "cloud": "SECURE",
        "dataCenterIds": ["EU-RO-1"],
        "registry": "reg1",
        "gpu": {
            "id": "NVIDIA GeForce RTX 4090",
            "count": 1,
            "minVcpuCountPerGpu": 2,
            "minRamPerGpu": 8,
            "minCudaVersion": "12.8",
        },
    }
    assert list(env) == ["SKYWARD_BOOT", "SKYWARD_PRICE_PER_HOUR"]
    assert env["SKYWARD_PRICE_PER_HOUR"] == "0.69"
    script = gzip.decompress(base64.b64decode(env["SKYWARD_BOOT"])).decode()
    key = ssh_keys.our_key()
    host = ssh_keys.host_key(tags()[LAUNCH_TAG], key)
    assert STARTUP in script and key.public in script and host.public in script
    assert 'id=$(printf %s "$RUNPOD_POD_ID")\n' in script
    assert f"{fake.url}/v2/pods/" in script
    assert KEY not in script
    assert machine.directory == f"/root/.cache/skyward/instances/{machine.id}"
    assert machine.endpoint is not None
    assert (machine.endpoint.host, machine.endpoint.port) == (HOST, 30001)
    assert (machine.endpoint.user, machine.endpoint.key, machine.endpoint.host_key) == (
        "root",
        str(key.path),
        host.public,
    )
    assert fake.keys == ["ssh-ed25519 AAAAsomebodyelses"]


def test_the_creating_call_has_the_cpus_and_memory_of_the_offer(fake: FakeRunPod) -> None:
    """They are the minimum of the type, or the configured one, for each GPU."""
    provider = RunPod(min_vcpus_per_gpu=5, min_memory_gb_per_gpu=50)
    (offer,) = provider.offers(Requirements(instance_type="NVIDIA A100 80GB PCIe x2"))[:1]
    assert (offer.vcpus, offer.memory_gb) == (10, 100)
    provider.launch(offer, 1, tags(), STARTUP)
    assert {"minVcpuCountPerGpu": 5, "minRamPerGpu": 50}.items() <= order(fake)["gpu"].items()


def test_a_community_machine_is_requested_without_a_data_centre(fake: FakeRunPod) -> None:
    """The region of its instance is that of its offer."""
    (machine,) = RunPod(cloud="community").launch(cheapest(provider=RunPod(cloud="community")), 1, tags(), STARTUP)
    assert order(fake)["cloud"] == "COMMUNITY"
    assert "dataCenterIds" not in order(fake)
    assert (machine.region, machine.instance_type) == ("any", "NVIDIA GeForce RTX 4090 x1 community")
    fake.pods[machine.id]["dataCenterId"] = "US-OR-1"  # RunPod may name a data centre, but the offer had none
    assert [found.region for found in RunPod().instances(POOL)] == ["any"]


def test_amd_machines_get_another_image_and_no_cuda(fake: FakeRunPod) -> None:
    RunPod().launch(cheapest(Requirements(accelerator=sky.accelerators.parse("MI300X"))), 1, tags(), STARTUP)
    assert "rocm" in order(fake)["image"]
    assert "minCudaVersion" not in order(fake)["gpu"]


def test_a_machine_without_gpu_has_no_more_disk_than_its_flavour_allows(fake: FakeRunPod) -> None:
    """With more disk RunPod only answers "no instances"."""
    (machine,) = RunPod().launch(cheapest(CPUS), 1, tags(), STARTUP)
    body = order(fake)
    assert (body["cpu"], body["disk"], body["image"], body["cloud"]) == (
        {"id": "cpu3c", "vcpuCount": 2},
        20,
        "ubuntu:24.04",
        "SECURE",
    )
    assert "gpu" not in body
    assert (machine.instance_type, machine.region, machine.price_per_hour) == (
        "cpu3c-2-4",
        "EU-RO-1",
        pytest.approx(0.06),
    )


def test_the_stock_is_checked_before_the_creating_call(fake: FakeRunPod) -> None:
    """A creating call would only answer 400, so none is made without stock."""
    offer = cheapest()
    fake.gpus["NVIDIA GeForce RTX 4090"]["dataCenters"][0]["availability"] = "NONE"
    with pytest.raises(NoCapacity, match="EU-RO-1 in stock") as caught:
        RunPod().launch(offer, 1, tags(), STARTUP)
    assert caught.value.code == "NONE"
    eight = RunPod().offers(Requirements(instance_type="NVIDIA GeForce RTX 4090 x8"))[0]
    fake.gpus["NVIDIA GeForce RTX 4090"]["sold_out_from"] = 8
    with pytest.raises(NoCapacity, match="x8 in US-TX-3 in stock"):
        RunPod().launch(eight, 1, tags(), STARTUP)
    cpus = cheapest(Requirements(instance_type="cpu3c-8-16"))
    fake.cpus["cpu3c"]["availability"] = "NONE"
    with pytest.raises(NoCapacity):
        RunPod().launch(cpus, 1, tags(), STARTUP)
    assert fake.asked("GET", "/v2/catalog/cpus/cpu3c")[0].query["vcpuCount"] == "8"
    del fake.gpus["NVIDIA GeForce RTX 4090"]
    with pytest.raises(NoCapacity, match="any more"):
        RunPod().launch(offer, 1, tags(), STARTUP)
    assert fake.asked("POST") == []


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, NoCapacity, "Bad Request"),
        (402, sky.QuotaExceeded, "Payment Required"),
        (403, NoCapacity, "Forbidden"),
        (401, CredentialsError, "Unauthorized"),
        (422, BadRequest, "Unprocessable Entity"),
    ],
)
def test_a_refusal_determines_the_error(fake: FakeRunPod, status: int, error: type[Exception], code: str) -> None:
    """400 is a broken rule or a lack of stock, so the error has RunPod's text."""
    offer = cheapest()
    fake.fail("POST", "/v2/pods", problem(status, "what RunPod says"), times=100)
    with pytest.raises(error, match="what RunPod says") as caught:
        RunPod().launch(offer, 30, tags(), STARTUP)
    assert type(caught.value) is error
    assert caught.value.code == code  # type: ignore[attr-defined]
    assert len(fake.asked("POST")) <= MOST_THREADS
    assert fake.alive() == set()


def test_an_unknown_outcome_is_reported_as_a_failure(fake: FakeRunPod) -> None:
    """Without an answer, and without the pod in the list, the error is not NoCapacity."""
    offer = cheapest()
    fake.creates_left = 0
    with pytest.raises(ProviderFailed) as caught:
        RunPod().launch(offer, 2, tags(), STARTUP)
    assert not isinstance(caught.value, NoCapacity)
    fake.fail("GET", "/v2/pods", problem(500, "internal error"), times=1000)
    with pytest.raises(ProviderFailed):
        RunPod().launch(offer, 1, tags(), STARTUP)
    assert len(fake.asked("POST")) <= 3


def test_launch_waits_for_the_direct_address(fake: FakeRunPod) -> None:
    """A pod runs before its port is mapped. The proxy's address, which is listed before, does not support files."""
    (machine,) = RunPod().launch(cheapest(), 1, tags(), STARTUP)
    assert len(fake.asked("GET", "/v2/pods$")) == 4
    assert machine.ip == HOST
    fake.pods[machine.id]["ssh"]["direct"] = None
    (found,) = RunPod().instances(POOL)
    assert (found.state, found.endpoint, found.ip) == (InstanceState.RUNNING, None, None)


@pytest.mark.parametrize("word", ["ERROR", "EXITED", "TERMINATED"])
def test_a_pod_that_fails_to_start_is_deleted(fake: FakeRunPod, word: str) -> None:
    """It is not returned. If no pod is left, the error has RunPod's own code."""
    fake.becomes = {"-1.l": word}
    machines = RunPod().launch(cheapest(), 3, tags(), STARTUP)
    assert [machine.rank for machine in machines] == [0, 2]
    assert {machine.id for machine in machines} == fake.alive()
    fake.becomes = {".lL2": word}
    with pytest.raises(NoCapacity) as caught:
        RunPod().launch(cheapest(), 2, tags(launch="L2"), STARTUP)
    assert caught.value.code == word
    assert {machine.id for machine in machines} == fake.alive()


def test_a_pod_in_another_data_centre_is_deleted(fake: FakeRunPod) -> None:
    """RunPod treats the requested data centre as a preference."""
    fake.elsewhere = "CA-MTL-3"
    with pytest.raises(NoCapacity, match="in CA-MTL-3 and not in EU-RO-1"):
        RunPod().launch(cheapest(), 2, tags(), STARTUP)
    assert fake.alive() == set()


def test_the_wait_for_an_address_has_a_limit(fake: FakeRunPod) -> None:
    """A machine may have no public address at all."""
    fake._go_on = lambda: None  # type: ignore[method-assign]
    with pytest.raises(NoCapacity, match="has no address after"):
        RunPod().launch(cheapest(), 1, tags(), STARTUP)
    assert fake.alive() == set()


def test_pods_get_a_private_network_where_there_is_one(fake: FakeRunPod) -> None:
    """It is available for NVIDIA's GPUs in some data centres. The launch waits for its address too."""
    provider = RunPod(global_networking=True, cloud=None)
    offers = provider.offers(Requirements())
    assert {offer.region for offer in offers} == {"EU-RO-1"}
    assert {offer.accelerator for offer in offers} == {"RTX 4090", "H100", "A100"}
    machines = provider.launch(cheapest(provider=provider), 2, tags(), STARTUP)
    assert {machine.private_ip for machine in machines} == {"10.65.1.1", "10.65.1.2"}
    assert fake.asked("POST")[0].body["globalNetworking"] is True
    (other,) = RunPod().launch(cheapest(), 1, tags(launch="L2"), STARTUP)
    assert other.private_ip is None


@pytest.mark.parametrize("page", [1, 3, None])
def test_all_pages_of_the_list_are_read(fake: FakeRunPod, page: int | None) -> None:
    """A list without pages, as it was until autumn 2026, is complete."""
    machines = RunPod().launch(cheapest(), 4, tags(), STARTUP)
    fake.page = page
    assert {found.id: found.rank for found in RunPod().instances(POOL)} == {
        machine.id: machine.rank for machine in machines
    }


def test_each_status_has_a_state(fake: FakeRunPod) -> None:
    """An unknown status is neither running nor gone."""
    (machine,) = RunPod().launch(cheapest(), 1, tags(), STARTUP)
    fake.steps[machine.id] = 100
    for state, words in {
        InstanceState.PENDING: "PROVISIONING STARTING MIGRATING",
        InstanceState.RUNNING: "RUNNING",
        InstanceState.STOPPING: "EXITED ERROR",
        None: "TERMINATED",
    }.items():
        for word in words.split():
            fake.pods[machine.id]["status"] = word
            assert [found.state for found in RunPod().instances(POOL)] == ([state] if state else []), word


def test_a_stopped_pod_is_listed_and_has_no_cost_for_its_gpu(fake: FakeRunPod) -> None:
    (machine,) = RunPod().launch(cheapest(), 1, tags(), STARTUP)
    fake.halt(machine.id)
    (found,) = RunPod().instances(POOL)
    assert (found.state, found.price_per_hour, found.endpoint) == (InstanceState.STOPPING, 0.0, None)


def test_pods_that_cannot_be_deleted_are_named(fake: FakeRunPod) -> None:
    """All pods are tried first."""
    machines = RunPod().launch(cheapest(), 3, tags(), STARTUP)
    fake.undying = {machines[0].id}
    with pytest.raises(InstancesLeft) as caught:
        RunPod().terminate([machine.id for machine in machines])
    assert caught.value.ids == (machines[0].id,)
    assert fake.alive() == {machines[0].id}


@pytest.mark.parametrize(
    ("settings", "needed", "asked"),
    [
        ({}, None, "12.8"),
        ({}, 13.0, "13.0"),
        ({"image": "ubuntu:24.04"}, None, None),
        ({"min_cuda": "12.1"}, 13.0, "12.1"),
    ],
)
def test_cuda_has_the_version_that_the_image_needs(
    fake: FakeRunPod, settings: dict[str, Any], needed: float | None, asked: str | None
) -> None:
    """The versions are those of the container's image, by its name (cu1281), and of the pool's packages."""
    provider = RunPod(**settings)
    provider.launch(cheapest(RTX_4090.model_copy(update={"min_cuda": needed}), provider), 1, tags(), STARTUP)
    assert fake.asked("POST", "/v2/pods")[-1].body["gpu"].get("minCudaVersion") == asked


def test_the_disk_is_counted(fake: FakeRunPod) -> None:
    """The price is $0.10 per GB and month (docs.runpod.io/pods/storage, 2026-11-22) of the requested disk, also for a
    listed pod.
    """
    offer = cheapest(provider=RunPod(disk_gb=72))
    assert [(extra.name, extra.usd_per_hour) for extra in offer.extras_per_hour] == [("disk", 0.01)]
    RunPod(disk_gb=72).launch(offer, 1, tags(), STARTUP)
    (found,) = RunPod().instances()
    assert found.extras_per_hour == offer.extras_per_hour


@pytest.mark.parametrize("is_in_cost", [False, True])
def test_the_disk_is_counted_once(fake: FakeRunPod, is_in_cost: bool) -> None:
    """RunPod does not document whether a pod's `cost` has the disk in it. Both are recognised, by the price of the
    catalogue that the pod keeps, and the sum is the same. Another `cost` is believed.
    """
    fake.is_disk_in_cost = is_in_cost
    offer = cheapest(provider=RunPod(disk_gb=720))  # 0.10 USD an hour
    launched = RunPod(disk_gb=720).launch(offer, 1, tags(), STARTUP)
    for one in (*launched, *RunPod().instances()):
        assert (one.price_per_hour, total_of(one.extras_per_hour)) == (pytest.approx(0.69), pytest.approx(0.1))
    row = fake.pods[launched[0].id]
    row["cost"] = 0.5  # a savings plan
    assert RunPod().instances()[0].price_per_hour == 0.5
    row["env"]["SKYWARD_PRICE_PER_HOUR"] = "abc"
    assert RunPod().instances()[0].price_per_hour == 0.5


def test_a_key_that_may_only_read_is_no_sold_out_market(fake: FakeRunPod) -> None:
    """It lists offers and pods. If all creations are refused so, the error says what it lacks and where that is set.

    RunPod has one status for this and for a pool of machines that the account may not use ("Skip this candidate, keep
    going"): then the next candidate is tried.
    """
    fake.is_read_only = True
    assert RunPod().instances() == []
    with pytest.raises(NoCapacity, match="does not have access to this resource") as caught:
        RunPod().launch(cheapest(), 1, tags(), STARTUP)
    others = [NoCapacity("sold out")]
    assert type(none_left([Requirements()], 1, [], [caught.value, *others])) is NoCapacity
    alike = none_left([Requirements()], 1, [], [caught.value, caught.value])
    assert isinstance(alike, CredentialsError)
    assert "the variable RUNPOD_API_KEY may not do this: give it read and write" in str(alike)
    assert alike.code == "Forbidden"


def test_data_centres_that_have_the_gpu_are_named(fake: FakeRunPod) -> None:
    """For a configured one without it, and for one whose stock is gone since the offer."""
    fake.sell(gpu("NVIDIA H200", 141, 4.59, places="EU-CZ-1 US-KS-2"))
    (answer,) = ask([RunPod(region="EU-RO-1", cloud=None)], Requirements(accelerator=sky.accelerators.parse("H200")))
    _, (refused,) = candidates(sky.PoolSpec.of(accelerator="H200"), [answer])
    assert "runpod sells it now in EU-CZ-1, US-KS-2: write one of them as region=" in refused.message
    offer = of("H200")[0]
    fake.gpus["NVIDIA H200"]["dataCenters"][0]["availability"] = "NONE"
    with pytest.raises(NoCapacity, match="in EU-CZ-1 in stock; US-KS-2 have it"):
        RunPod().launch(offer, 1, tags(), STARTUP)


@pytest.mark.parametrize(
    "text",
    [
        f'[default]\napi_key = "{KEY}"\n',
        f"apikey = '{KEY}'\napiurl = 'https://api.runpod.io/graphql'\n",
        f"apiKey = '{KEY}'\n",
    ],
)
def test_the_key_can_be_in_the_file_of_runpods_tools(
    fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    """The tools are the Python package and runpodctl."""
    monkeypatch.delenv("RUNPOD_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod/config.toml").write_text(text)
    assert RunPod().account() == RunPod(api_key=KEY).account()


@pytest.mark.parametrize(
    "text", [f"[default\napi_key = {KEY}", "default = 3\n", "[default]\napi_key = 7\n", "[default]\napi_key = ' '\n"]
)
def test_a_file_without_a_key_is_an_error(
    fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    """The error names the variable to set, and no content of the file."""
    monkeypatch.delenv("RUNPOD_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod/config.toml").write_text(text)
    with pytest.raises(CredentialsError, match="RUNPOD_API_KEY") as caught:
        RunPod().instances()
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_account_is_identified_by_a_part_of_the_keys_hash(fake: FakeRunPod) -> None:
    """The API has no account id. A refused key has no account."""
    account = RunPod().account()
    assert account.startswith("key-") and len(account) == 16
    assert account[4:] not in KEY
    with pytest.raises(CredentialsError):
        RunPod(api_key="rpa_another").account()


@pytest.mark.parametrize(
    "fields",
    [
        {"cloud": "ALL"},
        {"min_cuda": "12"},
        {"disk_gb": 0},
        {"cloud": "community", "region": "EU-RO-1"},
        {"cloud": "community", "global_networking": True},
        {"min_vcpus_per_gpu": 0},
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        load({"name": "runpod", "api_key": KEY, **fields})
    assert KEY not in str(caught.value)


def test_volumes_are_refused_with_an_alternative(fake: FakeRunPod) -> None:
    (machine,) = RunPod().launch(cheapest(), 1, tags(), STARTUP)
    assert set(RunPod.refuses) == {"volume", "mig"}
    assert RunPod().console_url(machine) == f"https://console.runpod.io/pods?id={machine.id}"
    assert json.loads(json.dumps(RunPod(region=("EU-RO-1",)).to_json())) == {"name": "runpod", "region": ["EU-RO-1"]}


def test_the_fakes_answers_match_runpods_specification(fake: FakeRunPod) -> None:
    """They are a pod in each of its states, and each refusal. The fake itself checks each order."""
    (machine,) = RunPod(registry="r1").launch(cheapest(), 1, tags(), STARTUP)
    validator("Pod").validate(row := fake.pods[machine.id])
    for status in SPECIFICATION["$defs"]["PodStatus"]["enum"]:
        assert status in STATES
    fake.halt(machine.id)
    validator("Pod").validate(row)
    RunPod().terminate([machine.id])
    validator("Pod").validate(row)
    assert (row["status"], row["cost"]) == ("TERMINATED", 0.0)
    for status in (400, 404, 422, 429):
        validator("ErrorResponse").validate(problem(status, "no").body)


def test_an_incomplete_launch_returns_its_machines(fake: FakeRunPod, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skyward_core.providers.runpod")
    offer = cheapest()
    fake.fail("POST", "/v2/pods", problem(400, NO_CAPACITY), after=1)
    machines = RunPod().launch(offer, 2, tags(), STARTUP)
    assert {machine.id for machine in machines} == fake.alive()
    assert len(machines) == 1
    assert "no longer any instances" in caplog.text


def test_a_pod_of_a_lost_answer_is_found_by_name_and_not_requested_again(fake: FakeRunPod) -> None:
    """The list may be some seconds late, and the pod may be on its second page."""
    offer = cheapest()
    for number in range(25):
        fake.stranger(f"pod-{number}")
    fake.hidden = 2
    fake.fail("POST", "/v2/pods", problem(502, "bad gateway"), is_done=True)
    (machine,) = RunPod().launch(offer, 1, tags(), STARTUP)
    assert len(fake.asked("POST")) == 1
    assert machine.tags[RANK_TAG] == "0"


@pytest.mark.parametrize(
    "pages", [{"hasNextPage": True, "nextCursor": "after:"}, {"hasNextPage": True, "nextCursor": None}]
)
def test_a_list_with_repeated_pages_is_a_failure(fake: FakeRunPod, pages: dict[str, Any]) -> None:
    fake.fail("GET", "/v2/pods", Reply(200, {"pods": [], "pagination": pages}), times=5)
    with pytest.raises(ProviderFailed, match="repeat"):
        RunPod().instances()


def test_pools_with_a_common_prefix_are_distinguished(fake: FakeRunPod) -> None:
    RunPod().launch(cheapest(), 1, tags("a-1"), STARTUP)
    RunPod().launch(cheapest(), 1, tags("a"), STARTUP)
    (found,) = RunPod().instances("a")
    assert (found.pool_id, found.rank) == ("a", 0)
