"""What is sold, where no provider is named: the clouds with credentials are asked, and the others are named."""

from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.doctor import CheckState, diagnose
from skyward_core.provisioning.price_list import PriceList
from tests.providers.fake_runpod import KEY as RUNPOD_KEY
from tests.providers.fake_runpod import FakeRunPod, gpu
from tests.providers.in_process import Install, clock, in_process  # noqa: F401 - fixtures

CREDENTIALS = (
    "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_PROFILE DIGITALOCEAN_TOKEN RUNPOD_API_KEY VAST_API_KEY VERDA_CLIENT_ID"
    " VERDA_CLIENT_SECRET DATACRUNCH_CLIENT_ID DATACRUNCH_CLIENT_SECRET SKYWARD_PROVIDER"
)


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A user without settings and without credentials."""
    for name in CREDENTIALS.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def test_each_cloud_with_credentials_is_asked(no_credentials: pytest.MonkeyPatch, in_process: Install) -> None:
    """The others are named, each with what to set. This computer sells nothing, and is not asked then."""
    in_process(fake := FakeRunPod())
    fake.sell(gpu("NVIDIA H200", 141, 4.59, places="EU-CZ-1"))
    no_credentials.setenv("RUNPOD_API_BASE_URL", fake.url)
    no_credentials.setenv("RUNPOD_API_KEY", RUNPOD_KEY)
    prices = sky.offers(accelerator="H200")
    assert {offer.provider for offer in prices} == {"runpod"}
    lacks = {refusal.provider: refusal.message for refusal in prices.refusals}
    assert lacks.keys() == {"aws", "digitalocean", "vastai", "verda"}
    assert "AWS_ACCESS_KEY_ID" in lacks["aws"]
    assert "DIGITALOCEAN_TOKEN" in lacks["digitalocean"]
    assert "VAST_API_KEY" in lacks["vastai"]
    assert "VERDA_CLIENT_ID" in lacks["verda"]


def test_with_a_provider_in_the_settings_only_that_is_asked(no_credentials: pytest.MonkeyPatch) -> None:
    no_credentials.setenv("SKYWARD_PROVIDER", "local")
    prices = sky.offers(cpu=1)
    assert ({offer.provider for offer in prices}, prices.refusals) == ({"local"}, ())


def test_without_any_credentials_this_computer_is_asked(no_credentials: pytest.MonkeyPatch) -> None:
    prices = sky.offers(cpu=1)
    assert {offer.provider for offer in prices} == {"local"}
    assert len(prices.refusals) == 5


def test_the_doctor_names_clouds_without_credentials(no_credentials: pytest.MonkeyPatch, in_process: Install) -> None:
    """A wrong key of a cloud is a failure, though no setting names the cloud."""
    in_process(fake := FakeRunPod())
    no_credentials.setenv("RUNPOD_API_BASE_URL", fake.url)
    no_credentials.setenv("RUNPOD_API_KEY", "rpa_wrong")
    checks = {check.subject: check for check in diagnose()}
    assert checks["provider runpod"].state is CheckState.FAILED
    assert checks["provider vastai"].state is CheckState.OK
    assert "set VAST_API_KEY" in checks["provider vastai"].message
    assert "provider local" not in checks


def test_a_list_that_is_empty_because_nobody_answered_warns(
    no_credentials: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not say that nothing is sold, and shows why."""
    prices = sky.offers([sky.RunPod(), sky.VastAI()], accelerator="H100")
    assert prices.is_unknown
    assert "no provider has said what it sells: runpod: CredentialsError" in caplog.text
    assert "set RUNPOD_API_KEY" in repr(prices)
    assert "<div>vastai: CredentialsError" in prices._repr_html_()
    caplog.clear()
    assert not sky.offers("local", accelerator="H100").is_unknown
    assert caplog.text == ""


def test_a_list_shows_itself_as_a_table(no_credentials: pytest.MonkeyPatch) -> None:
    prices = sky.offers("local", cpu=1)
    head, row = repr(prices).splitlines()
    assert head.split()[:2] == ["PROVIDER", "REGION"]
    assert row.split()[0] == "local"
    assert "<td>local</td>" in prices._repr_html_()
    assert repr(PriceList(())) == "no offers"
