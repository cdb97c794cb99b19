"""Checks of an installation: what works, what does not, and what to do about it. Nothing is rented."""
