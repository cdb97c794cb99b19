"""`Image(cache=True)`: an image is captured from the first machine before secrets reach it.

Later machines start from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.errors import BootstrapFailed, ConnectionLost, PoolClosed
from skyward_core.image.image import Image
from skyward_core.ledger.budgets import Commitment
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.machines.instances import Instance
from skyward_core.providers.base import IMAGE_TAG, STARTED_FROM_TAG
from skyward_core.provisioning.bootstrap import IMAGE_ENV, KEEP_PHASE, REST, Preparation, node_script_in_two
from skyward_core.provisioning.image_capture import is_to_be_kept, start_and_keep
from skyward_core.spec import PoolSpec
from tests.fakes import FakeProvider
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

IMAGE_SECRET, POOL_SECRET = "image-secret-7d1f", "pool-secret-9c2e"
SPEC = PoolSpec(image=Image(cache=True, env={"INDEX_TOKEN": IMAGE_SECRET}), env={"HF_TOKEN": POOL_SECRET})


# ── as a value ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cache_does_not_change_the_installed_software() -> None:
    """The content hash is the same with and without `cache=True`, so both can start from one captured image."""
    assert Image().cache is False
    assert Image(cache=True).content_hash() == Image().content_hash()
    assert Image(cache=True) != Image()
    assert Image.model_validate_json(Image(cache=True).model_dump_json()) == Image(cache=True)


@pytest.mark.parametrize(
    ("cache", "keeps", "is_tagged"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_the_tags_of_a_launch_have_the_hash_of_the_packages(
    tmp_path: Path, cache: bool, keeps: bool, is_tagged: bool
) -> None:
    """Only providers that capture images get the hash, and only with `cache=True`: other providers have little space for
    tags.
    """
    kind = type("Keeping", (FakeProvider,), {"keeps_images": keeps, "name": "keeping"})
    image = Image(cache=cache)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        journal = Journal(ledger, "sky-1", PoolSpec(image=image), kind(folder=str(tmp_path)), Meter(), lambda _: None)
        journal.open()
        tags = journal.intend(OFFER, 1, 0, Commitment(None, None)).tags
    assert tags.get(IMAGE_TAG) == (image.content_hash() if is_tagged else None)


OFFER = sky.Offer(provider="keeping", instance_type="big", region="here", price_per_hour=1.0, vcpus=4, memory_gb=8)


# ── the script in two parts ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_part_contains_no_value_of_the_environment() -> None:
    """The second part contains all of them."""
    first, rest = node_script_in_two(SPEC)
    for secret in (IMAGE_SECRET, POOL_SECRET):
        assert secret not in first
        assert secret in rest
    assert SPEC.image.content_hash() in first
    assert "skyward_core.worker.supervisor" in rest


# ── the order of the steps ───────────────────────────────────────────────────────────────────────────────────────────


class Machine:
    """A machine that records its input in order."""

    def __init__(self, *, has_memory: bool = True, keep: Callable[[], str | None] = lambda: "ami-1") -> None:
        self.given: list[tuple[str, str]] = []
        self.has_memory = has_memory
        self.instance = cast("Instance", SimpleNamespace(id="i-1", tags={}))
        self._keep_disk = keep
        self.is_cut = False
        self.node = Preparation(cast("Any", self), 0, lambda _: None)
        self.provider = cast("Any", SimpleNamespace(name="keeping", keeps_images=True, keep_image=self.keep_image))

    def start(self, script: str, **_: object) -> None:
        self.given.append(("start", script))

    def write_in_memory(self, name: str, text: str) -> str | None:
        if not self.has_memory:
            return None
        self.given.append((f"memory {name}", text))
        return f"/dev/shm/x/{name}"

    def write(self, name: str, text: str) -> None:
        if self.is_cut:
            raise ConnectionLost("cut")
        self.given.append((name, text))
        if name == IMAGE_ENV:
            self.node.phase = KEEP_PHASE

    def keep_image(self, instance: Instance, image_hash: str) -> str | None:
        self.given.append(("keep", image_hash))
        return self._keep_disk()

    def prepare(self) -> list[str]:
        start_and_keep(self.node, SPEC, self.provider, 10.0, threading.Event())
        return [name for name, _ in self.given]


def test_an_image_is_captured_before_secrets_reach_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    """All earlier writes contain nothing of the environment."""
    caplog.set_level(logging.INFO)
    machine = Machine()
    assert machine.prepare() == ["start", f"memory {IMAGE_ENV}", IMAGE_ENV, "keep", REST]
    written = dict(machine.given)
    for name in ("start", IMAGE_ENV):
        assert IMAGE_SECRET not in written[name]
        assert POOL_SECRET not in written[name]
    assert written["keep"] == SPEC.image.content_hash()
    assert written[IMAGE_ENV] == f". /dev/shm/x/{IMAGE_ENV}; rm -f -- /dev/shm/x/{IMAGE_ENV}\n"
    assert "is being kept as ami-1" in caplog.text
    assert IMAGE_SECRET not in caplog.text


@pytest.mark.parametrize("error", [sky.ProviderFailed("out"), sky.CredentialsError("may not"), OSError("whatever")])
def test_a_failed_capture_does_not_fail_the_pool(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is reported, and the machine is used."""

    def keep() -> str | None:
        raise error

    assert Machine(keep=keep).prepare()[-2:] == ["keep", REST]
    assert (
        f"is not kept, and later pools install the packages of image {SPEC.image.content_hash()} again: {error}"
        in caplog.text
    )


def test_an_existing_image_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Another pool has captured it earlier."""
    caplog.set_level(logging.INFO)
    assert Machine(keep=lambda: None).prepare()[-1] == REST
    assert "is being kept" not in caplog.text


def test_a_machine_without_space_in_memory_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Its environment must be written to its disk."""
    machine = Machine(has_memory=False)
    assert machine.prepare() == ["start", IMAGE_ENV, REST]
    assert IMAGE_SECRET in dict(machine.given)[IMAGE_ENV]
    assert "its disk is not kept" in caplog.text


def test_an_image_without_environment_is_captured_too() -> None:
    """Nothing is handed over before, and the node is at the capture at once."""
    machine = Machine()
    machine.node.phase = KEEP_PHASE
    spec = PoolSpec(image=Image(cache=True))
    start_and_keep(machine.node, spec, machine.provider, 10.0, threading.Event())
    assert [name for name, _ in machine.given] == ["start", "keep", REST]


def test_the_wait_ends_if_the_pool_fails() -> None:
    """Another node has failed meanwhile."""
    machine, is_over = Machine(), threading.Event()
    is_over.set()
    spec = PoolSpec(image=Image(cache=True))
    with pytest.raises(PoolClosed):
        start_and_keep(machine.node, spec, machine.provider, 10.0, is_over)
    assert [name for name, _ in machine.given] == ["start"]


def test_a_machine_that_stops_answering_during_the_capture_is_reported() -> None:
    """The error is that of every other step of the bootstrap."""
    machine = Machine()
    machine.is_cut = True
    with pytest.raises(BootstrapFailed, match="it does not answer any more: cut"):
        machine.prepare()


@pytest.mark.parametrize(
    ("cache", "keeps", "tags", "is_kept"), [(True, True, {}, True), (False, True, {}, False), (True, False, {}, False)]
)
def test_which_machines_are_captured(cache: bool, keeps: bool, tags: dict[str, str], is_kept: bool) -> None:
    """`cache=True` is set and the provider supports it.

    A machine that was started from a captured image is not captured.
    """
    spec, provider = PoolSpec(image=Image(cache=cache)), cast("Any", SimpleNamespace(keeps_images=keeps))
    assert is_to_be_kept(spec, provider, cast("Any", SimpleNamespace(tags=tags))) is is_kept
    assert not is_to_be_kept(spec, provider, cast("Any", SimpleNamespace(tags={STARTED_FROM_TAG: "ami-1"})))
