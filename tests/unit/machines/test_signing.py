"""Signatures of leases: the owner signs a lease, and a process verifies it before it uses anything in it."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.machines import signing
from skyward_core.machines.instances import InstanceState, Lease, Node

POOL = "sky-signed"


def lease(
    directory: str = "/root/x", endpoint: sky.Endpoint | None = None, instance_id: str = "host-0123456789ab"
) -> Lease:
    kind: dict[str, Any] = {"provider": "hosts" if endpoint else "local", "region": "r", "instance_type": "t"}
    place: dict[str, Any] = {"pool_id": POOL, "rank": 0, "directory": directory, "endpoint": endpoint}
    instance = sky.Instance(id=instance_id, state=InstanceState.RUNNING, **kind, **place)
    return Lease(
        pool_id=POOL,
        provider={"name": "hosts"},
        nodes=(Node(instance=instance, rank=0),),
        scheduler="tls://127.0.0.1:1",
        created_at=datetime.now(UTC),
    )


ELSEWHERE = lease(endpoint=sky.Endpoint(host="gpu-1", user="me", key="/home/me/key"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skyward"


def altered(claim: Lease, where: tuple[Any, ...], value: object) -> Lease:
    fields = claim.model_dump(mode="json")
    place = fields
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    return Lease.model_validate(fields)


def test_a_signed_lease_is_valid_after_json(state: Path) -> None:
    """Also with another path of the SSH key. The key of the signature is private to the user."""
    claim = signing.signed(ELSEWHERE)
    assert claim.signature
    again = Lease.model_validate_json(claim.model_dump_json())
    signing.verify(again)
    signing.verify(again.with_key("/elsewhere/key"))
    assert signing.signed(again) == claim
    assert (state / "lease.key").stat().st_mode & 0o777 == 0o600
    assert (state / "lease.key").read_bytes().hex() not in claim.model_dump_json()


INSTANCE = ("nodes", 0, "instance")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("scheduler",), "tls://10.0.0.1:1"),
        (("pool_id",), "sky-other"),
        (("expires_at",), "2030-01-01T00:00:00Z"),
        ((*INSTANCE, "directory"), "/tmp/hers"),
        ((*INSTANCE, "endpoint", "host"), "hers"),
        ((*INSTANCE, "endpoint", "host_key"), "ssh-ed25519 AAAA"),
        ((*INSTANCE, "endpoint", "config"), "/tmp/config"),
        ((*INSTANCE, "endpoint", "known_hosts"), "/dev/null"),
        ((*INSTANCE, "endpoint", "proxy_command"), ["sh", "-c", "touch /tmp/proof"]),
        # without an address a lease needs no signature; with one that is not its own it is refused
        ((*INSTANCE, "endpoint"), None),
    ],
)
def test_a_changed_lease_is_refused(where: tuple[Any, ...], value: object) -> None:
    """The change may be a machine, a host key, or a command that the client would run."""
    claim = altered(signing.signed(ELSEWHERE), where, value)
    with pytest.raises(sky.LeaseTampered, match="changed after it was signed"):
        sky.ComputePool.attach(claim)


def test_two_computers_can_share_a_key(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SKYWARD_SECRET_KEY signs; an older key of its list is accepted. SKYWARD_LEASE_KEY goes first. No file is written."""
    old, new = "b2xk" * 10 + "b2w=", "bmV3" * 10 + "bmU="
    monkeypatch.setenv("SKYWARD_SECRET_KEY", old)
    claim = signing.signed(ELSEWHERE)
    monkeypatch.setenv("SKYWARD_SECRET_KEY", f"{new},{old}")
    signing.verify(claim)
    assert signing.signed(ELSEWHERE) != claim
    monkeypatch.setenv("SKYWARD_SECRET_KEY", new)
    with pytest.raises(sky.CredentialsError, match="another key"):
        signing.verify(claim)
    monkeypatch.setenv("SKYWARD_LEASE_KEY", "k" * 16)
    both = signing.signed(ELSEWHERE)
    monkeypatch.delenv("SKYWARD_SECRET_KEY")
    signing.verify(both)
    assert not state.exists()
    monkeypatch.setenv("SKYWARD_LEASE_KEY", "l" * 16)
    with pytest.raises(sky.CredentialsError, match="another key"):
        signing.verify(both)
    monkeypatch.setenv("SKYWARD_LEASE_KEY", "short")
    with pytest.raises(sky.BadRequest, match="at least 16"):
        signing.verify(both)


def test_a_providers_address_in_a_lease_is_verified_before_it_gets_our_credentials(tmp_path: Path) -> None:
    """A forged `endpoint_url` would receive the API key. It holds without nodes, too."""
    claim = signing.signed(ELSEWHERE)
    address = {"name": "runpod", "endpoint_url": "http://127.0.0.1:1"}
    nowhere = f"sqlite:///{tmp_path / 'ledger.db'}"
    for changed in (
        altered(claim, ("provider",), address),
        altered(altered(claim, ("nodes",), []), ("provider",), address),
    ):
        for signature, words in ((claim.signature, "changed after it was signed"), ("", "is not signed")):
            with pytest.raises(sky.CredentialsError, match=words):
                sky.release(altered(changed, ("signature",), signature), ledger_url=nowhere)
    signing.verify(signing.signed(altered(claim, ("nodes",), [])), asks_provider=True)


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "truncated",
        "open",
        "symlink",
        "folder",
        pytest.param(
            "stranger's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
        ),
    ],
)
def test_a_key_that_others_may_know_is_not_used(state: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk leaves an empty file, with which any user could sign."""
    signing.signed(ELSEWHERE)
    key = state / "lease.key"
    if kind in ("empty", "truncated"):
        os.truncate(key, 0 if kind == "empty" else 15)
        assert signing.signed(ELSEWHERE).signature == ""
        assert "remove it" in caplog.text
    elif kind == "open":
        key.chmod(0o644)
    elif kind == "stranger's":
        os.chown(key, 61_001, 61_001)
    else:
        key.rename(state / "other")
        key.symlink_to(state / "other") if kind == "symlink" else key.mkdir()
    with pytest.raises(sky.CredentialsError, match="cannot be verified"):
        signing.verify(ELSEWHERE)


def test_without_a_folder_for_a_key_the_lease_is_not_signed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool works. The log names what an attached pool needs."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert signing.signed(ELSEWHERE).signature == ""
    assert "is_trusted=True" in caplog.text
