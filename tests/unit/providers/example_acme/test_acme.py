"""The worked example of docs/clouds/another-cloud.md: a sixth cloud, found by its entry point, keeps the contract."""

import re
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.errors import NoCapacity
from skyward_core.machines.offers import Requirements
from skyward_core.providers.base import load
from tests.providers.contract import POOL, STARTUP, Make, ProviderContract, tags
from tests.providers.example_acme.acme import Acme
from tests.providers.example_acme.fake_acme import TOKEN, FakeAcme
from tests.providers.in_process import Install

ROOT = Path(__file__).parents[4]
ENTRY = "[skyward.providers]\nacme = tests.providers.example_acme.acme:Acme\n"


@pytest.fixture
def cloud(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeAcme:
    """Return the cloud. A distribution with its provider seems to be installed."""
    installed = tmp_path / "site/acme_skyward-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-skyward\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY)
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.setenv("ACME_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    in_process(fake := FakeAcme())
    return fake


@pytest.fixture
def make(cloud: FakeAcme) -> Make:
    return lambda **fields: Acme(endpoint_url=cloud.url, **fields)


class TestAcme(ProviderContract):
    want, secrets = Requirements(accelerator=sky.accelerators.parse("H100")), (TOKEN,)
    variables, explicit = ("ACME_TOKEN",), {"token": TOKEN}


def test_a_failed_machine_is_not_returned_and_not_left(cloud: FakeAcme) -> None:
    """Acme reports "active" or "failed" some reads after it has accepted the call."""
    provider = Acme(endpoint_url=cloud.url)
    offer = provider.offers(Requirements())[0]
    add = cloud.add
    cloud.add = lambda **order: {**add(**order), **(cloud.machines[max(cloud.machines)].update(state="failed") or {})}  # type: ignore[method-assign]
    with pytest.raises(NoCapacity, match="did not come up"):
        provider.launch(offer, 2, tags(), STARTUP)
    assert cloud.machines == {}


def test_a_region_is_a_filter_and_unknown_chips_are_left_out(cloud: FakeAcme) -> None:
    """The input is the list of types that Acme sells."""
    assert {(offer.instance_type, offer.region) for offer in Acme(endpoint_url=cloud.url).offers(Requirements())} == {
        ("gpu.1", "here"),
        ("gpu.1", "there"),
        ("cpu.4", "here"),
    }
    assert {offer.region for offer in Acme(endpoint_url=cloud.url, region="there").offers(Requirements())} == {"there"}


def test_the_provider_is_found_by_name(cloud: FakeAcme) -> None:
    """The name may come from a settings file or a lease."""
    assert load("acme") == Acme()
    assert load({"name": "acme", "region": "there"}) == Acme(region="there")
    assert load({"name": "acme", "endpoint_url": cloud.url}).instances(POOL) == []


def test_the_page_quotes_these_files() -> None:
    """Each excerpt of the page is in the file that is named above it, word for word.

    The page also shows how to register a provider.
    """
    page = (ROOT / "docs/clouds/another-cloud.md").read_text()
    excerpts = re.findall(r"^`(tests/[\w/]+\.py)`[^\n]*\n\n```py\n(.*?)```$", page, re.DOTALL | re.MULTILINE)
    assert len(excerpts) == page.count("```py\n") >= 6
    for path, text in excerpts:
        assert text in (ROOT / path).read_text(), f"{path} has no longer:\n{text}"
    folder = "providers/example_acme"
    names = (f"tests/{folder}/acme.py", f"tests/{folder}/fake_acme.py", f"tests/unit/{folder}/test_acme.py")
    assert {path for path, _ in excerpts} == set(names)
