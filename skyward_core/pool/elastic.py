"""The number of nodes of an open pool: `scale`."""

from __future__ import annotations

from skyward_core.errors import BadRequest
from skyward_core.pool.current_session import CurrentSession


class ElasticSize:
    """The part of `ComputePool` for pools of `nodes=(least, most)`."""

    _session: CurrentSession

    def scale(self, nodes: int | None, *, wait_seconds: float = 0.0) -> int:
        """Keep the pool at this number of nodes from now on; None: let it grow and shrink by itself again.

        New nodes take calls as soon as each has joined; a node that is to leave ends its calls first. Machines that are
        not to be had are tried again, with an `Error` event each time. Returns how many nodes take calls now, or as
        soon as they are as many as wanted, after at most `wait_seconds`.

        Raises BadRequest for a pool of a fixed size, for a number outside its limits, and in a process that does not
        keep the machines, as after `attach`: the error names the process that does, if the pool has a name. Raises
        PoolClosed, and LedgerError if it is not certain which process keeps the pool.
        """
        if not wait_seconds >= 0:
            raise BadRequest(f"wait_seconds={wait_seconds!r}: write for how many seconds to wait for the nodes, or 0")
        return self._session.scale(nodes, wait_seconds)
