"""Each fake of a cloud is used by the vendor's own Python SDK.

So a fake cannot differ from what the vendor's client sends and expects. RunPod's fake is compared in `test_runpod.py`,
and botocore uses AWS's fake in each of its tests.

The SDKs are no dependency of ours and not in the development group. With all three of them uv resolves beside Prefect,
Airflow and Dagster. But it would use an older release of `cryptography` and thirty more packages, which the published
constraints would contain. So they are installed here, in their own environment, at fixed versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uv

from skyward_core.providers.ssh_keys import our_key
from tests.providers.fake_digitalocean import TOKEN, FakeDigitalOcean
from tests.providers.fake_vastai import KEY as VAST_KEY
from tests.providers.fake_vastai import FakeVast, ask
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda
from tests.providers.http_fake import Request

SDKS = ("pydo==0.44.0", "verda==1.25.0", "vastai==1.9.1")
NOT_NEEDED = "azure-identity; python_version < '3'\n"
"""pydo depends on it, but imports nothing from it."""

type Drive = Callable[..., Any]


@pytest.fixture(scope="module")
def sdk_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the SDKs and without our packages."""
    place = tmp_path_factory.mktemp("sdks")
    (place / "overrides.txt").write_text(NOT_NEEDED)
    python = place / "environment/bin/python"
    quiet = [uv.find_uv_bin(), "--quiet", "--no-config"]
    subprocess.run([*quiet, "venv", "--python", sys.executable, str(place / "environment")], check=True)
    subprocess.run(
        [*quiet, "pip", "install", "--python", str(python), "--overrides", str(place / "overrides.txt"), *SDKS],
        check=True,
        timeout=300,
    )
    return python


@pytest.fixture
def drive(sdk_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Run a program with the SDKs. It gets its arguments as `given`. Return its `answer`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(program: str, **words: Any) -> Any:
        code = (
            "import json, sys\ngiven = json.loads(sys.argv[1])\n"
            + textwrap.dedent(program)
            + "\nprint(json.dumps(answer))\n"
        )
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sdk_python, "-c", code, json.dumps(words)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def ocean() -> Iterator[FakeDigitalOcean]:
    with FakeDigitalOcean() as fake:
        yield fake


@pytest.fixture
def verda() -> Iterator[FakeVerda]:
    with FakeVerda() as fake:
        yield fake


@pytest.fixture
def vast() -> Iterator[FakeVast]:
    with FakeVast() as fake:
        fake.sell(*(ask(number) for number in range(1, 4)))
        yield fake


def test_digitaloceans_sdk_rents_a_droplet_of_the_fake(drive: Drive, ocean: FakeDigitalOcean) -> None:
    """pydo reads sizes, keys, droplets and actions by their names, follows the pages, and deletes."""
    answer = drive(
        """
        import pydo
        from azure.core.pipeline.policies import HeadersPolicy
        # its own policy sends no token without TLS
        client = pydo.Client(given["token"], endpoint=given["url"], authentication_policy=HeadersPolicy({"Authorization": "Bearer " + given["token"]}))
        sizes, page = [], 1
        while True:
            part = client.sizes.list(per_page=5, page=page)
            sizes += part["sizes"]
            if "next" not in part["links"].get("pages", {}):
                break
            page += 1
        key = client.ssh_keys.create(body={"name": "mine", "public_key": given["key"]})["ssh_key"]
        made = client.droplets.create(body={
            "name": "sdk-1", "region": "nyc1", "size": "s-2vcpu-4gb", "image": "ubuntu-24-04-x64", "ssh_keys": [key["fingerprint"]], "tags": ["sdk"]})
        id = made["droplet"]["id"]
        for _ in range(9):
            (droplet,) = [one for one in client.droplets.list()["droplets"] if one["id"] == id]
            actions = client.droplet_actions.list(droplet_id=id)["actions"]
        address = [network["ip_address"] for network in droplet["networks"]["v4"] if network["type"] == "public"]
        account = client.account.get()["account"]
        client.droplets.destroy(droplet_id=id)
        gone = client.droplets.destroy(droplet_id=id)["id"]
        answer = [len(sizes), made["links"]["actions"][0]["rel"], droplet["status"], droplet["size_slug"], actions[0]["type"], len(address), account["status"], gone]
        """,
        token=TOKEN,
        url=ocean.url,
        key=our_key().public,
    )
    assert answer == [len(ocean.sizes), "create", "active", "s-2vcpu-4gb", "create", 1, "active", "not_found"]
    assert ocean.droplets == {}


def test_verdas_sdk_rents_a_machine_of_the_fake(drive: Drive, verda: FakeVerda) -> None:
    """It reads types, availability, images, keys, scripts, volumes and machines into its own classes."""
    answer = drive(
        """
        import verda
        client = verda.VerdaClient(given["id"], given["secret"], given["url"])
        types = client.instance_types.get()
        places = client.instances.get_availabilities(is_spot=True)
        image = client.images.get()[0].image_type
        key = client.ssh_keys.create("mine", given["key"])
        script = client.startup_scripts.create("mine", "echo hello")
        made = client.instances.create(
            instance_type="1H100.80S.30V", image=given["image"], hostname="sdk-1", description="sdk", ssh_key_ids=[key.id], location="FIN-01",
            startup_script_id=script.id, os_volume={"name": "sdk", "size": 60, "on_spot_discontinue": "delete_permanently"}, is_spot=True,
            contract="SPOT", pricing="FIXED_PRICE", initial_interval=0.01)
        listed = [one.id for one in client.instances.get()]
        volumes = [volume.id for volume in client.volumes.get()]
        for _ in range(9):
            machine = client.instances.get_by_id(made.id)
        client.instances.action(made.id, "delete", volume_ids=[machine.os_volume_id], delete_permanently=True)
        client.startup_scripts.delete_by_id(script.id)
        amount = client.balance.get().amount
        answer = [len(types) > 3, bool(places), bool(image), listed == [made.id], machine.os_volume_id in volumes, machine.status, machine.is_spot, machine.contract, amount]
        """,
        id=CLIENT_ID,
        secret=CLIENT_SECRET,
        url=verda.url + "/v1",
        key=our_key().public,
        image=_image_of(verda, "1H100.80S.30V"),
    )
    assert answer == [True, True, True, True, True, "running", True, "SPOT", 100.0]
    assert (verda.alive(), verda.volumes, verda.scripts) == (set(), {}, {})


def _image_of(verda: FakeVerda, instance_type: str) -> str:
    return verda.images(Request("GET", "", {"instance_type": instance_type}, None, {})).body[0]["image_type"]  # type: ignore[attr-defined,index]


def test_vasts_sdk_rents_a_container_of_the_fake(drive: Drive, vast: FakeVast) -> None:
    """It searches, bids, lists page by page, reads one container, and destroys one and several."""
    answer = drive(
        """
        import vastai
        client = vastai.VastAI(api_key=given["key"], server_url=given["url"], quiet=True, raw=True)
        offers = client.search_offers(query={"gpu_name": {"eq": "RTX 4090"}, "num_gpus": {"eq": 1}}, order="dph_total", storage=40)
        made = [
            client.create_instance(id=offer["id"], image="nvidia/cuda:12.4.1-runtime-ubuntu22.04", disk=40, label=f"sdk-{number}", env={"-p 22:22": "1", "A": "b"},
                                   onstart_cmd="/bin/sh", runtype="args", args=["-c", "sleep 1"], user="root", cancel_unavail=True)
            for number, offer in enumerate(offers[:3])
        ]
        ids = [one["new_contract"] for one in made]
        for _ in range(9):
            listed = client.show_instances()
        one = next(row for row in listed if row["id"] == ids[0])
        stopped = client.stop_instance(id=ids[0])
        destroyed = [client.destroy_instance(id=ids[0]), client.destroy_instances(ids=ids[1:])]
        answer = [len(offers) >= 3, all(one["success"] for one in made), sorted(row["id"] for row in listed) == sorted(ids), one["actual_status"], one["extra_env"]["A"],
                  [one["success"] for one in destroyed], stopped["success"]]
        """,
        key=VAST_KEY,
        url=vast.url,
    )
    assert answer == [True, True, True, "running", "b", [True, True], True]
    assert vast.containers == {}
