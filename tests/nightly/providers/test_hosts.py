"""`Hosts`: as a value, and on the machines of the test bed, with real guards that tests kill."""

import json
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.providers import hosts
from skyward_core.providers.base import rank
from skyward_core.provisioning.bootstrap import guard_script
from tests.system.providers.test_hosts import (  # noqa: F401 - a fixture
    ANY,
    CACHE_ONLY,
    POOL,
    REPOSITORY,
    guard_of,
    launch,
    left_on,
    machines,
    provider_of,
    said,
    start_in,
)
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.waiting import wait_until

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.parametrize("name", ["LOOK", "START", "LIST", "END", "ENDS", "SWEEP"])
def test_the_scripts_are_plain_sh(name: str) -> None:
    """shellcheck and dash report nothing for the scripts for hosts. Functions that a script does not use are ignored."""
    script = getattr(hosts, name)
    lines = subprocess.run(
        [SHELLCHECK, "--shell=sh", "--exclude=SC2329,SC2317,SC2034", "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert lines == ""
    assert subprocess.run(["dash", "-n"], input=script, capture_output=True, text=True, check=False).stderr == ""


def test_hosts_with_equal_gpus_are_one_offer(machines) -> None:
    """The driver reports the GPUs, and hosts are grouped by them. A node that needs GPUs starts on one of these hosts."""
    plain, one, two = machines(3)
    for host in (one, two):
        smi = host.root / "usr/local/bin/nvidia-smi"
        smi.write_text(
            "#!/bin/sh\n[ \"$1\" = --query-gpu=name,memory.total ] && yes 'NVIDIA A100-SXM4-40GB, 40960' | head -n 2\n"
        )
        smi.chmod(0o755)
    (plain.root / "usr/local/bin/nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    (plain.root / "usr/local/bin/nvidia-smi").chmod(0o755)
    provider = provider_of([plain, one, two])
    want = sky.Requirements(accelerator=parse("2xA100-40GB"))
    without, offer = provider.offers(want)
    assert (without.instance_type, without.accelerators) == ("hosts", 0)
    assert (offer.instance_type, offer.accelerator, offer.accelerators) == ("2 x A100", "A100", 2)
    assert rank([without, offer], want) == [offer]
    instances = provider.launch(offer, 3, {"skyward-pool": POOL, "skyward-rank": "0"}, guard_script(300, None))
    assert [instance.ip for instance in instances] == [one.ip, two.ip]
    assert (
        {instance.instance_type for instance in instances}
        == {"2 x A100"}
        == {instance.instance_type for instance in provider.instances(POOL)}
    )
    with pytest.raises(sky.NoCapacity, match=rf"{plain.ip} has no GPU; {one.ip} is held by pool {POOL}"):
        provider.launch(offer, 1, {"skyward-pool": "other", "skyward-rank": "0"}, guard_script(300, None))
    assert len(provider.offers(ANY)) == 1


TAGS = {
    "skyward-launch": "token-1",
    "skyward-owner": "Jo Doe@box",
    "skyward-process": "boot.4026531836.7.123",
    "skyward-created": "1790000000",
    "skyward-expires": "1790003600",
    "odd": "a b\"c'd$(touch pwned)\n\\é=;\t*",
}
"""The tags of a pool, and a value with characters that shells and line-wise readers may misinterpret."""


def test_all_pools_are_listed_with_their_tags(machines) -> None:
    """A process that knows only the provider lists all pools."""
    trio = machines(3)
    provider = provider_of(trio)
    (offer,) = provider.offers(ANY)
    of_one = provider.launch(
        offer, 2, {"skyward-pool": "sky-one", "skyward-rank": "3", **TAGS}, guard_script(300, None)
    )
    of_other = provider.launch(offer, 1, {"skyward-pool": "sky-on", "skyward-rank": "0"}, guard_script(300, None))
    assert [instance.tags for instance in of_one] == [
        {"skyward-pool": "sky-one", "skyward-rank": rank, **TAGS} for rank in ("3", "4")
    ]
    for host, instance in zip(trio, [*of_one, *of_other], strict=True):
        guard_of(host, instance)
    said(
        trio[0],
        "SKYWARD_INSTANCE_ID=local-0123456789ab SKYWARD_POOL_ID=sky-one setsid sleep 300 </dev/null >/dev/null 2>&1 &",
    )
    code = f"""
        from skyward_core.providers import base
        provider = base.load({provider.to_json()!r})
        found = provider.instances()
        print("[" + ",".join(instance.model_dump_json() for instance in found) + "]")
        provider.terminate([instance.id for instance in found])
        assert provider.instances() == []
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert [sky.Instance.model_validate(fields) for fields in json.loads(done.stdout)] == [*of_other, *of_one]


def test_terminate_works_without_a_guard(machines) -> None:
    """If the guard was killed or stopped, the provider ends the node. Another pool's node on another host still runs."""
    dead, still, _ = trio = machines(3)
    provider = provider_of(trio)
    launched = launch(provider, 2)
    (neighbour,) = launch(provider, 1, "sky-other")
    for host, instance, signal in zip((dead, still), launched, ("KILL", "STOP"), strict=True):
        guard = guard_of(host, instance)
        start_in(host, instance, "sleep 1234")
        said(host, f"mkdir /dev/shm/skyward-node-{instance.id}; kill -{signal} {guard}")
    assert [instance.rank for instance in provider.instances(POOL)] == [0, 1]
    provider.terminate([instance.id for instance in launched])
    assert provider.instances(POOL) == []
    assert [sorted(left_on(host)) for host in (dead, still)] == [CACHE_ONLY, CACHE_ONLY]
    assert provider.instances("sky-other") == [neighbour]


def test_another_user_cannot_block_a_host(machines) -> None:
    """A file, pipe or link with the lock's former name has no effect."""
    (host,) = machines(1)
    nobody = "setpriv --reuid=nobody --clear-groups"
    said(
        host,
        f"{nobody} mkfifo -m 600 /tmp/skyward-host.lock; setsid {nobody} flock /proc sleep 300 </dev/null >/dev/null 2>&1 &",
    )
    wait_until(lambda: host.run("flock -n /proc true").returncode == 1, "the lock to be taken")
    provider = provider_of([host])
    (instance,) = launch(provider)
    with pytest.raises(sky.NoCapacity, match=f"held by pool {POOL}"):
        launch(provider, 1, "sky-other")
    provider.terminate([instance.id])
    (again,) = launch(provider)
    provider.terminate([again.id])


def test_an_expired_lease_ends_the_node(machines) -> None:
    """If the client never returns, the guard ends the whole node. The host is free and unchanged, but for a file that
    says when and why the node has ended: the next process that settles the pool reads it.
    """
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider, lease_seconds=6)
    start_in(host, instance, "sleep 1234")
    began = datetime.now(UTC)
    wait_until(lambda: provider.instances(POOL) == [], "the lease to run out", 60)
    ended = "/root/.cache/skyward/ended"
    assert sorted(left_on(host)) == sorted([*CACHE_ONLY, ended, f"{ended}/{instance.id}"])
    end = provider.ends([instance.id, "host-000000000000", "../secret"])[instance.id]
    assert end.reason == "no sign of life from a client, and the lease has run out (lease_seconds)"
    assert began - timedelta(seconds=10) < end.at <= datetime.now(UTC)


def test_a_full_disk_starts_nothing(machines) -> None:
    """NoCapacity names the host's reason. The host keeps no files and its lock is free; a pool uses the next host."""
    full, good = pair = machines(2)
    said(full, "mkdir -p ~/.cache/skyward/instances")
    full.fill_disk()
    with pytest.raises(sky.NoCapacity, match="could not start a node"):
        launch(provider_of([full]))
    (instance,) = launch(provider_of(pair))
    assert (instance.ip, instance.rank) == (good.ip, 0)
    full.empty_disk()
    assert sorted(left_on(full)) == CACHE_ONLY
    launch(provider_of([full]))


@pytest.mark.parametrize(
    "squatted",
    ["-o nobody -m 755 /shared/home", "-o nobody -m 755 /shared/home /shared/home/instances", "-m 777 /shared/home"],
)
def test_a_home_that_another_user_could_replace_is_refused(machines, squatted: str) -> None:
    """Its programs would be the other user's: nothing is started, and the error has advice."""
    (host,) = machines(1)
    said(host, f"mkdir -m 1777 /shared; install -d {squatted}")
    (host.root / "root/.bashrc").write_text("export SKYWARD_HOME=/shared/home\n")
    provider = provider_of([host])
    with pytest.raises(
        sky.NoCapacity, match=r"/shared/home belongs to another user, or every user may write to it.*SKYWARD_HOME"
    ):
        launch(provider)
    assert provider.instances(POOL) == []
    said(host, "chown -R root /shared/home; chmod 755 /shared/home")
    (instance,) = launch(provider)
    provider.terminate([instance.id])


def test_environments_are_swept_on_hosts_without_nodes(machines) -> None:
    """Cached environments are removed on request, but not while a node runs. Other files in the directory stay."""
    busy, idle = pair = machines(2)
    for host in pair:
        said(host, "mkdir -p ~/.cache/skyward/envs/e/bin ~/.cache/skyward/ship ~/.cache/skyward/mine")
    provider = provider_of(pair)
    (instance,) = launch(provider)
    assert provider.sweep_environments() == [busy.ip]
    assert said(busy, "ls ~/.cache/skyward").split() == ["envs", "instances", "mine", "ship"]
    assert said(idle, "ls ~/.cache/skyward").split() == ["mine"]
    provider.terminate([instance.id])
    assert provider.sweep_environments() == []
    assert said(busy, "ls ~/.cache/skyward").split() == ["mine"]
