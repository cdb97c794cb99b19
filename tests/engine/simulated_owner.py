"""The dispatcher's owner in the simulation (`simulation.py`): it sends batches, asks the scheduler, and moves large values
to machines and back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from skyward_core.engine import actions as do
from skyward_core.wire.messages import Parcel
from tests.engine.model import FUNCTION_SPANS, SPANS, require
from tests.engine.simulated_streams import names_of

if TYPE_CHECKING:
    from tests.engine.model import Machine
    from tests.engine.simulation import World

type Steps = Generator[None]
"""Something that takes time: other events may happen at each `yield`."""


class Owner:
    """What the owner does with the actions of the dispatcher that go to the pool."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.doers: dict[type, Callable[..., object]] = {
            do.Send: self._send,
            do.Follow: self._follow,
            do.TakeBack: self._take_back,
            do.Gather: self._begin(self._gather),
            do.Release: self._release,
            do.Stop: lambda action: self.tell(action.epoch, ("cancel", action.call_ids)),
            do.RepeatReports: lambda action: self.tell(action.epoch, ("tell kept", None)),
            do.ReleaseRetainedCalls: lambda action: self.tell(action.epoch, ("release kept", action.call_ids)),
            do.Acknowledge: lambda action: self.tell(
                action.epoch, ("acknowledge", (world.dispatcher.topic, action.number))
            ),
            do.AskLoad: self._begin(self._ask_load),
            do.Ping: self._begin(self._ping),
            do.Upload: self._upload,
            do.Fetch: self._begin(self._fetch),
            do.Remove: self._begin(self._remove),
            do.CutOff: lambda _: setattr(world, "is_cut", True),
        }

    def _begin(self, steps: Callable[[Any], Steps]) -> Callable[[Any], object]:
        return lambda action: self.world.under_way.append(steps(action))

    def tell(self, epoch: int, message: tuple[str, Any]) -> None:
        """Send a message to the scheduler, on the connection of this epoch."""
        connection = self.world.connection
        if connection is not None and connection.epoch == epoch:
            connection.up.send(message)

    def _send(self, action: do.Send) -> None:
        world = self.world
        connection = world.connection
        require(
            not world.is_over and not world.is_drained, "a batch goes out on a pool that begins no calls", action.key
        )
        if connection is None or connection.epoch != action.epoch:
            return
        if connection.is_closed:
            world.dispatcher.unsent(action.epoch, action.number, OSError("closed"), is_its_fault=False)
        elif world.has_own_faults and world.rng.random() < 0.05:
            world.dispatcher.unsent(action.epoch, action.number, ValueError("cannot be pickled"), is_its_fault=True)
        else:
            for call in action.batch.calls:
                world.callers[call.call_id].sends += 1
            connection.follow(action.number, action.key)
            connection.up.send(("run", (action.key, action.batch, action.address)))

    def _follow(self, action: do.Follow) -> None:
        world = self.world
        if world.connection is not None and world.connection.epoch == action.epoch:
            world.connection.follow(action.number, action.key)

    def _release(self, action: do.Release) -> None:
        world = self.world
        if world.connection is not None and world.connection.epoch == action.epoch:
            world.connection.release(action.keys)

    def _take_back(self, action: do.TakeBack) -> None:
        connection = self.world.connection
        if connection is not None and connection.epoch == action.epoch and connection.take_back(action.key):
            self.world.dispatcher.taken_back(action.epoch, action.number)

    def _gather(self, action: do.Gather) -> Steps:
        world = self.world
        connection = world.connection
        if connection is None:
            return
        yield
        task = connection.scheduler.tasks.get(action.key)
        worker = task.worker if task is not None else None
        outcomes = worker.results.get(action.key) if worker is not None and worker.is_alive else None
        if not connection.carries:
            if world.rng.random() < 0.5:
                return  # the question ends with the connection
            outcomes = None
        yield
        if outcomes is None or worker is None:
            world.post("not_gathered", action.epoch, action.number, OSError("it is not there"))
        else:
            world.post("gathered", action.epoch, action.number, outcomes, worker.node.rank, worker.machine.id)

    def _ask_load(self, action: do.AskLoad) -> Steps:
        connection = self.world.connection
        yield
        load = connection.scheduler.load() if connection is not None and connection.carries else {}
        yield
        self.world.post("load_known", action.epoch, load)

    def _ping(self, action: do.Ping) -> Steps:
        connection = self.world.connection
        yield
        self.world.post("pinged", action.epoch, is_answered=connection is not None and connection.carries)

    def _upload(self, action: do.Upload) -> None:
        world = self.world
        machine = world.machines[action.instance_id]
        values = names_of(action.functions)
        for name in values:
            world.values.begins(name, machine)
        world.under_way.append(self._put(action, machine, values))

    def _put(self, action: do.Upload, machine: Machine, values: list[str]) -> Steps:
        world = self.world
        yield
        names = [name for name, _ in action.functions]
        is_its_fault = world.has_own_faults and world.rng.random() < 0.1
        has_no_room = bool(values) and world.rng.random() < 0.1
        if is_its_fault or has_no_room or not (machine.is_alive and machine.is_reachable):
            yield
            for name in values:
                world.values.ends(name, machine)
            world.post(
                "upload_failed", action.number, action.instance_id, names, OSError("no way"), is_its_fault=is_its_fault
            )
            return
        arguments = dict[str, Parcel]()
        functions = dict[str, Parcel | None]()
        for name in names:
            functions[name] = None
            if name in values:
                functions[name] = Parcel(b"", (), path := world.new_path(machine), SPANS)
                machine.files[path] = f"value {name}"
                world.values.ends(name, machine)
            elif world.rng.random() < 0.9:
                functions[name] = Parcel(b"", (), path := world.new_path(machine), FUNCTION_SPANS)
                machine.files[path] = f"function {name}"
        for call_id, _ in action.arguments:
            arguments[call_id] = Parcel(b"", (), path := world.new_path(machine), SPANS)
            machine.files[path] = f"arguments of {call_id}"
        yield
        world.post("uploaded", action.number, action.instance_id, arguments, functions)

    def _fetch(self, action: do.Fetch) -> Steps:
        world = self.world
        yield
        machine, path = world.machines[action.instance_id], str(action.parcel.path)
        if not (machine.is_alive and machine.is_reachable):
            yield
            world.post("not_fetched", action.call_id, path, OSError("no way"), is_cut=True)
        elif path not in machine.files:
            yield
            world.post("not_fetched", action.call_id, path, OSError("no such file"), is_cut=False)
        else:
            value = machine.files[path]
            if world.rng.random() < 0.1:
                yield
                world.post("not_fetched", action.call_id, path, OSError("cut on the way"), is_cut=True)
                return
            del machine.files[path]
            yield
            world.post("fetched", action.call_id, Parcel(value.encode()), path)

    def _remove(self, action: do.Remove) -> Steps:
        machine = self.world.machines[action.instance_id]
        yield
        while machine.is_alive and not machine.is_reachable:
            yield
        machine.files.pop(str(action.parcel.path), None)
