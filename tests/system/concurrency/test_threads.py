"""Several tasks at once, in plain threads: in order, to the end, and also when the interpreter ends."""

import subprocess
import sys
import threading

import pytest

from skyward_core.concurrency.threads import Threads, side_by_side


def test_an_interrupt_begins_no_more_tasks_and_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, may_end = list[int](), list[int](), threading.Event()
    one_has_begun = threading.Event()
    joins = iter([True, False])
    join = Threads.join

    def work(thing: int) -> None:
        begun.append(thing)
        one_has_begun.set()
        assert may_end.wait(30)
        ended.append(thing)

    def interrupted(threads: Threads) -> None:
        if next(joins):
            assert one_has_begun.wait(30)
            raise KeyboardInterrupt
        may_end.set()
        join(threads)

    monkeypatch.setattr(Threads, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, [1, 2, 3], "test", 1)
    assert begun == ended == [1]


def test_after_its_end_an_owner_of_threads_begins_nothing_and_says_so() -> None:
    """A future without an outcome would be waited for for ever."""
    threads, done = Threads("test"), list[int]()
    threads.close()
    with pytest.raises(RuntimeError, match="nothing begins any more"):
        threads.submit(done.append, 1).result(30)
    assert done == []


def test_it_works_while_the_interpreter_ends() -> None:
    """An executor takes no tasks then."""
    code = (
        "import atexit\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from skyward_core.concurrency.threads import side_by_side\n"
        "atexit.register(lambda: print(side_by_side(str, [1, 2, 3], 'test')))\n"
        "atexit.register(lambda: ThreadPoolExecutor(1).submit(str))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['1', '2', '3']\n"
    assert "cannot schedule new futures" in done.stderr  # otherwise this test tests nothing
