"""Every row of the reference's tables is supported, or is refused with a message that says what to do.

The tables are those of accelerators, providers, machines, images, volumes and spot strategies. The rows are data here,
each with the file of the reference (shared/seeds: 000 the guide to accelerators, 001 their reference, 003 the API) and
its line. If vendors and clouds contradict the reference, they are correct (fact sheet of 2026-11-20), and the row says
so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.machines.offers import matches
from tests.providers.fake_digitalocean import SIZES, TOKEN, FakeDigitalOcean
from tests.providers.fake_runpod import KEY as RUNPOD_KEY
from tests.providers.fake_runpod import FakeRunPod, gpu
from tests.providers.fake_vastai import KEY as VAST_KEY
from tests.providers.fake_vastai import FakeVast, ask
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda
from tests.providers.http_fake import Reply


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mapping[str, Any]]:
    """The fakes of four clouds, with an A100 and an H100 each."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeDigitalOcean() as ocean, FakeVerda() as verda, FakeVast() as vast, FakeRunPod() as runpod:
        monkeypatch.setenv("DIGITALOCEAN_TOKEN", TOKEN)
        monkeypatch.setenv("VERDA_CLIENT_ID", CLIENT_ID)
        monkeypatch.setenv("VERDA_CLIENT_SECRET", CLIENT_SECRET)
        monkeypatch.setenv("VAST_API_KEY", VAST_KEY)
        monkeypatch.setenv("RUNPOD_API_KEY", RUNPOD_KEY)
        monkeypatch.setenv("VAST_URL", vast.url)
        monkeypatch.setenv("RUNPOD_API_BASE_URL", runpod.url)
        vast.sell(ask(1, "A100 SXM4", 1, 1.1, gpu_ram=81920), ask(2, "RTX 4090"))
        runpod.sell(gpu("NVIDIA A100 80GB PCIe", 80, 1.79), gpu("NVIDIA GeForce RTX 4090", 24, 0.69))
        yield {"digitalocean": ocean, "verda": verda, "vastai": vast, "runpod": runpod}


def test_an_a100_has_the_name_of_each_cloud(clouds: Mapping[str, Any]) -> None:
    """000:26: a p4d or p4de on AWS (above), a `gpuTypeId` on RunPod, offers filtered by the GPU's model on Vast.ai."""
    want = sky.Requirements(accelerator=sky.accelerators.parse("A100"))
    of_runpod = [offer for offer in sky.RunPod().offers(want) if matches(offer, want) is None]
    assert {offer.instance_type.split(" x")[0].partition("NVIDIA A100 80GB PCIe")[1] for offer in of_runpod} == {
        "NVIDIA A100 80GB PCIe"
    }
    assert {offer.accelerator for offer in sky.VastAI().offers(want)} == {"A100"}
    searches = [request.body["gpu_name"] for request in clouds["vastai"].requests if request.path.endswith("/bundles/")]
    assert all("A100 SXM4" in names["in"] and "RTX 4090" not in names["in"] for names in searches)


@pytest.mark.parametrize("region", ["us-east-1", "eu-central-1"])
def test_aws_rents_in_its_region(region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """003:218."""
    from tests.providers.fake_aws import FakeAWS  # moto takes a second, which each test process would need at its start

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with FakeAWS() as cloud:
        cloud.list_prices = {("us-east-1", "g4dn.xlarge"): 0.5, ("eu-central-1", "g4dn.xlarge"): 0.6}
        provider = sky.AWS(
            region=region, endpoint_url=cloud.url, access_key_id="AKIAIOSFODNN7EXAMPLE", secret_access_key="wJalr"
        )
        offers = provider.offers(sky.Requirements(instance_type="g4dn.xlarge"))
    assert {offer.region for offer in offers} == {region}
    assert {(offer.accelerator, offer.price_per_hour) for offer in offers if not offer.is_spot} == {
        ("T4", {"us-east-1": 0.5, "eu-central-1": 0.6}[region])
    }


# 003:237
@pytest.mark.parametrize("region", ["nyc1", "nyc3", "sfo2", "sfo3", "ams3", "sgp1", "lon1", "fra1", "tor1"])
def test_digitalocean_rents_in_each_of_its_regions(region: str, clouds: Mapping[str, Any]) -> None:
    """Of the offers of several regions only those of this one."""
    size = dict(next(row for row in SIZES if row["slug"] == "s-2vcpu-4gb"))
    rows = [size | {"regions": ["nyc1", "atl1"]}, size | {"slug": "s-elsewhere", "regions": [region]}]
    clouds["digitalocean"].fail("GET", "/v2/sizes", Reply(200, {"sizes": rows, "links": {}, "meta": {"total": 2}}))
    offers = sky.DigitalOcean(region=region, endpoint_url=clouds["digitalocean"].url).offers(sky.Requirements())
    assert {offer.region for offer in offers} == {region}
    assert "s-elsewhere" in {offer.instance_type for offer in offers}


def test_verda_finds_its_locations_itself(clouds: Mapping[str, Any]) -> None:
    """003:253: None means all locations.

    The example's "us-east" (003:245) is none of Verda's locations (fact sheet, 3.2): it is refused with the existing
    ones.
    """
    url = clouds["verda"].url + "/v1"
    assert {offer.region for offer in sky.Verda(endpoint_url=url).offers(sky.Requirements())} == {
        "FIN-01",
        "FIN-02",
        "FIN-03",
    }
    assert {offer.region for offer in sky.Verda(endpoint_url=url, region="FIN-03").offers(sky.Requirements())} == {
        "FIN-03"
    }
    with pytest.raises(sky.NoCapacity, match="no machines at us-east; it has some at FIN-01, FIN-02, FIN-03"):
        sky.Verda(endpoint_url=url, region="us-east").offers(sky.Requirements())
