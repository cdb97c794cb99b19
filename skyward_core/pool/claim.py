"""What a process gives to `ComputePool.attach`: a lease, its JSON, or the id of a pool. It is verified here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from skyward_core.errors import LeaseTampered
from skyward_core.machines.instances import Lease
from skyward_core.machines.signing import verify
from skyward_core.session.sealed_lease import PoolKeys, find_keys, find_lease

POOL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def verified_claim(
    given: Lease | Mapping[str, Any] | str, *, has_key: bool, is_trusted: bool
) -> tuple[Lease, PoolKeys | None]:
    """Return a lease that may be used, and the sealed keys for it; None if it needs none.

    Raises LeaseTampered for what is no lease, or an altered one; else as `find_lease` and `verify`. Nothing is
    unpickled, and nothing in the lease is used before.
    """
    if isinstance(given, str) and POOL_ID.fullmatch(given):
        return find_lease(given, has_key=has_key)
    lease = _parsed(given)
    if not is_trusted:
        verify(lease)
    return lease, None if has_key else find_keys(lease)


def _parsed(given: Lease | Mapping[str, Any] | str) -> Lease:
    if isinstance(given, Lease):
        return given
    try:
        if not isinstance(given, str):
            # values that have no JSON, such as bytes, are no part of a lease, and the signature is over the JSON
            given = Lease.model_validate(given).model_dump_json()
        return Lease.model_validate_json(given)
    except ValidationError as error:
        fields = sorted({".".join(map(str, detail["loc"])) or "the whole" for detail in error.errors()})
        raise LeaseTampered(_words(", ".join(fields)[:200])) from error
    except ValueError as error:
        raise LeaseTampered(_words(str(error)[:200])) from error


def _words(reason: str) -> str:
    return f"this is no lease, or was altered ({reason}): get `pool.lease` from its owner again"
