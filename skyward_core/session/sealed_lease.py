"""The newest lease of a pool that outlives its owner, in the ledger, with keys that only holders of SKYWARD_SECRET_KEY
can open: written by the owner's session, read by a process that attaches.

    not shared ── detach, or the first detached call ──> shared ── the pool's end is recorded ──> deleted
                                                         └─ a node was replaced, or there is a new head: written again

The seal covers the pool's certificate with its key, and the SSH keys that the lease names, if they are files without a
passphrase. It also has the pool's name, to which the ledger could give another pool, and the hash of the versions of
the image's packages, which a process that adopts the pool reads from the ledger. The seal is bound to the pool's id and
to the lease beside it. docs/decisions/0030 says what a kill between any two lines leaves.

`KeysInMemory` has the texts of SSH keys as files in this process's memory: a kill leaves nothing of them on a disk.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from skyward_core.engine.certificates import PoolCertificate
from skyward_core.errors import BadRequest, CredentialsError, LeaseLost, LeaseTampered, NodeLost, SkywardError
from skyward_core.ledger.rows import SealedLease, UnreadableRow
from skyward_core.machines.instances import Lease, Node
from skyward_core.machines.signing import CURE, KeyRing
from skyward_core.spec import PoolSpec
from skyward_core.wire.masking import SecretValues

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.session.bookkeeping import Bookkeeping


CLOCK_SKEW = timedelta(minutes=2)
"""How much the clocks of two clients may differ before a lease counts as run out."""
LARGEST_KEY = 64 << 10
CONTEXT = "skyward lease 1"


@dataclass(frozen=True, slots=True, repr=False)
class PoolKeys:
    """What the members of a pool know: its certificate, and the texts of SSH keys by the paths in its lease.

    `lock_hash` is that of `Image.lock` with which its nodes are prepared, "" without one. `name` is that of the pool.
    """

    certificate: PoolCertificate
    ssh_keys: SecretValues
    lock_hash: str = ""
    name: str = ""

    def __repr__(self) -> str:
        return "PoolKeys(...)"

    def for_paths(self, paths: set[str]) -> PoolKeys:
        """Return the keys for some paths of a lease.

        The path is not signed, and may have been changed. If there is only one key, it is used for any path.
        """
        only = next(iter(self.ssh_keys.values())) if len(set(self.ssh_keys.values())) == 1 else None
        found = {path: self.ssh_keys.get(path, only) for path in paths}
        return replace(self, ssh_keys=SecretValues({path: text for path, text in found.items() if text is not None}))


# ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SharedLease:
    """The sealed lease of one session. Nothing is written before `share`."""

    def __init__(
        self,
        pool_id: str,
        certificate: Future[PoolCertificate],
        bookkeeping: Bookkeeping,
        log: Callable[..., object],
        spec: Callable[[], PoolSpec] = PoolSpec,
    ) -> None:
        """`spec` returns that of the pool, with the lock of its image once that is known."""
        self._pool_id = pool_id
        self._certificate = certificate
        self._spec = spec
        self._bookkeeping = bookkeeping
        self._log = log
        self._writing = threading.Lock()
        """Held during the write, so that no older lease replaces a newer one."""
        self._is_shared = False
        self._written: Lease | None = None

    def share(self, lease: Lease | None) -> None:
        """Write this lease, and from now on keep the row current.

        Raises LedgerError, LeaseLost, and BadRequest for a malformed SKYWARD_SECRET_KEY. A user who can store no key
        gets a warning: then the pool is shared by its lease alone.
        """
        self._is_shared = True
        self.keep_current(lease)

    def adopt(self, lease: Lease) -> None:
        """Keep the row current from now on; it has this lease."""
        self._is_shared, self._written = True, lease

    def keep_current(self, lease: Lease | None) -> None:
        """Write the lease if it is not the one in the ledger. Errors as of `share`; call it again after them."""
        if self._is_shared and lease is not None:
            self._write(lease)

    def keep_at_last(self, lease: Lease) -> None:
        """Write the lease of a pool that is left, if a node was replaced meanwhile; an error is only logged.

        With the lease before, a process that attaches goes on without that node.
        """
        try:
            self.keep_current(lease)
        except SkywardError as error:
            self._log(logging.WARNING, "the ledger has an older lease of pool %s: %s", self._pool_id, error)

    def _write(self, lease: Lease) -> None:
        with self._writing:
            ledger = self._bookkeeping.ledger
            if ledger is None or lease == self._written:
                return
            try:
                ring = KeyRing.to_seal()
            except (OSError, RuntimeError, KeyError) as error:  # the latter two: the user has no home
                self._is_shared = False
                words = "the lease of pool %s is not in the ledger, because its key cannot be stored: %s. %s"
                self._log(logging.WARNING, words, self._pool_id, error, CURE)
                return
            text = lease.model_dump_json()
            ledger.seal_lease(
                self._pool_id,
                text,
                ring.seal(_content(lease, self._certificate.result(), self._spec()), _context(self._pool_id, text)),
                epoch=self._bookkeeping.epoch,
            )
            self._written = lease


def lock_hash(lock: str | None) -> str:
    """Return the hash of the lock of an image; "" if there is none."""
    return "" if lock is None else hashlib.sha256(lock.encode()).hexdigest()


def _content(lease: Lease, certificate: PoolCertificate, spec: PoolSpec) -> bytes:
    keys = {path: text for path in sorted(key_paths(lease)) if (text := _key_without_passphrase(path)) is not None}
    pair = {"certificate": certificate.certificate, "key": certificate.key}
    of_spec = {"name": spec.name or "", "lock_hash": lock_hash(spec.image.lock)}
    return json.dumps({**pair, **of_spec, "ssh_keys": keys}).encode()


def _context(pool_id: str, lease_json: str) -> bytes:
    """Return what a seal is bound to: the pool, and the exact text of the lease."""
    return json.dumps([CONTEXT, pool_id, lease_json]).encode()


def key_paths(lease: Lease) -> set[str]:
    """Return the paths of the SSH keys that a lease names."""
    endpoints = [node.instance.endpoint for node in lease.nodes]
    return {endpoint.key for endpoint in endpoints if endpoint is not None and endpoint.key is not None}


def _key_without_passphrase(path: str) -> str | None:
    """Return the text of a private key; None if the file cannot be read, is no key, or has a passphrase."""
    serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    unsupported = importlib.import_module("cryptography.exceptions").UnsupportedAlgorithm
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(LARGEST_KEY)
    except (OSError, RuntimeError):
        return None
    for load in (serialization.load_ssh_private_key, serialization.load_pem_private_key):
        try:
            load(text, None)
            return text.decode()
        except (ValueError, TypeError, unsupported):
            continue
    return None


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_lease(
    pool_id: str, *, has_key: bool = False, ledger: Ledger | None = None, name: str | None = None
) -> tuple[Lease, PoolKeys]:
    """Return the newest lease of a pool and its keys, from this process's ledger, both verified.

    `has_key`: the caller has an SSH key for all machines. `ledger`: this one, which stays open. `name`: the pool must
    have been opened with it; else an altered ledger would lead calls and their secrets to another pool of this key.
    Raises BadRequest for a pool that the ledger does not have or that is not shared; NodeLost if it has ended or its
    lease has run out; LeaseLost if it was condemned; LeaseTampered if the row was altered or belongs to another pool;
    CredentialsError without the key that has sealed it; LedgerError.
    """
    with _ledger() if ledger is None else nullcontext(ledger) as found:
        _must_live(found, pool_id)
        try:
            row = found.sealed_lease(pool_id)
        except UnreadableRow as error:
            raise LeaseTampered(f"the lease of pool {pool_id} in the ledger was altered: {error}") from error
    if row is None:
        raise BadRequest(
            f"the ledger has no lease of pool {pool_id}, because it lives with its owner: call `detach` or"
            " `start_detached` there first, or attach with its `pool.lease`"
        )
    keys = _opened(row, pool_id)
    try:
        lease = Lease.model_validate_json(row.lease_json)  # authentic: it is a part of the seal
    except ValidationError as error:
        raise _of_an_earlier_release(pool_id) from error
    if lease.pool_id != pool_id or any(node.instance.pool_id != pool_id for node in lease.nodes):
        raise LeaseTampered(f"the lease of pool {pool_id} in the ledger is that of another pool")
    if name not in (None, keys.name):
        raise LeaseTampered(
            f"the ledger says that the pool {name!r} is {pool_id}, which was opened with another name: it was not used"
        )
    missing = {path for path in key_paths(lease) - keys.ssh_keys.keys() if not exists(path)}
    if missing and not has_key:
        raise CredentialsError(
            f"the SSH key of pool {pool_id}, {', '.join(sorted(missing))}, is not in the ledger: only a key in a file"
            " without passphrase is sealed. Attach with the pool's lease and key=, the text or the path of a key that"
            " the machines know"
        )
    return lease, keys


def find_keys(lease: Lease) -> PoolKeys | None:
    """Return the sealed keys for a verified lease whose SSH keys this machine does not have.

    None if none are needed, or the ledger has none.

    Raises LeaseTampered and CredentialsError as `find_lease`.
    """
    paths = {path for path in key_paths(lease) if not exists(path)}
    if not paths:
        return None
    try:
        with _ledger() as ledger:
            row = ledger.sealed_lease(lease.pool_id)
    except UnreadableRow as error:
        raise LeaseTampered(f"the keys of pool {lease.pool_id} in the ledger were altered: {error}") from error
    except SkywardError:  # the lease may need no key; if it does, the error of the login names it
        return None
    return None if row is None else _opened(row, lease.pool_id).for_paths(paths)


def exists(path: str) -> bool:
    """Return whether there is such a file here, as far as this user can see."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _ledger() -> Ledger:
    module = importlib.import_module("skyward_core.ledger.ledger")
    return cast("Ledger", module.Ledger(module.default_url()))


def _must_live(ledger: Ledger, pool_id: str) -> None:
    entry = ledger.pool(pool_id)
    if entry is None:
        raise BadRequest(
            f"the ledger has no pool {pool_id!r}: is SKYWARD_LEDGER the ledger in which it was opened? `skyward ps`"
            " lists its pools"
        )
    entry.raise_if_stopped()
    if entry.ended_at is not None:
        raise NodeLost(f"pool {pool_id} is not there any more: it ended at {entry.ended_at:%Y-%m-%d %H:%M:%S} UTC")
    if entry.condemned_at is not None:
        raise LeaseLost(f"pool {pool_id} was judged dead, and its machines are being ended: open another one")
    # a lease of this boot is exact by this computer's time of day; that of another one is judged by the server's
    now = ledger.names.now() if entry.lease_shift is None else ledger.time_of_day()
    if entry.lease_expires_at + CLOCK_SKEW < now:
        raise NodeLost(
            f"pool {pool_id} is not there any more: its lease ran out at {entry.lease_expires_at:%Y-%m-%d %H:%M:%S} UTC"
        )


def _opened(row: SealedLease, pool_id: str) -> PoolKeys:
    try:
        content = KeyRing.to_open().unseal(row.sealed, _context(pool_id, row.lease_json))
    except CredentialsError as error:
        raise type(error)(f"pool {pool_id} cannot be attached to by its entry in the ledger: {error}") from error
    sealed = cast("Mapping[str, Any]", json.loads(content))
    try:
        certificate = PoolCertificate(sealed["certificate"], sealed["key"])
        return PoolKeys(certificate, SecretValues(sealed["ssh_keys"]), sealed["lock_hash"], sealed["name"])
    except KeyError as error:
        raise _of_an_earlier_release(pool_id) from error


def _of_an_earlier_release(pool_id: str) -> CredentialsError:
    """Return the error of a row that was authentic when another release has written it."""
    return CredentialsError(
        f"the pool {pool_id} was opened by an earlier release: end it with that release (`skyward stop {pool_id}`)"
    )


class KeysInMemory:
    """Owns files without a name. Their paths are valid in this process, until `close`."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._paths: dict[str, str] = {}

    def path_of(self, key: str) -> str:
        """Write a key, unless it was written before, and return its path."""
        if key in self._paths:
            return self._paths[key]
        file = os.memfd_create("skyward-key")
        self._files.append(file)
        path = self._paths[key] = f"/proc/{os.getpid()}/fd/{file}"
        Path(path).write_text(key.strip() + "\n")
        return path

    def with_keys(self, lease: Lease, ssh_keys: Mapping[str, str]) -> Lease:
        """Return the lease with the paths of these keys, whose texts are given by the paths in the lease."""
        paths = {path: self.path_of(text) for path, text in ssh_keys.items()}
        return lease.model_copy(update={"nodes": tuple(_with_path(node, paths) for node in lease.nodes)})

    def close(self) -> None:
        """Remove the keys. May be called twice."""
        self._paths.clear()
        while self._files:
            os.close(self._files.pop())


def _with_path(node: Node, paths: Mapping[str, str]) -> Node:
    endpoint = node.instance.endpoint
    key = None if endpoint is None else endpoint.key
    return node if key is None or key not in paths else node.with_key(paths[key])
