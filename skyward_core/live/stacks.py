"""What each slot of a live pool does right now: the Python stacks of the processes of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyward_core.errors import BadRequest
from skyward_core.live.observer import Observer
from skyward_core.worker.stacks import SlotStack, stacks_of_worker


@dataclass(frozen=True, slots=True)
class WorkerStacks:
    """The slots of one worker, RANK-INDEX."""

    worker: str
    slots: tuple[SlotStack, ...]


def stacks_of(observer: Observer) -> list[WorkerStacks]:
    """Return the stacks of all slots, by worker. The calls go on.

    Raises BadRequest if the nodes were started by an earlier release, which cannot do this.
    """
    client: Any = observer.client()
    names: dict[str, str] = {
        str(address): str(one["name"]) for address, one in client.scheduler_info(n_workers=-1)["workers"].items()
    }
    try:
        found = client.run(stacks_of_worker, on_error="raise")
    except (ImportError, AttributeError) as error:
        raise BadRequest(
            f"the nodes of pool {observer.pool_id} have a release that shows no stacks: {error}"
        ) from error
    return sorted(
        (WorkerStacks(names.get(str(address), str(address)), tuple(slots)) for address, slots in found.items()),
        key=lambda one: one.worker,
    )
