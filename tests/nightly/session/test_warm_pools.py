"""`skyward warm NAME --for 2h`: what is refused, what is reserved, and what is written; the nodes come in at the end."""

from datetime import timedelta

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import NameState
from skyward_core.session.warm_pools import keep_warm
from tests.system.session.test_warm_pools import (  # noqa: F401 - fixtures
    Nodes,
    Open,
    nodes,
    open_pool,
)
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    PROVIDER,
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)


def test_a_warm_pool_stays_longer(ledger: Ledger, clock: Clock, open_pool: Open, nodes: Nodes) -> None:
    """The nodes first; then warm time and lease in the ledger."""
    open_pool()
    row = keep_warm(ledger, "nightly", 7200)
    until = clock.time + timedelta(seconds=7200)
    assert (row.state, row.warm_until, row.keep_warm_seconds) == (NameState.WARM, until, 600)
    assert nodes.leases == [(7200, False)]
    entry = ledger.pool("sky-a")
    assert entry is not None
    assert entry.lease_expires_at == until
    assert ledger.names.named("nightly") == row
