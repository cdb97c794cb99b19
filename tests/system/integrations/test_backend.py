"""joblib and scikit-learn on a pool: two local nodes with two slots each, which the tests of this file share."""

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed

import skyward_core as sky
from tests.conftest import RecordedEvents, shared
from tests.waiting import WAIT_SECONDS, wait_until

pytestmark = [pytest.mark.timeout(600)]

SLOTS = 4
RECORDED = RecordedEvents()


@pytest.fixture(scope="module")
def pool_of_four() -> Iterator[sky.ComputePool]:
    with shared(
        sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, retries=2, display="quiet", on_event=RECORDED)
    ) as pool:
        yield pool


@pytest.fixture
def pool(pool_of_four: sky.ComputePool) -> Iterator[sky.ComputePool]:
    """The pool as joblib's backend."""
    with sky.joblib_backend(pool_of_four):
        yield pool_of_four


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    return X[:600], y[:600]


def note(folder: str, name: str) -> None:
    """Write this process's id into a file, at once."""
    path = Path(folder, f".{name}")
    path.write_text(str(os.getpid()))
    path.rename(Path(folder, name))


def wait_for(folder: str, pattern: str, count: int = 1) -> None:
    while len(list(Path(folder).glob(pattern))) < count:
        time.sleep(0.01)


def score_when_allowed(folder: str, estimator: Any, X: Any, y: Any) -> float:
    """Score as the estimator does, once there is the file `go`."""
    note(folder, f"runs-{os.getpid()}")
    wait_for(folder, "go")
    return float(estimator.score(X, y))


def search(data: tuple[Any, Any], scoring: Any = None) -> Any:
    from sklearn.model_selection import GridSearchCV
    from sklearn.tree import DecisionTreeClassifier

    grid = {"max_depth": [1, 2, 4, 8], "criterion": ["gini", "entropy"]}
    return GridSearchCV(DecisionTreeClassifier(random_state=0), grid, cv=3, n_jobs=-1, scoring=scoring).fit(*data)


def assert_equal_searches(found: Any, expected: Any) -> None:
    assert found.best_params_ == expected.best_params_
    for name in ("mean_test_score", "std_test_score", "rank_test_score"):
        np.testing.assert_array_equal(found.cv_results_[name], expected.cv_results_[name])


def test_a_random_forest(pool: sky.ComputePool, digits: tuple[Any, Any]) -> None:
    from sklearn.ensemble import RandomForestClassifier

    def probabilities() -> Any:
        forest = RandomForestClassifier(n_estimators=20, random_state=0, n_jobs=-1).fit(*digits)
        return forest.predict_proba(digits[0])

    found = probabilities()
    with joblib.parallel_config(backend="threading"):
        np.testing.assert_array_equal(found, probabilities())


def test_a_worker_is_killed_during_a_search(pool: sky.ComputePool, digits: tuple[Any, Any], tmp_path: Path) -> None:
    """The fits that it had run again elsewhere."""
    client: Any = pool.dask_client()
    found = in_background(lambda: search(digits, functools.partial(score_when_allowed, str(tmp_path))), pool)
    wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == SLOTS, "fits in every slot")
    workers = client.run(os.getpid)
    os.kill(next(iter(workers.values())), signal.SIGKILL)
    wait_until(lambda: RECORDED.of(sky.CallRetrying), "the loss")
    (tmp_path / "go").touch()
    with joblib.parallel_config(backend="threading"):
        assert_equal_searches(found.result(WAIT_SECONDS), search(digits))


def length_when_allowed(folder: str, values: list[float]) -> int:
    note(folder, f"runs-{os.getpid()}")
    wait_for(folder, "go")
    return len(values)


def test_large_arguments_outlive_a_worker(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Also those that are no arrays."""
    client: Any = pool.dask_client()
    values = [float(number) for number in range(20_000)]
    parallel = Parallel(n_jobs=-1, return_as="generator", batch_size=1)
    found = parallel(delayed(length_when_allowed)(str(tmp_path), values) for _ in range(2 * SLOTS))
    wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == SLOTS, "tasks in every slot")
    before = len(RECORDED.of(sky.CallRetrying))
    for pid in client.run(os.getpid).values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(RECORDED.of(sky.CallRetrying)) > before, "the loss")
    (tmp_path / "go").touch()
    assert list(found) == [20_000] * 2 * SLOTS


def in_background(work: Any, pool: sky.ComputePool) -> Any:
    """Do something in a separate thread, in which the pool is joblib's backend too."""
    from concurrent.futures import Future
    from threading import Thread

    future = Future[Any]()

    def do() -> None:
        try:
            with sky.sklearn_backend(pool):
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=do, daemon=True).start()
    return future


# ── joblib.Parallel ──────────────────────────────────────────────────────────────────────────────────────────────────


def meet(folder: str, number: int, count: int) -> int:
    """Return the id of this process once as many tasks run at once."""
    note(folder, f"met-{number}")
    wait_for(folder, "met-*", count)
    return os.getpid()


def test_all_slots_run_at_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    pids = Parallel(n_jobs=-1)(delayed(meet)(str(tmp_path), number, SLOTS) for number in range(SLOTS))
    assert len(set(pids)) == SLOTS
    assert os.getpid() not in pids


def test_an_error_stops_the_tasks_of_its_own_parallel_only(pool: sky.ComputePool, tmp_path: Path) -> None:
    found = Parallel(n_jobs=2, batch_size=1, return_as="generator")(
        delayed(length_when_allowed)(str(tmp_path), [0.0]) for _ in range(2)
    )
    with pytest.raises(ZeroDivisionError):
        Parallel(n_jobs=2, batch_size=1)(delayed(divmod)(1, number) for number in range(3))
    (tmp_path / "go").touch()
    assert list(found) == [1, 1]


@pytest.mark.parametrize(("return_as", "n_jobs"), [("list", -1), ("generator", 2)])
def test_results_come_in_order(pool: sky.ComputePool, return_as: str, n_jobs: int) -> None:
    """Tiny tasks travel in batches."""
    parallel = Parallel(n_jobs=n_jobs, return_as=return_as)
    found = parallel(delayed(pow)(number, 2) for number in range(3000))
    assert list(found) == [number**2 for number in range(3000)]
    assert parallel.n_dispatched_batches < 1000


def return_when_allowed(folder: str, number: int) -> int:
    if number == 0:
        wait_for(folder, "go")
    return number


def test_an_unordered_generator_yields_what_has_ended(pool: sky.ComputePool, tmp_path: Path) -> None:
    parallel = Parallel(n_jobs=-1, return_as="generator_unordered", batch_size=1)
    found = parallel(delayed(return_when_allowed)(str(tmp_path), number) for number in range(8))
    first = [next(found) for _ in range(7)]
    (tmp_path / "go").touch()
    assert sorted(first) == list(range(1, 8))
    assert list(found) == [0]


def fail_or_wait(number: int) -> None:
    if number == SLOTS - 1:
        raise ValueError("the last one")
    signal.pause()


def test_the_error_of_a_task_is_raised_and_the_others_are_stopped(pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the last one") as caught:
        Parallel(n_jobs=-1)(delayed(fail_or_wait)(number) for number in range(SLOTS))
    assert "fail_or_wait" in str(caught.value.__cause__)
    pids = Parallel(n_jobs=-1)(delayed(meet)(str(tmp_path), number, SLOTS) for number in range(SLOTS))
    assert len(set(pids)) == SLOTS


def test_a_generator_that_is_dropped_stops_its_tasks(pool: sky.ComputePool, tmp_path: Path) -> None:
    found = Parallel(n_jobs=-1, return_as="generator", batch_size=1)(
        delayed(wait_if_not_first)(number) for number in range(SLOTS + 1)
    )
    assert next(found) == 0
    with pytest.warns(UserWarning, match="have been cancelled"):
        found.close()
    pids = Parallel(n_jobs=-1)(delayed(meet)(str(tmp_path), number, SLOTS) for number in range(SLOTS))
    assert len(set(pids)) == SLOTS


def wait_if_not_first(number: int) -> int:
    if number:
        signal.pause()
    return number


def test_a_task_that_cannot_travel_is_an_error(pool: sky.ComputePool) -> None:
    """joblib sends its later tasks in the thread that reports the end of earlier ones."""
    arguments: list[Any] = [*range(40), (number for number in ())]
    with pytest.raises(sky.NotPicklable):
        Parallel(n_jobs=-1, batch_size=1)(delayed(type)(argument) for argument in arguments)


def test_a_timeout_of_joblib(pool: sky.ComputePool) -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        Parallel(n_jobs=-1, timeout=0.1)(delayed(wait_if_not_first)(number) for number in (1, 2))


def inner_parallel(number: int) -> tuple[int, list[int], str, str]:
    with joblib.parallel_config(backend="threading", n_jobs=2):
        threading = type(joblib.parallel.get_active_backend()[0]).__name__
    pids = Parallel(n_jobs=-1)(delayed(os.getpid)() for _ in range(4))
    return os.getpid(), pids, threading, type(joblib.parallel.get_active_backend()[0]).__name__


def test_parallel_inside_a_task_takes_no_more_processors(pool: sky.ComputePool) -> None:
    """All slots of these nodes share this machine. Contexts inside a task nest, and end."""
    for pid, inside, threading, after in Parallel(n_jobs=-1)(delayed(inner_parallel)(number) for number in range(8)):
        assert (set(inside), threading, after) == ({pid}, "ThreadingBackend", "SequentialBackend")


def active() -> str:
    return type(joblib.parallel.get_active_backend()[0]).__name__


def test_contexts_nest_and_restore_what_was_before(pool_of_four: sky.ComputePool) -> None:
    outside = active()
    with joblib.parallel_config(backend="threading"), pytest.raises(KeyError):
        with sky.joblib_backend(pool_of_four) as inner:
            assert (inner, active()) == (pool_of_four, "PoolBackend")
            with sky.sklearn_backend(pool_of_four):
                assert active() == "PoolBackend"
                with joblib.parallel_config(backend="loky"):
                    assert active() == "LokyBackend"
            assert active() == "PoolBackend"
            raise KeyError
    assert active() == outside


def test_without_n_jobs_nothing_leaves_this_process(pool: sky.ComputePool) -> None:
    """As without a pool: scikit-learn's estimators say `n_jobs=None` for one job."""
    assert Parallel()(delayed(os.getpid)() for _ in range(3)) == [os.getpid()] * 3
    assert joblib.effective_n_jobs(-1) == SLOTS


def test_a_closed_pool_is_an_error() -> None:
    pool = sky.JoblibPool(provider=sky.Local())
    with pytest.raises(sky.PoolClosed), sky.joblib_backend(pool):
        pass
    assert active() != "PoolBackend"
