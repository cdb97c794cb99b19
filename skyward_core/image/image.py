"""`Image`: what a node needs installed, as a value, and the script that installs it."""

import difflib
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from skyward_core.accelerators.cuda import cuda_of
from skyward_core.errors import BadRequest
from skyward_core.image import shell
from skyward_core.secret import masked, refuse_masks


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("an image is a value: make a new one, with env={**image.env, ...}")


class FrozenEnv(dict[str, str]):
    """Environment variables that compare as a dict, print as one without what looks like a secret, hash by value, and cannot be changed."""

    def __repr__(self) -> str:
        return repr(masked(self))

    __str__ = __repr__

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - a dict has none because it can change
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenEnv, (dict(self),)  # pickle would fill an empty one, item by item

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class Image(BaseModel):
    """What a node has installed.

    `python` is "major.minor" and defaults to the interpreter that builds the image: functions travel as bytecode, so both sides must agree.
    `pip` holds requirements (PEP 508) and `pip_extra_index_url` one more index beside the package index, asked as pip asks it: the best
    version of all indexes wins. `apt` holds Debian package names, also as "name=version". `env` is set in every call, its values
    literally; in repr and JSON those that look like secrets are masked (docs/secrets.md). With `cache` a provider that can keep disks (AWS) keeps
    that of the first machine with these packages, and later machines start from it; elsewhere it changes nothing. Lists become tuples. Raises
    pydantic's ValidationError (a ValueError) before anything starts.

    >>> Image(python="3.13", pip=["torch"], env={"OMP_NUM_THREADS": "1"}).pip
    ('torch',)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    python: str = Field(default_factory=lambda: "{}.{}".format(*sys.version_info))
    pip: Sequence[str] = ()
    pip_extra_index_url: str | None = None
    apt: Sequence[str] = ()
    env: Annotated[dict[str, str], AfterValidator(FrozenEnv)] = Field(default_factory=FrozenEnv)
    cache: bool = False

    _RESERVED: ClassVar = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
    """Read-only in bash: exporting one of them fails (bash(1), "Shell Variables")."""

    @property
    def is_bare(self) -> bool:
        """Whether there is nothing to install beside the node's own needs; `env` does not count."""
        return not self.pip and not self.apt

    @property
    def min_cuda(self) -> float | None:
        """The CUDA that `pip` and `pip_extra_index_url` speak of, as "+cu128" and ".../whl/cu128" do; None if they do not.

        >>> Image(pip=["torch"], pip_extra_index_url="https://download.pytorch.org/whl/cu128").min_cuda
        12.8
        """
        told = [version for text in (*self.pip, self.pip_extra_index_url or "") if (version := cuda_of(text)) is not None]
        return max(told, default=None)

    def content_hash(self, *, runtime: Sequence[str] | None = None) -> str:
        """Return 12 hexadecimal characters that name what is on the disk of a prepared machine; it names environments and snapshots.

        Two images have the same if and only if they install the same: python, pip, apt (in any order), the extra index and `runtime`, what
        the node itself needs (default: `runtime_pins()`). `env` is left out: it is exported after the installation and cannot change it; and so is `cache`.
        The same in every process and on every machine.
        """
        parts = {
            "python": self.python,
            "pip": sorted(set(self.pip)),
            "pip_extra_index_url": self.pip_extra_index_url,
            "apt": sorted(set(self.apt)),
            "runtime": sorted(set(runtime_pins() if runtime is None else runtime)),
        }
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def bootstrap(self, ttl: int = 0, *, runtime: Sequence[str] | None = None) -> str:
        """Return a bash script that prepares a machine for this image, as whoever runs it. It may run twice: then it installs nothing.

        `ttl`, in seconds, turns the machine off so long after the script started (root or sudo needed); 0 means never. `runtime` is as in
        `content_hash`. Everything lives under `$SKYWARD_HOME` (default `~/.cache/skyward`), but uv's own cache, which stays
        where uv has it; the environment is `$SKYWARD_HOME/envs/<content_hash>`. `$SKYWARD_UV` names uv's binary and `$SKYWARD_PYTHON` an
        interpreter of the right version, if they are set. Lines on stdout that begin with `::skyward ` tell the phases, the failure and the
        end (see `shell`). What is appended runs in the same shell, under the same trap, with the image's `env`, `SKYWARD_HOME` and
        `SKYWARD_ENV_PYTHON` (the environment's interpreter) exported; it may call `skyward_phase NAME`.

        Raises BadRequest if `ttl` is negative.
        """
        if ttl < 0:
            raise BadRequest(f"ttl={ttl} seconds is in the past: give 0 for a machine that is not turned off by itself, or more")
        refuse_masks(self.env, "the image's env")
        pins = tuple(runtime_pins() if runtime is None else runtime)
        return shell.script(
            shell.prelude(),
            shell.export(self.env),  # first: indexes and proxies for what is installed stand here
            shell.shutdown_after(ttl),
            shell.python_environment(self.content_hash(runtime=pins), self.python, (*pins, *self.pip), self.pip_extra_index_url, self.apt),
            'export SKYWARD_ENV_PYTHON="$skyward_environment/bin/python"',
            shell.done("deps"),
        )

    @field_serializer("env", when_used="json")
    def _without_secrets(self, env: dict[str, str]) -> dict[str, str]:
        return masked(env)

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, data: Any) -> Any:
        return refuse_unknown_fields(cls, data)

    @field_validator("python")
    @classmethod
    def _look_like_a_version(cls, python: str) -> str:
        if not re.fullmatch(r"3\.[0-9]{1,2}", python):
            raise ValueError(f'python={python!r} is not a version of Python 3 as major.minor: write "3.13"')
        return python

    @field_validator("pip")
    @classmethod
    def _look_like_requirements(cls, pip: Sequence[str]) -> tuple[str, ...]:
        for entry in pip:
            if not entry.strip() or not entry.isprintable():
                raise ValueError(f'pip has the entry {entry!r}: each must be one requirement on one line, as "torch>=2.9"')
            if entry.lstrip().startswith("-"):
                raise ValueError(f"pip has the entry {entry!r}, an option: only requirements can stand here; an index goes to pip_extra_index_url")
        return tuple(entry.strip() for entry in pip)

    @field_validator("pip_extra_index_url")
    @classmethod
    def _look_like_an_index(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "file") or not url.isprintable() or " " in url:
            raise ValueError(f'pip_extra_index_url={url!r} is not the URL of an index: write "https://..."')
        if parts.username is not None:
            raise ValueError("pip_extra_index_url must not hold a password or token, for images are written to logs: put it into ~/.netrc on the machine")
        return url

    @field_validator("apt")
    @classmethod
    def _look_like_debian_packages(cls, apt: Sequence[str]) -> tuple[str, ...]:
        for entry in apt:
            if not _DEBIAN_PACKAGE.fullmatch(entry):
                raise ValueError(f'apt has the entry {entry!r}: write the name of a Debian package, as "ffmpeg" or "ffmpeg=7:5.1.6-0+deb12u1"')
        return tuple(apt)

    @field_validator("env")
    @classmethod
    def _can_be_exported(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"env has {name!r}: a name is made of letters, digits and underscores, and does not begin with a digit")
            if name in cls._RESERVED or name.startswith("SKYWARD_"):
                raise ValueError(f"env has {name!r}, which belongs to {'us' if name.startswith('SKYWARD_') else 'bash'}: choose another name")
            if "\0" in value:
                raise ValueError(f"env[{name!r}] holds a NUL character, which no environment variable can")
        return env


def runtime_pins() -> tuple[str, ...]:
    """Return what a node needs to run calls, at the versions that this client has: both ends of Dask's protocol must be the same."""
    return tuple(f"{name}=={version(name)}" for name in ("cloudpickle", "dask", "distributed", "nvidia-ml-py", "psutil", "uvloop"))


def refuse_unknown_fields(model: type[BaseModel], data: Any) -> Any:
    """Return `data`, or raise a ValueError that names the nearest field if it is a mapping with a field that `model` has not."""
    if isinstance(data, dict):
        for name in data:  # pyright: ignore[reportUnknownVariableType] - whatever the user wrote
            if name not in model.model_fields:
                nearest = difflib.get_close_matches(str(name), model.model_fields, n=1, cutoff=0.0)[0]  # pyright: ignore[reportUnknownArgumentType]
                raise ValueError(f"{model.__name__} has no field {name!r}: did you mean {nearest!r}?")
    return data  # pyright: ignore[reportUnknownVariableType]


# Names: Debian Policy 5.6.1. A trailing "-" would make apt-get remove the package.
_DEBIAN_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.](:[a-z0-9-]*[a-z0-9])?([=/][A-Za-z0-9.+:~-]*[A-Za-z0-9.+~])?")
