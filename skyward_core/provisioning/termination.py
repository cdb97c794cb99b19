"""Machines of an open pool that are to end while the pool goes on: those that are lost, and those that did not become a
node.

States of such a machine; whoever asks first does so in a thread of its own (one that does not answer takes its time),
what is left over then is this file's:

    lost ──asked to end──▶ asked, and still listed ──listed no more, or its provider confirms──▶ gone (the book is told,
    its money is free)
      └──the request failed──▶ asked again, with growing pauses ──┘

One thread repeats request and listing for all that are left over, begins with the first of them and ends with the last,
or with the pool. What has not come that far by then stays in the book as rented: closing the pool ends it and does not
let go (`teardown`), and so does a sweep after a kill.

Only ids are asked for that the pool has rented itself. A listing is believed once a request for the machine's end was
accepted; an outage says nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar, Protocol

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import InstancesLeft
from skyward_core.machines.instances import Instance

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0

_log = logging.getLogger("skyward")


class Rents(Protocol):
    """What is needed of a provider."""

    name: ClassVar[str]
    terminate_confirms: ClassVar[bool]

    def instances(self, pool_id: str | None = None) -> list[Instance]: ...
    def terminate(self, ids: Sequence[str]) -> Mapping[str, str] | None: ...


class Witness(Protocol):
    """Who is told what is gone: `journal.Journal`."""

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None: ...


class Ending:
    """One machine that is to end."""

    def __init__(self, instance_id: str, provider: Rents) -> None:
        self.instance_id = instance_id
        self.provider = provider
        self.was_accepted = False
        """Whether the provider has accepted a request for its end."""
        self.over = threading.Event()
        """It is gone; or the pool ends, and this is the pool's release's business."""


class Endings:
    """All of a pool. Safe to use from several threads; `stop` ends what goes on here."""

    def __init__(self, pool_id: str, witness: Witness) -> None:
        self._pool_id = pool_id
        self._witness = witness
        self._lock = threading.Lock()
        self._all: set[Ending] = set()
        self._left_over: set[Ending] = set()
        self._firsts: list[threading.Thread] = []
        self._repeater: threading.Thread | None = None
        self._more = threading.Event()
        self._closing = threading.Event()

    def end(self, instance_id: str, provider: Rents) -> Ending:
        """Ask for the end of a machine, here and now, and see to it that it comes. Raises nothing."""
        ending = self._of(instance_id, provider)
        self._ask_first(ending)
        return ending

    def end_aside(self, instance_id: str, provider: Rents, name: str, first: Callable[[], None]) -> Ending:
        """The same in a thread of that name, and before that what may take long too."""
        ending = self._of(instance_id, provider)

        def work() -> None:
            try:
                first()
            finally:
                self._ask_first(ending)

        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._firsts = [*(one for one in self._firsts if one.is_alive()), thread]
            thread.start()
        return ending

    def stop(self) -> None:
        """Ask for nothing more, and let nobody wait. Waits for requests that are on their way."""
        self._closing.set()
        self._more.set()
        with self._lock:
            endings = list(self._all)
            threads = [*self._firsts, *([] if self._repeater is None else [self._repeater])]
        for ending in endings:
            ending.over.set()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _of(self, instance_id: str, provider: Rents) -> Ending:
        ending = Ending(instance_id, provider)
        with self._lock:
            self._all.add(ending)
        if self._closing.is_set():
            ending.over.set()
        return ending

    def _ask_first(self, ending: Ending) -> None:
        self._ask([ending])
        if ending.over.is_set() or self._closing.is_set():
            return
        with self._lock:
            self._left_over.add(ending)
            self._more.set()
            if self._repeater is None:
                self._repeater = threading.Thread(target=self._repeat, name="skyward-ending", daemon=True)
                self._repeater.start()

    def _repeat(self) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        pauses = backoff.pauses()
        while not self._closing.wait(0):
            if self._more.is_set():
                self._more.clear()
                pauses = backoff.pauses()
            if self._more.wait(next(pauses)):
                continue  # another one is lost, or the pool closes
            with self._lock:
                left = sorted(self._left_over, key=lambda ending: ending.instance_id)
            self._ask(left)
            with self._lock:
                self._left_over = {ending for ending in self._left_over if not ending.over.is_set()}
                if not self._left_over:
                    self._repeater = None
                    return

    def _ask(self, endings: Sequence[Ending]) -> None:
        """Ask once for the end of these, and what is still there."""
        provider = endings[0].provider  # of a pool one provider has machines at a time
        ids = [ending.instance_id for ending in endings]
        refused, proofs = _refused(provider, ids)
        for ending in endings:
            ending.was_accepted = ending.was_accepted or ending.instance_id not in refused
        asked = [ending for ending in endings if ending.was_accepted]
        if provider.terminate_confirms:
            self._are_gone(
                [ending for ending in asked if ending.instance_id not in refused],
                f"{provider.name} confirmed its termination",
                proofs,
            )
        elif asked and (listed := self._listed(provider)) is not None:
            self._are_gone(
                [ending for ending in asked if ending.instance_id not in listed],
                f"{provider.name} lists it no more",
                proofs,
            )

    def _listed(self, provider: Rents) -> set[str] | None:
        try:
            return {instance.id for instance in provider.instances(self._pool_id)}
        except Exception as error:
            _log.debug("%s does not say which machines there are: %s", provider.name, error)
            return None

    def _are_gone(self, endings: Sequence[Ending], evidence: str, proofs: Mapping[str, str]) -> None:
        if not endings:
            return
        try:
            tell_gone(self._witness, {ending.instance_id for ending in endings}, evidence, proofs)
        except Exception:  # the pool was judged dead, which its clock sees as well; the machines are gone all the same
            _log.debug("what is gone could not be written down", exc_info=True)
        with self._lock:
            self._all.difference_update(endings)
        for ending in endings:
            ending.over.set()


def tell_gone(witness: Witness, gone: AbstractSet[str], evidence: str, proofs: Mapping[str, str]) -> None:
    """Tell what is gone, and for each machine how the provider knows, if it has said so."""
    for proof in sorted({proofs.get(machine, "") for machine in gone}):
        its = sorted(machine for machine in gone if proofs.get(machine, "") == proof)
        witness.gone(its, f"{evidence}: {proof}" if proof else evidence)


def _refused(provider: Rents, ids: Sequence[str]) -> tuple[AbstractSet[str], Mapping[str, str]]:
    """Ask for the end of these; return those for which the request was not accepted, and how the provider knows that
    others are gone.
    """
    try:
        return frozenset(), provider.terminate(ids) or {}
    except InstancesLeft as error:
        return set(error.ids) or set(ids), {}
    except Exception as error:
        _log.debug("%s was asked to end %s: %s", provider.name, ", ".join(ids), error)
        return set(ids), {}
