"""What a pool would rent now: `quote`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyward_core.pool.preparation import Prepared

if TYPE_CHECKING:
    from skyward_core.provisioning.quote import Quote


class Quoting:
    """The part of `ComputePool` that asks for prices before machines are rented."""

    _prepared: Prepared

    def quote(self) -> Quote:
        """Return the ways to rent this pool's machines now, the price of each, and the most that the pool may cost.

        Queries the providers; rents nothing. Allowed whether the pool is open or not. Raises BadRequest, as `open`.
        """
        from skyward_core.provisioning.quote import quote

        return quote(self._prepared.spec, self._prepared.providers)
