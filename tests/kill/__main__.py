"""`python -m tests.kill [--points N] [--reaped N] [--seed N]`"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console

from tests.kill import matrix

SEED = 20261121
REPORT_EVERY = 250


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kill", description="Kill -9 at generated points, and look at what is left alive."
    )
    parser.add_argument("--points", type=int, default=1000, help="how many points in all, without those of the reaper")
    parser.add_argument(
        "--reaped", type=int, default=None, help="how many more points are left to a real reaper (default: a fortieth)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the scenarios")
    options = parser.parse_args()
    console = Console(width=180) if not sys.stdout.isatty() else Console()
    reaped = max(12, options.points // 40) if options.reaped is None else options.reaped
    console.print(f"seed {options.seed}: {options.points} points, and {reaped} for the reaper")
    began = time.monotonic()
    done: list[dict[str, Any]] = []

    def report(point: dict[str, Any]) -> None:
        done.append(point)
        if len(done) % REPORT_EVERY == 0:
            console.print(f"{len(done)} after {time.monotonic() - began:.0f} s")

    points = matrix.work_off(options.seed, options.points, reaped, report)
    console.print(matrix.table(points))
    kills = sum(map(matrix.is_kill, points))
    scenarios = len({point["scenario"] for point in points})
    console.print(f"{kills} kills in {scenarios} scenarios in {time.monotonic() - began:.0f} s, seed {options.seed}")
    wrong = matrix.wrong(points)
    for line in wrong[:50]:
        console.print(line, markup=False, style="red", soft_wrap=True)
    if wrong:
        console.print(f"{len(wrong)} points went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
