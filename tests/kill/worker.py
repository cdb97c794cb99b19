"""A process that runs points, and prints a line of JSON for each."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from tests.kill.console import RunningService


def main(folder: Path, safeguard: str, *numbers: int) -> None:
    os.environ |= {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "STATE")}
    os.environ["SKYWARD_LEDGER"] = f"sqlite:///{folder / 'ledger.db'}"
    with RunningService(folder / "service") as service:
        put_back = service.clock.take_over() if safeguard != "reaper" else lambda: None
        try:
            _prepare(service)
            for point in {"sweep": _swept, "faults": _faulty, "reaper": _reaped}[safeguard](service, folder, *numbers):
                print(json.dumps(asdict(point)), flush=True)
        finally:
            put_back()


def _swept(service: RunningService, folder: Path, seed: int, share: int, of: int, wanted: int) -> Iterator[Any]:
    """Yield this worker's share of the scenarios of a seed, until it has enough points."""
    from tests.kill import points
    from tests.kill.driver import scenarios

    work = points.Round(service, folder)
    work.warm_up()
    done = 0
    for scenario in scenarios(seed):
        if scenario.number % of != share:
            continue
        for point in work.points(scenario):
            yield point
            done += point.killed is not points.Killed.NONE
            if done >= wanted:
                return


def _faulty(service: RunningService, folder: Path) -> Iterator[Any]:
    from tests.kill import points
    from tests.kill.driver import faulty

    work = points.Round(service, folder)
    work.warm_up()
    for scenario in faulty():
        yield from work.faulty(scenario)


def _reaped(service: RunningService, folder: Path, wanted: int) -> Iterator[Any]:
    from tests.kill import points
    from tests.kill.driver import REAPED

    work = points.Round(service, folder)
    for number, scenario in enumerate(REAPED):
        yield from work.reaped_points(scenario, wanted // len(REAPED) + (number < wanted % len(REAPED)))


def _prepare(service: RunningService) -> None:
    logging.getLogger("skyward").addHandler(logging.NullHandler())
    logging.getLogger("skyward").propagate = False
    from skyward_core.ledger import database
    from skyward_core.providers import base
    from skyward_core.worker.keeper import adopt_orphans
    from tests.kill import driver

    adopt_orphans()
    base.entry_points = lambda group: [
        EntryPoint(name, f"tests.kill.provider:{kind.__name__}", group) for name, kind in driver.KINDS.items()
    ]  # type: ignore[assignment,misc]
    for name in (
        "pool",
        "session.session",
        "ledger.ledger",
        "ledger.receipt",
        "cleanup.sweep",
        "provisioning.lifecycle",
        "transport.transport",
        "spec",
    ):
        importlib.import_module(f"skyward_core.{name}")
    driver.prepare_process()
    _turn_dates(service)
    # an engine caches its compiled statements, and a fork inherits that; connections are closed
    database.open_engine = functools.cache(database.open_engine)


def _turn_dates(service: RunningService) -> None:
    """Make `datetime.now` return the advanced clock, in each of our modules that has it by that name."""

    class Turned(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(service.clock.time(), tz)

    for name, module in list(sys.modules.items()):
        if (
            name.startswith("skyward_core")
            and getattr(module, "datetime", None) is datetime
            and "ledger.rows" not in name
            and "spec" not in name
        ):
            module.datetime = Turned  # type: ignore[attr-defined]


if __name__ == "__main__":
    folder, safeguard, *numbers = sys.argv[1:]
    main(Path(folder), safeguard, *map(int, numbers))
