"""`@sky.distributed.transformers(...)`: Hugging Face's Trainer on all workers of a pool."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, cast, overload

from skyward_core.distributed.group import RENDEZVOUS_SECONDS, Decorator, Group, ListDecorator, decorator
from skyward_core.distributed.torch import check_backend, environment, process_group


@overload
def transformers(
    *, backend: str | None = None, nproc_per_node: None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Decorator: ...
@overload
def transformers(
    *, backend: str | None = None, nproc_per_node: int, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> ListDecorator: ...
def transformers(
    *, backend: str | None = None, nproc_per_node: int | None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Any:
    """Run a function as one rank of a group that Hugging Face's `Trainer` and Accelerate detect.

    `backend` and `rendezvous_seconds` are those of `sky.distributed.torch`, and so is the environment. Besides, the
    state that Accelerate keeps for a whole process ends with the function, because the process runs other calls then.

    >>> import skyward_core as sky
    >>> @sky.compute
    ... @sky.distributed.transformers(backend="nccl")
    ... def train() -> None:
    ...     from transformers import Trainer
    >>> train()
    <pending train()>
    """
    check_backend(backend)
    return decorator(Transformers(backend), rendezvous_seconds, nproc_per_node)


@dataclass(frozen=True, slots=True)
class Transformers:
    """PyTorch's process group and Accelerate's state around a function."""

    needs_process: ClassVar[bool] = False
    backend: str | None = None

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        """Initialise the default process group, and end Accelerate's state before and after the function."""
        with environment(group), process_group(self.backend, group.place):
            forget_state()
            try:
                yield
            finally:
                forget_state()


def forget_state() -> None:
    """End the state in which Accelerate keeps rank, world size and device of this process, if it is loaded.

    An earlier call may have left it. Accelerate's own tests use these methods; there are no public ones.
    """
    state = cast(Any, sys.modules.get("accelerate.state"))
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
