"""The programs of the runs with one refusal: `python -m tests.refusals.programs SCENARIO`.

Each prints a JSON object a line: what its calls have returned or raised, and which threads of ours ran at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.refusals import injector

INJECTOR = injector.from_environment("client")
if INJECTOR is not None:
    injector.install(INJECTOR)

import skyward_core as sky  # noqa: E402 - the injector comes first
from skyward_core import Instance, Offer  # noqa: E402

NAME = "refused"
LEASE_SECONDS = 12.0
USD_PER_HOUR = 3600.0
"""One USD a second for each node."""
WITH_INJECTOR = Path(__file__).with_name("in_nodes")
"""A folder with a `sitecustomize` for nodes."""


class Refused(sky.Local):
    """Local nodes whose provider says no once, or whose answer is lost; its nodes have the injector too."""

    name = "local"

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        """As `Local`."""
        environ = {name: value for name, value in os.environ.items() if name.startswith("REFUSALS_")}
        lines = [f"export {name}='{value}'" for name, value in environ.items()]
        assert "export PYTHONPATH=" in startup
        started = startup.replace("export PYTHONPATH=", f"export PYTHONPATH={WITH_INJECTOR}:")
        script = "\n".join([*lines, started]) if environ else startup
        return _asked("launch", lambda: sky.Local.launch(self, offer, count, tags, script))

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """As `Local`."""
        return _asked("instances", lambda: sky.Local.instances(self, pool_id))

    def terminate(self, ids: Sequence[str]) -> dict[str, str]:
        """As `Local`."""
        return _asked("terminate", lambda: sky.Local.terminate(self, ids))


def _asked[R](what: str, ask: Callable[[], R]) -> R:
    if INJECTOR is not None and INJECTOR.is_refused("provider", what):
        raise ConnectionError("the provider answers 503")
    answer = ask()
    if INJECTOR is not None and INJECTOR.is_refused("provider-answer", what):
        raise ConnectionError("the provider's answer is lost")
    return answer


def pool(**settings: Any) -> sky.ComputePool:
    hosts = os.environ.get("HOSTS")  # the provider of the hosts of the test bed, as JSON
    return sky.ComputePool(
        provider=json.loads(hosts) if hosts else Refused(price_per_hour=USD_PER_HOUR),
        display="quiet",
        retries=2,
        lease_seconds=LEASE_SECONDS,
        provision_timeout=60,
        **settings,
    )


@sky.compute
def double(number: int) -> int:
    print("line", number)
    return 2 * number


@sky.compute
def large(count: int) -> bytes:
    return bytes(count)


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def called(name: str, call: Callable[[], object], expected: object) -> None:
    """Call, and say how that has ended: ok, wrong, or the error."""
    try:
        value = call()
    except Exception as error:  # it is compared with what was refused
        say(call=name, raised=type(error).__name__, is_ours=isinstance(error, sky.SkywardError), message=str(error))
    else:
        say(call=name, ok=value == expected)


def work(on: sky.ComputePool) -> None:
    """Calls of each kind."""
    called("run", lambda: double(1) >> on, 2)
    called("map", lambda: list(on.map(double, range(8))), [2 * number for number in range(8)])
    called("broadcast", lambda: list(double(2) @ on), [4] * on.instance_count)
    called("large", lambda: len(large(3 << 20) >> on), 3 << 20)
    future = on.submit(double(4))
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    called("future", lambda: future.result(60), 8)
    called("callback", lambda: done.wait(30), expected=True)
    say(threads=sorted({thread.name.rstrip("-0123456789") for thread in threading.enumerate()}))


def own() -> None:
    with pool(nodes=2) as mine:
        say(id=mine.id)
        work(mine)


def ssh() -> None:
    with pool(nodes=1) as mine:
        say(id=mine.id)
        work(mine)


def named() -> None:
    """A pool with a name, also as the one that joins it; the driver says which."""
    with pool(nodes=1, name=NAME) as mine:
        say(id=mine.id)
        work(mine)
        if "--wait" in sys.argv:
            sys.stdin.readline()


def detached() -> None:
    with pool(nodes=1) as mine:
        say(id=mine.id)
        call = mine.start_detached(double(21), call_id="answer")
        called("detached", lambda: call.result(60), 42)
        mine.detach(LEASE_SECONDS)


PROGRAMS = {"own": own, "ssh": ssh, "named": named, "joined": named, "detached": detached}


def main(scenario: str) -> int:
    if INJECTOR is not None:
        injector.install_commits(INJECTOR)
    try:
        PROGRAMS[scenario]()
    except Exception as error:  # the driver judges it
        say(
            ended=type(error).__name__,
            is_ours=isinstance(error, sky.SkywardError),
            message=str(error),
            cause=repr(error.__cause__),
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
