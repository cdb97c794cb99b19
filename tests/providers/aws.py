"""What the tests of AWS share: the fake with the test's credentials, and the usual offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
import skyward_core.providers.aws
from skyward_core.accelerators import parse
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.aws import AWS
from tests.providers.fake_aws import FakeAWS
from tests.providers.in_process import Install

KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
T4 = Requirements(instance_type="g4dn.xlarge", accelerator=parse("T4"))
OFFER = Offer(
    provider="aws",
    instance_type="g4dn.xlarge",
    region="us-east-1",
    price_per_hour=0.526,
    on_demand_price_per_hour=0.526,
    vcpus=4,
    memory_gb=17.2,
    accelerator="T4",
    accelerators=1,
    accelerator_memory_gb=16,
)
SPOT = OFFER.model_copy(update={"is_spot": True, "price_per_hour": 0.2})
OTHERS = ["SESSION_TOKEN", "PROFILE", "REGION", "DEFAULT_REGION", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE"]


def as_us(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this AWS, with only the test's credentials."""
    for name in OTHERS:
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)


@pytest.fixture
def cloud(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAWS]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeAWS() as fake:
        as_us(fake.url, monkeypatch)
        in_process(fake.checkip)
        yield fake


def make_aws(**fields: Any) -> sky.AWS:
    return AWS(**{"checkip_url": "https://cloud.test/checkip", **fields})


def of_type(name: str, region: str = "us-east-1", **fields: Any) -> Offer:
    return OFFER.model_copy(update={"instance_type": name, "region": region, **fields})
