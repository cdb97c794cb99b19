"""Signatures of leases: the owner signs a lease, and a process verifies it before it uses anything in it."""

import json
import os
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.machines import signing
from tests.unit.machines.test_signing import (  # noqa: F401 - fixtures
    ELSEWHERE,
    INSTANCE,
    POOL,
    altered,
    lease,
    state,
)


def test_a_lease_without_our_signature_runs_nothing(tmp_path: Path) -> None:
    """If our key has not signed it, not even a proxy command runs. A caller may still trust a lease explicitly."""
    proof = tmp_path / "proof"
    claim = altered(
        ELSEWHERE, (*INSTANCE, "endpoint", "proxy_command"), ["sh", "-c", f"touch {proof}; echo no >&2; exit 78"]
    )
    claim = altered(claim, (*INSTANCE, "endpoint", "key"), None)
    signing.signed(ELSEWHERE)
    for signature, words in (("", "is not signed"), ("01234567:00", "signed with another key")):
        with pytest.raises(sky.CredentialsError, match=f"{words}.*SKYWARD_LEASE_KEY.*is_trusted=True"):
            sky.ComputePool.attach(altered(claim, ("signature",), signature), timeout_seconds=5)
    assert not proof.exists()
    with pytest.raises(sky.SkywardError):
        sky.ComputePool.attach(claim, is_trusted=True, timeout_seconds=5)
    assert proof.exists()


def made(tmp_path: Path, name: str, mode: int = 0o700, owner: int = 0) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    settings = {"pool_id": POOL, "instance_id": name, "head_port": 1}
    settings |= dict.fromkeys(("tls_certificate", "tls_key"), "-----BEGIN NOTHING")
    (folder / "settings.json").write_text(json.dumps(settings))
    folder.chmod(mode)
    os.chown(folder, owner, owner)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others")
@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [(0o700, 61_001, "belongs to user 61001"), (0o755, 61_001, "belongs to"), (0o777, 0, "everybody")],
)
def test_the_folder_of_a_local_node_is_checked_first(tmp_path: Path, mode: int, owner: int, words: str) -> None:
    """It has certificate and key. A folder that another user owns or can write to is not read."""
    folder = made(tmp_path, "local-0123456789ab", mode, owner)
    with pytest.raises(sky.CredentialsError, match=f"not followed: .*{words}"):
        sky.ComputePool.attach(lease(str(folder), instance_id=folder.name), timeout_seconds=5)


def test_a_folder_with_another_name_or_a_link_is_not_used(tmp_path: Path) -> None:
    """Other paths contain the id too. `is_trusted` holds for the lease, not for a folder."""
    folder = made(tmp_path, "local-0123456789ab")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / folder.name).symlink_to(folder)
    for directory, instance_id in (
        (folder, "../local-0123456789ab"),
        (folder, "local-ab"),
        ("relative", "relative"),
        (tmp_path / "link" / folder.name, folder.name),
    ):
        with pytest.raises(sky.CredentialsError, match="not followed"):
            sky.ComputePool.attach(lease(str(directory), instance_id=instance_id), timeout_seconds=5, is_trusted=True)


def test_settings_of_another_node_are_not_used(tmp_path: Path) -> None:
    """A folder that was moved to this path has its own id in its settings."""
    folder = made(tmp_path, "local-0123456789ab")
    moved = folder.rename(tmp_path / "local-ab0123456789")
    with pytest.raises(sky.NodeLost, match="its head is local-0123456789ab"):
        sky.ComputePool.attach(lease(str(moved), instance_id=moved.name), timeout_seconds=5)
