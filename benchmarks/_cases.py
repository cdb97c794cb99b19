"""Run one case with one system in this process, and print the result as a JSON line on stdout.

    python benchmarks/_cases.py --case calls --system dask

`bench.py` starts a new process of this program for each measurement. All three systems send the functions below by
value, because they are defined in `__main__`. Each system has its default settings and runs one call at a time in each
slot. There are two slots on this machine, or one on each host of `--place`. A system imports its packages when it
opens, because the time of opening includes the imports.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy as np
    from _place import Place
    from _tunnel import Tunnel
    from numpy.typing import NDArray

    type Array = NDArray[np.float64]
    type Result = dict[str, float]

SEQUENTIAL = 300
MANY = 10_000
MIXED = 2_000
SLOW_SECONDS = 0.05
ARRAY_LENGTH = 12_500_000  # float64: 100 MB = 10⁸ bytes
ARRAY_ROUNDS = 3
FAR_MANY = 2_000
FAR_ARRAY_LENGTH = (100 << 20) // 8  # float64: 100 MiB


def same(value: Any) -> Any:
    return value


def nap(seconds: float) -> float:
    if seconds:
        time.sleep(seconds)
    return seconds


def incremented(array: Array) -> Array:
    # The arrays of Ray are read-only views of its store, so only Ray needs a copy.
    writable = array if array.flags.writeable else array.copy()
    writable += 1
    return writable


class System(Protocol):
    """What a case uses of a system. The context manager opens and closes it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def call(self, value: Any) -> Any: ...
    def bulk_methods(self) -> dict[str, Callable[[Callable[..., Any], Sequence[Any]], list[Any]]]: ...
    def array(self, array: Array) -> Array: ...


class Skyward:
    def __enter__(self) -> Self:
        import skyward_core as sky

        self._sky = sky
        self._same, self._incremented = sky.compute(same), sky.compute(incremented)
        self.pool = self._new_pool()
        self.pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.__exit__(kind, error, trace)

    def call(self, value: Any) -> Any:
        return self._same(value) >> self.pool

    def bulk_methods(self) -> dict[str, Callable[[Callable[..., Any], Sequence[Any]], list[Any]]]:
        return {"map": self._map, "gather": self._gather}

    def array(self, array: Array) -> Array:
        return self._incremented(array) >> self.pool

    def _new_pool(self) -> Any:
        return self._sky.ComputePool(provider=self._sky.Local(), nodes=2, display="quiet")

    def _map(self, function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        return self.pool.map(self._sky.compute(function), values)

    def _gather(self, function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        call = self._sky.compute(function)
        return list(self._sky.gather(*[call(value) for value in values]) >> self.pool)


class Dask:
    """`LocalCluster` of two single-threaded workers, without its dashboard."""

    def __enter__(self) -> Self:
        distributed: Any = importlib.import_module("distributed")
        self._cluster: Any = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
        self._client: Any = distributed.Client(self._cluster)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._cluster.close()

    def call(self, value: Any) -> Any:
        return self._client.submit(same, value, pure=False).result()

    def bulk_methods(self) -> dict[str, Callable[[Callable[..., Any], Sequence[Any]], list[Any]]]:
        return {"map": self._map}

    def array(self, array: Array) -> Array:
        return self._client.submit(incremented, array).result()

    def _map(self, function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        return list(self._client.gather(self._client.map(function, values, pure=False)))


class DaskOnSkyward(Dask):
    """Dask's client on our cluster: `pool.dask_client()`."""

    def __enter__(self) -> Self:
        self._skyward = Skyward().__enter__()
        self._client = self._skyward.pool.dask_client()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._skyward.__exit__(kind, error, trace)


class Ray:
    def __enter__(self) -> Self:
        self._ray: Any = importlib.import_module("ray")
        self._ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=os.path.join(os.getcwd(), "ray"),
        )
        self._same, self._incremented = self._ray.remote(same), self._ray.remote(incremented)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def call(self, value: Any) -> Any:
        return self._ray.get(self._same.remote(value))

    def bulk_methods(self) -> dict[str, Callable[[Callable[..., Any], Sequence[Any]], list[Any]]]:
        return {"map": self._map}

    def array(self, array: Array) -> Array:
        return self._ray.get(self._incremented.remote(self._ray.put(array)))

    def _map(self, function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        remote = self._ray.remote(function)
        return self._ray.get([remote.remote(value) for value in values])


class SkywardFar(Skyward):
    """A pool on hosts reached over SSH, one node on each."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def _new_pool(self) -> Any:
        place = self._place
        hosts = self._sky.Hosts(
            *place.addresses, user="root", key=place.key, known_hosts="/dev/null", config="/dev/null"
        )
        image = self._sky.Image(pip=place.packages)
        return self._sky.ComputePool(provider=hosts, nodes=len(place.addresses), image=image, display="quiet")


class DaskFar(Dask):
    """Dask's scheduler and workers on the same hosts, and its client on this machine, behind a plain asyncssh tunnel.

    Each host has one worker with one thread.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> Self:
        tunnel: Any = importlib.import_module("_tunnel")
        self._tunnel: Tunnel = tunnel.Tunnel(self._place)
        # Our pool too imports its packages while the hosts start.
        address = self._tunnel.start(lambda: importlib.import_module("distributed"))
        self._client: Any = importlib.import_module("distributed").Client(address)
        if len(self._place.addresses) > 1:
            self._client.wait_for_workers(len(self._place.addresses))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._tunnel.close()

    def array(self, array: Array) -> Array:
        # Dask recommends `scatter` for large arguments. It takes a third less time than an argument of the call.
        return self._client.submit(incremented, self._client.scatter(array), pure=False).result()


SYSTEMS: dict[str, Callable[[], System]] = {
    "skyward": Skyward,
    "dask": Dask,
    "ray": Ray,
    "dask-on-skyward": DaskOnSkyward,
}
FAR_SYSTEMS: dict[str, Callable[[Place], System]] = {"skyward-far": SkywardFar, "dask-far": DaskFar}


# ── cases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def start(system: Callable[[], System], _phase: Callable[[str], None]) -> Result:
    """Return the time of the first result, in seconds of the monotonic clock.

    All processes of a machine share this clock.
    """
    with system() as opened:
        _check(opened.call(1) == 1)
        return {"first_result_at": time.monotonic()}


def sequential(system: Callable[[], System], _phase: Callable[[str], None]) -> Result:
    """Measure only tiny calls, one after another."""
    with system() as opened:
        return _one_after_another(opened)


def calls(system: Callable[[], System], _phase: Callable[[str], None]) -> Result:
    """Measure all kinds of calls in one process, because opening a system for each kind takes longer than the calls."""
    with system() as opened:
        return _one_after_another(opened) | _mixed(opened) | _many(opened)


def _one_after_another(opened: System) -> Result:
    """Return the median and the 99th percentile of the time of a tiny call, in seconds."""
    taken: list[float] = []
    for number in range(20 + SEQUENTIAL):
        began = time.perf_counter()
        _check(opened.call(number) == number)
        taken.append(time.perf_counter() - began)
    taken = sorted(taken[20:])
    return {"median": taken[SEQUENTIAL // 2], "p99": taken[SEQUENTIAL * 99 // 100]}


def _mixed(opened: System) -> Result:
    """Return the seconds for 2,000 calls: 1 % of them, at random positions, sleep 50 ms, and the others do nothing."""
    durations = [SLOW_SECONDS] * (MIXED // 100) + [0.0] * (MIXED - MIXED // 100)
    random.Random(20).shuffle(durations)
    run_all = opened.bulk_methods()["map"]
    run_all(nap, [0.0] * 100)
    began = time.perf_counter()
    _check(run_all(nap, durations) == durations)
    return {"mixed": time.perf_counter() - began}


def _many(opened: System, count: int = MANY) -> Result:
    """Return the tiny calls per second for each bulk method of the system, which gets all calls at once."""
    result: Result = {}
    for name, run_all in opened.bulk_methods().items():
        _check(run_all(same, range(100)) == list(range(100)))
        began = time.perf_counter()
        _check(run_all(same, range(count)) == list(range(count)))
        result[name] = count / (time.perf_counter() - began)
    return result


def array(system: Callable[[], System], phase: Callable[[str], None]) -> Result:
    """Return the seconds for 100 MB in and out.

    The case then sends the array three more times, without timing, while `bench.py` measures the memory.
    """
    import numpy as np

    taken: list[float] = []
    with system() as opened:
        _import_numpy(opened)
        gc.collect()
        phase("before")
        for number in range(2 * ARRAY_ROUNDS):
            if number == ARRAY_ROUNDS:
                phase("transfer")
            # Each array has new contents, because Dask keeps the result of a pure call, by the hash of its arguments.
            taken.append(_there_and_back(opened, np.full(ARRAY_LENGTH, float(number))))
        gc.collect()
        phase("after")
    return {"seconds": sorted(taken[:ARRAY_ROUNDS])[ARRAY_ROUNDS // 2]}


def _import_numpy(opened: System) -> None:
    """Run calls with arrays before the measurement, so that each slot has imported numpy."""
    import numpy as np

    _check([float(one[0]) for one in opened.bulk_methods()["map"](incremented, [np.zeros(1000)] * 16)] == [1.0] * 16)
    _check(float(opened.array(np.zeros(1000))[-1]) == 1.0)


def _there_and_back(opened: System, values: Array) -> float:
    """Return the seconds until the array is back, with one added to each element."""
    began = time.perf_counter()
    back = opened.array(values)
    _check(len(back) == len(values) and float(back[0]) == values[0] + 1 and float(back[-1]) == values[-1] + 1)
    return time.perf_counter() - began


def far(system: Callable[[], System], _phase: Callable[[str], None]) -> Result:
    """Measure a host over SSH, all in one process: first result, tiny calls, and 100 MiB in and out.

    The time of the first result begins at `with`. All times are in seconds.
    """
    import numpy as np

    began = time.monotonic()
    with system() as opened:
        _check(opened.call(1) == 1)
        result = {"first": time.monotonic() - began}
        result |= _one_after_another(opened) | _many(opened, FAR_MANY)
        _import_numpy(opened)
        # The numbers are random, because a tunnel may compress. Only the first transfer includes one-time costs.
        numbers = np.random.default_rng(20)
        taken = [_there_and_back(opened, numbers.random(FAR_ARRAY_LENGTH)) for _ in range(1 + ARRAY_ROUNDS)]
        return result | {"array": sorted(taken[1:])[ARRAY_ROUNDS // 2], "first_array": taken[0]}


def opening(system: Callable[[], System], _phase: Callable[[str], None]) -> Result:
    """Return the seconds from `with` to the first result, when all nodes have joined.

    Return also the processor time of all processes of the machine during these seconds.
    """
    began, processor_before = time.monotonic(), _processor_seconds()
    with system() as opened:
        _check(opened.call(1) == 1)
        return {"first": time.monotonic() - began, "processor": _processor_seconds() - processor_before}


def _processor_seconds() -> float:
    """Return the processor time of all cores, without idle time and time of waiting for disks (proc_stat(5))."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


CASES = {"start": start, "sequential": sequential, "calls": calls, "array": array, "far": far, "opening": opening}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--system", choices=(*SYSTEMS, *FAR_SYSTEMS), required=True)
    parser.add_argument("--place", help="the hosts, for skyward-far and dask-far: the fields of a `Place`, as JSON")
    options = parser.parse_args()
    system = SYSTEMS[options.system] if options.system in SYSTEMS else _far_system(options.system, options.place)
    # Systems and workers print to stdout too: they get stderr instead, so that stdout has only our JSON lines.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def phase(name: str) -> None:
        print(json.dumps({"phase": name}), file=output)
        sys.stdin.readline()  # waits until `bench.py` output

    result = CASES[options.case](system, phase)
    print(json.dumps({"result": result}), file=output)


def _far_system(name: str, place: str) -> Callable[[], System]:
    from _place import Place

    hosts = Place(**json.loads(place))
    return lambda: FAR_SYSTEMS[name](hosts)


def _check(is_right: bool) -> None:
    if not is_right:
        raise SystemExit("a system returned a wrong result, so its time is not valid")


if __name__ == "__main__":
    main()
