"""The vendors' own packages list, create and delete machines at our fakes: what they send is accepted, and what they read is there.

The packages are in an environment of their own, because they are no packages of ours: `.sdks/venv`. boto3 is in every
test of AWS. RunPod's package (1.11.0) speaks only GraphQL, and we speak its REST API v2; that fake checks each request
against RunPod's OpenAPI file instead (`runpod_specification.json`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import uv

from tests.providers import fake_digitalocean, fake_vastai, fake_verda

PACKAGES = ("pydo==0.44.0", "verda==1.25.0", "vastai==1.9.1")
FOLDER = Path(__file__).parents[3] / ".sdks"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGq1 jo@box"

PYDO = """
from pydo import Client
client = Client(token=SECRET, endpoint=URL)
plain = {"enforce_https": False}
key = client.ssh_keys.create(body={"name": "jo", "public_key": KEY}, **plain)["ssh_key"]
sold = client.sizes.list(per_page=200, **plain)["sizes"]
sizes = len(sold)
size = next(row for row in sold if row["available"] and row["regions"] and "gpu_info" not in row)
body = {"name": "web", "region": size["regions"][0], "size": size["slug"], "image": "ubuntu-24-04-x64", "ssh_keys": [key["id"]], "tags": ["a"]}
made = client.droplets.create(body=body, **plain)["droplet"]["id"]
listed = [row["id"] for row in client.droplets.list(per_page=200, **plain)["droplets"]]
client.droplets.destroy(droplet_id=made, **plain)
left = [row["id"] for row in client.droplets.list(**plain)["droplets"]]
"""
VERDA = """
from verda import VerdaClient
client = VerdaClient("Fk7clientidofverda01", SECRET, base_url=URL + "/v1")
key = client.ssh_keys.create("jo", KEY)
script = client.startup_scripts.create("s", "#!/bin/sh")
instance = client.instances.create("CPU.4V.16G", "24.04.base", "web", "a web server", [key.id], "FIN-01", script.id,
    os_volume={"name": "web", "size": 50}, wait_for_status="running", initial_interval=0.01)
made = instance.id
listed = [each.id for each in client.instances.get()]
client.instances.action(made, "delete")
client.instances.get()
left = [each.id for each in client.instances.get()]
sizes = len(client.instance_types.get())
"""
VASTAI = """
from vastai import VastAI
client = VastAI(api_key=SECRET, server_url=URL)
sizes = len(client.search_offers(query="gpu_name=RTX_4090 num_gpus=1"))
made = client.create_instance(id=101, image="ubuntu:24.04", disk=20, label="web", onstart_cmd="true", env={"A": "b"})["new_contract"]
listed = [row["id"] for row in client.show_instances()]
client.destroy_instance(id=made)
left = [row["id"] for row in client.show_instances()]
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with exactly these packages."""
    environment, noted = FOLDER / "venv", FOLDER / "packages"
    interpreter = environment / "bin/python"
    if not (interpreter.exists() and noted.exists() and noted.read_text() == " ".join(PACKAGES)):
        tool = uv.find_uv_bin()
        subprocess.run([tool, "venv", "--clear", "--quiet", "--python", sys.executable, environment], check=True)
        subprocess.run([tool, "pip", "install", "--quiet", "--python", interpreter, *PACKAGES], check=True)
        noted.write_text(" ".join(PACKAGES))
    return interpreter


def run(python: Path, program: str, folder: Path, **values: str) -> Mapping[str, Any]:
    """Run a program with these constants, its home an empty folder; return its variables."""
    constants = "".join(f"{name} = {value!r}\n" for name, value in {"KEY": KEY, **values}.items())
    last = 'import json\nprint(json.dumps({"made": made, "listed": listed, "left": left, "sizes": sizes}))\n'
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(
        [python, "-c", constants + program + last], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(result: Mapping[str, Any]) -> None:
    """What was created is listed; what was deleted is not; there is something for sale."""
    assert result["made"] in result["listed"]
    assert result["made"] not in result["left"]
    assert result["sizes"] > 0


def test_pydo(python: Path, tmp_path: Path) -> None:
    with fake_digitalocean.FakeDigitalOcean() as fake:
        check(run(python, PYDO, tmp_path, URL=fake.url, SECRET=fake_digitalocean.TOKEN))
        assert fake.alive() == set()


def test_verda(python: Path, tmp_path: Path) -> None:
    with fake_verda.FakeVerda() as fake:
        check(run(python, VERDA, tmp_path, URL=fake.url, SECRET=fake_verda.CLIENT_SECRET))
        assert fake.alive() == set()


def test_vastai(python: Path, tmp_path: Path) -> None:
    with fake_vastai.FakeVast() as fake:
        fake.sell(fake_vastai.ask(101))
        check(run(python, VASTAI, tmp_path, URL=fake.url, SECRET=fake_vastai.KEY))
        assert fake.alive() == set()
