"""Sends the provider's requests.

It is a separate module, so that kill points can replace it while the provider is pickled for a reaper without them.
"""

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
