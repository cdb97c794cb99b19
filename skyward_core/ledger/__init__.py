"""Money: the database with its tables and rows, the journal of a pool, its receipt, metering and budgets.

Programs set limits of accounts with four names (docs/nothing-left-running.md). They are loaded when they are first
used, so that importing the package does not import SQLAlchemy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger as Ledger
    from skyward_core.ledger.ledger import default_url as default_url
    from skyward_core.ledger.rows import Account as Account
    from skyward_core.ledger.rows import Period as Period

_HOMES = {"Ledger": "ledger", "default_url": "ledger", "Account": "rows", "Period": "rows"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
