"""One size of `scale.py`, in a process of its own: a real client with a pool of played nodes (`_played_pool.py`).

It prints one JSON object: what opening the pool, a map, and the loss of nodes took.

    python -m benchmarks._scale_pool --nodes 16 --calls 10000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import skyward_core as sky
from benchmarks._played_pool import thread_seconds

WARM_CALLS = 200
LOST_SHARE = 0.05
PATIENCE_SECONDS = 300.0
"""How long the replacements of lost nodes may take to join."""
LEASE_SECONDS = 3600.0
"""So long that a busy machine, on which a thousand logins take minutes, does not end the pool."""
KEPT_THREADS = 6
NUMBER = re.compile(r"[-_]?\d+$")


@dataclass
class Part:
    """What one part took: seconds by the clock, and processor seconds by process and by thread."""

    seconds: float = 0.0
    client: float = 0.0
    """Processor seconds of this process."""
    player: float = 0.0
    """Processor seconds of the process with cloud, nodes and scheduler."""
    threads: dict[str, float] = field(default_factory=dict[str, float])
    """By "client THREAD" and "played THREAD". Threads that began and ended meanwhile are missing."""
    more: dict[str, float] = field(default_factory=dict[str, float])


class Prompt(sky.DigitalOcean):
    """DigitalOcean without the listing delay, for which a closing pool waits half a minute."""

    listing_lag_seconds: ClassVar[float] = 0.0


class Player:
    """The process with cloud, nodes and scheduler."""

    def __init__(self, url: str, ask: Callable[[dict[str, Any]], Any]) -> None:
        self.url = url
        self.ask = ask

    @contextlib.contextmanager
    def part(self) -> Generator[Part]:
        """Measure what is done meanwhile."""
        part = Part()
        before, ours = self.ask({"op": "times"}), thread_seconds()
        processor, began = time.process_time(), time.perf_counter()
        yield part
        part.seconds = time.perf_counter() - began
        part.client = time.process_time() - processor
        after, ours_after = self.ask({"op": "times"}), thread_seconds()
        part.player = after["process"] - before["process"]
        spent = defaultdict[str, float](float)
        for side, now, then in (
            ("client", ours_after, ours),
            ("played", after["threads"], before["threads"]),
        ):
            for name, seconds in now.items():
                spent[f"{side} {NUMBER.sub('', name)}"] += seconds - then.get(name, 0.0)
        part.threads = dict(sorted(spent.items(), key=lambda item: -item[1])[:KEPT_THREADS])


@contextlib.contextmanager
def playing(call_seconds: float, threads: int) -> Generator[Player]:
    """Start the other process."""
    command = [sys.executable, "-m", "benchmarks._played_pool", "--call-seconds", str(call_seconds)]
    command += ["--threads", str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(command: dict[str, Any]) -> Any:
            print(json.dumps(command), file=asked, flush=True)
            return json.loads(answers.readline())

        try:
            yield Player(json.loads(process.stdout.readline())["url"], ask)
        finally:
            process.stdin.close()
    if process.returncode:
        raise RuntimeError(f"the played nodes ended with {process.returncode}")


def pool_of(player: Player, nodes: int, on_event: sky.Callback | None = None) -> sky.ComputePool:
    return sky.ComputePool(
        provider=Prompt(endpoint_url=player.url),
        nodes=nodes,
        display="quiet",
        collect_metrics=False,
        lease_seconds=LEASE_SECONDS,
        on_event=on_event,
    )


def same(value: int) -> int:
    """Return the argument. The played nodes do this without the function."""
    return value


def opened_and_mapped(nodes: int, calls: int) -> tuple[Part, Part, Part]:
    """Open a pool, map calls that take no time, and close it; return the three parts."""
    rented: list[float] = []

    def note(event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.InstanceProvisioned):
            rented.append(time.perf_counter())

    with playing(0.0, 64) as player:
        pool = pool_of(player, nodes, note)
        began = time.perf_counter()
        with player.part() as opening:
            pool.open()
        opening.more["rented"] = max(rented) - began
        members = player.ask({"op": "times"})
        opening.more |= {"failed_joins": members["failed_joins"], "removed": members["removed"]}
        opening.more["logins"] = player.ask({"op": "asked"})["login"]
        try:
            opening.more["megabytes"] = memory()["VmRSS"]
            assert pool.map(same, range(WARM_CALLS)) == list(range(WARM_CALLS))
            before = memory(is_peak_reset=True)["VmRSS"]
            with player.part() as mapping:
                results = pool.map(same, range(calls))
            mapping.more["megabytes"] = memory()["VmHWM"] - before
            assert results == list(range(calls))
            del results
        finally:
            with player.part() as closing:
                pool.close()
    return opening, mapping, closing


def lost(nodes: int, seconds: float, calls_each: int) -> Part:
    """Map calls that take time, and lose nodes when half of the calls have run."""
    calls, count = nodes * calls_each, max(1, round(nodes * LOST_SHARE))
    retried: set[str] = set()

    def note(event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.CallRetrying):
            retried.add(event.call_id)

    with playing(seconds, nodes * 2) as player, pool_of(player, nodes, note) as pool:
        assert pool.map(same, range(nodes)) == list(range(nodes))
        began = time.perf_counter()
        pool.map(same, range(calls))
        undisturbed = time.perf_counter() - began
        presence = Presence(pool, range(nodes - count, nodes))
        player.ask({"op": "lose", "nodes": count, "after": calls // 2, "later": seconds / 2})
        with player.part() as part:
            assert pool.map(same, range(calls)) == list(range(calls))
            ended_at = time.monotonic()
        lost_at = player.ask({"op": "lost"})
        part.more = {"undisturbed": undisturbed, "calls": calls, "lost": count, "retried": len(retried)}
        part.more["after_loss"] = ended_at - lost_at
        part.more["whole_again"] = presence.whole_at() - lost_at
    return part


class Presence:
    """Watches nodes from a thread: when one was absent, and when all were present after that."""

    def __init__(self, pool: sky.ComputePool, ranks: Sequence[int]) -> None:
        self._cluster = pool._session.cluster  # pyright: ignore[reportPrivateUsage] - no public name tells who is present
        self._ranks = ranks
        self._whole_at = float("nan")
        self._thread = threading.Thread(target=self._watch, name="presence", daemon=True)
        self._thread.start()

    def whole_at(self) -> float:
        """Wait until all have come back, and return when that was; NaN if they have not within PATIENCE_SECONDS."""
        self._thread.join(PATIENCE_SECONDS)
        return self._whole_at

    def _watch(self) -> None:
        for is_awaited in (False, True):
            while all(map(self._cluster.has, self._ranks)) is not is_awaited:
                time.sleep(0.05)
        self._whole_at = time.monotonic()


def memory(*, is_peak_reset: bool = False) -> dict[str, float]:
    """Return VmRSS and VmHWM of proc(5), in megabytes; the peak begins anew now if it is to be reset."""
    if is_peak_reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line.partition(":")[0]: int(line.split()[1]) * 1024 / 1e6
        for line in lines
        if line.startswith(("VmRSS", "VmHWM"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--call-seconds", type=float, default=1.0, help="how long calls take when nodes are lost")
    parser.add_argument("--calls-each", type=int, default=10, help="how many calls each node has then")
    options = parser.parse_args()
    opening, mapping, closing = opened_and_mapped(options.nodes, options.calls)
    parts = {"opening": opening, "mapping": mapping, "closing": closing}
    # the loss of a large pool takes longest, and may be stopped
    print(json.dumps({name: asdict(part) for name, part in parts.items()}), file=sys.stderr, flush=True)
    if options.nodes > 1:  # the only node is the head: its loss is another matter
        parts["loss"] = lost(options.nodes, options.call_seconds, options.calls_each)
    print(json.dumps({name: asdict(part) for name, part in parts.items()}))


if __name__ == "__main__":
    main()
