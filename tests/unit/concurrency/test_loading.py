"""Large modules are imported without garbage collections, which go on afterwards as the program had them."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward_core.concurrency.loading import load


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that notes whether there are collections while it is imported."""
    name = "skyward_test_loading"
    (tmp_path / f"{name}.py").write_text("import gc\nis_collected = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the program collects garbage."""
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_an_import_collects_no_garbage_and_changes_nothing_after_it(module: str, enabled: bool) -> None:
    frozen = gc.get_freeze_count()
    loaded = load(module)
    assert not loaded.is_collected
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == frozen
    assert load(module) is loaded


def test_collections_go_on_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError):
        load("skyward_test_that_is_not_there")
    assert gc.isenabled()
