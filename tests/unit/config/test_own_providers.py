"""What a row of the ledger decides about the provider of a pool, and what its reader decides."""

import ast
import json
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import skyward_core as sky
from skyward_core.config.own_providers import OwnProviders, provider_of, same_as
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.errors import LedgerError
from skyward_core.ledger.rows import PoolEntry
from skyward_core.ledger.tables import SIGNATURE, provider_text
from skyward_core.machines.owner import Owner
from skyward_core.providers import base
from skyward_core.providers.base import BUILT_IN, Provider, kind_of
from skyward_core.session import stewardship
from skyward_core.session.sealed_lease import PoolKeys, lock_hash
from skyward_core.wire.masking import SecretValues
from tests.cleanup.pools import FolderProvider, install_folder_provider

ROOT = Path(__file__).parents[3]
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PROXY = "https://proxy.example"
LEADING = {
    "aws": {"endpoint_url", "access_key_id", "secret_access_key", "session_token"},
    "digitalocean": {"endpoint_url", "token", "node_token"},
    "verda": {"endpoint_url", "client_id", "client_secret", "node_client_id", "node_client_secret"},
    "vastai": {"endpoint_url", "api_key"},
    "runpod": {"endpoint_url", "api_key"},
    "hosts": {"addresses", "user", "port"},
    "local": set[str](),
}
OWN = {
    "aws": {
        "use_ssm",
        "profile",
        "subnet_ids",
        "ssh_cidr",
        "checkip_url",
        "use_private_ip",
        "instance_profile",
        "ami",
        "ssh_key",
    },
    "digitalocean": {"image", "vpc_uuid", "ssh_key"},
    "verda": {"image", "ssh_key"},
    "vastai": {"ssh_key", "image", "verified_only", "min_reliability"},
    "runpod": {"cloud", "ssh_key", "image", "registry", "global_networking"},
    "hosts": {"key", "known_hosts", "config"},
    "local": set[str](),
}
HARMLESS = {
    "aws": {"region", "disk_gb", "spot_spread", "image_keep_days"},
    "digitalocean": {"region"},
    "verda": {"region", "os_volume_gb"},
    "vastai": {
        "region",
        "disk_gb",
        "bid_margin",
        "price_tolerance",
        "traffic_down_gb_per_hour",
        "traffic_up_gb_per_hour",
        "min_download_mbps",
        "min_direct_ports",
        "min_cuda",
        "min_hours_left",
        "schedule_end",
    },
    "runpod": {"region", "disk_gb", "min_cuda", "min_vcpus_per_gpu", "min_memory_gb_per_gpu"},
    "hosts": {"price_per_hour", "keep_environments"},
    "local": {"price_per_hour", "spot_price_per_hour", "simulate"},
}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with this user's keys; its settings name no provider."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SKYWARD_PROVIDER", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "skyward"


def written(provider: dict[str, Any], pool_id: str = "sky-a", **fields: Any) -> PoolEntry:
    """Return the entry of a pool, as its owner has written it."""
    read = json.loads(provider_text(pool_id, provider))
    signature = read.pop(SIGNATURE, "")
    end = NOON + timedelta(minutes=1)
    return PoolEntry(pool_id, Owner.here(), read, "{}", NOON, end, provider_signature=signature, **fields)


def unsigned(provider: dict[str, Any], **fields: Any) -> PoolEntry:
    """Return the entry of a pool as anybody can write it."""
    return replace(written({"name": "local"}), written_provider=provider, **fields)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_field_of_each_provider_is_classified(name: str) -> None:
    """A new field leads to the machines, until it is decided here that it does not."""
    kind = kind_of(name)
    fields = set(kind.model_fields)
    own = kind.own_fields | (kind.of_one_computer & fields)
    assert (kind.harmless_fields, own) == (HARMLESS[name], OWN[name])
    assert fields - kind.harmless_fields - own == LEADING[name]
    assert kind.harmless_fields | own <= fields
    assert not kind.harmless_fields & own


def test_all_fields_of_another_distributions_provider_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not recognised never means known not to."""
    install_folder_provider(monkeypatch)
    assert base.sensitive_fields({"name": "folder", "folder": "/x"}, FolderProvider) == {"folder": "/x"}
    assert base.sensitive_fields({"name": "odd", "a": None}, None) == {"a": None}
    assert provider_of(written({"name": "folder", "folder": "/x"})) == FolderProvider(folder="/x")
    with pytest.raises(sky.CredentialsError, match="folder='/y'"):
        provider_of(unsigned({"name": "folder", "folder": "/y"}))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"name": "aws", "region": ["eu-west-1"], "disk_gb": 99}, sky.AWS(region=("eu-west-1",), disk_gb=99)),
        ({"name": "aws", "endpoint_url": None, "subnet_ids": []}, sky.AWS()),
        ({"name": "digitalocean"}, sky.DigitalOcean()),
        ({"name": "vastai", "region": "SE"}, sky.VastAI(region="SE")),
        ({"name": "local", "price_per_hour": 1.0}, sky.Local(price_per_hour=1.0)),
    ],
)
def test_a_row_that_leads_nowhere_needs_no_signature(row: dict[str, Any], expected: Provider, state: Path) -> None:
    """No key is made for it, and whoever has the credentials of the cloud can use it."""
    entry = written(row)
    assert entry.provider_signature == ""
    assert provider_of(entry) == expected
    assert not state.exists()


def test_a_signed_row_is_used_as_it_was_written(state: Path) -> None:
    """With how its user logs in. The key is a file of this user."""
    row = {"name": "hosts", "addresses": ["gpu-1"], "user": "ada", "key": "/home/ada/key", "config": "/home/ada/config"}
    entry = written(row)
    assert provider_of(entry) == sky.Hosts("gpu-1", user="ada", key="/home/ada/key", config="/home/ada/config")
    assert (state / "lease.key").stat().st_mode & 0o777 == 0o600
    assert provider_of(written({"name": "aws", "profile": "work"})) == sky.AWS(profile="work")


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ["hers"]},
        {"config": "/tmp/hers"},
        {"known_hosts": "/dev/null"},
        {"price_per_hour": 3.0},
        {"name": "local", "addresses": None, "key": None},
    ],
)
def test_an_altered_row_is_refused(change: dict[str, Any]) -> None:
    """Whatever was altered, and on another pool too. One that its reader names himself is used."""
    entry = written({"name": "hosts", "addresses": ["gpu-1"], "key": "/home/ada/key"})
    row = {name: value for name, value in {**entry.written_provider, **change}.items() if value is not None}
    for altered in (replace(entry, written_provider=row), replace(entry, id="sky-b")):
        with pytest.raises(sky.LeaseTampered, match="was changed after it was signed"):
            provider_of(altered)
    own = sky.Hosts("gpu-1", key="/home/bob/key")
    assert provider_of(replace(entry, id="sky-b"), [own]) == own


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"name": "aws", "endpoint_url": PROXY}, "endpoint_url"),
        ({"name": "AWS", "endpoint_url": PROXY}, "endpoint_url"),
        ({"name": "verda", "region": "FIN-01", "endpoint_url": PROXY}, "endpoint_url"),
        ({"name": "digitalocean", "token": "hers"}, "token"),
        ({"name": "runpod", "base_url": PROXY}, "base_url"),
        ({"name": "hosts", "addresses": ["hers"]}, "addresses"),
        ({"name": "local", "folder": "/etc"}, "folder"),
    ],
)
@pytest.mark.parametrize("signature", ["", "0011aabb:mac"], ids=["not signed", "signed with another key"])
def test_a_row_that_leads_elsewhere_is_refused_with_its_cure(row: dict[str, Any], field: str, signature: str) -> None:
    """A given provider of the same kind is not taken in its place: its listing would show no machine of the pool."""
    entry = unsigned(row, provider_signature=signature)
    for given in ([], [sky.AWS(), sky.Verda(), sky.DigitalOcean(), sky.RunPod(), sky.Hosts("mine"), sky.Local()]):
        with pytest.raises(sky.CredentialsError, match=f"with {field}=") as caught:
            provider_of(entry, given)
        assert ("is signed with another key" if signature else "is not signed") in str(caught.value)
        assert "SKYWARD_PROVIDER" in str(caught.value)
        assert "SKYWARD_SECRET_KEY" in str(caught.value)


def test_a_signature_without_what_it_signed_is_refused() -> None:
    """Somebody has removed the address: the cloud's own would show no machine of the pool."""
    entry = written({"name": "digitalocean", "endpoint_url": PROXY})
    stripped = replace(entry, written_provider={"name": "digitalocean"})
    with pytest.raises(sky.LeaseTampered):
        provider_of(stripped)
    with pytest.raises(sky.CredentialsError, match="another key"):
        provider_of(replace(stripped, provider_signature="0011aabb:mac"))


def test_the_text_of_a_refusal_acts_on_no_terminal_and_shows_no_login() -> None:
    row = {
        "name": "runpod",
        "endpoint_url": "https://ada:hidden@h/\x1b]52;c;AAAA\x07",
        "\x1b[2J": "\u202e" + "x" * 5000,
    }
    with pytest.raises(sky.CredentialsError) as caught:
        provider_of(unsigned(row, id="sky-\x1b[2J"))
    text = str(caught.value)
    assert text.isascii()
    assert text.isprintable()
    assert "hidden" not in text
    assert len(text) < 2000
    assert unsigned({"name": "\x1b[2Jaws"}).provider_name == "\\x1b[2Jaws"


def test_the_reader_gives_address_and_credentials_and_the_row_the_region() -> None:
    """A provider with a token of the caller lists the region in which the pool was opened."""
    given = sky.DigitalOcean(endpoint_url=PROXY, region="nyc2", token=SecretStr("mine"), ssh_key="/home/bob/key")
    found = provider_of(unsigned({"name": "digitalocean", "endpoint_url": PROXY, "region": "tor1"}), [given])
    assert isinstance(found, sky.DigitalOcean)
    assert (found.endpoint_url, found.region, found.ssh_key) == (PROXY, "tor1", "/home/bob/key")
    assert found.token is not None
    assert found.token.get_secret_value() == "mine"
    at_home = provider_of(
        unsigned({"name": "digitalocean"}), [sky.DigitalOcean(token=SecretStr("mine"), region="ams3")]
    )
    assert isinstance(at_home, sky.DigitalOcean)
    assert at_home.region is None
    assert at_home.token is not None


def test_how_to_log_in_comes_from_the_reader(caplog: pytest.LogCaptureFixture) -> None:
    """Paths of another computer, and what is rented, never come from a row that is not signed."""
    row = {"name": "hosts", "addresses": ["gpu-1"], "key": "/home/ada/key", "config": "/tmp/hers"}
    own = sky.Hosts("gpu-1", config="/home/bob/config")
    assert provider_of(unsigned(row), [own]) == own
    caplog.set_level(logging.INFO, logger="skyward")
    rented = {"name": "aws", "region": "eu-west-1", "ami": "ami-hers", "profile": "prod", "use_ssm": True}
    assert provider_of(unsigned(rented)) == sky.AWS(region="eu-west-1")
    assert provider_of(unsigned(rented), [sky.AWS(profile="work")]) == sky.AWS(profile="work", region="eu-west-1")
    assert "ami, profile, use_ssm of this process, or the default, is used instead" in caplog.text
    risky = {"name": "vastai", "verified_only": False, "min_reliability": 0.0}
    assert provider_of(unsigned(risky)) == sky.VastAI()


def test_the_settings_of_this_process_name_providers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SKYWARD_PROVIDER, skyward.toml, and its table of the pool. Settings with a fault name none."""
    entry = unsigned({"name": "hosts", "addresses": ["gpu-1"]}, name="nightly")
    file = tmp_path / "skyward.toml"
    file.write_text('[pools.nightly]\nprovider = {name = "hosts", addresses = ["gpu-1"], key = "/home/bob/key"}\n')
    assert provider_of(entry) == sky.Hosts("gpu-1", key="/home/bob/key")
    with pytest.raises(sky.CredentialsError):
        provider_of(replace(entry, name="other"))
    monkeypatch.setenv("SKYWARD_PROVIDER", '["aws", {"name": "hosts", "addresses": ["gpu-1"]}]')
    assert provider_of(entry) == sky.Hosts("gpu-1")
    monkeypatch.delenv("SKYWARD_PROVIDER")
    file.write_text("provider = 3")
    with pytest.raises(sky.CredentialsError):
        provider_of(entry)
    assert provider_of(unsigned({"name": "digitalocean"})) == sky.DigitalOcean()


def test_a_key_that_cannot_be_stored_leaves_the_row_unsigned(
    state: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool opens; the log says who can use its row."""
    state.parent.write_text("a file, where a folder should be")
    entry = written({"name": "hosts", "addresses": ["gpu-1"]})
    assert entry.provider_signature == ""
    assert "its key cannot be stored" in caplog.text
    with pytest.raises(sky.CredentialsError, match="is not signed"):
        provider_of(entry)


def test_harmless_values_that_no_provider_has_are_an_error_of_the_row() -> None:
    for row in ({"name": "aws", "disk_gb": -1}, {"name": "local", "simulate": "nonesuch"}, {"name": "hosts"}):
        with pytest.raises(sky.BadRequest, match="of pool 'sky-a' in the ledger cannot be used"):
            provider_of(unsigned(row))
    for row in ({"name": "nonesuch"}, {}, {"name": ["aws"]}, {"name": None}):
        with pytest.raises(sky.BadRequest, match="no provider is called"):
            OwnProviders().of(unsigned(row))


def test_a_process_that_keeps_a_pool_rents_at_its_own_providers_only() -> None:
    """A row adds none, also a signed one; a region that it names is not rented in."""
    east, west = sky.AWS(region="us-east-1", ami="ami-1"), sky.AWS(region="us-west-2", profile="work")
    for own in (east, west):
        assert same_as(written(own.to_json()), [east, west]) == [own]
        assert stewardship._provider_of(written(own.to_json()), [east, west]) is own
    theirs = {"name": "aws", "region": "us-west-2", "profile": "theirs", "ami": "ami-theirs"}
    assert stewardship._provider_of(unsigned(theirs), [east, west]) is west
    for row in ({"name": "aws", "region": "eu-west-1"}, {**east.to_json(), "endpoint_url": PROXY}, {"name": "local"}):
        for entry in (unsigned(row), written(row)):
            with pytest.raises(sky.CredentialsError, match="another provider than those of this process"):
                stewardship._provider_of(entry, [east, west])


LOCK = "numpy==2.1.0 --hash=sha256:" + "0" * 64
EVIL = "numpy==6.6.6 --hash=sha256:" + "6" * 64


@pytest.mark.parametrize(
    "row",
    [
        json.dumps({"image": {"pip": [], "lock": EVIL}}),
        json.dumps({"image": {"pip": ["git+https://hers"], "lock": None}}),
        json.dumps({"image": {"lock": "/etc/shadow"}}),
        "[]",
        "no json",
        '{"image": {"lock": "\\ud800"}}',
    ],
)
def test_an_altered_spec_decides_nothing_about_new_nodes(row: str) -> None:
    """Their packages have the versions that the opener has sealed, and all else is the spec of the process that rents."""
    spec = sky.PoolSpec.of(image=sky.Image(pip=["numpy"], require_hashes=True), provider=sky.Local())
    certificate = PoolCertificate("certificate", "key")
    sealed = PoolKeys(certificate, SecretValues(), lock_hash(LOCK))
    kept = {"image": {"lock": LOCK, "shell": ["touch /tmp/proof"]}, "env": {"A": "hers"}, "provider": {"name": "aws"}}
    found = stewardship._with_its_lock(spec, unsigned({"name": "local"}, spec_json=json.dumps(kept)), sealed)
    assert found == spec.with_(image=spec.image.model_copy(update={"pip": (), "lock": LOCK}))
    entry = unsigned({"name": "local"}, spec_json=row)
    with pytest.raises(sky.LeaseTampered, match="versions of packages"):
        stewardship._with_its_lock(spec, entry, sealed)
    assert stewardship._with_its_lock(found, entry, sealed) is found
    assert stewardship._with_its_lock(spec, entry, replace(sealed, lock_hash="")) is spec


@pytest.mark.parametrize(("text", "usd"), [("{}", None), ('{"max_cost": 5}', 5.0), ('{"max_cost": null}', None)])
def test_the_limit_of_a_pool_is_read_without_rebuilding_its_spec(text: str, usd: float | None) -> None:
    """A lock of an image that names a file, or a provider, is not looked at."""
    spec = {**json.loads(text), "image": {"lock": "/nonexistent/lock"}, "provider": {"name": "nonesuch"}}
    assert unsigned({}, spec_json=json.dumps(spec)).max_cost == usd
    for fault in ("[]", "x", '{"max_cost": "many"}', '{"max_cost": NaN}', '{"max_cost": -1}'):
        with pytest.raises(LedgerError, match="of pool 'sky-a' in the ledger"):
            _ = unsigned({}, spec_json=fault).max_cost


# ── who reads it ─────────────────────────────────────────────────────────────────────────────────────────────────────


LOADERS = {"load", "load_all", "kind_of"}


def sources() -> dict[str, ast.Module]:
    """Return the modules of the core and of the integrations, by their paths."""
    files = [*ROOT.glob("skyward_core/**/*.py"), *ROOT.glob("integrations/**/*.py")]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def test_one_module_decides_what_a_row_leads_to() -> None:
    """No other one rebuilds a provider, but from what its own user has typed, or reads the provider of a row.

    `provider_name` is for people. The signature is written where the row is.
    """
    loaders, readers = dict[str, set[str]](), set[str]()
    for path, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "") == "skyward_core.providers.base":
                if names := {alias.name for alias in node.names} & LOADERS:
                    loaders.setdefault(path, set()).update(names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("base.") and node.attr in LOADERS:
                loaders.setdefault(path, set()).add(node.attr)
            elif isinstance(node, ast.Attribute) and node.attr in ("written_provider", "provider_signature"):
                readers.add(path)
    assert readers == {"skyward_core/config/own_providers.py", "skyward_core/ledger/rows.py"}
    assert loaders == {
        "skyward_core/config/own_providers.py": {"load", "load_all", "kind_of"},
        "skyward_core/cli/options.py": {"load"},  # --provider
        "skyward_core/spec.py": {"load_all"},  # what its user has written
        # the caller's, and the settings; without settings each cloud with credentials
        "skyward_core/operations.py": {"load_all", "load", "kind_of"},
        "skyward_core/config/report.py": {"kind_of"},  # the forms of settings
        "skyward_core/ledger/tables.py": {"kind_of"},  # what is to be signed
    }


def test_no_spec_is_rebuilt_from_a_row() -> None:
    """A text that anybody may write could name a file of this computer, such as the lock of an image."""
    readers = {
        path
        for path, module in sources().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and any(isinstance(part, ast.Attribute) and part.attr == "spec_json" for part in ast.walk(node))
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "model_validate_json"
    }
    assert readers == set()
