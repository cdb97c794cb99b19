"""`Image`: the packages and environment of a node, as a value, and the script that installs them."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from skyward_core.accelerators.catalog import cuda_of
from skyward_core.errors import BadRequest
from skyward_core.frozen import Frozen
from skyward_core.image import local_files, shell
from skyward_core.image.local_files import IncludedFiles, LocalFile, NodeFile, included_in, pinned
from skyward_core.image.packages import NAME, Step, canonical, lacks, locked, locked_steps, name_of, read_lock, steps
from skyward_core.secret import looks_secret, masked, refuse_masks

_RESERVED = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
"""Read-only in bash: exporting one of them fails (bash(1), "Shell Variables")."""
_LOGIN_IN_SHELL = re.compile(r"https?://[^/?#\s@$]+@")
_LOGIN = re.compile(r"https?://(?!\$\{)[^/?#\s@]+@")
# Names: Debian Policy 5.6.1. A trailing "-" would make apt-get remove the package.
_DEBIAN_PACKAGE = re.compile(
    r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.](:[a-z0-9-]*[a-z0-9])?([=/][A-Za-z0-9.+:~-]*[A-Za-z0-9.+~])?"
)
_ENTER = """mkdir -p -- "$SKYWARD_INSTANCE_DIRECTORY/work"
cd -- "$SKYWARD_INSTANCE_DIRECTORY/work" || exit 1"""
_UNPACK = r"""skyward_unpack() { # archive, folder
  tar -xzf "$1" -C "$2"
}
"""
# A service that a command starts must not inherit the lock, so 9>&- closes it.
_COMMANDS = r"""skyward_prepare() { # key, archive or "", commands
  local made="$skyward_environment/prepared/$1" archive=$2
  shift 2
  skyward_phase shell
  skyward_lock "$made.lock"
  if [ ! -f "$made.complete" ]; then
    skyward_run rm -rf -- "$made"
    skyward_run mkdir -p -- "$made"
    [ -z "$archive" ] || skyward_run skyward_unpack "$archive" "$made"
    for skyward_command; do
      (cd -- "$made" && PATH="$skyward_environment/bin:$SKYWARD_HOME/uv/bin:$PATH" VIRTUAL_ENV="$skyward_environment" exec bash -eo pipefail -c "$skyward_command") </dev/null 9>&-
    done
    skyward_command=
    : >"$made.complete"
  fi
  skyward_run cp -a -- "$made/." .
  skyward_unlock
}
"""  # noqa: E501


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("an image cannot be changed: create a new one, with env={**image.env, ...}")


class FrozenIndexes(dict[str, tuple[str, ...]]):
    """Packages by their index; compares and prints as a dict, hashes by value, and cannot be changed."""

    # A dict has no hash, because it can change.
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenIndexes, (dict(self),)

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class FrozenEnv(dict[str, str]):
    """Environment variables; compares as a dict, prints without likely secrets, hashes by value, cannot be changed."""

    def __repr__(self) -> str:
        return repr(masked(self))

    __str__ = __sentry_repr__ = __repr__

    # A dict has no hash, because it can change.
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenEnv, (dict(self),)  # by default pickle fills an empty one, item by item

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class Image(Frozen):
    """The packages and environment of a node, as a frozen value: lists become tuples.

    In repr and JSON, values of `env` that look like secrets are masked (docs/secrets.md). `pip_extra_index_url` has
    precedence over the package index for each package that it has, in any version; `pip_indexes` is safer. With
    `require_hashes` the package index gives this client the hashes before anything is rented. Files of this machine are
    read now, and are known by content: one that changes before the pool opens is refused. Raises BadRequest before
    anything starts.

    >>> Image(python="3.13", pip=["torch"], env={"OMP_NUM_THREADS": "1"}).pip
    ('torch',)
    """

    examples: ClassVar[Mapping[str, str]] = {
        "python": '"3.12"',
        "pip": '["torch", "numpy==2.4"]',
        "pip_indexes": '{"torch": "https://download.pytorch.org/whl/cu128"}',
        "apt": '["ffmpeg"]',
        "env": '{"NAME": "value"}',
        "preload": '["torch"]',
        "includes": '["src"]',
        "excludes": '["*.ckpt"]',
        "shell": '["nvidia-smi"]',
    }

    model_config = ConfigDict(hide_input_in_errors=True)
    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("packages", "pip_install", "pip_packages", "requirements"), "pip"),
        **dict.fromkeys(("apt_install", "apt_packages", "system_packages"), "apt"),
        **dict.fromkeys(("environment", "env_vars"), "env"),
        **dict.fromkeys(("include", "files", "file_mounts", "local_files", "workdir"), "includes"),
        **dict.fromkeys(("exclude", "ignore"), "excludes"),
        **dict.fromkeys(("setup", "commands", "run_commands", "setup_commands"), "shell"),
    }

    python: str = Field(
        default_factory=lambda: "{}.{}".format(*sys.version_info),
        description=(
            'Python on the nodes, as "3.13": that of this client, because functions travel as bytecode. A pool refuses'
            " another one."
        ),
    )
    pip: Sequence[str] = Field(
        default=(),
        description=(
            "Requirements (PEP 508), and paths of wheels, source archives and requirements files of this machine."
        ),
    )
    pip_extra_index_url: str | None = Field(
        default=None,
        description="Another index: packages that it has come from it, the others from the package index.",
    )
    pip_indexes: Annotated[dict[str, tuple[str, ...]], AfterValidator(FrozenIndexes)] = Field(
        default_factory=FrozenIndexes,
        description="URLs of other indexes, each with the names of the packages that come from it and only from it.",
    )
    require_hashes: bool = Field(default=False, description="Install only files whose hashes are known.")
    lock: str | None = Field(
        default=None,
        repr=False,
        description="A lock file with hashes, as its path or its text, in place of `pip`.",
    )
    apt: Sequence[str] = Field(default=(), description='Debian packages, also as "name=version".')
    env: Annotated[dict[str, str], AfterValidator(FrozenEnv)] = Field(
        default_factory=FrozenEnv,
        description="Environment variables of the preparation and of each call; values are literal.",
    )
    preload: Sequence[str] = Field(
        default=(),
        description=(
            "Modules that a node imports once, before it starts the processes of calls. One that cannot be imported,"
            " starts threads or opens a GPU is skipped with a warning."
        ),
    )
    excludes: Sequence[str] = Field(
        default=(), description='Patterns ("*.ckpt", "data/raw") of what of the included folders does not travel.'
    )
    includes: Sequence[str] = Field(
        default=(),
        description=(
            "Files and folders of this machine: calls find them at the same relative path below their working"
            " directory."
        ),
    )
    shell: Sequence[str] = Field(
        default=(),
        description=(
            "Commands of bash that run once on each machine, after the packages are installed and before the first"
            " call, where the included files are. One that fails ends the preparation."
        ),
    )
    cache: bool = Field(
        default=False,
        description=(
            "Keep the disk of the first machine with these packages, and start later machines from it. AWS can; with"
            " other providers it has no effect."
        ),
    )

    @property
    def is_bare(self) -> bool:
        """Whether only the node's own packages are installed; `env` does not count."""
        return not self.pip and not self.apt and self.lock is None

    @property
    def min_cuda(self) -> float | None:
        """The CUDA version in the names of the packages and their indexes, as "+cu128"; None if they have none.

        >>> Image(pip=["torch"], pip_extra_index_url="https://download.pytorch.org/whl/cu128").min_cuda
        12.8
        """
        versions = [
            version
            for text in (*self.pip, *(self.lock or "").splitlines(), *self.pip_indexes, self.pip_extra_index_url or "")
            if (version := cuda_of(text)) is not None
        ]
        return max(versions, default=None)

    @property
    def files(self) -> tuple[LocalFile, ...]:
        """The files of this machine among the packages."""
        return tuple(dict.fromkeys(local_files.files_in("\n".join((*self.pip, self.lock or "")))))

    @property
    def included(self) -> tuple[IncludedFiles, ...]:
        """The included files: one archive, or none."""
        return (IncludedFiles(included_in(self.includes), tuple(self.excludes)),) if self.includes else ()

    @property
    def uploads(self) -> tuple[NodeFile, ...]:
        """All that a machine gets from this one."""
        return (*self.files, *self.included)

    def refuse_changed_files(self) -> None:
        """Raise BadRequest for a file that has changed since the image was made, or is gone."""
        for file in self.files:
            if not file.is_unchanged:
                what = "has changed since this image was made" if file.path.exists() else "is not on this machine"
                raise BadRequest(f"{file.path} {what}: make the image again, with the file that is to be installed")
        for files in self.included:
            if changed := files.changed:
                raise BadRequest(f"{changed}: make the image again, with the files that are to be included")

    def content_hash(self, *, runtime: Sequence[str] | None = None) -> str:
        """Return 12 hexadecimal characters that identify the installed software; they name environments and snapshots.

        Two images have the same hash if and only if they install the same: python, pip, apt (in any order), the
        indexes, hashes and `runtime`, the node's own packages (default: `runtime_pins()`). `env`, `preload`,
        `includes`, `shell` and `cache` are left out, because they do not change the installation of packages. The hash
        is the same in every process and on every machine.
        """
        parts: dict[str, Any] = {
            "python": self.python,
            "pip": sorted({local_files.without_folders(entry) for entry in self.pip}),
            "pip_extra_index_url": self.pip_extra_index_url,
            "apt": sorted(set(self.apt)),
            "runtime": sorted(set(runtime_pins() if runtime is None else runtime)),
        }
        if self.pip_extra_index_url is not None:
            parts["index_strategy"] = "first-index"
        if self.pip_indexes:
            parts["pip_indexes"] = {
                url: sorted({canonical(name) for name in names}) for url, names in self.pip_indexes.items()
            }
        if self.require_hashes or self.lock is not None:
            parts["lock"] = sorted(local_files.without_folders(self.lock).splitlines()) if self.lock is not None else []
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def locked(self, *, runtime: Sequence[str] | None = None) -> Image:
        """Return this image with a complete lock; the image itself if it has one, or needs none.

        Versions and hashes come from the package index of this client, or from the one that `env` names. `runtime` is
        as in `content_hash`. Raises BadRequest if the index does not give them.
        """
        pins = tuple(runtime_pins() if runtime is None else runtime)
        known = self.lock or ""
        if (not self.require_hashes and self.lock is None) or (self.lock is not None and not lacks(known, pins)):
            return self
        wanted = pins if self.lock is not None else (*pins, *self.pip)
        lock = locked(self.python, wanted, self.pip_indexes if self.lock is None else {}, known, self.env)
        return self.model_copy(update={"pip": (), "lock": lock})

    def bootstrap(self, ttl: int = 0, *, runtime: Sequence[str] | None = None) -> str:
        """Return a bash script that prepares a machine for this image, as any user. It is idempotent.

        `ttl`, in seconds, turns the machine off this long after the script started (root or sudo needed); 0 means
        never. `runtime` is as in `content_hash`. All files are under `$SKYWARD_HOME` (default `~/.cache/skyward`),
        except uv's own cache; the environment is `$SKYWARD_HOME/envs/<content_hash>`. `$SKYWARD_UV` names uv's binary
        and `$SKYWARD_PYTHON` an interpreter of the right version, if they are set. Lines on stdout that begin with
        `::skyward ` report the phases, the failure and the end (see `shell`). Appended text runs in the same shell,
        under the same trap, with the image's `env`, `SKYWARD_HOME` and `SKYWARD_ENV_PYTHON` (the environment's
        interpreter) exported. It may call `skyward_phase NAME`.

        Raises BadRequest if `ttl` is negative, and for an image with hashes that is not `locked`.
        """
        if ttl < 0:
            raise BadRequest(f"ttl={ttl} seconds is in the past: give 0 for a machine that is not turned off, or more")
        refuse_masks(self.env, "the image's env")
        pins = tuple(runtime_pins() if runtime is None else runtime)
        return shell.script(
            shell.prelude(),
            shell.export(self.env),  # first: it may have the indexes and proxies for the installation
            shell.shutdown_after(ttl),
            shell.python_environment(self.content_hash(runtime=pins), self.python, self._steps(pins), self.apt),
            'export SKYWARD_ENV_PYTHON="$skyward_environment/bin/python"',
            shell.done("deps"),
        )

    @field_serializer("env", when_used="json")
    def _without_secrets(self, env: dict[str, str]) -> dict[str, str]:
        return masked(env)

    def _steps(self, pins: Sequence[str]) -> list[Step]:
        if self.lock is None and not self.require_hashes:
            return steps(pins, self.pip, self.pip_extra_index_url, self.pip_indexes)
        if self.lock is None or lacks(self.lock, pins):
            raise BadRequest(
                "the image's packages have no hashes yet: use image.locked(), which gets them from the package index"
            )
        extra = [self.pip_extra_index_url] if self.pip_extra_index_url is not None else []
        return locked_steps(self.lock, [*self.pip_indexes, *extra])

    @field_validator("python")
    @classmethod
    def _look_like_a_version(cls, python: str) -> str:
        if not re.fullmatch(r"3\.[0-9]{1,2}", python):
            raise ValueError(f'python={python!r} is not a version of Python 3 as major.minor: write "3.13"')
        return python

    @field_validator("pip")
    @classmethod
    def _look_like_requirements(cls, pip: Sequence[str]) -> tuple[str, ...]:
        requirements: list[str] = []
        for entry in pip:
            if not entry.strip() or not entry.isprintable():
                raise ValueError(
                    f'pip has the entry {entry!r}: each must be one requirement on one line, as "torch>=2.9"'
                )
            if entry.lstrip().startswith("-"):
                raise ValueError(
                    f"pip has the entry {entry!r}, an option: only requirements are allowed here; an index goes to"
                    " pip_extra_index_url"
                )
            requirements += local_files.expanded(entry.strip())
        for entry in requirements:
            _refuse_login("pip", entry)
        return tuple(requirements)

    @field_validator("pip_extra_index_url")
    @classmethod
    def _look_like_an_index(cls, url: str | None) -> str | None:
        return None if url is None else _sound_index("pip_extra_index_url", url)

    @field_validator("pip_indexes")
    @classmethod
    def _look_like_indexes(cls, indexes: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for url in indexes:
            _sound_index("pip_indexes", url)
        names = [canonical(name) for listed in indexes.values() for name in listed]
        for url, listed in indexes.items():
            if not listed:
                raise ValueError(f"pip_indexes names no package for {url}: write which ones come from there")
            if wrong := [name for name in listed if not NAME.fullmatch(name)]:
                raise ValueError(
                    f"pip_indexes has {wrong[0]!r}: write the name of a package alone; its version goes to pip"
                )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"pip_indexes names {twice[0]!r} twice: a package comes from one index")
        return indexes

    @field_validator("lock")
    @classmethod
    def _read_lock(cls, lock: str | None) -> str | None:
        if lock is None:
            return None
        is_text = "\n" in lock or "--hash" in lock
        try:
            text = read_lock(lock if is_text else Path(lock).read_text())
        except OSError as error:
            raise ValueError(f"lock={lock!r} cannot be read: {error.strerror}") from error
        for line in text.splitlines():
            _refuse_login("lock", line)
        return text

    @model_validator(mode="after")
    def _has_no_contradictions(self) -> Image:
        if self.lock is not None:
            if self.pip:
                raise ValueError(
                    "pip and lock cannot be together: lock the packages too (uv pip compile --generate-hashes)"
                )
            return self
        listed = {name_of(entry) for entry in self.pip}
        if strangers := [
            name for names in self.pip_indexes.values() for name in names if canonical(name) not in listed
        ]:
            raise ValueError(f"pip_indexes names {strangers[0]!r}, which is not in pip: name it there too")
        if self.require_hashes and self.pip_extra_index_url is not None:
            raise ValueError(
                "require_hashes and pip_extra_index_url cannot be together: list the packages from there with"
                " pip_indexes, or give a lock"
            )
        return self

    @field_validator("apt")
    @classmethod
    def _look_like_debian_packages(cls, apt: Sequence[str]) -> tuple[str, ...]:
        for entry in apt:
            if not _DEBIAN_PACKAGE.fullmatch(entry):
                raise ValueError(
                    f'apt has the entry {entry!r}: write the name of a Debian package, as "ffmpeg" or'
                    ' "ffmpeg=7:5.1.6-0+deb12u1"'
                )
        return tuple(apt)

    @field_validator("preload")
    @classmethod
    def _look_like_modules(cls, preload: Sequence[str]) -> tuple[str, ...]:
        for entry in preload:
            if not all(part.isidentifier() for part in entry.split(".")):
                raise ValueError(f'preload has {entry!r}: write the names of modules as in an import, "sklearn.tree"')
        return tuple(preload)

    @field_validator("excludes")
    @classmethod
    def _look_like_patterns(cls, excludes: Sequence[str]) -> tuple[str, ...]:
        for pattern in excludes:
            if not pattern.strip("/") or pattern.startswith(("/", "./", "../", "!")):
                raise ValueError(
                    f'excludes has {pattern!r}: write a name ("*.ckpt"), or a path below the working directory of the'
                    ' calls ("data/raw")'
                )
        return tuple(excludes)

    @field_validator("includes")
    @classmethod
    def _pin_what_is_included(cls, includes: Sequence[str], info: ValidationInfo) -> tuple[str, ...]:
        try:
            return pinned(includes, info.data.get("excludes", ()))
        except OSError as error:
            raise ValueError(f"{error.filename}, which the image includes, cannot be read: {error.strerror}") from error

    @field_validator("shell")
    @classmethod
    def _look_like_commands(cls, shell: Sequence[str]) -> tuple[str, ...]:
        for command in shell:
            if not command.strip() or "\0" in command:
                raise ValueError(f'shell has {command!r}: write commands of bash, as "python -m spacy download de"')
            if _LOGIN_IN_SHELL.search(command):
                raise ValueError(
                    "shell must not hold a password or token, because images are written to logs and the ledger:"
                    " put it into env, and write $NAME in the command"
                )
        return tuple(shell)

    @field_validator("env")
    @classmethod
    def _can_be_exported(cls, env: dict[str, str]) -> dict[str, str]:
        refuse_unexportable(env)
        return env


def refuse_unexportable(env: Mapping[str, str]) -> None:
    """Raise BadRequest for variables that no script can export, and for names reserved for Skyward."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise BadRequest(
                f"env has {name!r}: a name is made of letters, digits and underscores, and does not begin with a digit"
            )
        if name in _RESERVED or name.startswith("SKYWARD_"):
            raise BadRequest(
                f"env has {name!r}, which is reserved for {'Skyward' if name.startswith('SKYWARD_') else 'bash'}:"
                " choose another name"
            )
        if "\0" in value:
            raise BadRequest(f"env[{name!r}] holds a NUL character, which no environment variable can")


def _refuse_login(field: str, requirement: str) -> None:
    """Raise ValueError for a package's URL that contains a user, which over HTTP means a password or a token.

    The user of git over SSH is no secret.
    """
    if _LOGIN.search(requirement):
        what = name_of(requirement) if "@" in requirement.partition("://")[0] else "a package"
        raise ValueError(
            f"{field} must not hold a password or token, because images are written to logs and the ledger, and {what}"
            " comes from a URL with one: put it into ~/.netrc on the machine, or for git into env, as GIT_CONFIG_KEY_0"
        )


def _sound_index(field: str, url: str) -> str:
    """Return the URL of an index. Raises ValueError for anything else, and for one with a secret in it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "file") or not url.isprintable() or " " in url:
        raise ValueError(f'{field}={url!r} is not the URL of an index: write "https://..."')
    if parts.username is not None:
        raise ValueError(
            f"{field} must not hold a password or token, because images are written to logs: put it into ~/.netrc on"
            " the machine"
        )
    return url


def runtime_pins() -> tuple[str, ...]:
    """Return a node's own packages at this client's versions: both ends of Dask's protocol need the same ones."""
    return tuple(
        f"{name}=={version(name)}"
        for name in ("cloudpickle", "dask", "distributed", "nvidia-ml-py", "psutil", "uvloop")
    )


# Shell text that makes the working directory of the calls: the image's included files, and what its commands make.
#
# As in `shell`, the program is constant and values enter it only as quoted words.


def make_work(image: Image, archive: str, env: Mapping[str, str]) -> str:
    """Return lines of bash that fill the working directory of the calls and enter it.

    They follow `Image.bootstrap()`'s text, or `shell.prelude()`, in the same shell, and need
    `$SKYWARD_INSTANCE_DIRECTORY`. `archive` is the path of the included files on the node, as a word of bash,
    and `env` has the variables that commands see.

    Without commands the archive is unpacked for each node. With commands the phase is "shell". They run once on each
    machine, in a directory that keeps what they make, and each node gets a copy of it. They run again, in an empty
    directory, if the commands, the included files, the packages or a variable that they name are others, and after a
    failure or a kill.
    """
    if not image.shell:
        unpack = f'skyward_run skyward_unpack {archive} "$PWD"' if image.included else ""
        return "\n".join([_ENTER, *([_UNPACK, unpack] if unpack else [])])
    parts = [image.content_hash(), *(one.sha256 for one in image.included), list(image.shell), _named(image.shell, env)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    words = f"{key} {archive if image.included else shlex.quote('')} {shlex.join(image.shell)}"
    return "\n".join([_ENTER, _UNPACK, _COMMANDS, f"skyward_prepare {words}"])


def _named(commands: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names are in the commands. A token decides who may read, and not what is read: a new
    one is no reason to run them again.
    """
    words = set(re.findall(r"\w+", " ".join(commands)))
    return {name: value for name, value in sorted(env.items()) if name in words and not looks_secret(name, value)}
