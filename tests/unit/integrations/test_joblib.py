"""joblib without a pool: what runs on a node, the large arrays of its tasks, and the packages of an image."""

import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.sklearn import tasks as client_side
from skyward_core.sklearn.tasks import MOST_PROCESSORS, SHARED_BYTES, THREAD_VARIABLES, Share, TaskPacker, run_tasks

LARGE = np.arange(SHARED_BYTES // 8, dtype=np.float64)
MANY_SLOTS = Share(slots=10_000)
OURS = f"scikit-learn=={version('scikit-learn')}"


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arrays that were scattered, in order. Here a reference is the array itself."""
    found = list[Any]()
    monkeypatch.setattr(client_side, "scatter", lambda array: found.append(array) or array)
    return found


def run(packer: TaskPacker, *tasks: tuple[Callable[..., Any], tuple[Any, ...]]) -> list[Any]:
    packed, arrays = packer.pack([(function, arguments, {}) for function, arguments in tasks])
    return run_tasks(packed, arrays, MANY_SLOTS)


def facts(array: Any) -> tuple[float, bool]:
    return float(array.sum()), bool(array.flags.writeable)


def test_equal_arrays_of_many_tasks_are_sent_once(sent: list[Any]) -> None:
    """Also views of the same values, but no array that takes the place of another."""
    packer, table = TaskPacker(0), np.vstack([LARGE, LARGE])
    for _ in range(3):
        assert run(packer, (np.sum, (LARGE,)), (np.max, ([LARGE],))) == [LARGE.sum(), LARGE.max()]
        assert run(packer, (np.sum, (table[1],))) == [LARGE.sum()]
    assert run(packer, (np.sum, (table[0],))) == [LARGE.sum()]
    assert len(sent) == 3
    for value in range(20):
        assert run(packer, (np.max, (np.full(SHARED_BYTES, value, dtype=np.uint8),))) == [value]
    assert len(sent) == 23


@pytest.mark.parametrize(
    ("max_nbytes", "mmap_mode", "is_writable"),
    [(0, "r", False), (LARGE.nbytes, "r", True), (None, "r", True), (0, "c", True), (0, None, True)],
)
def test_large_arrays_are_read_only_where_joblib_maps_them(
    max_nbytes: int | None, mmap_mode: str | None, is_writable: bool
) -> None:
    """Smaller ones, and those of other modes, are copies: a task may change them, and no other task sees it."""
    assert run(TaskPacker(max_nbytes, mmap_mode), (facts, (LARGE,))) == [(LARGE.sum(), is_writable)]


def clear(array: Any) -> float:
    array[:] = 0
    return float(array.sum())


def test_a_task_changes_its_own_copy_only() -> None:
    kept = LARGE.copy()
    assert run(TaskPacker(), (clear, (kept,))) == [0]
    assert kept.sum() == LARGE.sum()


def grow(values: list[Any], buffer: Any) -> int:
    values.append(0)
    buffer[0] = 1
    return len(values)


def test_a_large_task_is_scattered_and_may_change_what_it_gets(sent: list[Any]) -> None:
    values, buffer = [float(number) for number in range(20_000)], np.ma.masked_less(LARGE, 5)
    assert run(TaskPacker(), (grow, (values, buffer))) == [20_001]
    assert len(values) == 20_000
    assert type(sent[-1]).__name__ == "Pickled"


def test_a_scattered_value_stays_a_reference(sent: list[Any]) -> None:
    """Also one that is no array."""
    reference: Any = sky.scatter({"rows": LARGE})
    packed, references = TaskPacker().pack([(len, (reference,), {}), (len, ([reference],), {})])
    assert references == (reference,)
    assert run_tasks(packed, [{"rows": LARGE}], MANY_SLOTS) == [1, 1]
    assert sent == []


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in (*THREAD_VARIABLES, MOST_PROCESSORS)}


def test_a_task_has_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read the variables when they are loaded. A number that the user has set stays."""
    for name in (*THREAD_VARIABLES, MOST_PROCESSORS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    before = variables()
    (inside,) = run(TaskPacker(), (variables, ()))
    assert inside == dict.fromkeys((*THREAD_VARIABLES, MOST_PROCESSORS), "1") | {"MKL_NUM_THREADS": "7"}
    assert variables() == before


def threads_of_libraries() -> list[int]:
    from threadpoolctl import threadpool_info

    return [library["num_threads"] for library in threadpool_info()]


@pytest.mark.parametrize(("share", "expected"), [(MANY_SLOTS, 1), (Share(10_000, threads=2), 2)])
def test_loaded_libraries_have_the_share_too(share: Share, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert sys.modules["numpy"] is np
    packed, arrays = TaskPacker().pack([(threads_of_libraries, (), {})])
    (inside,) = run_tasks(packed, arrays, share)
    assert set(inside) == {expected}


def inner(n_jobs: int) -> tuple[str, int]:
    import joblib

    with joblib.Parallel(n_jobs=n_jobs) as parallel:
        return type(parallel._backend).__name__, joblib.effective_n_jobs(n_jobs)


def test_joblib_inside_a_task_stays_in_its_share() -> None:
    """In a share of one processor it runs in turn. In a larger one it takes threads. Afterwards all is as before."""
    import joblib

    before = joblib.parallel.get_active_backend()[0]
    for share, expected in ((MANY_SLOTS, ("SequentialBackend", 1)), (Share(1, threads=2), ("ThreadingBackend", 2))):
        packed, arrays = TaskPacker().pack([(inner, (2,), {})])
        assert run_tasks(packed, arrays, share) == [expected]
    assert type(joblib.parallel.get_active_backend()[0]) is type(before)


@pytest.mark.parametrize(
    ("image", "keywords", "expected"),
    [
        (sky.Image(), {}, (OURS,)),
        (sky.Image(pip=["numpy"]), {}, ("numpy", OURS)),
        (sky.Image(pip=["Scikit_Learn>=1.5"]), {}, ("Scikit_Learn>=1.5",)),
        (sky.Image(), {"sklearn_version": "1.6.1"}, ("scikit-learn==1.6.1",)),
        (sky.Image(lock="numpy==2.0.0 --hash=sha256:" + 64 * "0"), {}, ()),
    ],
)
def test_the_image_of_a_remote_pool_has_scikit_learn(
    image: sky.Image, keywords: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """In the version that was asked for, else as the image says, else in the version of this process."""
    pool = sky.ScikitLearnPool(provider=sky.DigitalOcean(), image=image.model_copy(), **keywords)
    assert pool.spec.image.pip == expected
    assert pool.spec.image.lock == image.lock


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, ()),
        ({"joblib_version": "1.5.3"}, ("joblib==1.5.3",)),
        ({"image": sky.Image(pip=["requests"])}, ("requests", f"joblib=={version('joblib')}")),
    ],
)
def test_local_nodes_have_the_packages_of_this_process(keywords: dict[str, Any], expected: tuple[str, ...]) -> None:
    """As long as the image is bare."""
    assert sky.JoblibPool(provider=sky.Local(), **keywords).spec.image.pip == expected


def test_a_version_in_two_places_is_refused() -> None:
    with pytest.raises(sky.BadRequest, match=r"'joblib<2' already.*'1\.5\.3'"):
        sky.JoblibPool(provider=sky.Local(), image=sky.Image(pip=["joblib<2"]), joblib_version="1.5.3")


def test_other_fields_of_the_image_stay() -> None:
    image = sky.Image(env={"A": "1"}, apt=["git"], preload=["sklearn.tree"], cache=True)
    changed = sky.ScikitLearnPool(provider=sky.DigitalOcean(), image=image).spec.image
    assert changed == image.model_copy(update={"pip": (OURS,)})


@pytest.mark.parametrize(
    ("kind", "own"), [(sky.JoblibPool, "joblib_version"), (sky.ScikitLearnPool, "sklearn_version")]
)
def test_the_parameters_are_those_of_a_pool_and_one_more(kind: type, own: str) -> None:
    assert set(inspect.signature(kind).parameters) == {*inspect.signature(sky.ComputePool).parameters, own}
    assert kind(spec=sky.PoolSpec.of(provider=sky.Local(), nodes=2), **{own: None}).spec.nodes == 2
    with pytest.raises(sky.BadRequest, match=rf"write {kind.__name__}\(accelerator=\.\.\.\)"):
        kind("A100")
