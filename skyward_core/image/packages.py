"""Arguments and files for uv: which of an image's packages come from which index, and the hashes of files.

Pure text, for uv on a node and on the client.

`locked` makes the lock of an image: on the client, with its own uv, before anything is rented. The network is used only
for the package index.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uv

from skyward_core.errors import BadRequest

NAME = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
"""The name at the start of a requirement (PEP 508)."""
_HASH = re.compile(r"--hash[= ]([a-z0-9]+):([0-9a-f]+)")
_WEAK = ("md5", "sha1")
PROJECT, LOCK = "pyproject.toml", "requirements.txt"


@dataclass(frozen=True, slots=True)
class Step:
    """One `uv pip install` with these arguments. `file` is the name and the content of a file that it reads."""

    arguments: tuple[str, ...]
    file: tuple[str, str] | None = None


def canonical(name: str) -> str:
    """Return a distribution's name in the form of the package index (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Return the canonical name in a requirement; "" if it has none, for instance a bare URL."""
    found = NAME.match(requirement)
    return canonical(found[1]) if found is not None else ""


def steps(
    pins: Sequence[str], pip: Sequence[str], extra_index: str | None, pinned: Mapping[str, Sequence[str]]
) -> list[Step]:
    """Return the steps that install a node's own packages (`pins`) and `pip`.

    Packages in `pinned` come only from their index, the others from the package index. Packages that the extra index
    has come only from it, so that no other user's package of the same name is installed. A node's own packages are
    installed before the extra index is used: otherwise an old version of Dask there would be the only choice.
    """
    if not pinned and extra_index is None:
        return [Step(("--", *pins, *pip))]
    index = ("--index", extra_index, "--index-strategy", "first-index") if extra_index is not None else ()
    first = [Step(("--", *pins))] if extra_index is not None and pins else []
    if not pinned:
        return [*first, Step((*index, "--", *pins, *pip))]
    return [*first, Step(index, (PROJECT, project((*pins, *pip), pinned)))]


def locked_steps(lock: str, indexes: Iterable[str]) -> list[Step]:
    """Return the steps that install a lock and nothing else.

    Any index may serve a file, because its hash is checked.
    """
    index = [word for index in indexes for word in ("--index", index)]
    strategy = ("--index-strategy", "unsafe-best-match") if index else ()
    return [Step(("--require-hashes", *index, *strategy), (LOCK, lock))]


def project(requirements: Iterable[str], pinned: Mapping[str, Sequence[str]]) -> str:
    """Return a pyproject.toml with these dependencies, some of which come from other indexes."""
    listed = list(dict.fromkeys(requirements))
    places = {canonical(name): f"index-{number}" for number, names in enumerate(pinned.values()) for name in names}
    lines = [
        "[project]",
        'name = "skyward-image"',
        'version = "0"',
        f"dependencies = {json.dumps(listed, ensure_ascii=False)}",
    ]
    lines += ["[tool.uv.workspace]  # so that uv reads no folder above", "members = []", "[tool.uv.sources]"]
    lines += [f"{name} = {{ index = {json.dumps(place)} }}" for name, place in places.items()]
    for number, url in enumerate(pinned):
        lines += [
            "[[tool.uv.index]]",
            f'name = "index-{number}"',
            f"url = {json.dumps(url, ensure_ascii=False)}",
            "explicit = true",
        ]
    return "\n".join(lines) + "\n"


# ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_lock(text: str) -> str:
    """Return a lock as lines of a requirements file, each with its hashes. Raises ValueError.

    `text` is a requirements file or a pylock.toml (PEP 751).
    """
    lines = _of_pylock(text) if re.search(r"^lock-version\s*=", text, re.MULTILINE) else requirement_lines(text)
    if not lines:
        raise ValueError("the lock names no package")
    for line in lines:
        what = line.split()[0]
        if line.startswith("-"):
            raise ValueError(
                f"the lock has {what!r}: only packages are allowed in it (uv export --no-emit-project; indexes go to"
                " pip_indexes)"
            )
        if not name_of(line) or not re.match(r"\S+\s*(==\s*\S|@)", line):
            raise ValueError(
                f"the lock has {what!r} without a version: each must be as name==version (make it with uv pip compile"
                " --generate-hashes)"
            )
        hashes = [kind for kind, _ in _HASH.findall(line)]
        if not hashes or set(hashes) & set(_WEAK):
            raise ValueError(
                f"the lock has {what!r} without a sha256 hash (make it with uv pip compile --generate-hashes, or uv"
                " export)"
            )
    return "\n".join(lines) + "\n"


def names_of(lock: str) -> set[str]:
    """Return the names of the packages of a lock."""
    return {name_of(line) for line in lock.splitlines()}


def lacks(lock: str, pins: Iterable[str]) -> list[str]:
    """Return those pins (name==version) that a lock does not have."""
    there = {(name_of(line), _version(line)) for line in lock.splitlines()}
    return [pin for pin in pins if (name_of(pin), _version(pin)) not in there]


def _version(line: str) -> str:
    return line.partition("==")[2].split(";")[0].split("--hash")[0].strip()


def requirement_lines(text: str) -> list[str]:
    """Return the lines of a requirements file, joined where they go on, without comments and empty ones."""
    joined = re.sub(r"\\\r?\n", " ", text)
    bare = (re.sub(r"(^|\s)#.*$", "", line) for line in joined.splitlines())
    return [" ".join(line.split()) for line in bare if line.strip()]


def _of_pylock(text: str) -> list[str]:
    try:
        packages = cast("list[dict[str, Any]]", tomllib.loads(text).get("packages", []))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the lock is not valid TOML: {error}") from error
    lines: list[str] = []
    for package in packages:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        hashes = sorted(
            {f"--hash=sha256:{file['hashes']['sha256']}" for file in files if "sha256" in file.get("hashes", {})}
        )
        if "version" not in package or not hashes:
            raise ValueError(
                f"the lock has {package.get('name')!r} from a folder or a repository: only packages of an index are"
                " allowed in it"
            )
        marker = f" ; {package['marker']}" if "marker" in package else ""
        lines.append(" ".join([f"{package['name']}=={package['version']}{marker}", *hashes]))
    return lines


COMPILE_SECONDS = 300.0
COMPILE = ("--universal", "--generate-hashes", "--quiet", "--no-header", "--no-annotate", "--no-progress")


def locked(
    python: str, requirements: Sequence[str], pinned: Mapping[str, Sequence[str]], known: str, env: Mapping[str, str]
) -> str:
    """Return a lock of these requirements and their dependencies, for Linux on every architecture.

    It begins with the `known` lock, whose versions are kept. `env` is the image's: its mirror or proxy is used here
    too. Raises BadRequest with uv's message.
    """
    with tempfile.TemporaryDirectory(prefix="skyward-lock-") as folder:
        (Path(folder) / PROJECT).write_text(project(requirements, pinned))
        (Path(folder) / "known.txt").write_text(known)
        command = [
            uv.find_uv_bin(),
            "pip",
            "compile",
            *COMPILE,
            "--python",
            sys.executable,
            "--python-version",
            python,
            "--constraints",
            "known.txt",
            PROJECT,
        ]
        environment = {name: value for name, value in {**os.environ, **env}.items() if name != "UV_NO_VERIFY_HASHES"}
        try:
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env=environment,
            )
        except subprocess.CalledProcessError as error:
            raise BadRequest(f"the image's packages cannot be locked: {error.stderr.strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise BadRequest(
                f"the package index did not resolve the image's packages within {COMPILE_SECONDS:.0f} s, so they cannot"
                " be locked"
            ) from error
    there = names_of(known)
    return known + "".join(f"{line}\n" for line in read_lock(done.stdout).splitlines() if name_of(line) not in there)
