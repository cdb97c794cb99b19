"""Where a call runs: its node, its worker, its place among all workers of the pool."""

import json
import os
from dataclasses import asdict, dataclass, field

from skyward_core.errors import BadRequest

ENV = "SKYWARD_INSTANCE_INFO"
"""The environment variable that carries an `InstanceInfo` as JSON, so that processes started by a call (torchrun) see
it too.
"""

JOB_PLACE = "{job}"  # stands for the job's id in the text of the instance's information
_DEFAULT_HEAD_PORT = 29500  # torch.distributed's own default, see the torchrun manual, --master-port


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The surroundings of one call.

    `node` counts from 0 (the head) to `total_nodes - 1`, `worker` from 0 to `workers_per_node - 1` on its node.
    `accelerators` are the names of what this worker may use, one per device. `head_addr` and `head_port` are where the
    workers of this call can meet: an address that all nodes reach and a port that is free on the head. `job_id` is the
    same on all workers of one broadcast, and different for each call. `neuron_cores` are the numbers of the NeuronCores
    (Trainium, Inferentia) that this process may use, also in NEURON_RT_VISIBLE_CORES for AWS's runtime: a part of the
    node's if calls run there at once. Empty elsewhere, and if the runtime chooses. `is_simulated`: `Local` simulates
    these accelerators. `is_broadcast`: the same call runs on every worker of the pool (`call @ pool`).

    In a pool of `nodes=(least, most)`, `node` and `total_nodes` of a broadcast count the nodes that it runs on. In
    other calls `total_nodes` is the most that the pool may have.
    """

    node: int
    total_nodes: int
    is_head: bool
    accelerators: list[str]
    head_addr: str
    head_port: int
    job_id: str
    worker: int
    workers_per_node: int
    neuron_cores: list[int] = field(default_factory=list[int])
    is_simulated: bool = False
    is_broadcast: bool = False

    @property
    def rank(self) -> int:
        """This worker among all workers of the pool, from 0; node by node."""
        return self.node * self.workers_per_node + self.worker

    @property
    def world_size(self) -> int:
        """How many workers the pool has."""
        return self.total_nodes * self.workers_per_node


def instance_info() -> InstanceInfo:
    """Return where this code runs; outside a pool, the only worker of the only node, with `job_id` "local".

    Raises `BadRequest` if the environment variable `SKYWARD_INSTANCE_INFO` has a value that `to_env` does not write.

    >>> instance_info().rank
    0
    """
    text = os.environ.get(ENV)
    if not text:
        return _outside_a_pool()
    try:
        return InstanceInfo(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise BadRequest(
            f"{ENV} is set, but not to what skyward writes there ({error}): unset it outside a pool"
        ) from error


def to_env(info: InstanceInfo) -> str:
    """Return the value for the environment variable `SKYWARD_INSTANCE_INFO` that `instance_info` reads."""
    fields = asdict(info)
    if not info.neuron_cores:  # an older version in the user's own environment does not know the field
        del fields["neuron_cores"]
    if not info.is_simulated:  # the same
        del fields["is_simulated"]
    if not info.is_broadcast:  # the same
        del fields["is_broadcast"]
    return json.dumps(fields)


def of_call(text: str, job_id: str, *, is_broadcast: bool, place: tuple[int, int] | None = None) -> str:
    """Return the text of `to_env` for one call, from the text that has JOB_PLACE in place of its job's id.

    `place` is that of its node among the nodes of the broadcast, and their number; None: as the text says.
    """
    filled = text.replace(JOB_PLACE, job_id)
    if place is not None:
        fields = json.loads(filled)
        if place != (fields["node"], fields["total_nodes"]):
            fields["node"], fields["total_nodes"] = place
            filled = json.dumps(fields)
    return f'{filled[:-1]}, "is_broadcast": true}}' if is_broadcast else filled


def current_accelerator() -> str | None:
    """Return the name of the first accelerator of this worker, such as "H100"; None if it has none."""
    return next(iter(instance_info().accelerators), None)


def _outside_a_pool() -> InstanceInfo:
    return InstanceInfo(
        node=0,
        total_nodes=1,
        is_head=True,
        accelerators=[],
        head_addr="127.0.0.1",
        head_port=_DEFAULT_HEAD_PORT,
        job_id="local",
        worker=0,
        workers_per_node=1,
    )
