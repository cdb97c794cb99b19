"""`diagnose`: all checks at once, each with a time limit; and the checks of this machine, of clouds and of others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import dagster  # noqa: F401 - its first import starts a process, and a unit test starts none
import pytest

import skyward_core as sky
from skyward_core import doctor as diagnosis
from skyward_core import doctor as this_machine
from skyward_core.doctor import Check, CheckState, check_cloud
from skyward_core.errors import CredentialsError, ProviderFailed
from tests.cleanup.pools import FolderProvider


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without settings, keys and orchestrators, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    for name in ("SKYWARD_SECRET_KEY", "SKYWARD_PROVIDER", "SKYWARD_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: ())
    return tmp_path


class Cloud(FolderProvider):
    """A provider that tells an account and a quota, or raises."""

    account_or_error: ClassVar[str | Exception] = "team-7"
    quota: ClassVar[float | Exception] = 3.0

    def account(self) -> str:
        if isinstance(self.account_or_error, Exception):
            raise self.account_or_error
        return self.account_or_error

    def quotas(self) -> Mapping[str, float]:
        if isinstance(self.quota, Exception):
            raise self.quota
        return {"machines at once": self.quota}


def states(checks: Sequence[Check]) -> dict[str, str]:
    return {check.subject: check.state.value for check in checks}


def test_the_ledger(place: Path) -> None:
    """One that cannot be read or written to has failed; a password is not shown."""
    (place / "text").write_text("no ledger at all, and longer than the header of one\n" * 20)
    (found,) = this_machine.check_ledger(f"sqlite:///{place}/text")
    assert (found.state, "damaged" in found.message) == (CheckState.FAILED, True)
    (found,) = this_machine.check_ledger("postgresql+psycopg://ada:hidden-value@127.0.0.1:1/db")
    assert (found.state, "hidden-value" in found.message + found.cure) == (CheckState.FAILED, False)
    (found,) = this_machine.check_ledger(None)
    assert found.state is CheckState.OK


@pytest.mark.parametrize(
    ("variable", "file", "state", "words"),
    [
        ("", None, "ok", "the first pool that needs a key makes one"),
        ("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", None, "ok", "1 in SKYWARD_SECRET_KEY"),
        ("short", None, "failed", "key 1 is not 32 bytes"),
        ("", 0o600, "ok", "secret.key"),
        ("", 0o644, "failed", "is not private"),
    ],
)
def test_the_secret_key(
    place: Path, monkeypatch: pytest.MonkeyPatch, variable: str, file: int | None, state: str, words: str
) -> None:
    monkeypatch.setenv("SKYWARD_SECRET_KEY", variable)
    if file is not None:
        key = place / "state/skyward/secret.key"
        key.parent.mkdir(parents=True)
        key.write_bytes(b"k" * 32)
        key.chmod(file)
    (found,) = this_machine.check_keys()
    assert (found.state.value, words in found.message) == (state, True)
    assert bool(found.cure) == (state == "failed")


def test_a_cloud_tells_account_machines_and_quota(place: Path) -> None:
    credentials, quota = check_cloud(Cloud(folder=str(place)))
    assert credentials.state is CheckState.OK
    assert credentials.message.startswith("account team-7, answered in")
    assert credentials.message.endswith("; 0 machines of pools")
    assert (quota.state, quota.message) == (CheckState.OK, "machines at once: 3")


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (CredentialsError("who are you?"), "set other credentials"),
        (ProviderFailed("503"), "look whether this machine reaches the provider"),
        (OSError("no route"), "look whether this machine reaches the provider"),
        (ModuleNotFoundError("No module named 'boto3'"), "install the package"),
    ],
)
def test_a_cloud_that_refuses_has_failed(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, cure: str
) -> None:
    monkeypatch.setattr(Cloud, "account_or_error", error)
    (found,) = check_cloud(Cloud(folder=str(place)))
    assert (found.state, found.cure.startswith(cure)) == (CheckState.FAILED, True)
    assert str(error) in found.message


@pytest.mark.parametrize("quota", [0.0, CredentialsError("not for you")])
def test_a_quota_that_allows_nothing_or_may_not_be_read_is_a_warning(
    place: Path, monkeypatch: pytest.MonkeyPatch, quota: float | Exception
) -> None:
    monkeypatch.setattr(Cloud, "quota", quota)
    _, found = check_cloud(Cloud(folder=str(place)))
    assert (found.state, bool(found.cure)) == (CheckState.WARNING, True)


@pytest.mark.parametrize("name", ["prefect_skyward", "airflow_provider_skyward", "dagster_skyward"])
def test_each_integration_registers_its_check(name: str) -> None:
    """In pyproject.toml; the metadata of this environment may be older."""
    import tomllib

    root = Path(sky.__file__).parents[1]
    entries = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["skyward.doctor"]
    assert f"{name}.doctor:check" in entries.values()


def test_airflow_is_found_and_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that is too old, and a provider that is not registered, have failed."""
    from airflow_provider_skyward import doctor

    assert states(doctor.check()) == {"Airflow": "ok", "Airflow: provider": "ok", "Airflow: tabs": "ok"}
    monkeypatch.setattr(doctor, "entry_points", lambda group: ())
    assert states(doctor.check())["Airflow: provider"] == "failed"
    monkeypatch.setattr(doctor, "version", lambda name: "2.11.0")
    assert [(check.state.value, "apache-airflow>=3.3" in check.cure) for check in doctor.check()] == [("failed", True)]


def test_dagster_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_skyward import doctor

    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    assert states(doctor.check()) == {"Dagster": "ok", "Dagster: instance": "ok"}
    monkeypatch.setenv("DAGSTER_HOME", str(place / "nowhere"))
    assert states(doctor.check())["Dagster: instance"] == "failed"
    monkeypatch.setenv("DAGSTER_HOME", str(place))
    assert states(doctor.check())["Dagster: instance"] == "ok"
    monkeypatch.setattr(doctor, "version", lambda name: "1.11.9")
    assert states(doctor.check()) == {"Dagster": "failed"}
