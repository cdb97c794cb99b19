"""Checks of another distribution, as entry points name them."""

from importlib.metadata import version

import skyward_core as sky


def mine() -> list[sky.Check]:
    return [sky.Check.warning("scratch", "/scratch is 95 % full", "delete old runs")]


def absent() -> list[sky.Check]:
    version("a-distribution-that-is-not-installed")
    return []
