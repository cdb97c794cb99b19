"""What our code makes of each refusal that a vendor has published."""

from __future__ import annotations

import re

import httpx
import pytest

import skyward_core as sky
from skyward_core.machines.offers import Offer
from skyward_core.providers import digitalocean, runpod
from skyward_core.providers._http import Api
from tests.providers.fake_vastai import FakeVast
from tests.providers.http_fake import Reply
from tests.providers.in_process import Install
from tests.providers.vendor_refusals import Refusal, refusals

CLOUDS = ("digitalocean", "runpod", "vastai", "verda")
VARIABLES = ("DIGITALOCEAN_TOKEN", "RUNPOD_API_KEY", "VAST_API_KEY", "VERDA_CLIENT_ID", "VERDA_CLIENT_SECRET")
OFFER = Offer(provider="x", instance_type="t", region="r", vcpus=1, memory_gb=1, price_per_hour=1.0, is_spot=False)


def api_of(refusal: Refusal) -> Api:
    """Return the client that sends the call which is refused."""
    match refusal.cloud, refusal.call:
        case "digitalocean", "POST /v2/droplets":
            return sky.DigitalOcean()._api(digitalocean.refusal_of(OFFER))
        case "digitalocean", _:
            return sky.DigitalOcean()._api()
        case "runpod", "POST /v2/pods":
            return sky.RunPod()._api(runpod.refusal_of(OFFER))
        case "runpod", _:
            return sky.RunPod()._api()
        case "vastai", _:
            return sky.VastAI()._api()
        case _:
            return sky.Verda()._api()._api


def meaning(refusal: Refusal) -> str:
    """Return the name of our error for a refusal; "gone" where a thing that does not exist is no error."""
    api, (method, _, path) = api_of(refusal), refusal.call.partition(" ")
    how = {"json": refusal.body} if isinstance(refusal.body, dict) else {"text": str(refusal.body)}
    answer = httpx.Response(refusal.status, **how)
    is_thing = "{" in path and "/asks/" not in path
    if is_thing and refusal.status == 404 and isinstance(refusal.body, dict) and api._says_missing(refusal.body):
        return "gone"
    error = api._failure(method, path, answer)
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(sky, kind.__name__))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_published_refusal_has_its_meaning(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column `means` was read row by row: a change of it is a decision."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "k" * 20)
    different = {
        f"{each.call} {each.status} {each.code}": (meaning(each), each.means)
        for each in refusals(cloud)
        if meaning(each) != each.means
    }
    assert different == {}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_source_is_a_file_and_a_version(cloud: str) -> None:
    """So that it can be read again."""
    versioned = re.compile(r"[\w.-]+/[\w.-]+ \S+@[0-9a-f]{40}|docs\.rs/crate/|[\w.-]+/[\w.-]+ issue #")
    sources = [each.source for each in refusals(cloud)]
    assert [source for source in sources if source and not versioned.match(source)] == []
    assert len([source for source in sources if source]) > len(sources) / 2


def test_an_outage_that_speaks_of_a_session_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may exist after it. With the status 404 the same words refuse the key."""
    monkeypatch.setenv("VAST_API_KEY", "k" * 20)
    api = sky.VastAI()._api()
    errors = [
        api._failure("PUT", "/api/v0/asks/1/", httpx.Response(status, json={"error": "e", "msg": "session expired"}))
        for status in (500, 404)
    ]
    assert [type(error) for error in errors] == [sky.ProviderFailed, sky.CredentialsError]


def test_a_fake_plays_no_refusal_that_is_not_listed(in_process: Install) -> None:
    class Inventive(FakeVast):
        def refuse(self, request: object) -> Reply | None:
            return Reply(418, {"error": "teapot"})

    in_process(fake := Inventive())
    with httpx.Client(base_url=fake.url) as client, pytest.raises(AssertionError, match="418 'teapot'"):
        client.get("/api/v1/instances/")
