"""Which providers may rent which alternative of a spec, by the features that it asks for: known before any request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyward_core.errors import BadRequest, NotYetSupported
from skyward_core.providers.base import Provider, plain_name
from skyward_core.spec import PoolSpec


@dataclass(frozen=True, slots=True)
class Question:
    """One alternative: its place in the user's list, the spec with it alone, and the providers that may rent it."""

    place: int
    spec: PoolSpec
    providers: tuple[Provider, ...]


def questions(spec: PoolSpec, providers: Sequence[Provider]) -> list[Question]:
    """Return a question for each alternative that a provider can do.

    Raises BadRequest if none can, or if an alternative names a provider that the pool does not have.
    """
    names = [one.provider for one in spec.alternatives] or [None]
    found: list[Question] = []
    reasons: list[NotYetSupported] = []
    for place, (alone, name) in enumerate(zip(spec.each_alternative(), names, strict=True)):
        own = [one for one in providers if name is None or plain_name(one.name) == plain_name(name)]
        if not own:
            having = ", ".join(sorted({provider.name for provider in providers}))
            raise BadRequest(
                f"accelerator: {spec.alternatives[place]} is for a provider that the pool does not have (it has"
                f" {having}): add it to provider=[...]"
            )
        try:
            found.append(Question(place, alone, tuple(able(alone, own))))
        except NotYetSupported as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


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
    is_partitioned = spec.first_accelerator is not None and bool(spec.first_accelerator.mig)
    needed = {
        "apt": bool(spec.image.apt),
        "shell": bool(spec.image.shell),
        "volume": bool(spec.volume),
        "mig": is_partitioned,
    }
    for feature, reason in type(provider).refuses.items():
        if needed.get(feature):
            raise NotYetSupported(f"{provider.name} does not do {feature}: {reason}")
