"""Reports of a client's load: only changes are sent, and all of it on a new connection."""

from skyward_core.engine.load_reports import LoadReports
from skyward_core.worker.client_loads import load

TOPIC = "skyward-topic"


def test_only_changes_are_reported() -> None:
    reports = LoadReports(TOPIC)
    assert reports.next(0, []) is None
    assert reports.next(3, []) == load(TOPIC, 3, [])
    assert reports.next(3, []) is None
    assert reports.next(None, ["b", "a"]) == load(TOPIC, 3, ["a", "b"])
    assert reports.next(None, ["a", "b"]) is None
    reports.forget()
    assert reports.next(3, ["a"]) == load(TOPIC, 3, ["a"])
    assert reports.next(0, []) == load(TOPIC, 0, [])


def test_a_load_that_has_ended_while_there_was_no_connection_is_reported() -> None:
    """The scheduler may be the same one, and still have the old load."""
    reports = LoadReports(TOPIC)
    assert reports.next(50, ["a"]) == load(TOPIC, 50, ["a"])
    reports.forget()
    assert reports.next(0, []) == load(TOPIC, 0, [])
    assert reports.next(0, []) is None
    reports.forget()
    assert reports.next(None, []) == load(TOPIC, 0, [])
