"""Requests of providers are answered in this process."""

from tests.providers.in_process import clock, in_process

__all__ = ["clock", "in_process"]
