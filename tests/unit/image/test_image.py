"""Images: refused values, the content hash, CUDA versions, and the uv that is sent to nodes."""

import pickle
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import skyward_core as sky
from skyward_core.errors import BadRequest
from skyward_core.image import uv_wheels
from skyward_core.image.image import Image, runtime_pins
from skyward_core.transport import code_upload

ROOT = Path(__file__).parents[3]


def test_an_image_is_a_frozen_value() -> None:
    variables = {"A": "1", "B": "two\nlines"}
    image = Image(pip=["six"], env=variables)
    variables["A"] = "2"
    assert len({image, Image(env={"B": "two\nlines", "A": "1"}, pip=("six",))}) == 1
    assert Image.model_validate_json(image.model_dump_json()) == image
    again = pickle.loads(pickle.dumps(image))
    assert (again, hash(again)) == (image, hash(image))
    with pytest.raises(ValidationError):
        image.python = "3.12"
    for change in ("__setitem__", "setdefault"):
        with pytest.raises(TypeError, match="create a new one"):
            getattr(image.env, change)("A", "3")
    with pytest.raises(TypeError, match="create a new one"):
        image.env.update(A="3")
    assert Image(apt=["g++", "libc6:amd64", "ffmpeg=7:5.1.6-0+deb12u1", "git/bookworm-backports", "7zip"]).apt
    assert Image(pip=["a @ git+ssh://git@github.com/o/a", "b @ git+https://${TOKEN}@github.com/o/b"]).pip


TORCH = {"pip": ["torch"]}


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"pyhton": "3.13"}, "did you mean 'python'"),
        ({"packages": ["six"]}, "did you mean '"),
        (TORCH | {"pip_indexes": {"https://me:secret@x.org": ["torch"]}}, "must not hold a password"),
        (TORCH | {"pip_indexes": {"x.org": ["torch"]}}, "is not the URL of an index"),
        (TORCH | {"pip_indexes": {"https://x.org": []}}, "names no package"),
        (TORCH | {"pip_indexes": {"https://x.org": ["torch>=2"]}}, "write the name of a package alone"),
        (TORCH | {"pip_indexes": {"https://x.org": ["torch"], "https://y.org": ["Torch"]}}, "comes from one index"),
        (TORCH | {"pip_indexes": {"https://x.org": ["torchvision"]}}, "which is not in pip"),
        (TORCH | {"pip_extra_index_url": "https://x.org", "require_hashes": True}, "with pip_indexes"),
        (TORCH | {"lock": "torch==1 --hash=sha256:1"}, "pip and lock cannot be together"),
        ({"pip": ["ours @ git+https://x:secret@github.com/o/ours"]}, "and ours comes from a URL with one"),
        ({"pip": ["https://secret@x.org/ours-1-py3-none-any.whl"]}, "pip must not hold a password or token"),
        ({"lock": "ours @ https://me:secret@x.org/ours.whl --hash=sha256:1\n"}, "lock must not hold a password"),
        ({"lock": "/no/such/file"}, "cannot be read: No such file"),
        ({"lock": "# nothing\n"}, "names no package"),
        ({"lock": "torch==1\n"}, "without a sha256 hash"),
        ({"lock": "torch==1 --hash=md5:1\n"}, "without a sha256 hash"),
        ({"lock": "torch>=1 --hash=sha256:1\n"}, "without a version"),
        ({"lock": "--extra-index-url https://x.org\n"}, "only packages are allowed in it"),
        ({"lock": "-e .\n"}, "only packages are allowed in it"),
        ({"lock": 'lock-version = "1.0"\n[[packages]]\nname = "own"\ndirectory = {path = "."}\n'}, "'own' from a folder"),
        ({"python": "3.13.1"}, 'write "3.13"'),
        ({"python": "3.13\n"}, 'write "3.13"'),
        ({"python": 3.13}, "string"),
        ({"pip": "torch"}, "not allowed as a Sequence"),
        ({"pip": ["  "]}, "one requirement"),
        ({"pip": ["six\nseven"]}, "one requirement"),
        ({"pip": ["six\0"]}, "one requirement"),
        ({"pip": ["--index-url=https://x.org"]}, "pip_extra_index_url"),
        ({"pip": [" -r requirements.txt"]}, "an option"),
        ({"pip_extra_index_url": "x.org/simple"}, "https://"),
        ({"pip_extra_index_url": "https://user:secret@x.org/simple"}, "netrc"),
        ({"pip_extra_index_url": "https://secret@x.org/simple"}, "netrc"),
        ({"apt": ["FFmpeg"]}, "Debian package"),
        ({"apt": ["-y"]}, "Debian package"),
        ({"apt": ["ffmpeg;reboot"]}, "Debian package"),
        ({"apt": ["a b"]}, "Debian package"),
        ({"apt": ["ffmpeg-"]}, "Debian package"),
        ({"apt": ["ffmpeg\n"]}, "Debian package"),
        ({"env": {"1A": ""}}, "does not begin with a digit"),
        ({"env": {"A\n": ""}}, "letters, digits"),
        ({"env": {"A-B": ""}}, "letters, digits"),
        ({"env": {"UID": "0"}}, "bash"),
        ({"env": {"SKYWARD_HOME": "/"}}, "reserved for Skyward"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"A": 1}}, "string"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_with_advice_and_without_passwords(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Image(**fields)
    assert advice in str(caught.value)
    shown = str(caught.value).partition("[type=")[0] + repr(caught.value) + str(caught.value.__cause__)
    assert "secret" not in shown


def test_a_negative_ttl_is_refused() -> None:
    with pytest.raises(BadRequest, match="ttl=-1"):
        Image().bootstrap(ttl=-1)


def test_the_hash_identifies_the_installed_software() -> None:
    """The order of packages does not matter, any other difference does; variables are not installed."""
    fields: dict[str, Any] = {"python": "3.13", "pip": ["torch", "numpy"], "apt": ["ffmpeg", "git"]}
    image, runtime = Image(**fields), ["dask==1"]
    name = image.content_hash(runtime=runtime)
    assert len(name) == len(f"{int(name, 16):012x}") == 12
    for same in ({"apt": ["git", "ffmpeg"], "pip": ["numpy", "torch"]}, {"env": {"A": "1"}}):
        assert Image(**fields | same).content_hash(runtime=runtime) == name
    others = [
        {"python": "3.12"},
        {"pip": ["torch"]},
        {"apt": ["ffmpeg"]},
        {"pip": ["torch", "numpy", "git"], "apt": ["ffmpeg"]},
        {"pip_extra_index_url": "https://x.org"},
        {"pip_indexes": {"https://x.org": ["torch"]}},
        {"pip_indexes": {"https://x.org": ["torch", "numpy"]}},
        {"pip_indexes": {"https://y.org": ["torch"]}},
        {"require_hashes": True},
        {"pip": [], "lock": "torch==1 --hash=sha256:1"},
        {"pip": [], "lock": "torch==1 --hash=sha256:2"},
    ]
    hashes = {Image(**fields | other).content_hash(runtime=runtime) for other in others}
    assert len({name, image.content_hash(runtime=["dask==2"]), *hashes}) == 2 + len(others)


def test_the_runtime_pins_are_the_versions_of_this_client() -> None:
    names = ("cloudpickle", "dask", "distributed", "nvidia-ml-py", "psutil", "uvloop")
    assert sorted(runtime_pins()) == [f"{name}=={version(name)}" for name in names]


@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_the_uv_for_other_machines_is_that_of_the_lock_file(kind: str) -> None:
    """Version, files and hashes are those of `uv.lock`: an update there needs an update here."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (locked,) = [package for package in packages if package["name"] == "uv"]
    files = {one["url"]: one["hash"] for one in locked["wheels"] if kind in one["url"] and "linux" in one["url"]}
    wheel = uv_wheels.WHEELS[kind]
    assert locked["version"] == uv_wheels.VERSION
    assert files[wheel.url] == f"sha256:{wheel.sha256}"
    assert "musllinux" in wheel.url
    gnu = [digest for url, digest in files.items() if "manylinux_2_17" in url and "musllinux" not in url]
    assert gnu == ([f"sha256:{wheel.other_sha256}"] if wheel.other_sha256 else [])


@pytest.mark.parametrize(
    ("client", "is_musl", "sent"), [("Linux", False, "own"), ("Linux", True, "x86_64"), ("Darwin", False, "x86_64")]
)
def test_the_clients_uv_is_sent_only_to_machines_that_can_run_it(
    monkeypatch: pytest.MonkeyPatch, client: str, is_musl: bool, sent: str
) -> None:
    """Looks inside: else the uv of other machines is downloaded."""
    monkeypatch.setattr("platform.system", lambda: client)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(code_upload, "_compressed_uv", lambda: "own")
    monkeypatch.setattr(code_upload, "_fetched_uv", lambda machine: machine)
    assert code_upload.shipped_uv("Linux", "x86_64", is_musl=is_musl) == sent
    assert code_upload.shipped_uv("Linux", "aarch64") == "aarch64"
    assert code_upload.shipped_uv("Linux", "riscv64") is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pip": ["torch", "numpy>=2", "focus12", "cuddle"]}, None),
        ({"pip": ["torch==2.9.1+cu128", "cupy-cuda12x"]}, 12.8),
        ({"pip": ["torch"], "pip_extra_index_url": "https://download.pytorch.org/whl/cu130"}, 13.0),
        ({"pip": ["torch"], "pip_indexes": {"https://download.pytorch.org/whl/cu128": ["torch"]}}, 12.8),
        ({"lock": "torch==2.9.1+cu130 --hash=sha256:aa"}, 13.0),
        ({"pip": ["jax[cuda12]"]}, 12.0),
        ({"pip": ["nvidia-cublas-cu12==12.8.4.1"]}, 12.0),
    ],
)
def test_a_pool_requires_the_cuda_version_of_its_packages(fields: dict[str, Any], expected: float | None) -> None:
    """So hosts with an older driver are not rented."""
    assert sky.PoolSpec.of(image=Image(**fields)).requirements.min_cuda == expected
