"""Compare a grid search of 200 fits on 2 x 2 local slots: Skyward, loky of joblib, and joblib on a bare Dask cluster.

    .venv/bin/python benchmarks/grid_search.py --rounds 3

Each measurement is a new process, and the systems take turns. The table has the medians of the rounds, in seconds: until
the workers are ready, for the first search, which includes the imports in the workers, and for the second search.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from statistics import median
from typing import Any

SYSTEMS = ("skyward", "skyward, preloaded", "loky", "dask")
NODES, SLOTS = 2, 2
PHASES = ("open", "first", "second")
LIMIT_SECONDS = 600.0
PRELOADED = ("sklearn.model_selection", "sklearn.tree")


def opened(system: str, stack: ExitStack) -> None:
    """Open a system and make it the backend of joblib until the stack is closed."""
    if system.startswith("skyward"):
        import skyward_core as sky

        image = sky.Image(preload=PRELOADED if "preloaded" in system else ())
        pool = sky.ScikitLearnPool(provider=sky.Local(), nodes=NODES, concurrency=SLOTS, image=image, display="quiet")
        stack.enter_context(pool)
        return
    import joblib

    if system == "dask":
        from distributed import Client, LocalCluster

        cluster = stack.enter_context(LocalCluster(n_workers=NODES, threads_per_worker=SLOTS, dashboard_address=None))
        client = stack.enter_context(Client(cluster))
        stack.enter_context(joblib.parallel_config(backend="dask", client=client))
    else:
        stack.enter_context(joblib.parallel_config(backend="loky", n_jobs=NODES * SLOTS))


def search() -> Any:
    """Do 200 fits: 50 candidates in four folds each."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.tree import DecisionTreeClassifier

    grid = {"max_depth": list(range(1, 26)), "criterion": ["gini", "entropy"]}
    tree = DecisionTreeClassifier(random_state=0)
    return GridSearchCV(tree, grid, cv=4, n_jobs=-1).fit(*load_digits(return_X_y=True))


def measure(system: str) -> dict[str, float]:
    import sklearn.model_selection
    import sklearn.tree  # noqa: F401 - the time of the search must not include the imports of the client

    began = time.perf_counter()
    with ExitStack() as stack:
        opened(system, stack)
        seconds, scores = [time.perf_counter() - began], []
        for _ in range(2):
            began = time.perf_counter()
            scores.append(search().best_score_)
            seconds.append(time.perf_counter() - began)
    return dict(zip(PHASES, seconds, strict=True)) | {"score": scores[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, help="measure this system in this process, and print JSON")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.system:
        print(json.dumps(measure(options.system)))
        return 0
    measurements: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(options.rounds):
        for system in SYSTEMS:
            print(f"round {number + 1}: {system}", file=sys.stderr)
            command = [sys.executable, __file__, "--system", system]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)
            measurements[system].append(json.loads(done.stdout.splitlines()[-1]))
    assert len({one["score"] for measured in measurements.values() for one in measured}) == 1, measurements
    print("| grid search of 200 fits | open | first search | second search |\n| --- | ---: | ---: | ---: |")
    for system, measured in measurements.items():
        cells = " | ".join(f"{median(one[phase] for one in measured):.2f} s" for phase in PHASES)
        print(f"| {system} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
