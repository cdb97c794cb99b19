"""What carries the provider's requests.

A module of its own, so that kill points can stand in its way while the provider travels to a reaper without them.
"""

from __future__ import annotations

import functools
import ssl

import httpx


def transport() -> httpx.BaseTransport:
    """Return what carries requests; the kill points put themselves in its place."""
    return httpx.HTTPTransport(verify=_context(), trust_env=False)


@functools.cache
def _context() -> ssl.SSLContext:
    """Made once: it costs more than a request, and plain HTTP does not use it."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
