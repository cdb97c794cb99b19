"""`Account` and `Period` under the name by which programs imported them; `skyward_core.ledger` has both."""

from skyward_core.ledger.rows import Account as Account
from skyward_core.ledger.rows import Period as Period
