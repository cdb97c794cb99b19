"""Verda: the contract of all providers, and Verda's peculiarities."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest, CredentialsError, InstancesLeft, NoCapacity, ProviderFailed
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Offer, Requirements, matches
from skyward_core.providers.base import CREATED_TAG, LAUNCH_TAG, OWNER_TAG, POOL_TAG, PROCESS_TAG, RANK_TAG, load, rank
from skyward_core.providers.tagging import launch_word
from skyward_core.providers.verda import Verda
from skyward_core.provisioning.candidates import ask, candidates
from tests.providers.contract import POOL, STARTUP, Make, RestContract, tags
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, STRANGE_SCRIPT, FakeVerda, error
from tests.providers.in_process import Install

WANT = Requirements(accelerator=sky.accelerators.parse("H100"))
VARIABLES = ("VERDA_CLIENT_ID", "VERDA_CLIENT_SECRET", "DATACRUNCH_CLIENT_ID", "DATACRUNCH_CLIENT_SECRET")


@pytest.fixture
def cloud(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeVerda:
    monkeypatch.setenv("VERDA_CLIENT_ID", CLIENT_ID)
    monkeypatch.setenv("VERDA_CLIENT_SECRET", CLIENT_SECRET)
    for variable in (*VARIABLES[2:], "VERDA_PROFILE", "VERDA_HOME", "VERDA_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    in_process(fake := FakeVerda())
    return fake


@pytest.fixture
def make(cloud: FakeVerda) -> Make:
    return lambda **fields: Verda(endpoint_url=cloud.url + "/v1", **fields)


@pytest.fixture
def mine(make: Make) -> Verda:
    return make()


def offer_of(provider: Verda, name: str = "1H100.80S.30V", *, spot: bool = False) -> Offer:
    return next(
        offer
        for offer in provider.offers(Requirements())
        if offer.instance_type == name and offer.is_spot == spot and offer.region == "FIN-01"
    )


class TestVerda(RestContract):
    want, secrets, variables = WANT, (CLIENT_ID, CLIENT_SECRET), VARIABLES
    explicit = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}
    ending, login = ("PUT", "/v1/instances$"), "/v1/oauth2/"


def test_the_disk_is_counted(make: Make) -> None:
    """The price is about $0.20 per GB and month (fact sheet, 3.2), also for a listed machine."""
    provider = make(os_volume_gb=360)
    offer = rank(provider.offers(WANT), WANT)[0]
    assert [(extra.name, extra.usd_per_hour) for extra in offer.extras_per_hour] == [("disk", 0.1)]
    (machine,) = provider.launch(offer, 1, tags(), STARTUP)
    (found,) = provider.instances()
    assert machine.extras_per_hour == found.extras_per_hour == offer.extras_per_hour


def test_the_price_of_disks_is_verdas(make: Make, cloud: FakeVerda) -> None:
    """It is that of `/volume-types`. Without an answer it is assumed, at once, because machines must be listed."""
    provider = make(os_volume_gb=720)
    cloud.nvme_price = 0.3
    offer = rank(provider.offers(WANT), WANT)[0]
    (machine,) = provider.launch(offer, 1, tags(), STARTUP)
    (found,) = provider.instances()
    for one in (offer, machine, found):
        assert [(extra.name, round(extra.usd_per_hour, 6)) for extra in one.extras_per_hour] == [("disk", 0.3)]
        assert "volume-types" in one.extras_per_hour[0].source
    cloud.requests.clear()
    cloud.fail("GET", "/v1/volume-types", cloud.outage, times=99)
    assert round(provider.instances()[0].extras_per_hour[0].usd_per_hour, 6) == 0.2
    assert len(cloud.asked("GET", "/v1/volume-types")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "1H100.80S.30V is out of stock in FIN-01",
        "Not enough capacity for the requested instance",
        "We have run out of capacity",
        "Instance type is currently unavailable",
    ],
)
def test_a_lack_of_stock_is_no_capacity(mine: Verda, cloud: FakeVerda, text: str) -> None:
    """Verda has one code for most refusals."""
    offer = offer_of(mine)
    cloud.fail("POST", "/v1/instances", error(400, "invalid_request", text))
    with pytest.raises(NoCapacity, match="Try again later, another location") as caught:
        mine.launch(offer, 1, tags(), STARTUP)
    assert type(caught.value) is NoCapacity
    cloud.fail("POST", "/v1/instances", error(400, "invalid_request", "Quota exceeded: GPU capacity of your team"))
    with pytest.raises(sky.QuotaExceeded, match="Verda's support"):
        mine.launch(offer, 1, tags(launch="L2"), STARTUP)


def test_locations_that_have_the_gpu_are_named(make: Make, cloud: FakeVerda) -> None:
    cloud.sold["FIN-03", False] = ["CPU.4V.16G"]
    (answer,) = ask([make(region="FIN-03")], WANT)
    _, (refused,) = candidates(sky.PoolSpec.of(accelerator="H100"), [answer])
    assert "verda sells it now in FIN-01" in refused.message


def test_chips_have_the_catalogues_names(mine: Verda) -> None:
    """ "8x A100 SXM4 80GB" has the memory of all eight. Unknown chips and confidential machines are left out."""
    sold = {
        offer.instance_type: offer
        for offer in mine.offers(Requirements())
        if offer.region == "FIN-01" and not offer.is_spot
    }
    named = {
        name: (one.accelerators, one.accelerator, one.accelerator_memory_gb, one.form_factor)
        for name, one in sold.items()
    }
    assert named == {
        "1H100.80S.30V": (1, "H100", 80, "SXM"),
        "2H100.80S.80V": (2, "H100", 80, "SXM"),
        "8A100.176V": (8, "A100", 80, "SXM"),
        "1A100.40S.22V": (1, "A100", 40, "SXM"),
        "1RTX6000ADA.10V": (1, "RTX 6000 Ada", 48, None),
        "1RTXPRO6000.30V": (1, "RTX PRO 6000", 96, None),
        "1A6000.10V": (1, "RTX A6000", 48, None),
        "1V100.6V": (1, "V100", 16, None),
        "1L40S.20V": (1, "L40S", 48, None),
        "1B300.30V": (1, "B300", 268, "SXM"),
        "CPU.4V.16G": (0, None, None, None),
    }
    assert matches(sold["1B300.30V"], Requirements(accelerator=sky.accelerators.parse("B300"))) is None


def test_spot_is_offered_where_spot_is_available(mine: Verda, cloud: FakeVerda) -> None:
    """The availabilities of spot and on demand are two requests. A type without a spot price is not sold as spot."""
    sold = {(one.region, one.is_spot, one.instance_type): one for one in mine.offers(Requirements())}
    assert ("FIN-02", True, "1H100.80S.30V") in sold
    assert ("FIN-02", False, "1H100.80S.30V") not in sold
    assert ("FIN-03", True, "1H100.80S.30V") not in sold
    assert ("FIN-01", True, "CPU.4V.16G") not in sold
    spot = sold["FIN-01", True, "1H100.80S.30V"]
    assert (spot.price_per_hour, spot.on_demand_price_per_hour) == (1.85, 3.7)
    assert {request.query["is_spot"] for request in cloud.asked("GET", "/v1/instance-availability")} == {
        "true",
        "false",
    }
    assert cloud.asked("GET", "/v1/instance-types")[0].query == {"currency": "usd"}


def test_a_region_is_a_filter(mine: Verda, make: Make, cloud: FakeVerda) -> None:
    assert {one.region for one in mine.offers(Requirements())} == {"FIN-01", "FIN-02", "FIN-03"}
    assert {one.region for one in make(region="FIN-03").offers(Requirements())} == {"FIN-03"}
    assert {one.region for one in make(region=("FIN-03", "FIN-02")).offers(Requirements())} == {"FIN-02", "FIN-03"}


def test_a_machine_has_its_name_disk_and_script_from_the_creating_call(mine: Verda, cloud: FakeVerda) -> None:
    """Its Instance has the login and the expected host key."""
    (instance,) = mine.launch(offer_of(mine), 1, tags(), STARTUP)
    (request,) = cloud.asked("POST", "/v1/instances$")
    assert request.body["hostname"] == f"{POOL}-0-{launch_word(tags())}"
    assert request.body["os_volume"] == {"name": f"skyward-{POOL}-0-{launch_word(tags())}", "size": 100}
    assert request.body["location_code"] == "FIN-01"
    assert cloud.keys.keys() == set(request.body["ssh_key_ids"])
    script = cloud.scripts[request.body["startup_script_id"]]["script"]
    assert instance.endpoint is not None
    assert instance.endpoint.host == instance.ip == cloud.machines[instance.id]["ip"]
    assert instance.endpoint.user == "root"
    assert instance.endpoint.host_key in script
    assert "id=$(hostname)" in script
    assert STARTUP.strip() in script
    assert instance.directory == f"/root/.cache/skyward/instances/{POOL}-0-{launch_word(tags())}"
    assert mine.instances(POOL)[0].endpoint == instance.endpoint


def test_the_key_is_added_once(mine: Verda, cloud: FakeVerda) -> None:
    """It is found by the key itself: Verda adds a comment to it, and a user may have renamed it."""
    for token in ("La", "Lb"):
        mine.launch(offer_of(mine), 1, tags(launch=token), STARTUP)
    assert len(cloud.keys) == len(cloud.asked("POST", "/v1/ssh-keys")) == 1
    next(iter(cloud.keys.values()))["name"] = "laptop"
    mine.launch(offer_of(mine), 1, tags(launch="Lc"), STARTUP)
    assert len(cloud.keys) == 1


def test_a_call_that_may_still_take_effect_keeps_its_script(mine: Verda, cloud: FakeVerda) -> None:
    """The machine may start later, and needs the script for its guard."""
    cloud.fail("POST", "/v1/instances$")
    with pytest.raises(ProviderFailed):
        mine.launch(offer_of(mine), 1, tags(), STARTUP)
    assert len(cloud.scripts) == 1


def test_a_launch_without_machines_leaves_no_script(mine: Verda, cloud: FakeVerda) -> None:
    for refusal in (
        error(503, "service_unavailable", "nothing free"),
        error(403, "forbidden_action", "not yours"),
        error(400, "invalid_request", "what?"),
    ):
        cloud.fail(*cloud.creating, refusal)
        with pytest.raises((NoCapacity, CredentialsError, BadRequest)):
            mine.launch(offer_of(mine), 1, tags(), STARTUP)
        assert cloud.scripts == {}


@pytest.mark.parametrize("word", ["no_capacity", "error", "discontinued"])
def test_a_machine_that_fails_is_deleted(mine: Verda, cloud: FakeVerda, word: str) -> None:
    """The error has the cloud's own code. Disk and script are deleted too."""
    cloud.path = ["ordered", word]
    with pytest.raises(NoCapacity) as caught:
        mine.launch(offer_of(mine), 2, tags(), STARTUP)
    assert caught.value.code == word
    assert cloud.alive() == set()
    assert cloud.scripts == {}
    assert word == "discontinued" or cloud.volumes == {}


def test_the_wait_for_an_address_has_a_limit(mine: Verda, cloud: FakeVerda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is deleted as soon as Verda allows that, which is not while it is provisioned."""
    cloud.path = ["provisioning"] * 140 + ["running"]
    with pytest.raises(NoCapacity, match="no address"):
        mine.launch(offer_of(mine), 1, tags(), STARTUP)
    assert cloud.alive() == set()
    assert len(cloud.asked("PUT")) >= 2


def test_a_machine_that_can_be_neither_used_nor_deleted_is_an_error(
    mine: Verda, cloud: FakeVerda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NoCapacity would mean that no machine is left, and InstancesLeft is for `terminate`."""
    cloud.path = ["provisioning"] * 1000
    with pytest.raises(ProviderFailed, match="could not delete") as caught:
        mine.launch(offer_of(mine), 1, tags(), STARTUP)
    (left,) = cloud.alive()
    assert left in str(caught.value)
    assert len(cloud.scripts) == 1


def test_node_credentials_are_in_no_message(mine: Verda, make: Make, cloud: FakeVerda) -> None:
    """Verda may quote the script that it refuses."""
    own = make(node_client_id="idofnode", node_client_secret="secretofnode")  # type: ignore[arg-type]
    cloud.fail(
        "POST", "/v1/scripts", error(400, "invalid_request", 'Invalid script: CLIENT_SECRET = "secretofnode"'), times=2
    )
    with pytest.raises(BadRequest) as caught:
        own.launch(offer_of(mine), 1, tags(), STARTUP)
    assert "secretofnode" not in str(caught.value)


def test_a_spot_machines_disk_is_deleted_with_it(mine: Verda, cloud: FakeVerda) -> None:
    """The default is that it is kept and billed. On demand the field is refused."""
    (instance,) = mine.launch(offer_of(mine, spot=True), 1, tags(), STARTUP)
    assert instance.is_spot
    assert (instance.price_per_hour, instance.on_demand_price_per_hour) == (1.85, 3.7)
    assert [(one.is_spot, one.price_per_hour) for one in mine.instances(POOL)] == [(True, 1.85)]
    cloud.preempt(instance.id)
    assert cloud.volumes == {}
    assert mine.instances(POOL) == []
    mine.launch(offer_of(mine), 1, tags(launch="Lb"), STARTUP)
    assert "on_spot_discontinue" not in cloud.asked("POST", "/v1/instances$")[-1].body["os_volume"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("1H100.80S.30V", "ubuntu-24.04-cuda-13.0-open-docker"),
        ("1B300.30V", "ubuntu-24.04-cuda-13.0-open-docker"),
        ("1V100.6V", "24.04.cuda12.9.docker"),
        ("1A6000.10V", "24.04.cuda12.9.docker"),
        ("CPU.4V.16G", "24.04.base"),
    ],
)
def test_the_image_fits_the_machine(mine: Verda, cloud: FakeVerda, name: str, slug: str) -> None:
    mine.launch(offer_of(mine, name), 1, tags(), STARTUP)
    assert cloud.asked("POST", "/v1/instances$")[0].body["image"] == slug


def test_a_configured_image_is_used(mine: Verda, make: Make, cloud: FakeVerda) -> None:
    own = make(image="24.04.cuda12.9.docker", os_volume_gb=250)
    own.launch(offer_of(mine), 1, tags(), STARTUP)
    body = cloud.asked("POST", "/v1/instances$")[0].body
    assert body["image"] == "24.04.cuda12.9.docker"
    assert body["os_volume"]["size"] == 250


def test_tags_are_preserved(mine: Verda, cloud: FakeVerda) -> None:
    """They are encoded in letters, digits, "." and "-". The fake refuses other characters, and Verda may do so."""
    odd = {OWNER_TAG: "jörg_40 20%@büro", PROCESS_TAG: "", "skyward-expires": "1790003600"}
    mine.launch(offer_of(mine), 1, tags() | odd, STARTUP)
    (instance,) = mine.instances(POOL)
    assert instance.tags == tags() | odd


def test_a_machine_that_verda_has_not_tagged_is_found_by_its_name(mine: Verda, cloud: FakeVerda) -> None:
    """Its description identifies it too. It has no endpoint then, but can be terminated."""
    cloud.strangers()
    (launched,) = mine.launch(offer_of(mine), 1, tags(first_rank=7), STARTUP)
    cloud.is_untagging = True
    (instance,) = mine.instances()
    assert (instance.id, instance.pool_id, instance.rank, instance.endpoint) == (launched.id, POOL, 7, None)
    assert instance.tags == {POOL_TAG: POOL, RANK_TAG: "7"}
    assert LAUNCH_TAG not in instance.tags


def test_each_status_has_a_state(mine: Verda, cloud: FakeVerda) -> None:
    """An unknown one is PENDING."""
    (launched,) = mine.launch(offer_of(mine), 1, tags(), STARTUP)
    for state, words in {
        InstanceState.PENDING: "ordered new provisioning validating pending restoring unknown a-new-word",
        InstanceState.RUNNING: "running",
        InstanceState.STOPPING: "offline starting_hibernation hibernating error no_capacity notfound",
        None: "discontinued",
    }.items():
        for word in words.split():
            cloud.machines[launched.id]["status"] = word
            assert [instance.state for instance in mine.instances(POOL)] == ([state] if state else []), word


def test_a_listing_needs_no_key(mine: Verda, make: Make, tmp_path: Path) -> None:
    """A user without the key can still find and terminate the machines."""
    (launched,) = mine.launch(offer_of(mine), 1, tags(), STARTUP)
    other = make(ssh_key=str(tmp_path / "none"))
    (instance,) = other.instances(POOL)
    assert (instance.id, instance.endpoint) == (launched.id, None)


def test_the_disk_is_deleted_with_the_machine(mine: Verda, cloud: FakeVerda) -> None:
    """It does not go to the trash."""
    launched = mine.launch(offer_of(mine), 2, tags(), STARTUP)
    mine.terminate([launched[0].id])
    assert len(cloud.volumes) == 1
    assert len(cloud.scripts) == 1  # that of the other machine
    mine.terminate([launched[1].id])
    assert cloud.volumes == cloud.trash == cloud.scripts == {}


def test_a_disk_that_verda_leaves_behind_is_swept(mine: Verda, cloud: FakeVerda) -> None:
    """It is deleted when its machine is terminated again, or another one an hour later."""
    cloud.leaves_disks = True
    (launched,) = mine.launch(offer_of(mine), 1, tags(), STARTUP)
    mine.terminate([launched.id])
    assert len(cloud.volumes) == 1  # it is attached until the machine is gone
    mine.terminate([launched.id])
    assert cloud.volumes == {}
    old, young = (
        cloud.orphan(f"skyward-{POOL}-5-aaaaaaaa", age_seconds=4000),
        cloud.orphan(f"skyward-{POOL}-6-bbbbbbbb", age_seconds=60),
    )
    going = cloud.orphan(f"skyward-{POOL}-7-cccccccc", age_seconds=4000)
    cloud.volumes[going]["status"] = "deleting"
    kept = [
        going,
        cloud.orphan("skyward-data", age_seconds=9999),
        cloud.orphan("job-1-abcdef", age_seconds=9999),
        cloud.orphan("skyward-a-1-b", age_seconds=9999, is_os=False),
    ]
    mine.terminate([launched.id])
    assert old not in cloud.volumes
    assert not [request for request in cloud.asked("DELETE") if going in request.path]
    assert cloud.volumes.keys() == {young, *kept}
    assert cloud.trash == {}


def test_an_attached_disk_is_never_swept(mine: Verda, cloud: FakeVerda) -> None:
    """Its age does not matter, because it is the disk of a running machine."""
    mine.launch(offer_of(mine), 1, tags(), STARTUP)
    (volume,) = cloud.volumes.values()
    volume["created_at"] = "2020-01-01T00:00:00Z"
    (other,) = mine.launch(offer_of(mine), 1, tags(launch="Lb"), STARTUP)
    mine.terminate([other.id])
    assert list(cloud.volumes.values()) == [volume]


def test_old_scripts_without_machines_are_swept(mine: Verda, cloud: FakeVerda) -> None:
    """The next launch or termination deletes them."""
    now = int(time.time())
    old, young = (
        cloud.script(f"skyward-sky-other-aaaaaaaa-{now - 4000}"),
        cloud.script(f"skyward-sky-other-bbbbbbbb-{now - 60}"),
    )
    strange = cloud.script(STRANGE_SCRIPT)
    (launched,) = mine.launch(offer_of(mine), 1, tags(), STARTUP)
    assert old not in cloud.scripts
    assert {young, strange} < cloud.scripts.keys()
    mine.terminate([launched.id])
    assert cloud.scripts.keys() == {young, strange}


def test_a_preempted_machines_script_is_deleted_with_its_termination(mine: Verda, cloud: FakeVerda) -> None:
    """No list has the machine any more, but its id can be queried."""
    now = str(int(time.time()))
    (launched,) = mine.launch(offer_of(mine, spot=True), 1, tags() | {CREATED_TAG: now}, STARTUP)
    cloud.preempt(launched.id)
    mine.terminate([launched.id])
    assert cloud.scripts == {}
    assert cloud.asked("PUT") == []


def test_deleting_a_machine_that_is_being_provisioned_is_tried_again(mine: Verda, cloud: FakeVerda) -> None:
    """Verda refuses to delete it until it is up. The error is a row of a 207."""
    (launched,) = mine.launch(offer_of(mine), 1, tags(), STARTUP)
    cloud.machines[launched.id]["status"] = "provisioning"
    cloud.path_of[launched.id] = ["provisioning", "provisioning", "validating", "running"]
    mine.terminate([launched.id])
    assert cloud.alive() == set()
    assert len(cloud.asked("PUT")) >= 2


def test_machines_that_stay_busy_are_named(mine: Verda, cloud: FakeVerda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machines are deleted first."""
    busy, other = mine.launch(offer_of(mine), 2, tags(), STARTUP)
    cloud.machines[busy.id]["status"] = "provisioning"
    with pytest.raises(InstancesLeft, match="provisioning") as caught:
        mine.terminate([busy.id, other.id])
    assert caught.value.ids == (busy.id,)
    assert cloud.alive() == {busy.id}
    assert len(cloud.scripts) == 1


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_failed_sweep_of_disks_is_reported_after_the_machines(
    mine: Verda, cloud: FakeVerda, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """A disk that is left is billed, but a machine that is left costs more."""
    busy, other = mine.launch(offer_of(mine), 2, tags(), STARTUP)
    cloud.machines[busy.id]["status"] = "provisioning"
    cloud.fail("GET", "/v1/volumes", error(500, "server_error", "no"), times=99)
    with pytest.raises(InstancesLeft if is_busy else ProviderFailed):
        mine.terminate([busy.id, other.id] if is_busy else [other.id])
    assert cloud.alive() == {busy.id}


def test_an_expired_token_is_fetched_again_once(mine: Verda, cloud: FakeVerda) -> None:
    cloud.fail("GET", "/v1/instances$", error(401, "unauthorized_request", "expired"))
    assert mine.instances() == []
    assert len(cloud.asked("POST", "/v1/oauth2/token")) == 2
    cloud.fail("GET", "/v1/instances$", error(401, "unauthorized_request", "expired"), times=2)
    with pytest.raises(CredentialsError, match="expired") as caught:
        mine.instances()
    assert caught.value.code == "unauthorized_request"


def test_the_error_for_a_wrong_secret_does_not_contain_it(mine: Verda, make: Make, cloud: FakeVerda) -> None:
    """Verda answers 400 and quotes the secret, which is masked."""
    wrong = make(client_id=CLIENT_ID, client_secret="wrong-secret-0002")  # type: ignore[arg-type]
    with pytest.raises(CredentialsError) as caught:
        wrong.instances()
    assert "wrong-secret-0002" not in str(caught.value)
    assert "***" in str(caught.value)


def test_credentials_with_the_older_name_are_used(mine: Verda, monkeypatch: pytest.MonkeyPatch) -> None:
    for new, old in zip(VARIABLES[:2], VARIABLES[2:], strict=True):
        monkeypatch.setenv(old, os.environ[new])
        monkeypatch.delenv(new)
    assert mine.instances() == []


def test_credentials_come_from_the_file_of_verdas_tools(
    cloud: FakeVerda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file sets a profile, a URL, and a path."""
    monkeypatch.delenv("VERDA_CLIENT_ID")
    (tmp_path / "credentials").write_text(
        f"[default]\nverda_client_id = x\nverda_client_secret = y\n"
        f"[work]\nverda_client_id = {CLIENT_ID}\nverda_client_secret = {CLIENT_SECRET}\nverda_base_url = {cloud.url}/v1\n"
    )
    monkeypatch.setenv("VERDA_PROFILE", "work")
    monkeypatch.setenv("VERDA_HOME", str(tmp_path))
    assert Verda().instances() == []
    monkeypatch.delenv("VERDA_HOME")
    monkeypatch.setenv("VERDA_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert Verda().instances() == []
    monkeypatch.setenv("VERDA_PROFILE", "none")
    with pytest.raises(CredentialsError, match="VERDA_CLIENT_ID"):
        Verda().instances()
    (tmp_path / "credentials").write_text("secret-without-a-section")
    with pytest.raises(CredentialsError) as caught:
        Verda().instances()
    assert "secret-without" not in str(caught.value)


def test_without_node_credentials_a_machine_powers_off(mine: Verda, cloud: FakeVerda) -> None:
    """It has none of the client's credentials."""
    mine.launch(offer_of(mine), 1, tags(), STARTUP)
    (script,) = cloud.scripts.values()
    assert end_script(script["script"]) == "poweroff"
    assert CLIENT_SECRET not in script["script"]


def test_node_credentials_are_complete_and_in_no_json() -> None:
    with pytest.raises(BadRequest, match="two halves"):
        load({"name": "verda", "node_client_id": "a"})
    provider = Verda(node_client_id="idofnode", node_client_secret="secretofnode")  # type: ignore[arg-type]
    assert provider.to_json() == {"name": "verda"}
    assert "ofnode" not in repr(provider)


def end_script(script: str) -> str:
    """Return the command that the end script runs repeatedly."""
    return script.partition("cat >/root/.cache/skyward/end <<'SKYWARD_END_OF_FILE'\nwhile :; do\n(\n")[2].partition(
        "\n)\nsleep "
    )[0]


def test_the_other_machines_of_a_launch_are_returned_if_one_fails(
    mine: Verda, cloud: FakeVerda, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = FakeVerda._add

    def unlucky(self: FakeVerda, body: dict[str, Any], gb: int) -> dict[str, Any]:
        machine = add(self, body, gb)
        if "-1-" in body["hostname"]:
            self.path_of[machine["id"]] = ["provisioning", "no_capacity"]
        return machine

    monkeypatch.setattr(FakeVerda, "_add", unlucky)
    launched = mine.launch(offer_of(mine), 3, tags(), STARTUP)
    assert [instance.rank for instance in launched] == [0, 2]
    assert cloud.alive() == {instance.id for instance in launched}
    assert len(cloud.scripts) == 1


def test_too_many_or_too_long_tags_are_refused_before_any_creating_call(mine: Verda, cloud: FakeVerda) -> None:
    for more in ({OWNER_TAG: "j" * 128}, {f"tag-{number}": "x" for number in range(4)}):
        with pytest.raises(BadRequest, match="127"):
            mine.launch(offer_of(mine), 1, tags() | more, STARTUP)
    assert cloud.alive() == set()
    assert cloud.scripts == {}
