"""Keeping the disk of the first machine that has an image's packages, so that later ones start from it (`Image.cache`).

Whoever may use a copy of a disk can read it. So the machine whose disk is kept is prepared in two pieces, and what is
secret comes after the copy:

    bootstrap.sh               installs the packages; the image's `env`, which installing may need (indexes, proxies),
    comes through the machine's memory sync, phase "keep"         and it waits
    `Provider.keep_image`      returns when the moment that the copy shows is over, or fails; either way the machine
    goes on rest.sh, settings.json     the environment of calls, volumes with their credentials, the pool's certificate

It is the head's, for a pool has one, and the others go on meanwhile. A client that is killed leaves a machine that
waits, until its lease runs out; what it has begun to keep is the provider's to find and to take away
(`Provider.prune`). Replacements and new heads are prepared in one piece.
"""

from __future__ import annotations

import logging
import threading

from skyward_core.errors import CommandFailed, PoolClosed, Unreachable
from skyward_core.image import shell
from skyward_core.machines.instances import Instance
from skyward_core.providers.base import STARTED_FROM_TAG, Provider
from skyward_core.provisioning.bootstrap import IMAGE_ENV, KEEP_PHASE, REST, Preparation, node_script_in_two
from skyward_core.spec import PoolSpec

LOOK_SECONDS = 0.05

_log = logging.getLogger("skyward")


def is_to_be_kept(spec: PoolSpec, provider: Provider, instance: Instance) -> bool:
    """Tell whether a copy of this machine's disk is of use: it is wanted, it can be made, and the machine was not
    started from one itself.
    """
    return spec.image.cache and provider.keeps_images and STARTED_FROM_TAG not in instance.tags


def start_and_keep(
    node: Preparation, spec: PoolSpec, provider: Provider, timeout_seconds: float, is_over: threading.Event
) -> None:
    """Have a machine install its packages, keep its disk, and have it do the rest. Returns when that begins; somebody
    else follows the node meanwhile.

    `is_over` is set when the pool is not going to open. Raises BootstrapFailed if the machine cannot be reached,
    PoolClosed if it is over. That the disk cannot be kept is told in the log: a copy saves time, and no pool is worth
    less without one.
    """
    first, rest = node_script_in_two(spec)
    node.start(first, timeout_seconds)
    try:
        can_be_kept = _hand_over_environment(node, spec)
        while node.phase != KEEP_PHASE:
            if is_over.wait(LOOK_SECONDS):
                raise PoolClosed("the pool is not going to open")
        if can_be_kept:
            _keep(node.instance, spec, provider)
        node.transport.write(REST, rest)
    except (Unreachable, CommandFailed) as error:
        raise node.failure(f"it does not answer any more: {error}") from error


def _hand_over_environment(node: Preparation, spec: PoolSpec) -> bool:
    """Give the machine the image's `env`, in memory if it has room there; False if it has none, and a copy of its disk
    would show it.
    """
    if not spec.image.env:
        return True
    text = shell.export(spec.image.env) + "\n"
    path = node.transport.write_in_memory(IMAGE_ENV, text)
    node.transport.write(IMAGE_ENV, text if path is None else f"{shell.source(path)}\n")
    if path is None:
        _log.warning("%s has no place in memory for the image's env: its disk is not kept", node.instance.id)
    return path is not None


def _keep(instance: Instance, spec: PoolSpec, provider: Provider) -> None:
    name = spec.image.content_hash()
    try:
        kept = provider.keep_image(instance, name)
    except Exception as error:  # whatever a provider fails with, the machine is there and is paid for
        _log.warning(
            "the disk of %s is not kept, and later pools install the packages of image %s again: %s",
            instance.id,
            name,
            error,
        )
        return
    if kept is not None:
        _log.info(
            "the disk of %s is being kept as %s: later pools with the packages of image %s start from it",
            instance.id,
            kept,
            name,
        )
