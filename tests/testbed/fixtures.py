"""Fixtures for tests that need real machines: a fleet, and a mirror from which its hosts install.

There is one of each for a test session, created at the first use.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from skyward_core.image.image import runtime_pins
from tests.testbed import Fleet, why_not
from tests.testbed.mirror import Mirror

PURE_PACKAGE = "six==1.17.0"
"""A small package that no node needs, for images with packages."""


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The fleet of this test session: create your own hosts, and crash them.

    Skips, or fails in CI, if this machine cannot run hosts.
    """
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(scope="session")
def mirror(fleet: Fleet) -> Iterator[Mirror]:
    """The mirror from which the fleet's hosts install.

    It has this Python, the requirements of a node in this client's versions, uv, numpy and `PURE_PACKAGE`. Tests must
    leave it unbroken.
    """
    with Mirror(fleet.network.gateway, requirements()) as mirror:
        yield mirror


def requirements() -> tuple[str, ...]:
    """Return the packages of the session's mirror, without their dependencies."""
    return (*runtime_pins(), f"uv=={version('uv')}", f"numpy=={version('numpy')}", PURE_PACKAGE)
