"""Levels of the client's loggers on a node."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from skyward_core.events.console import levels_for_nodes
from skyward_core.wire.log_records import LevelsOfCalls


@contextmanager
def new_root() -> Generator[logging.Logger]:
    """The root logger as Python starts with it: pytest gives it handlers for each test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        yield root
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
def test_the_level_of_a_client_that_has_configured_logging_holds(level: int):
    with new_root():
        logging.basicConfig(level=level)
        assert dict(levels_for_nodes())[""] == level


def test_a_client_without_handlers_gets_what_its_calls_tell():
    """INFO, and what its own level asks for: nobody has decided that records of nodes be dropped."""
    with new_root() as root:
        assert dict(levels_for_nodes())[""] == logging.INFO
        root.setLevel(logging.DEBUG)
        assert dict(levels_for_nodes())[""] == logging.DEBUG
        assert dict(levels_for_nodes(logging.ERROR))[""] == logging.ERROR


def test_loggers_with_a_level_of_their_own_travel():
    names = {"test_levels.extra": logging.DEBUG, "test_levels.noisy": logging.ERROR, "skyward.node": logging.ERROR}
    try:
        for name, level in names.items():
            logging.getLogger(name).setLevel(level)
        logging.getLogger("test_levels.plain")
        levels = dict(levels_for_nodes())
    finally:
        for name in names:
            logging.getLogger(name).setLevel(logging.NOTSET)
    assert {name: level for name, level in levels.items() if name.startswith("test_levels")} == {
        "test_levels.extra": logging.DEBUG,
        "test_levels.noisy": logging.ERROR,
    }
    assert "skyward.node" not in levels


def test_calls_of_two_clients_have_each_its_levels():
    first, second = logging.getLogger("test_levels.first"), logging.getLogger("test_levels.second")
    first.setLevel(logging.ERROR)
    levels = LevelsOfCalls()
    levels.set((("test_levels.first", logging.DEBUG),))
    first.setLevel(logging.INFO)  # by the call
    levels.set((("test_levels.first", logging.DEBUG),))
    assert (first.level, second.level) == (logging.INFO, logging.NOTSET)
    levels.set((("test_levels.second", logging.DEBUG),))
    assert (first.level, second.level) == (logging.ERROR, logging.DEBUG)
    levels.set(())
    assert (first.level, second.level) == (logging.ERROR, logging.NOTSET)
    first.setLevel(logging.NOTSET)
