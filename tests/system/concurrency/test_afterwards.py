"""What follows the work: its failure or its slowness is a line in the log, and no fate of the result."""

import threading
from contextvars import ContextVar

import skyward_core as sky

RUN: ContextVar[str] = ContextVar("RUN", default="none")


def test_bookkeeping_that_fails_or_does_not_end_is_a_line_in_the_log() -> None:
    """It has the caller's context variables. One that does not end in time goes on, and is not waited for."""
    said: list[str] = []
    go, ended = threading.Event(), threading.Event()

    def fails() -> None:
        raise ZeroDivisionError("no labels")

    def times_out() -> None:
        raise TimeoutError("no answer")

    def slow() -> None:
        go.wait(60)
        ended.set()

    RUN.set("run 1")
    assert sky.after_the_work("the labels", RUN.get, said.append) == "run 1"
    assert sky.after_the_work("the labels", fails, said.append) is None
    assert sky.after_the_work("the labels", times_out, said.append) is None
    assert sky.after_the_work("the bill", slow, said.append, seconds=0.01) is None
    assert not ended.is_set()
    go.set()
    assert ended.wait(60)
    assert said == [
        "the labels has failed: ZeroDivisionError('no labels'); the result of the work is not concerned",
        "the labels has failed: TimeoutError('no answer'); the result of the work is not concerned",
        "the bill has not ended within 0.01 s, and is not waited for; the result of the work is not concerned",
    ]
