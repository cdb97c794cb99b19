"""Notes (PEP 678) for exceptions of calls: what to do about a module or file that only the client has."""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import os
import sys
from importlib.metadata import packages_distributions


def note_for(error: BaseException) -> str | None:
    """Return what to do about an exception that a call has raised on a node; None if that is unknown.

    Looks at the packages that are installed here.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_module(error.name)
    if isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT:
        return _missing_file(error.filename)
    return None


def _missing_module(name: str) -> str | None:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None  # a part of Python that this interpreter was built without
    distributions = sorted(set(packages_distributions().get(top, ())))
    if not distributions and (file := _own_file(top)) is not None:
        if file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            return (
                f"{top!r} is compiled ({file}), and machine code does not travel with a call: build a wheel of it and"
                " list that in Image(pip=[...])"
            )
        return (
            f"{top!r} is a module of your own ({file}) that travels if an `import` statement names it: write one in the"
            " function, or at the head of its module"
        )
    wanted = " or ".join(f'"{one}"' for one in distributions or [top])
    if top != name:
        return (
            f"the node has {top!r}, but no {name!r} in it: name the version that you use here in Image(pip=[...]), for"
            f" {wanted}"
        )
    return f"the module {name!r} is not installed on the node: list it in Image(pip=[...]), as {wanted}"


def _own_file(module: str) -> str | None:
    """Return the file of a module that this client can import, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _missing_file(path: object) -> str | None:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str) or not path or os.path.isabs(path):
        return None
    return (
        f"{path!r} is a relative path, and the working directory of a call is the node's own: the files beside your"
        " program are not there. Include the file in the image, Image(includes=[...]), pass the content as an argument,"
        " or name an absolute path on the node, such as that of a volume"
    )
