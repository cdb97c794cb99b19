"""`Image(cache=True)`: an image is captured from the first machine before secrets reach it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyward_core.errors import BootstrapFailed, ConnectionLost, PoolClosed
from skyward_core.image.image import Image
from skyward_core.image.local_files import IncludedFiles
from skyward_core.ledger.budgets import Commitment
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.machines.instances import Instance
from skyward_core.providers.base import IMAGE_TAG, STARTED_FROM_TAG
from skyward_core.provisioning.bootstrap import (
    IMAGE_ENV,
    KEEP_PHASE,
    REST,
    Preparation,
    is_to_be_kept,
    node_script_in_two,
    start_and_keep,
)
from skyward_core.spec import PoolSpec
from tests.fakes import FakeProvider
from tests.offers import offer

IMAGE_SECRET, POOL_SECRET = "image-secret-7d1f", "pool-secret-9c2e"
SPEC = PoolSpec(image=Image(cache=True, env={"INDEX_TOKEN": IMAGE_SECRET}), env={"HF_TOKEN": POOL_SECRET})
BARE = PoolSpec(image=Image(cache=True))


def test_cache_does_not_change_the_installed_software() -> None:
    """The content hash is the same with and without it, so both can start from one captured image."""
    assert Image(cache=True).content_hash() == Image().content_hash()
    assert Image(cache=True) != Image()
    assert Image.model_validate_json(Image(cache=True).model_dump_json()) == Image(cache=True)


@pytest.mark.parametrize(("cache", "keeps"), [(True, True), (False, True), (True, False)])
def test_only_with_cache_and_a_provider_that_keeps_images_a_machine_is_captured(
    tmp_path: Path, cache: bool, keeps: bool
) -> None:
    """Then its tags have the hash of the packages. One that was started from a captured image is not captured."""
    kind = type("Keeping", (FakeProvider,), {"keeps_images": keeps, "name": "keeping"})
    spec, provider = PoolSpec(image=Image(cache=cache)), kind(folder=str(tmp_path))
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        journal = Journal(ledger, "sky-1", spec, provider, Meter(), lambda _: None)
        journal.open()
        tags = journal.intend(offer(provider="keeping"), 1, 0, Commitment(None, None)).tags
    assert tags.get(IMAGE_TAG) == (spec.image.content_hash() if cache and keeps else None)
    fresh, copy = (cast("Any", SimpleNamespace(tags=tags)) for tags in ({}, {STARTED_FROM_TAG: "ami-1"}))
    assert is_to_be_kept(spec, provider, fresh) is (cache and keeps)
    assert not is_to_be_kept(spec, provider, copy)


def test_the_first_part_of_the_script_contains_no_value_of_the_environment() -> None:
    first, rest = node_script_in_two(SPEC)
    for secret in (IMAGE_SECRET, POOL_SECRET):
        assert secret not in first
        assert secret in rest
    assert SPEC.image.content_hash() in first
    assert "skyward_core.worker.supervisor" in rest


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
        self.is_over = threading.Event()

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

    def send(self, files: Sequence[IncludedFiles]) -> None:
        self.given += [("send", file.place) for file in files]

    def keep_image(self, instance: Instance, image_hash: str) -> str | None:
        self.given.append(("keep", image_hash))
        return self._keep_disk()

    def prepare(self, spec: PoolSpec = SPEC) -> list[str]:
        start_and_keep(self.node, spec, self.provider, 10.0, self.is_over)
        return [name for name, _ in self.given]


def test_an_image_is_captured_before_secrets_reach_the_disk(caplog: pytest.LogCaptureFixture) -> None:
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
    caplog.clear()
    assert Machine(keep=lambda: None).prepare()[-1] == REST
    assert "is being kept" not in caplog.text, "another pool has captured it earlier"


def test_included_files_and_commands_reach_the_disk_after_the_capture(tmp_path: Path) -> None:
    (tmp_path / "patients.csv").write_text("a,b")
    image = Image(cache=True, includes=[str(tmp_path / "patients.csv")], shell=["echo prepared"])
    machine = Machine()
    machine.node.phase = KEEP_PHASE
    assert machine.prepare(PoolSpec(image=image)) == ["start", "keep", "send", REST]
    written = dict(machine.given)
    assert ("echo prepared" in written[REST], "echo prepared" in written["start"]) == (True, False)


def test_a_failed_capture_does_not_fail_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """The failure is reported, and the machine is used."""

    def keep() -> str | None:
        raise OSError("whatever")

    assert Machine(keep=keep).prepare()[-2:] == ["keep", REST]
    assert f"later pools install the packages of image {SPEC.image.content_hash()} again: whatever" in caplog.text


def test_a_machine_without_space_in_memory_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Its environment must be written to its disk."""
    machine = Machine(has_memory=False)
    assert machine.prepare() == ["start", IMAGE_ENV, REST]
    assert IMAGE_SECRET in dict(machine.given)[IMAGE_ENV]
    assert "its disk is not kept" in caplog.text


def test_without_an_environment_the_node_is_at_the_capture_at_once() -> None:
    """The wait for that ends if another node fails meanwhile. A machine that stops answering is reported."""
    machine = Machine()
    machine.node.phase = KEEP_PHASE
    assert machine.prepare(BARE) == ["start", "keep", REST]
    over = Machine()
    over.is_over.set()
    with pytest.raises(PoolClosed):
        over.prepare(BARE)
    assert [name for name, _ in over.given] == ["start"]
    cut = Machine()
    cut.is_cut = True
    with pytest.raises(BootstrapFailed, match="it does not answer any more: cut"):
        cut.prepare()
