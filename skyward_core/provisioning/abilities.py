"""Which providers have the features that a spec asks for; known before any request to them."""

from __future__ import annotations

from collections.abc import Sequence

from skyward_core.errors import NotYetSupported
from skyward_core.providers.base import Provider
from skyward_core.spec import PoolSpec


def able(spec: PoolSpec, providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers that can do what the spec asks for. Raises what `refuse` raises if none can."""
    found: list[Provider] = []
    reasons: list[NotYetSupported] = []
    for provider in providers:
        try:
            refuse(spec, provider)
            found.append(provider)
        except NotYetSupported as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def refuse(spec: PoolSpec, provider: Provider) -> None:
    """Raise BadRequest for a feature that the provider never has, before any request to it."""
    is_partitioned = spec.accelerator is not None and bool(spec.accelerator.mig)
    needed = {
        "apt": bool(spec.image.apt),
        "shell": bool(spec.image.shell),
        "volume": bool(spec.volume),
        "mig": is_partitioned,
    }
    for feature, reason in type(provider).refuses.items():
        if needed.get(feature):
            raise NotYetSupported(f"{provider.name} does not do {feature}: {reason}")
