"""What an account meets before its first machine, at each cloud: the class of the error, and what it says to do.

The table of docs/clouds/index.md is made here, from the answers of the fakes. To write it anew:

    WRITE=1 .venv/bin/python -m pytest -q tests/unit/providers/test_refusals.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import SkywardError
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.aws import AWS
from skyward_core.providers.base import rank
from skyward_core.providers.digitalocean import DigitalOcean
from skyward_core.providers.runpod import RunPod
from skyward_core.providers.vastai import VastAI
from skyward_core.providers.verda import Verda
from skyward_core.provisioning.candidates import ask, candidates, none_left, refusal
from tests.providers import fake_digitalocean, fake_runpod, fake_vastai, fake_verda
from tests.providers.aws import OFFER, SECRET, as_us
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import FakeAWS
from tests.providers.in_process import Install

PAGE = Path(__file__).parents[3] / "docs/clouds/index.md"
BEGIN, END = "<!-- made by tests/unit/providers/test_refusals.py -->\n", "<!-- end -->\n"
SITUATIONS = ("wrong key", "key without rights", "no quota", "no machine free", "region without the GPU")


@dataclass(frozen=True)
class Account:
    """One cloud: what is asked for, and how the fake comes into each situation."""

    name: str
    accelerator: str
    make: Callable[..., sky.Provider]
    cause: Mapping[str, Callable[[], object]]
    """Before a launch; "wrong key" before a listing."""
    region: str
    """One without the GPU."""
    secret: str
    offer: Offer | None = None
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)


def digitalocean() -> tuple[Account, Any]:
    fake = fake_digitalocean.FakeDigitalOcean()
    no_right = fake_digitalocean.refusal(403, "forbidden", "You are not authorized to perform this operation")
    return Account(
        "DigitalOcean",
        "H100",
        lambda **fields: DigitalOcean(endpoint_url=fake.url, **fields),
        {
            "wrong key": lambda: setattr(fake, "is_refusing", True),
            "key without rights": lambda: fake.fail("POST", "/v2/droplets", no_right),
            "no quota": lambda: setattr(fake, "gpu_limit", 0),
            "no machine free": fake.no_capacity,
        },
        "ams3",
        fake_digitalocean.TOKEN,
    ), fake


def runpod() -> tuple[Account, Any]:
    fake = fake_runpod.FakeRunPod()
    fake.sell(
        fake_runpod.gpu("NVIDIA GeForce RTX 4090", 24, 0.69),
        fake_runpod.gpu("NVIDIA H200", 141, 4.59, places="EU-CZ-1"),
    )
    return Account(
        "RunPod",
        "H200",
        lambda **fields: RunPod(endpoint_url=fake.url, **fields),
        {
            "wrong key": lambda: setattr(fake, "is_refusing", True),
            "key without rights": lambda: setattr(fake, "is_read_only", True),
            "no quota": fake.quota,
            "no machine free": fake.no_capacity,
        },
        "EU-RO-1",
        fake_runpod.KEY,
    ), fake


def vastai() -> tuple[Account, Any]:
    fake = fake_vastai.FakeVast()
    fake.sell(fake_vastai.ask(101), fake_vastai.ask(102, "RTX 3090", geolocation="Sweden, SE"))
    no_right = fake_vastai.refusal(403, "auth_error", "This key may not create instances")
    return Account(
        "Vast.ai",
        "RTX 4090",
        lambda **fields: VastAI(endpoint_url=fake.url, **fields),
        {
            "wrong key": lambda: setattr(fake, "is_refusing", True),
            "key without rights": lambda: fake.fail("PUT", "/api/v0/asks/", no_right),
            "no quota": lambda: fake.fail("PUT", "/api/v0/asks/", fake_vastai.SPENT),
            "no machine free": fake.no_capacity,
        },
        "SE",
        fake_vastai.KEY,
    ), fake


def verda() -> tuple[Account, Any]:
    fake = fake_verda.FakeVerda()
    fake.sold["FIN-03", False] = ["CPU.4V.16G"]
    no_right = fake_verda.error(403, "forbidden_action", "You do not have permission to do this")
    return Account(
        "Verda",
        "H100",
        lambda **fields: Verda(endpoint_url=f"{fake.url}/v1", **fields),
        {
            "wrong key": lambda: setattr(fake, "is_refusing", True),
            "key without rights": lambda: fake.fail("POST", "/v1/instances", no_right),
            "no quota": fake.quota,
            "no machine free": fake.no_capacity,
        },
        "FIN-03",
        fake_verda.CLIENT_SECRET,
    ), fake


def aws() -> tuple[Account, Any]:
    fake = FakeAWS()
    return Account(
        "AWS",
        "T4",
        lambda **fields: AWS(checkip_url="https://cloud.test/checkip", **fields),
        {
            "wrong key": lambda: setattr(fake, "is_refusing", True),
            "key without rights": lambda: fake.fail("RunInstances", "UnauthorizedOperation", 403),
            "no quota": fake.quota,
            "no machine free": fake.no_capacity,
            "region without the GPU": lambda: setattr(fake, "without_families", ("g4dn",)),
        },
        "us-west-2",
        SECRET,
        OFFER,
        fake,
    ), fake.checkip


ACCOUNTS = (aws, digitalocean, verda, vastai, runpod)


def test_each_cloud_has_an_account_here() -> None:
    """The table of the page has a row for each cloud that sells machines."""
    clouds = [name for name in sky.PROVIDERS if name not in {"Hosts", "Local"}]
    missing = {name.lower() for name in clouds} - {make.__name__ for make in ACCOUNTS}
    assert not missing, f"write the account of {missing} into ACCOUNTS, and its variable into SOURCES"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The credentials of all accounts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DIGITALOCEAN_TOKEN", fake_digitalocean.TOKEN)
    monkeypatch.setenv("RUNPOD_API_KEY", fake_runpod.KEY)
    monkeypatch.setenv("VAST_API_KEY", fake_vastai.KEY)
    monkeypatch.setenv("VERDA_CLIENT_ID", fake_verda.CLIENT_ID)
    monkeypatch.setenv("VERDA_CLIENT_SECRET", fake_verda.CLIENT_SECRET)
    as_us(FakeAWS.url, monkeypatch)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("kind", ACCOUNTS, ids=lambda kind: kind.__name__)
def test_a_pool_without_an_accelerator_climbs_to_none_and_to_no_price(
    kind: Callable[[], tuple[Account, Any]], in_process: Install
) -> None:
    """At DigitalOcean it went on from $0.036 to eight MI355X at $23.76, one refusal after the other."""
    account, fake = kind()
    in_process(fake)
    spec = sky.PoolSpec.of(spot="never")
    with account.within:
        (answer,) = ask([account.make()], spec.requirements)
    ranked, _ = candidates(spec, [answer])
    taken = [candidate for candidate in ranked if not candidate.too_dear]
    assert taken
    sells_others = any(not offer.accelerators for offer in answer.offers)
    assert sells_others == (account.name not in {"Vast.ai", "RunPod"})
    assert {part.offer.accelerators > 0 for candidate in taken for part in candidate.parts} == {not sells_others}
    assert taken[-1].price_per_hour <= 4 * taken[0].price_per_hour


@pytest.fixture
def refusals(in_process: Install, keys: None) -> Iterator[dict[tuple[str, str], tuple[str, str, str]]]:
    """Yield class, advice and whole message of each refusal, by cloud and situation."""
    found: dict[tuple[str, str], tuple[str, str, str]] = {}
    for kind in ACCOUNTS:
        for situation in SITUATIONS:
            account, fake = kind()
            in_process(fake)
            with account.within:
                error = refused(account, situation)
            assert account.secret not in str(error)
            found[account.name, situation] = (type(error).__name__, advice_of(error), str(error))
    yield found


def refused(account: Account, situation: str) -> SkywardError:
    """Return the error of a situation."""
    want = Requirements(accelerator=sky.accelerators.parse(account.accelerator))
    provider = account.make()
    if situation == "region without the GPU":
        account.cause.get(situation, lambda: None)()
        (answer,) = ask([account.make(region=account.region)], want)
        _, (one,) = candidates(sky.PoolSpec.of(accelerator=account.accelerator), [answer])
        return sky.NoCapacity(one.message)
    offer = account.offer or rank([one for one in provider.offers(want) if not one.is_spot], want)[0]
    account.cause[situation]()
    with pytest.raises(SkywardError) as caught:
        if situation == "wrong key":
            provider.instances(POOL)
        else:
            provider.launch(offer, 1, tags(), STARTUP)
    return none_left([want], 1, [refusal(provider, offer, caught.value, 0.0)], [caught.value])


def advice_of(error: SkywardError) -> str:
    """Return what the error says to do: its advice, or the last sentence of a message about a region."""
    return error.advice or str(error).rpartition(". ")[2]


def table(refusals: Mapping[tuple[str, str], tuple[str, str, str]]) -> str:
    rows = [
        f"| {cloud} | {situation} | `{kind}` | {advice.replace('|', ' ')} |"
        for (cloud, situation), (kind, advice, _) in refusals.items()
    ]
    return "\n".join(["| | | error | it says |", "| --- | --- | --- | --- |", *rows]) + "\n"


KINDS = dict(
    zip(
        SITUATIONS,
        ("CredentialsError", "CredentialsError", "QuotaExceeded", "NoCapacity", "NoCapacity"),
        strict=True,
    )
)
SOURCES = ("AWS_ACCESS_KEY_ID", "DIGITALOCEAN_TOKEN", "VERDA_CLIENT_ID", "VAST_API_KEY", "RUNPOD_API_KEY")


def test_each_refusal_has_its_class_and_says_what_to_do(
    refusals: dict[tuple[str, str], tuple[str, str, str]],
) -> None:
    """One about a key names the variable that it came from."""
    for (cloud, situation), (kind, advice, message) in refusals.items():
        assert kind == KINDS[situation], (cloud, situation, message)
        assert len(advice.split()) > 5, (cloud, situation, message)
        assert message.endswith(advice) and "answered" not in advice, (cloud, situation, message)
        if "key" in situation:
            assert any(source in advice for source in SOURCES), (cloud, situation, message)
        if situation == "region without the GPU":
            assert "region=" in advice


def test_the_table_of_the_documentation_is_that_of_the_fakes(
    refusals: dict[tuple[str, str], tuple[str, str, str]],
) -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = head + BEGIN + table(refusals) + END + tail
    if os.environ.get("WRITE"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made
