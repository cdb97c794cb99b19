"""Measure the time of a task while Airflow parses and serializes a DAG file, beside Airflow's own PythonOperator and
`@task`.

Airflow parses each file again and again: it makes all operators, and serializes their DAG for the scheduler. One process
does that with one DAG of 200 tasks in each form that users write. The forms take turns in each round. The time is the
processor time of the thread, because other programs may run. A cell has the least value of the rounds, and [the median].
The time includes the user's values (`sky.Image(...)`).

    python benchmarks/airflow_parse.py --rounds 25
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# Set before the import of Airflow, which reads its settings then, and writes files.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="skyward-airflow-")

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, task
from airflow.serialization.serialized_objects import DagSerialization

import skyward_core as sky
from airflow_provider_skyward.decorators import skyward_task
from airflow_provider_skyward.operators import SkywardOperator

TASKS = 200
MOST_TIMES = 1.5
SPEC = sky.PoolSpec.of(provider="local", nodes=2)
OPERATOR, DECORATOR = "PythonOperator", "@task"


def square(x: int) -> int:
    """The function of the tasks."""
    return x**2


def _operator(number: int, **pool: Any) -> None:
    SkywardOperator(task_id=f"t{number}", python_callable=square, op_args=[number], **pool)


def _decorated(number: int, **pool: Any) -> None:
    skyward_task(square, task_id=f"t{number}", **pool)(number)


def _everything(number: int) -> dict[str, Any]:
    image = sky.Image(pip=["torch", "numpy"], env={"OMP_NUM_THREADS": "1"})
    return {
        "provider": sky.AWS(region="us-east-1"),
        "image": image,
        "accelerator": "A100",
        "nodes": number + 1,
        "spot": "always",
        "env": {"DAY": f"{number}"},
    }


FORMS: dict[str, tuple[str, Callable[[int], object]]] = {
    OPERATOR: (OPERATOR, lambda n: PythonOperator(task_id=f"t{n}", python_callable=square, op_args=[n])),
    'provider="local"': (OPERATOR, lambda n: _operator(n, provider="local")),
    "spec=, one for all": (OPERATOR, lambda n: _operator(n, spec=SPEC)),
    "spec=, plain data": (OPERATOR, lambda n: _operator(n, spec={"provider": "local", "nodes": 2})),
    'provider=sky.AWS(region="us-east-1")': (OPERATOR, lambda n: _operator(n, provider=sky.AWS(region="us-east-1"))),
    "image=sky.Image(pip=[...])": (
        OPERATOR,
        lambda n: _operator(n, provider="local", image=sky.Image(pip=["torch", "numpy"])),
    ),
    "provider, image, accelerator, nodes, spot, env": (OPERATOR, lambda n: _operator(n, **_everything(n))),
    DECORATOR: (DECORATOR, lambda n: task(square, task_id=f"t{n}")(n)),
    '@task.skyward(provider="local")': (DECORATOR, lambda n: _decorated(n, provider="local")),
    "@task.skyward(...), with all of the above": (DECORATOR, lambda n: _decorated(n, **_everything(n))),
}
"""Each form with its peer, Airflow's own operator or decorator of that kind."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"])
    load = os.getloadavg()[0]
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)
    gc.collect()
    gc.freeze()  # so that the garbage collector does not scan the imported modules during the time of one form
    for _ in range(rounds):
        for form, (_, make) in FORMS.items():
            measured[form].append(_ms_per_task(make))
    print(
        f"Load {load:.1f} → {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, Python {platform.python_version()}, Airflow {version('apache-airflow')}.\n"
    )
    print("| 200 tasks, ms each | parse | to Airflow's own | serialize | to it | both | to both | mark |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for form, (peer, _) in FORMS.items():
        print(_line(form, measured[form], measured[peer]))


def _ms_per_task(make: Callable[[int], object]) -> tuple[float, float]:
    """Return how long a task takes to be made, and to be serialized."""
    gc.collect()  # removes the previous DAG
    with DAG("parsed", schedule=None) as dag:
        began = time.thread_time()
        for number in range(TASKS):
            make(number)
        made = time.thread_time()
    gc.collect()
    again = time.thread_time()
    DagSerialization.to_dict(dag)
    return (made - began) / TASKS * 1000, (time.thread_time() - again) / TASKS * 1000


def _line(form: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> str:
    cells = list[str]()
    for take in (lambda pair: pair[0], lambda pair: pair[1], sum):
        values, own = list(map(take, ours)), list(map(take, theirs))
        ratio = min(values) / min(own)
        cells += [f"{min(values):.3f} [{statistics.median(values):.3f}]", f"{ratio:.2f}" if ours is not theirs else ""]
    if ours is not theirs:
        cells.append(f"≤ {MOST_TIMES}: {'met' if ratio <= MOST_TIMES else '**missed**'}")
    shown = f"`{form}`" if "(" in form or "=" in form or form in {OPERATOR, DECORATOR} else form
    return f"| {shown} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
