"""Tests of the leak checks in conftest.py: a false leak costs a day, a missed one costs a machine."""

import socket

import pytest

import skyward_core as sky
from tests import conftest
from tests.conftest import shared


def test_one_more_connection_of_a_shared_pool_is_no_leak(request: pytest.FixtureRequest) -> None:
    """Its client opens one by its own clock, during any test. A connection to another address counts, and one to the
    pool too once it is closed.
    """
    others = set(conftest._shared_schedulers)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        shared(sky.ComputePool(provider=sky.Local(), display="quiet")),
    ):
        (port,) = conftest._shared_schedulers - others
        before = conftest._descriptors(request)
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(server.getsockname()) as strange:
            assert list(conftest._new_descriptors(before, request)) == [strange.fileno()]
    assert port not in conftest._shared_schedulers
