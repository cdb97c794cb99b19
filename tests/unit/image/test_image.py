"""Images: refused values, the content hash, and the effect of the script on a machine."""

import json
import os
import pickle
import shutil
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uv
from pydantic import ValidationError

import skyward_core as sky
from skyward_core.errors import BadRequest
from skyward_core.image import uv_wheels
from skyward_core.image.image import Image, runtime_pins
from skyward_core.transport import code_upload

HERE = "{}.{}".format(*sys.version_info)
ROOT = Path(__file__).parents[3]

# ── the value ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_of_the_reference():
    """The reference's image is valid as written; lists become tuples, and no field is required."""
    image = Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg"], env={"CUDA_VISIBLE_DEVICES": "0"})
    assert (image.python, image.pip, image.apt, image.env) == (
        "3.13",
        ("torch", "numpy"),
        ("ffmpeg",),
        {"CUDA_VISIBLE_DEVICES": "0"},
    )
    assert (type(image.pip), type(image.apt)) == (tuple, tuple)
    assert (Image().python, Image().pip, Image().pip_extra_index_url, Image().apt, Image().env) == (
        HERE,
        (),
        None,
        (),
        {},
    )


def test_an_image_is_a_value():
    """Images compare and hash by value, in any order of variables, and survive JSON and pickle."""
    image = Image(pip=["six"], env={"A": "1", "B": "two\nlines"})
    assert len({image, Image(env={"B": "two\nlines", "A": "1"}, pip=("six",))}) == 1
    assert Image.model_validate_json(image.model_dump_json()) == image
    again = pickle.loads(pickle.dumps(image))
    assert again == image
    assert hash(again) == hash(image)
    assert json.loads(image.model_dump_json())["env"] == {"A": "1", "B": "two\nlines"}


def test_an_image_cannot_be_changed():
    """Neither a field nor a variable of an image can be changed. The caller's own dict is not shared."""
    variables = {"A": "1"}
    image = Image(env=variables)
    variables["A"] = "2"
    with pytest.raises(ValidationError):
        image.python = "3.12"
    for change in (
        lambda env: env.__setitem__("A", "3"),
        lambda env: env.update(A="3"),
        lambda env: env.pop("A"),
        lambda env: env.clear(),
        lambda env: env.setdefault("B", "3"),
        lambda env: env.__ior__({"B": "3"}),
    ):
        with pytest.raises(TypeError, match="create a new one"):
            change(image.env)
    assert image.env == {"A": "1"}


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"pyhton": "3.13"}, "did you mean 'python'"),
        ({"pip_extra_index": "https://x.org"}, "did you mean 'pip_extra_index_url'"),
        ({"packages": ["six"]}, "did you mean '"),
        ({"pip": ["torch"], "pip_indexes": {"https://me:secret@x.org": ["torch"]}}, "must not hold a password"),
        ({"pip": ["torch"], "pip_indexes": {"x.org": ["torch"]}}, "is not the URL of an index"),
        ({"pip": ["torch"], "pip_indexes": {"https://x.org": []}}, "names no package"),
        ({"pip": ["torch"], "pip_indexes": {"https://x.org": ["torch>=2"]}}, "write the name of a package alone"),
        (
            {"pip": ["torch"], "pip_indexes": {"https://x.org": ["torch"], "https://y.org": ["Torch"]}},
            "a package comes from one index",
        ),
        ({"pip": ["torch"], "pip_indexes": {"https://x.org": ["torchvision"]}}, "which is not in pip"),
        ({"pip": ["torch"], "pip_extra_index_url": "https://x.org", "require_hashes": True}, "with pip_indexes"),
        ({"pip": ["torch"], "lock": "torch==1 --hash=sha256:1"}, "pip and lock cannot be together"),
        ({"pip": ["ours @ git+https://x:hunter2@github.com/o/ours"]}, "and ours comes from a URL with one"),
        (
            {"pip": ["https://hunter2@files.example.org/ours-1-py3-none-any.whl"]},
            "pip must not hold a password or token",
        ),
        (
            {"lock": "ours @ https://me:hunter2@files.example.org/ours.whl --hash=sha256:1\n"},
            "lock must not hold a password or token",
        ),
        ({"lock": "/no/such/file"}, "cannot be read: No such file"),
        ({"lock": "# nothing\n"}, "names no package"),
        ({"lock": "torch==1\n"}, "without a sha256 hash"),
        ({"lock": "torch==1 --hash=md5:1\n"}, "without a sha256 hash"),
        ({"lock": "torch>=1 --hash=sha256:1\n"}, "without a version"),
        ({"lock": "-e .\n"}, "only packages are allowed in it"),
        ({"lock": "--extra-index-url https://x.org\n"}, "only packages are allowed in it"),
        (
            {"lock": 'lock-version = "1.0"\n[[packages]]\nname = "own"\ndirectory = {path = "."}\n'},
            "'own' from a folder or a repository",
        ),
        ({"python": "3"}, 'write "3.13"'),
        ({"python": "3.13.1"}, 'write "3.13"'),
        ({"python": "python3.13"}, 'write "3.13"'),
        ({"python": "3.13\n"}, 'write "3.13"'),
        ({"python": 3.13}, "string"),
        ({"pip": "torch"}, "not allowed as a Sequence"),
        ({"pip": [""]}, "one requirement"),
        ({"pip": ["  "]}, "one requirement"),
        ({"pip": ["six\nseven"]}, "one requirement"),
        ({"pip": ["six\0"]}, "one requirement"),
        ({"pip": ["--index-url=https://x.org"]}, "pip_extra_index_url"),
        ({"pip": [" -r requirements.txt"]}, "an option"),
        ({"pip_extra_index_url": "x.org/simple"}, "https://"),
        ({"pip_extra_index_url": "https://x.org/a b"}, "https://"),
        ({"pip_extra_index_url": "https://user:secret@x.org/simple"}, "netrc"),
        ({"pip_extra_index_url": "https://token@x.org/simple"}, "netrc"),
        ({"apt": ["FFmpeg"]}, "Debian package"),
        ({"apt": ["ffmpeg-"]}, "Debian package"),
        ({"apt": ["-y"]}, "Debian package"),
        ({"apt": ["a b"]}, "Debian package"),
        ({"apt": ["ffmpeg;reboot"]}, "Debian package"),
        ({"apt": ["ffmpeg\n"]}, "Debian package"),
        ({"env": {"1A": ""}}, "does not begin with a digit"),
        ({"env": {"A-B": ""}}, "letters, digits"),
        ({"env": {"É": ""}}, "letters, digits"),
        ({"env": {"A\n": ""}}, "letters, digits"),
        ({"env": {"": ""}}, "letters, digits"),
        ({"env": {"UID": "0"}}, "bash"),
        ({"env": {"SKYWARD_HOME": "/"}}, "reserved for Skyward"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"A": 1}}, "string"),
    ],
)
def test_invalid_fields_are_refused_with_advice(fields, advice):
    """A wrong field raises a ValueError when the image is created. Its message has the right form."""
    with pytest.raises(BadRequest) as caught:
        Image(**fields)
    assert advice in str(caught.value)
    assert "secret" not in str(caught.value).partition("[type=")[0]


def test_an_error_contains_no_password():
    """Neither its text nor its cause has it. SSH user names and variables that the node replaces are no passwords."""
    for requested in (
        {"pip": ["ours @ git+https://x:hunter2@github.com/o/ours"]},
        {"pip_extra_index_url": "https://x:hunter2@pypi.example.org"},
    ):
        with pytest.raises(BadRequest) as caught:
            Image(**requested)
        assert "hunter2" not in repr(caught.value) + str(caught.value) + str(caught.value.__cause__)
    assert Image(pip=["a @ git+ssh://git@github.com/o/a", "b @ git+https://${TOKEN}@github.com/o/b"]).pip


@pytest.mark.parametrize(
    "package",
    [
        "ffmpeg",
        "g++",
        "libstdc++6",
        "libc6:amd64",
        "ffmpeg=7:5.1.6-0+deb12u1",
        "git/bookworm-backports",
        "r-base",
        "7zip",
    ],
)
def test_valid_debian_names_are_accepted(package):
    """A package's name may have an architecture, version or release."""
    assert Image(apt=[package]).apt == (package,)


def test_an_image_without_packages_is_bare():
    """Variables are ignored."""
    assert Image().is_bare
    assert Image(env={"A": "1"}).is_bare
    assert not Image(pip=["six"]).is_bare
    assert not Image(apt=["ffmpeg"]).is_bare


# ── the content hash ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hash_identifies_the_installed_software():
    """The order of packages does not matter, any other difference does; variables are not installed."""
    one = Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg", "git"])
    name = one.content_hash(runtime=["dask==1"])
    assert len(name) == 12
    assert set(name) <= set(string.hexdigits.lower())
    for same in (
        Image(apt=["git", "ffmpeg"], pip=["numpy", "torch"], python="3.13"),
        Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg", "git"], env={"A": "1"}),
        Image.model_validate_json(one.model_dump_json()),
    ):
        assert same.content_hash(runtime=["dask==1"]) == name
    others = [
        Image(python="3.12", pip=["torch", "numpy"], apt=["ffmpeg", "git"]),
        Image(python="3.13", pip=["torch"], apt=["ffmpeg", "git"]),
        Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg"]),
        Image(python="3.13", pip=["torch", "numpy", "git"], apt=["ffmpeg"]),
        Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg", "git"], pip_extra_index_url="https://x.org"),
        Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg", "git"], pip_indexes={"https://x.org": ["torch"]}),
        Image(
            python="3.13",
            pip=["torch", "numpy"],
            apt=["ffmpeg", "git"],
            pip_indexes={"https://x.org": ["torch", "numpy"]},
        ),
        Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg", "git"], pip_indexes={"https://y.org": ["torch"]}),
        Image(python="3.13", pip=["torch", "numpy"], apt=["ffmpeg", "git"], require_hashes=True),
        Image(python="3.13", lock="torch==1 --hash=sha256:1", apt=["ffmpeg", "git"]),
        Image(python="3.13", lock="torch==1 --hash=sha256:2", apt=["ffmpeg", "git"]),
    ]
    assert len(
        {name, one.content_hash(runtime=["dask==2"]), *(other.content_hash(runtime=["dask==1"]) for other in others)}
    ) == 2 + len(others)


def test_the_runtime_pins_are_the_versions_of_this_client():
    """A node gets the versions of the client's own modules."""
    import cloudpickle
    import dask
    import distributed
    import psutil
    import uvloop

    assert {pin for pin in runtime_pins() if not pin.startswith("nvidia-ml-py==")} == {
        f"cloudpickle=={cloudpickle.__version__}",
        f"dask=={dask.__version__}",
        f"distributed=={distributed.__version__}",
        f"psutil=={psutil.__version__}",
        f"uvloop=={uvloop.__version__}",
    }
    assert any(pin.startswith("nvidia-ml-py==") for pin in runtime_pins())


# ── the script as text ───────────────────────────────────────────────────────────────────────────────────────────────

FULL = {
    "pip": ["torch>=2.9; python_version<'3.15'", "pkg[extra]==1.*", "a @ https://x.org/a.whl#sha256=0"],
    "pip_extra_index_url": "https://download.pytorch.org/whl/cu128?a=$(id)",
    "pip_indexes": {"https://pins.example.org/a'b?c=$(id)": ["pkg"]},
    "apt": ["ffmpeg", "g++", "git=1:2.39.5-0+deb12u2"],
    "env": {"A": 'it\'s "quoted" $(id) `id` \\ !', "PEM": "-----\nabc\n-----", "EMPTY": "", "_x9": "~/*"},
}


def test_an_image_always_has_the_same_script():
    """It can be compared and cached."""
    assert Image(**FULL).bootstrap(60) == Image(**FULL).bootstrap(60)


def test_a_negative_ttl_is_refused():
    """A machine cannot be turned off in the past."""
    with pytest.raises(BadRequest, match="ttl=-1"):
        Image().bootstrap(ttl=-1)


# ── the script, run with fakes for uv, apt and shutdown ──────────────────────────────────────────────────────────────


class Machine:
    """A home for the script, and a separate PATH with a few real tools and the fakes of a test."""

    TOOLS = (
        "bash",
        "sh",
        "cat",
        "env",
        "flock",
        "grep",
        "kill",
        "mkdir",
        "mv",
        "rm",
        "sleep",
        "setsid",
        "touch",
        "ln",
        "uname",
    )

    def __init__(self, root: Path) -> None:
        self.home = root / "sky home"
        self.bin = root / "bin"
        self.log = root / "log"
        self.bin.mkdir()
        self.log.touch()
        for tool in self.TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(root),
            "SKYWARD_HOME": str(self.home),
            "LOG": str(self.log),
            "REAL_PYTHON": sys.executable,
        }

    def stand_in(self, name: str, body: str) -> Path:
        """Put a command on the PATH. It logs its arguments, each in brackets, and then runs `body`."""
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(
            f"""#!{self.bin}/bash\nwords=$(printf ' [%s]' "$@")\nprintf '%s\\n' "{name}$words" >>"$LOG"\n{body}\n"""
        )
        path.chmod(0o755)
        return path

    def is_a(self, kind: str) -> None:
        """Set the output of `uname`."""
        self.stand_in("uname", f"case $1 in -s) echo Linux ;; -m) echo {kind} ;; esac")

    def uv(self, body: str = "") -> None:
        """Put a uv on the PATH. After `body` it creates an environment with a link to this interpreter."""
        self.stand_in(
            "uv",
            body + '\nif [ "$1" = venv ]; then mkdir -p "${@: -1}/bin"; ln -s "$REAL_PYTHON" "${@: -1}/bin/python"; fi',
        )

    def run(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "bash"],
            input=script,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def called(self, name: str) -> list[str]:
        return [line.removeprefix(f"{name} ") for line in self.log.read_text().splitlines() if line.split()[0] == name]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_the_uv_for_other_machines_is_that_of_the_lock_file(kind):
    """Version, files and hashes are those of `uv.lock`: an update there needs an update here."""
    (locked,) = [
        package for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"] if package["name"] == "uv"
    ]
    files = {
        wheel["url"]: wheel["hash"] for wheel in locked["wheels"] if kind in wheel["url"] and "linux" in wheel["url"]
    }
    wheel = uv_wheels.WHEELS[kind]
    assert locked["version"] == uv_wheels.VERSION
    assert files[wheel.url] == f"sha256:{wheel.sha256}"
    assert "musllinux" in wheel.url
    gnu = [digest for url, digest in files.items() if "manylinux_2_17" in url and "musllinux" not in url]
    assert gnu == ([f"sha256:{wheel.other_sha256}"] if wheel.other_sha256 else [])


@pytest.mark.parametrize(
    ("client", "is_musl", "sent"),
    [
        (("Linux", "x86_64"), False, "own"),
        (("Linux", "x86_64"), True, "x86_64"),
        (("Darwin", "x86_64"), False, "x86_64"),
    ],
)
def test_the_clients_uv_is_sent_only_to_machines_that_can_run_it(monkeypatch, client, is_musl, sent):
    """A Mac with the same processor needs another program, and a host with musl may not run one for glibc.

    Looks inside: else the uv of other machines is downloaded.
    """
    monkeypatch.setattr("platform.system", lambda: client[0])
    monkeypatch.setattr("platform.machine", lambda: client[1])
    monkeypatch.setattr(code_upload, "_compressed_uv", lambda: "own")
    monkeypatch.setattr(code_upload, "_fetched_uv", lambda machine: machine)
    assert code_upload.shipped_uv("Linux", "x86_64", is_musl=is_musl) == sent
    assert code_upload.shipped_uv("Linux", "aarch64") == "aarch64"
    assert code_upload.shipped_uv("Linux", "riscv64") is None


# ── the script, run with real tools ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def real(tmp_path):
    """Return the variables for the real uv and this interpreter, with misleading variables of uv."""
    return {
        **os.environ,
        "SKYWARD_HOME": str(tmp_path / "sky home"),
        "SKYWARD_UV": uv.find_uv_bin(),
        "SKYWARD_PYTHON": sys.executable,
        "UV_PYTHON": "/nonexistent",
        "VIRTUAL_ENV": "/nonexistent",
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"pip": ["torch", "numpy>=2"]}, None),
        ({"pip": ["torch==2.9.1+cu128", "cupy-cuda12x"]}, 12.8),
        ({"pip": ["torch"], "pip_extra_index_url": "https://download.pytorch.org/whl/cu130"}, 13.0),
        ({"pip": ["jax[cuda12]"]}, 12.0),
        ({"pip": ["nvidia-cublas-cu12==12.8.4.1"]}, 12.0),
        ({"pip": ["torch==2.7.1+cu118"]}, 11.8),
        ({"pip": ["focus12", "cuddle", "recurse-cu"]}, None),
    ],
)
def test_an_image_has_the_cuda_version_of_its_packages(fields: dict[str, Any], expected: float | None) -> None:
    """It comes from the names of the wheels; None without one. A pool requires it."""
    assert Image(**fields).min_cuda == expected
    assert sky.PoolSpec.of(image=Image(**fields)).requirements.min_cuda == expected
