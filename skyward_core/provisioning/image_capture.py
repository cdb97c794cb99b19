"""Captures the disk of the first machine with an image's packages, so that later ones start from it (`Image.cache`).

Every user of a disk image can read it. So the machine is prepared in two parts, and secrets come after the capture:

    bootstrap.sh               installs the packages; the image's `env`, which the installation may need (indexes,
                               proxies), is kept in the machine's memory
    sync, phase "keep"         and the machine waits
    `Provider.keep_image`      returns when the content of the disk image is fixed, or fails; the machine goes on
    included files             of `Image(includes=...)`
    rest.sh, settings.json     the environment of calls, volumes with their credentials, the commands of
                               `Image(shell=...)`, the pool's certificate

The disk is that of the head, because each pool has one; the other machines go on meanwhile. If the client is killed,
the machine waits until its lease runs out, and `Provider.prune` removes the incomplete disk image. Replacements and new
heads are prepared in one part.
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
from skyward_core.transport.code_upload import FileChanged

LOOK_SECONDS = 0.05

_log = logging.getLogger("skyward")


def is_to_be_kept(spec: PoolSpec, provider: Provider, instance: Instance) -> bool:
    """Return whether to capture this machine's disk: the spec wants it, the provider can, and the machine was not
    started from a captured disk itself.
    """
    return spec.image.cache and provider.keeps_images and STARTED_FROM_TAG not in instance.tags


def start_and_keep(
    node: Preparation, spec: PoolSpec, provider: Provider, timeout_seconds: float, is_over: threading.Event
) -> None:
    """Start a machine's installation, capture its disk, and start the rest. Returns when the rest begins; another
    thread must follow the node meanwhile.

    `is_over` is set when the opening of the pool has failed. Raises BootstrapFailed if the machine cannot be reached,
    PoolClosed if `is_over` is set. A failed capture is only logged, because the pool does not need it.
    """
    first, rest = node_script_in_two(spec)
    node.start(first, timeout_seconds, spec.image.files)
    try:
        can_be_kept = _hand_over_environment(node, spec)
        while node.phase != KEEP_PHASE:
            if is_over.wait(LOOK_SECONDS):
                raise PoolClosed("the pool is not going to open")
        if can_be_kept:
            _keep(node.instance, spec, provider)
        node.transport.send(spec.image.included)
        node.transport.write(REST, rest)
    except FileChanged as error:
        raise node.failure(str(error)) from error
    except (Unreachable, CommandFailed) as error:
        raise node.failure(f"it does not answer any more: {error}") from error


def _hand_over_environment(node: Preparation, spec: PoolSpec) -> bool:
    """Write the image's `env` to the machine. Return False if it is not in memory, so that a captured disk would have
    it.
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
    except Exception as error:  # after an error of any kind the machine is usable and paid for
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
