"""Airflow's tasks, below a supervisor that is a test: what a try has cost is the same figure everywhere, however the try
ends and whose the pool is.

The figures are those of XCom, `skyward users`, `skyward cost` and the receipt, after the next try has looked. The table is
printed.
"""

import importlib.util
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations.airflow_host import Workers, micro, pushed, read_until
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
KINDS = ("own", "opener", "joiner")
"""The pool of the try alone; one with a name that it opens, and one that another task has opened."""
KEEPER = 9
"""The try of the task that has opened the pool of a joiner."""
ENDS: Mapping[str, Callable[[Workers, int], object]] = MappingProxyType(
    {
        "ends": lambda workers, _: (workers.folder / "go-1").touch(),
        "fails": lambda workers, _: (workers.folder / "go-1").touch(),
        "times out": lambda *_: None,
        "cancelled": lambda _, pid: os.killpg(pid, signal.SIGTERM),
        "SIGKILL": lambda _, pid: os.killpg(pid, signal.SIGKILL),
        "SIGTERM": lambda _, pid: os.kill(pid, signal.SIGTERM),
    }
)
"""How each end begins, while the call runs. A task that a user marks gets SIGTERM with its process group."""
ENVIRON = {"fails": {"FAIL": "1"}, "times out": {"ALARM_AT": "] line 1"}}


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    """Rows that are printed at the end."""
    rows: list[list[str]] = [["pool", "try", "XCom", "next try", "users", "by task", "receipt", "rest"]]
    yield rows
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join("".join(f"{text:>12}" for text in row) for row in rows))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    found = Workers(tmp_path, "plain")
    yield found
    found.end()


def figures(workers: Workers, kind: str, first: str, second: str) -> dict[str, int]:
    """What each place says of the first try, in micro-dollars, after the second one and the end of the pool."""
    bill = pushed(second)
    pools = [pool["pool"] for pool in workers.pools()]
    (by_task,) = (
        row
        for row in json.loads(workers.cli("cost", "--json", "--by", "task"))["rows"]
        if row["key"] == "airflow:killed/work"
    )
    receipts = [json.loads(workers.cli("receipt", pool, "--json")) for pool in pools]
    found = {
        "next try": micro(bill["tries"]["1"]),
        "by task": micro(by_task["cost_usd"]) - micro(bill["tries"]["2"]),
        "all tries": micro(bill["all_tries_usd"]) - micro(bill["tries"]["2"]),
        "receipt": sum(micro(receipt["total_cost_usd"]) for receipt in receipts),
        "rest": micro(bill["tries"]["2"]),
    }
    if "pushed skyward_cost" in first and (last := pushed(first))["is_final"]:
        found["XCom"] = micro(last["cost_usd"])
    if kind != "own":
        (pool,) = pools
        users = json.loads(workers.cli("users", "--json", pool))
        its = {"1": 0, "2": 0, str(KEEPER): 0}
        for user in users["users"]:
            its[user["work"]["attempt"]] += micro(user["cost_usd"])
        found |= {"users": its["1"], "second": its["2"], "rest": micro(users["rest_usd"]) + its["2"] + its[str(KEEPER)]}
    return found


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_try_is_one_figure(kind: str, how: str, workers: Workers, table: list[list[str]]) -> None:
    named = {} if kind == "own" else {"POOL": "cell"}
    keeper = None
    if kind == "joiner":
        keeper = workers.start(KEEPER, **named, TASK="keeper")
        read_until(keeper, "] line 1")
    process = workers.start(1, **named, **ENVIRON.get(how, {}))
    said = read_until(process, "] line 1")
    ENDS[how](workers, process.pid)
    said += process.communicate(timeout=120)[0]
    assert ("\nreturned " in said) == (how == "ends")
    if kind == "own":
        wait_until(lambda: all(pool["ended_at"] for pool in workers.pools()), "the end of the first pool")
    second = workers.finish(2, **named)
    assert ("launching" in second) == (kind == "own")
    if keeper is not None:
        (workers.folder / f"go-{KEEPER}").touch()
        keeper.communicate(timeout=120)
    if named:
        workers.cli("stop", "cell")
    found = figures(workers, kind, said, second)
    cost = found["by task"]
    columns = ("XCom", "next try", "users", "by task", "receipt", "rest")
    table.append([kind, how, *(f"{found[name] / 1e6:.6f}" if name in found else "" for name in columns)])
    assert cost > 0
    assert ("XCom" in found) == (how != "SIGKILL")
    places = ("XCom", "next try", "all tries", "users")
    assert {found[name] for name in places if name in found} == {cost}, found
    assert found["receipt"] == cost + found["rest"]
