"""Which process sets the number of nodes of a pool: the one that keeps it, and no other."""

from __future__ import annotations

from skyward_core.errors import BadRequest, LedgerError
from skyward_core.session.attached import Attached
from skyward_core.session.named_session import NamedSession
from skyward_core.session.named_use import NamedUse
from skyward_core.session.pool_size import PoolSize
from skyward_core.session.session import Session


def size_here(opened: Session | Attached, use: NamedUse | None) -> PoolSize | None:
    """Return the size of an open pool, if this process may set it; None before the pool is open.

    `use` is this process as a client, if the pool has a name. Raises BadRequest, which names the process that may set
    it, and LedgerError if it is not certain who that is.
    """
    if isinstance(opened, NamedSession):
        if opened.is_steward:
            return opened.size
    elif isinstance(opened, Session):
        return opened.size
    if use is not None and use.succession is not None and (size := use.succession.size) is not None:
        return size
    raise BadRequest(_refusal(use))


def _refusal(use: NamedUse | None) -> str:
    if use is None:
        return "only the process that has opened the pool rents and ends its machines: call scale() there"
    try:
        steward = use.steward()
    except LedgerError:
        steward = None
    if steward is None:
        return (
            f"this process does not keep the pool {use.name!r}, and cannot see which one does: call scale() in the"
            " process that has opened it, or try again in some seconds"
        )
    where = f"process {steward.pid} of {steward.name}" if steward.pid else f"a process of {steward.name}"
    return f"{where} keeps the pool {use.name!r}, rents and ends its machines: call scale() there"
