"""What `make live` finds out about an account without a request that costs anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.providers.aws import AWS
from skyward_core.providers.digitalocean import DigitalOcean
from skyward_core.providers.runpod import RunPod
from skyward_core.providers.vastai import VastAI
from tests.live_checks import findings
from tests.live_record import Recorder, cleaned, secrets_here
from tests.providers import fake_digitalocean, fake_runpod, fake_vastai
from tests.providers.aws import SECRET, as_us
from tests.providers.fake_aws import ACCOUNT, FakeAWS
from tests.providers.http_fake import FakeCloud, Reply, Request, route
from tests.providers.in_process import Install
from tests.unit.providers.test_aws import allows


class Hub(FakeCloud):
    """Docker Hub: it has all images but those in `gone`."""

    gone: frozenset[str] = frozenset()

    @route("GET", "/token")
    def token(self, request: Request) -> Reply:
        return Reply(200, {"token": "hub-token"})

    @route("GET", "/v2/(?P<name>.+)/manifests/{tag}")
    def manifest(self, request: Request) -> Reply:
        if request.words["name"] in self.gone:
            return Reply(404, {"errors": [{"code": "MANIFEST_UNKNOWN"}]}, is_of_test=True)
        return Reply(200, {"schemaVersion": 2})


class RunPodAndHub(Hub, fake_runpod.FakeRunPod):
    def refuse(self, request: Request) -> Reply | None:
        is_hub = request.path == "/token" or "/manifests/" in request.path
        return None if is_hub else fake_runpod.FakeRunPod.refuse(self, request)


class VastAndHub(Hub, fake_vastai.FakeVast):
    def refuse(self, request: Request) -> Reply | None:
        is_hub = request.path == "/token" or "/manifests/" in request.path
        return None if is_hub else fake_vastai.FakeVast.refuse(self, request)


def not_good(provider: sky.Provider) -> list[tuple[str, str, str]]:
    return [(one.verdict, one.name, one.text) for one in findings(provider) if one.verdict != "ok"]


def test_an_account_of_aws(in_process: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, the right to rent, the role for spot, and quotas, each with what to do. Nothing is created."""
    with FakeAWS() as fake:
        as_us(fake.url, monkeypatch)
        found = list(findings(AWS()))
        assert [one.name for one in found if one.verdict == "ok"] == [
            *["image in us-east-1"] * 5,
            "right to rent in us-east-1",
            "role for spot",
            "L-1216C47A in us-east-1",
        ]
        missing = next(one for one in found if one.name == "L-417A185B in us-east-1")
        assert missing.verdict == "NO"
        assert "0 vCPUs, Running On-Demand P instances: ask for more at https://us-east-1.console" in missing.text
        fake.has_spot_role = False
        fake.fail("GetServiceQuota", "AccessDeniedException", times=99)
        fake.fail("RunInstances", "UnauthorizedOperation", 403)
        left = {name: (verdict, text) for verdict, name, text in not_good(AWS())}
        assert left["role for spot"][0] == "NO"
        assert "create-service-linked-role" in left["role for spot"][1]
        assert left["right to rent in us-east-1"][0] == "NO"
        assert left["L-1216C47A in us-east-1"][0] == "?"
        assert fake.alive() == set()
        for call in fake.parameters("RunInstances"):
            assert call["DryRun"]
            tags = {
                spec["ResourceType"]: {tag["Key"]: tag["Value"] for tag in spec["Tags"]}
                for spec in call["TagSpecifications"]
            }
            kinds = ("instance", "volume", "network-interface")
            assert [kind for kind in kinds if not allows("ec2:RunInstances", kind, tags.get(kind, {}), {})] == []
        assert not any(SECRET in text for _, text in left.values())


def test_an_account_of_digitalocean(in_process: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status, limit, scopes and images. The limit of GPUs is unknown to everybody."""
    monkeypatch.setenv("DIGITALOCEAN_TOKEN", fake_digitalocean.TOKEN)
    in_process(fake := fake_digitalocean.FakeDigitalOcean())
    fake.faults.clear()
    fake.fail("GET", "/v2/account/keys", Reply(200, {"ssh_keys": [], "links": {}, "meta": {"total": 0}}), times=9)
    provider = DigitalOcean(endpoint_url=fake.url)
    assert not_good(provider) == [("?", "limit of GPU droplets", "the API does not tell it; a new account has 0")]
    fake.closed_paths = {"/v2/vpcs", "/v2/images"}
    assert [(verdict, name) for verdict, name, _ in not_good(provider)[1:]] == [
        ("NO", "scope image:read"),
        ("NO", "scope vpc:read"),
    ]
    assert {request.method for request in fake.requests} == {"GET"}


def test_an_account_of_runpod(in_process: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right to write, the balance, and the images. The only pod that is deleted does not exist."""
    monkeypatch.setenv("RUNPOD_API_KEY", fake_runpod.KEY)
    in_process(fake := RunPodAndHub())
    provider = RunPod(endpoint_url=fake.url)
    assert not_good(provider) == []
    fake.stranger("pod")
    fake.is_read_only, fake.gone = True, frozenset({"runpod/pytorch"})
    left = not_good(provider)
    assert [(verdict, name) for verdict, name, _ in left] == [
        ("NO", "right to write"),
        ("NO", "image at Docker Hub"),
        ("NO", "image at Docker Hub"),
    ]
    assert "give it read and write access to pods" in left[0][2]
    assert len(fake.alive()) == 1


def test_an_account_of_vastai(in_process: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAST_API_KEY", fake_vastai.KEY)
    in_process(fake := VastAndHub())
    found = [str(one) for one in findings(VastAI(endpoint_url=fake.url))]
    assert found == [
        "ok  credit in USD: 12.5",
        "ok  image at Docker Hub: nvidia/cuda:12.4.1-runtime-ubuntu22.04",
    ]


# ── answers for fixtures ─────────────────────────────────────────────────────────────────────────────────────────────


def test_recorded_answers_have_no_secrets_and_no_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields by their names, texts by their form, and the credentials of this environment wherever they are."""
    monkeypatch.setenv("VAST_API_KEY", "k-0123456789")
    told = {
        "api_key": "anything",
        "user_data": "#cloud-config",
        "extra_env": [["SKYWARD_BOOT_0", "H4sI"]],
        "email": "ann@firm.example",
        "message": "ann@firm.example uses k-0123456789 from 198.51.100.77",
        "public": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 ann@laptop.firm",
        "credit": 12.5,
        "token": None,
        "gpus": [{"name": "H100", "price": 3.5}],
    }
    assert cleaned(told, secrets_here()) == {
        "api_key": "***",
        "user_data": "***",
        "extra_env": "***",
        "email": "***",
        "message": "jo@example.org uses *** from 203.0.113.7",
        "public": "ssh-ed25519 AAAA jo@example.org",
        "credit": 12.5,
        "token": None,
        "gpus": [{"name": "H100", "price": 3.5}],
    }


def test_answers_are_written_as_they_came(in_process: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those over HTTP and those of AWS's SDK, refusals included."""
    monkeypatch.setenv("VAST_API_KEY", fake_vastai.KEY)
    in_process(fake := fake_vastai.FakeVast())
    with FakeAWS() as aws:
        as_us(aws.url, monkeypatch)
        aws.fail("DescribeInstances", "UnauthorizedOperation", 403)
        with Recorder(tmp_path / "new" / "answers.json"):
            assert VastAI(endpoint_url=fake.url).account() == "user 4711"
            assert AWS().account() == ACCOUNT
            with pytest.raises(sky.errors.CredentialsError):
                AWS().instances("p")
    text = (tmp_path / "new" / "answers.json").read_text()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "new", tmp_path / "new" / "answers.json")]
    assert modes == [0o700, 0o600]
    vast, account, refused = json.loads(text)
    assert (vast["request"], vast["status"], vast["body"]["credit"]) == ("GET /api/v0/users/current/", 200, 12.5)
    assert (account["request"], account["body"]["Account"]) == ("sts get_caller_identity in us-east-1", ACCOUNT)
    assert "UnauthorizedOperation" in refused["error"]
    assert not any(secret in text for secret in (fake_vastai.KEY, SECRET, "jo@example.org"))
    assert VastAI(endpoint_url=fake.url).account() == "user 4711"  # the patches are gone
