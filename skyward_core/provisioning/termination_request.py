"""One request to a provider to terminate machines, and how its answer is recorded: for `teardown` and `termination`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from skyward_core.errors import InstancesLeft
from skyward_core.machines.instances import Instance


class TerminatingProvider(Protocol):
    """The part of a provider that ends machines."""

    name: ClassVar[str]
    terminate_confirms: ClassVar[bool]

    def instances(self, pool_id: str | None = None) -> list[Instance]: ...
    def terminate(self, ids: Sequence[str]) -> Mapping[str, str] | None: ...


@dataclass(frozen=True, slots=True)
class TerminationAnswer:
    """What a provider has answered to one request for the end of machines."""

    unconfirmed: frozenset[str] | None
    """The machines that it could not end; None if it does not say which."""
    proofs: Mapping[str, str] = field(default_factory=dict[str, str])
    """By machine: how the provider knows that it is gone, in its words."""
    error: Exception | None = None


def request_termination(provider: TerminatingProvider, ids: Sequence[str]) -> TerminationAnswer:
    """Ask a provider once to terminate these machines. Raises nothing: an error is part of the answer."""
    try:
        return TerminationAnswer(frozenset(), provider.terminate(ids) or {} if ids else {})
    except InstancesLeft as error:
        return TerminationAnswer(frozenset(error.ids) or None, error=error)
    except Exception as error:  # the caller must go on with its next request
        return TerminationAnswer(None, error=error)


def report_gone(
    record: Callable[[Iterable[str], str], object], gone: AbstractSet[str], evidence: str, proofs: Mapping[str, str]
) -> None:
    """Record that machines are gone, with the evidence, and with the provider's own proof if it has given one."""
    for proof in sorted({proofs.get(machine, "") for machine in gone}):
        its = sorted(machine for machine in gone if proofs.get(machine, "") == proof)
        record(its, f"{evidence}: {proof}" if proof else evidence)
