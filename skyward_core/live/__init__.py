"""A look at a live pool from another process. It changes nothing: no lease is renewed, no call is made."""
