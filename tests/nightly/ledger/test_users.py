"""Who has used a pool with a name, and the part of its cost that is for the calls of each."""

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Usage
from tests.system.ledger.test_names import LEASE_SECONDS, opened
from tests.system.ledger.test_users import slot_seconds
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)


def test_the_time_of_slots_only_grows(ledger: Ledger) -> None:
    opened(ledger)
    for seconds, recorded in ((1.5, 1.5), (1.5, 1.5), (0.0, 1.5), (2.0, 2.0)):
        ledger.names.renew("a", LEASE_SECONDS, Usage(seconds))
        assert slot_seconds(ledger) == {"a": recorded}
