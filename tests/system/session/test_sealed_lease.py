"""The sealed lease in the ledger: when it is written, what it opens, and that nothing altered is ever used."""

import base64
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

import skyward_core as sky
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.machines.instances import Lease
from skyward_core.machines.owner import Owner
from skyward_core.machines.signing import KeyRing, signed
from skyward_core.pool.pool import verified_claim
from skyward_core.session.sealed_lease import CONTEXT, PoolKeys, SharedLease, find_keys, find_lease, lock_hash
from skyward_core.wire.masking import SecretValues
from tests.conftest import examples
from tests.unit.machines.test_signing import lease as lease_of

POOL = "sky-signed"
LOCK = "numpy==2.1.0 --hash=sha256:" + "0" * 64
SPEC = sky.PoolSpec.of(name="nightly", image=sky.Image(lock=LOCK))
CERTIFICATE = PoolCertificate("-----BEGIN CERTIFICATE-----", "-----BEGIN PRIVATE KEY-----")
SECRET = base64.b64encode(b"k" * 32).decode()


@pytest.fixture(scope="module")
def key_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path.read_text()


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """This process's ledger, with the pool of the leases in this file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.setenv("SKYWARD_SECRET_KEY", SECRET)
    with Ledger(default_url()) as ledger:
        open_pool(ledger, POOL)
        yield ledger


@pytest.fixture
def key(tmp_path: Path, key_text: str) -> Path:
    path = tmp_path / "id_ed25519"
    path.write_text(key_text)
    path.chmod(0o600)  # else ssh-keygen does not change it
    return path


def open_pool(ledger: Ledger, pool_id: str, lease_seconds: float = 60) -> None:
    end = datetime.now(UTC) + timedelta(seconds=lease_seconds)
    ledger.open_pool(pool_id, owner=Owner.here(), provider={}, spec_json="{}", lease_expires_at=end)


def over_ssh(key: object, host: str = "gpu-1") -> Lease:
    return lease_of(endpoint=sky.Endpoint(host=host, user="me", key=str(key)))


def writer(ledger: Ledger | None, logged: list[str] | None = None) -> SharedLease:
    certificate: Future[PoolCertificate] = Future()
    certificate.set_result(CERTIFICATE)

    def log(level: int, words: str, *arguments: object) -> None:
        (logged if logged is not None else []).append(words % arguments)

    bookkeeping: Any = SimpleNamespace(ledger=ledger, epoch=None)
    return SharedLease(POOL, certificate, bookkeeping, log, lambda: SPEC)


def shared(ledger: Ledger, lease: Lease) -> SharedLease:
    shared = writer(ledger)
    shared.share(lease)
    return shared


def alter(ledger: Ledger, column: str, value: object, pool_id: str = POOL) -> None:
    with ledger._database.write() as connection:
        connection.execute(
            text(f"UPDATE skyward_sealed_leases SET {column} = :value WHERE pool_id = :pool"),
            {"value": value, "pool": pool_id},
        )


# ── what another process finds ───────────────────────────────────────────────────────────────────────────────────────


def test_the_id_of_a_pool_leads_to_its_lease_and_keys(ledger: Ledger, key: Path, key_text: str) -> None:
    """With the same secret and nothing else. The ledger has neither key in readable form."""
    claim = over_ssh(key)
    shared(ledger, claim)
    key.unlink()
    found, keys = verified_claim(POOL, has_key=False, is_trusted=False)
    assert (found, keys) == (
        claim,
        PoolKeys(CERTIFICATE, SecretValues({str(key): key_text}), lock_hash(SPEC.image.lock), "nightly"),
    )
    assert find_lease(POOL, has_key=True, name="nightly") == (found, keys)
    with pytest.raises(sky.LeaseTampered, match=f"'weekly' is {POOL}, which was opened with another"):
        find_lease(POOL, has_key=True, name="weekly")
    row = ledger.sealed_lease(POOL)
    assert row is not None
    assert "PRIVATE" not in row.lease_json
    assert "PRIVATE" not in base64.b64decode(row.sealed.rpartition(":")[2]).decode(errors="replace")
    assert "PRIVATE" not in repr((keys, row))


def test_a_lease_without_its_key_file_gets_the_sealed_key(ledger: Ledger, key: Path, key_text: str) -> None:
    """A key that is here is used as it is, and so is `key=`. The path is not signed: with one key it does not matter."""
    shared(ledger, over_ssh(key))
    claim = signed(over_ssh(key))
    assert verified_claim(claim, has_key=False, is_trusted=False) == (claim, None)
    key.unlink()
    assert verified_claim(claim, has_key=True, is_trusted=False) == (claim, None)
    moved = claim.with_key("/elsewhere/key").model_dump_json()
    for given_lease, path in ((claim, str(key)), (moved, "/elsewhere/key")):
        _, keys = verified_claim(given_lease, has_key=False, is_trusted=False)
        assert keys is not None
        assert dict(keys.ssh_keys) == {path: key_text}
    assert find_keys(lease_of()) is None


def test_only_a_key_without_a_passphrase_is_sealed(ledger: Ledger, key: Path) -> None:
    """A caller without another key gets the error before anything is tried; `key=` needs none of it."""
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "a passphrase", "-f", str(key)], check=True, capture_output=True)
    for path in (key, key.parent / "missing", key.parent):
        claim = over_ssh(path)
        shared(ledger, claim)
        assert find_lease(POOL, has_key=True) == (
            claim,
            PoolKeys(CERTIFICATE, SecretValues(), lock_hash(SPEC.image.lock), "nightly"),
        )
        if path != key.parent:
            key.unlink(missing_ok=True)
            with pytest.raises(sky.CredentialsError, match="is not in the ledger: only a key in a file without"):
                find_lease(POOL)


def test_without_the_secret_the_error_says_what_is_missing(
    ledger: Ledger, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed with the key file of one machine, another machine cannot open it: with no key, or with another one."""
    monkeypatch.delenv("SKYWARD_SECRET_KEY")
    shared(ledger, over_ssh(key))
    assert find_lease(POOL)[0] == over_ssh(key).model_copy(update={"created_at": find_lease(POOL)[0].created_at})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    cure = "Set SKYWARD_SECRET_KEY to the same key where the pool is opened and here"
    with pytest.raises(sky.CredentialsError, match=f"is not set.*{cure}") as caught:
        sky.ComputePool.attach(POOL)
    monkeypatch.setenv("SKYWARD_SECRET_KEY", base64.b64encode(b"l" * 32).decode())
    with pytest.raises(sky.CredentialsError, match=f"sealed with another key.*{cure}") as other:
        sky.ComputePool.attach(POOL)
    assert sky.LeaseTampered not in {type(caught.value), type(other.value)}


def test_a_pool_that_is_not_there_is_not_attached_to(ledger: Ledger, key: Path) -> None:
    """Unknown, not shared, run out, condemned, ended: each is another error, and nothing is tried."""
    with pytest.raises(sky.BadRequest, match="lives with its owner: call `detach`"):
        sky.ComputePool.attach(POOL)
    with pytest.raises(sky.BadRequest, match="has no pool 'sky-unknown'"):
        sky.ComputePool.attach("sky-unknown")
    shared(ledger, over_ssh(key))
    open_pool(ledger, "sky-old", lease_seconds=-121)
    with pytest.raises(sky.NodeLost, match="its lease ran out"):
        sky.ComputePool.attach("sky-old")
    open_pool(ledger, "sky-skewed", lease_seconds=-60)
    with pytest.raises(sky.BadRequest, match="lives with its owner"):
        sky.ComputePool.attach("sky-skewed")
    entry = ledger.pool(POOL)
    assert entry is not None
    ledger.condemn(POOL, seen=entry.lease_expires_at)
    with pytest.raises(sky.LeaseLost, match="judged dead"):
        sky.ComputePool.attach(POOL)
    ledger.end_pool(POOL)
    with pytest.raises(sky.NodeLost, match="it ended at"):
        sky.ComputePool.attach(POOL)


# ── what the owner writes ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_is_written_when_it_is_shared_and_when_it_changes(
    ledger: Ledger, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, and not again while it is the same. The clock's next turn makes a write that has failed."""
    first, second = over_ssh(key), over_ssh(key, host="gpu-2")
    lease = writer(ledger)
    lease.keep_current(first)
    assert ledger.sealed_lease(POOL) is None

    def away(*_: object, **__: object) -> None:
        raise sky.LedgerError("the server is being restarted")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "seal_lease", away)
        with pytest.raises(sky.LedgerError):
            lease.share(first)
    lease.keep_current(first)
    written = ledger.sealed_lease(POOL)
    assert find_lease(POOL)[0] == first
    lease.keep_current(first)
    lease.keep_current(None)
    assert ledger.sealed_lease(POOL) == written
    lease.keep_current(second)
    assert find_lease(POOL)[0] == second
    ledger.end_pool(POOL)
    with pytest.raises(sky.LeaseLost):
        lease.keep_current(first)
    lease.keep_at_last(first)
    assert ledger.sealed_lease(POOL) is None


def test_without_a_place_for_a_key_the_pool_is_not_shared(
    ledger: Ledger, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_SECRET_KEY")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    logged: list[str] = []
    lease = writer(ledger, logged)
    lease.share(over_ssh(key))
    lease.keep_current(over_ssh(key))
    assert ledger.sealed_lease(POOL) is None
    assert len(logged) == 1
    assert "its key cannot be stored" in logged[0]
    assert "Set SKYWARD_SECRET_KEY" in logged[0]


def test_a_malformed_secret_is_refused_before_anything_is_rented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_SECRET_KEY", "hunter2")
    monkeypatch.setattr(sky.Local, "launch", lambda *_: pytest.fail("a machine was launched"))
    with pytest.raises(sky.BadRequest, match="openssl rand -base64 32") as caught:
        sky.ComputePool(provider=sky.Local(), display="quiet").open()
    assert "hunter2" not in str(caught.value)


# ── what was altered ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_were_swapped_are_refused(ledger: Ledger, key: Path) -> None:
    """The whole row of another pool, its keys alone, an older pair, and values that are no text."""
    shared(ledger, over_ssh(key))
    first = ledger.sealed_lease(POOL)
    shared(ledger, over_ssh(key, host="gpu-2"))
    second = ledger.sealed_lease(POOL)
    assert first is not None
    assert second is not None
    alter(ledger, "sealed", first.sealed)
    with pytest.raises(sky.LeaseTampered, match=f"pool {POOL} cannot be attached to by its entry"):
        sky.ComputePool.attach(POOL)
    with pytest.raises(sky.LeaseTampered):
        find_keys(over_ssh("/elsewhere/key"))
    open_pool(ledger, "sky-hers")
    ledger.seal_lease("sky-hers", second.lease_json, second.sealed)
    with pytest.raises(sky.LeaseTampered, match="belongs to another pool"):
        sky.ComputePool.attach("sky-hers")
    shared(ledger, over_ssh(key).model_copy(update={"pool_id": "sky-other"}))  # by a holder of the secret
    with pytest.raises(sky.LeaseTampered, match="that of another pool"):
        sky.ComputePool.attach(POOL)
    alter(ledger, "sealed", b"\x00\xff")
    for use in (lambda: sky.ComputePool.attach(POOL), lambda: find_keys(over_ssh("/elsewhere/key"))):
        with pytest.raises(sky.LeaseTampered):
            use()


def test_a_lease_of_an_earlier_release_says_so(ledger: Ledger) -> None:
    """Its seal has no hash and no name, or the lease has other fields."""
    ring, pair = KeyRing.to_seal(), {"certificate": CERTIFICATE.certificate, "key": CERTIFICATE.key, "ssh_keys": {}}
    own = over_ssh("/elsewhere/key").model_dump_json()
    now = {**pair, "lock_hash": "", "name": ""}
    for lease_json, content in ((own, pair), ('{"pool": "sky-signed"}', now)):
        context = json.dumps([CONTEXT, POOL, lease_json]).encode()
        ledger.seal_lease(POOL, lease_json, ring.seal(json.dumps(content).encode(), context))
        with pytest.raises(sky.CredentialsError, match=rf"earlier release: .* \(`skyward stop {POOL}`\)") as raised:
            sky.ComputePool.attach(POOL)
        assert not isinstance(raised.value, sky.LeaseTampered)


GENERATED = settings(
    max_examples=examples(1000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.generated
@GENERATED
@given(data=st.data())
def test_an_altered_field_of_a_lease_is_never_used(key: Path, data: st.DataObject) -> None:
    """Any value at any place, also none, and fields that are left out or new."""
    claim = signed(over_ssh(key))
    fields = json.loads(claim.model_dump_json())
    place: Any = fields
    while True:
        where = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[where], dict | list) or not place[where] or data.draw(st.booleans()):
            break
        place = place[where]
    values = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text(), max_size=2),
        st.dictionaries(st.text(), st.text(), max_size=2), st.binary(max_size=4),
    )  # fmt: skip
    if data.draw(st.booleans()):
        place[where] = data.draw(values)
    else:
        del place[where]
    try:
        found, _ = verified_claim(fields, has_key=True, is_trusted=False)
    except sky.CredentialsError:
        return
    assert found.with_key("") == claim.with_key("")
