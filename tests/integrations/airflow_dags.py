"""The DAGs of tests with a server: one task each, whose function counts its runs and waits for a file.

`folder` of the run's configuration has the files `runs`, with the try that has begun each run of the function,
`overlaps`, with those that began beside another run, and `go`, which lets the function end. With `silent` it writes no
line before its end.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import dag

import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator
from airflow_provider_skyward.pools import SkywardCreatePool, SkywardReleasePool

LOCAL = sky.Local(price_per_hour=36.0)
CALL: dict[str, Any] = {
    "provider": LOCAL,
    "op_args": ["{{ dag_run.conf['folder'] }}", "{{ ti.try_number }}"],
    "retry_delay": timedelta(seconds=0),
}


def work(folder: str, mark: str) -> int:
    """Count this run, then write lines until the file `go` is there."""
    import fcntl
    import time

    path = Path(folder)
    with (path / "lock").open("w") as lock:  # the kernel opens it when this process ends, however it does
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (path / "overlaps").open("a") as overlaps:
                overlaps.write(mark + "\n")
        with (path / "runs").open("a") as runs:
            runs.write(mark + "\n")
        number = 0
        while not (path / "go").exists():
            number += 1
            if not (path / "silent").exists():
                print("line", number, flush=True)
            time.sleep(0.2)
        print("the end", flush=True)
        (path / "ended").touch()
        return 42


def one_task(dag_id: str, **keywords: Any) -> None:
    """Make a DAG with the task `work`."""

    @dag(dag_id=dag_id, schedule=None, max_active_runs=16)
    def only_work() -> None:
        SkywardOperator(task_id="work", python_callable=work, **CALL | keywords)

    only_work()


one_task("attended", max_cost=5.0)
one_task("durable", retries=4)
one_task("deferred", deferrable=True, retries=4)
one_task("deferred_once", deferrable=True)
one_task("timed", deferrable=True, execution_timeout=timedelta(seconds=40))
one_task("ended_with_worker", durable=False, retries=4)


def shared(dag_id: str, **keywords: Any) -> None:
    """Make a DAG with the task `work` between a setup and a teardown."""

    @dag(dag_id=dag_id, schedule=None, max_active_runs=16)
    def shared_work() -> None:
        create = SkywardCreatePool(task_id="create", provider=LOCAL, retries=4, retry_delay=timedelta(seconds=0))
        release = SkywardReleasePool(task_id="release", skyward_pool=create.output)
        its = {name: value for name, value in CALL.items() if name != "provider"} | keywords
        (
            create
            >> SkywardOperator(task_id="work", python_callable=work, skyward_pool=create.output, retries=4, **its)
            >> release
        )

    shared_work()


shared("shared")

LIMIT = timedelta(seconds=120)
one_task("durable_limited", retries=4, execution_timeout=LIMIT)
one_task("deferred_limited", deferrable=True, retries=4, execution_timeout=LIMIT)
one_task("ended_with_worker_limited", durable=False, retries=4, execution_timeout=LIMIT)
shared("shared_limited", execution_timeout=LIMIT)
