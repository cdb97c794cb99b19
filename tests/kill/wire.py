"""Sends the provider's requests."""

from __future__ import annotations

import functools
import ssl

import httpx


def transport() -> httpx.BaseTransport:
    """Return what sends requests; the kill points replace it."""
    return httpx.HTTPTransport(verify=_context(), trust_env=False)


@functools.cache
def _context() -> ssl.SSLContext:
    """Created once: it costs more than a request, and plain HTTP does not use it."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
