"""Fixtures for whoever needs real machines: a fleet, and a mirror for its hosts to install from.

One of each for a test session, made when first asked for.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from skyward_core.image.image import runtime_pins
from tests.testbed import Fleet, why_not
from tests.testbed.mirror import Mirror

PURE_PACKAGE = "six==1.17.0"
"""Small, and no node's own need: for images that ask for something."""


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The fleet of this test session: make hosts of your own, and crash them.

    Skips, or fails in CI, where this machine cannot carry hosts.
    """
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(scope="session")
def mirror(fleet: Fleet) -> Iterator[Mirror]:
    """What the fleet's hosts install from: this Python, what a node needs in this client's versions, uv, numpy,
    `PURE_PACKAGE`. Leave it mended.
    """
    with Mirror(fleet.network.gateway, requirements()) as mirror:
        yield mirror


def requirements() -> tuple[str, ...]:
    """Return what the session's mirror serves, without the dependencies."""
    return (*runtime_pins(), f"uv=={version('uv')}", f"numpy=={version('numpy')}", PURE_PACKAGE)
