"""What commands print: pure functions from rows of the ledger, offers and reports to tables, JSON and sentences."""
