"""`python -m tests.ledger.write`"""

import sqlite3
import tempfile
from decimal import Decimal
from pathlib import Path

from skyward_core.ledger.database import newest_version
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period
from skyward_core.work import Work
from tests.ledger.fixtures import TRAIN, Clock, intend, open_pool, pay, record_shares

WRITTEN = Path(__file__).parent / "written"


def write(path: Path) -> None:
    """Write the dump of a ledger with the pools, the account and the machine that `test_written.py` expects."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ledger.db"
        with Ledger(f"sqlite:///{file}", clock=Clock()) as ledger:
            ledger.set_account(Account("team", Decimal(30), Period.MONTH))
            open_pool(ledger, "p")
            intend(ledger)
            pay(ledger, "q", TRAIN, 2)
            pay(ledger, "shared", Work(system="dagster", workflow="job", run="r1"), 16)
            asset = Work(system="dagster", workflow="job", run="r1", task="a", asset="a")
            record_shares(ledger, "shared", {asset: Decimal("5.000001")})
            ledger.reserve("team", "p", Decimal("0.37"))
        raw = sqlite3.connect(file)
        path.write_text("\n".join(raw.iterdump()) + "\n")
        raw.close()


if __name__ == "__main__":
    write(WRITTEN / f"version_{newest_version()}.sql")
