"""The page of `skyward ui`: a server on the loopback, its JSON, and what it reads from ledger and pools."""
