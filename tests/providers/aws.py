"""What the tests of AWS share: the fake with the test's credentials, without pauses, and the usual offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.aws import images, launch
from skyward_core.providers.aws import instances as aws_instances
from tests.providers.fake_aws import FakeAWS

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


def as_us(fake: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fake as AWS, with only the test's credentials."""
    for name in OTHERS:
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0)
    monkeypatch.setattr(launch, "AGAIN_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(aws_instances, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(images, "LOOK_SECONDS", 0.0)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAWS]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeAWS() as fake:
        as_us(fake, monkeypatch)
        yield fake


def make(cloud: FakeAWS, *, explicit: bool = False, **fields: Any) -> sky.AWS:
    keys: dict[str, Any] = {"access_key_id": KEY_ID, "secret_access_key": SECRET} if explicit else {}
    return sky.AWS(**{"checkip_url": f"{cloud.url}/checkip", **keys, **fields})


def of_type(name: str, region: str = "us-east-1", **fields: Any) -> Offer:
    return OFFER.model_copy(update={"instance_type": name, "region": region, **fields})


def every_type() -> dict[str, dict[str, Any]]:
    """Return AWS's own descriptions of its types."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return INSTANCE_TYPES
