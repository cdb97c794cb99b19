"""The migrations of the ledger, one module for each version of the schema.

A released module does not change any more. It names tables and columns by text, because `tables.py` has the newest
schema only.
"""
