"""The worked example of docs/clouds/another-cloud.md: a sixth cloud, found by its entry point, keeps the contract."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.errors import NoCapacity
from skyward_core.machines.offers import Requirements
from skyward_core.providers.base import load
from tests.providers.contract import POOL, STARTUP, Hands, ProviderContract, tags
from tests.providers.example_acme import acme
from tests.providers.example_acme.acme import Acme
from tests.providers.example_acme.fake_acme import TOKEN, FakeAcme
from tests.providers.http_fake import Reply

ROOT = Path(__file__).parents[4]
ENTRY = "[skyward.providers]\nacme = tests.providers.example_acme.acme:Acme\n"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAcme]:
    """Yield the cloud. A distribution with its provider seems to be installed, here and in child processes."""
    installed = tmp_path / "site/acme_skyward-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-skyward\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY)
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.setenv("PYTHONPATH", f"{installed.parent}:{ROOT}")
    monkeypatch.setenv("ACME_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(acme, "POLL_SECONDS", 0.001)
    with FakeAcme() as fake:
        yield fake


class TestAcme(ProviderContract):
    variables = ("ACME_TOKEN",)

    @pytest.fixture
    def hands(self, fake: FakeAcme) -> Hands:
        def provider(*, explicit: bool = False) -> Acme:
            return Acme(endpoint_url=fake.url, **({"token": TOKEN} if explicit else {}))

        def over() -> None:
            fake.is_out, fake.creates_left = False, None

        def refuse(code: str) -> None:
            fake.refusal = Reply(409, {"code": code, "message": "not now"})

        def strangers() -> None:
            for number in range(25):
                fake.add(name=f"theirs-{number}", type="cpu.4", region="here", labels={"skyward": "no"})

        return Hands(
            provider=provider,
            want=Requirements(accelerator=sky.accelerators.parse("H100")),
            secrets=(TOKEN,),
            alive=lambda: set(fake.machines),
            refuse_credentials=lambda: setattr(fake, "is_refusing", True),
            no_capacity=lambda: refuse("sold_out"),
            quota=lambda: refuse("limit_reached"),
            outage=lambda: setattr(fake, "is_out", True),
            outage_over=over,
            lose_create_answer=lambda: fake.fail("POST", "/v1/machines", is_done=True),
            fail_create_after=lambda many: setattr(fake, "creates_left", many),
            throttle=lambda: fake.fail("GET", "/v1/machines", Reply(429, {"code": "slow"})),
            stop=lambda machine_id: fake.machines[machine_id].update(state="off"),
            preempt=lambda machine_id: fake.machines.pop(machine_id) and None,
            strangers=strangers,
        )


def test_a_failed_machine_is_not_returned_and_not_left(fake: FakeAcme) -> None:
    """Acme reports "active" or "failed" some reads after it has accepted the call."""
    provider = Acme(endpoint_url=fake.url)
    offer = provider.offers(Requirements())[0]
    add = fake.add
    fake.add = lambda **order: {**add(**order), **(fake.machines[max(fake.machines)].update(state="failed") or {})}  # type: ignore[method-assign]
    with pytest.raises(NoCapacity, match="did not come up"):
        provider.launch(offer, 2, tags(), STARTUP)
    assert fake.machines == {}


def test_a_region_is_a_filter_and_unknown_chips_are_left_out(fake: FakeAcme) -> None:
    """The input is the list of types that Acme sells."""
    assert {(offer.instance_type, offer.region) for offer in Acme(endpoint_url=fake.url).offers(Requirements())} == {
        ("gpu.1", "here"),
        ("gpu.1", "there"),
        ("cpu.4", "here"),
    }
    assert {offer.region for offer in Acme(endpoint_url=fake.url, region="there").offers(Requirements())} == {"there"}


def test_the_provider_is_found_by_name(fake: FakeAcme) -> None:
    """The name may come from a settings file or a lease."""
    assert load("acme") == Acme()
    assert load({"name": "acme", "region": "there"}) == Acme(region="there")
    assert load({"name": "acme", "endpoint_url": fake.url}).instances(POOL) == []


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
    names = (f"tests/{folder}/acme.py", f"tests/{folder}/fake_acme.py", f"tests/system/{folder}/test_acme.py")
    assert {path for path, _ in excerpts} == set(names)
