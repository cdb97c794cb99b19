"""Images: refused values, the content hash, CUDA versions, and the uv that is sent to nodes."""

import hashlib
import pickle
import shutil
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import skyward_core as sky
from skyward_core.errors import BadRequest
from skyward_core.image import shell as uv_wheels
from skyward_core.image.image import Image, runtime_pins
from skyward_core.provisioning.bootstrap import node_script
from skyward_core.transport import code_upload
from tests.wheels import write_wheel

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
        ({"python": 3.13}, "write a text, such as"),
        ({"pip": "torch"}, "pip: write a list of texts"),
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
        ({"env": {"A": 1}}, "env['A']: write a text"),
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


# ── files of this machine ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entry", "advice"),
    [
        (".", "uv build --wheel"),
        (".[dev]", "a project of this machine: its functions and modules travel"),
        ("./src", "a project of this machine"),
        ("src @ ./src", "a project of this machine"),
        ("pyproject.toml", "a project of this machine"),
        ("./x-1-py3-none-any.whl", "there is no file"),
        ("x-1-py3-none-any.whl", "there is no file"),
        ("requirements.txt", "there is no file"),
        ("wrong.txt", "has the line '-r other.txt': only requirements"),
        ("./notes.md", "only wheels, source archives"),
        ("./odd.whl", "no wheel's name"),
        ("./odd.zip", "whose name tells no package"),
    ],
)
def test_a_path_that_no_node_can_install_is_refused_with_advice(
    entry: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the image is made. Before, uv looked for a package of that name, on a machine that was paid for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "wrong.txt").write_text("-r other.txt\n")
    for name in ("notes.md", "odd.whl", "odd.zip", "pyproject.toml"):
        (tmp_path / name).write_text("")
    with pytest.raises(BadRequest) as caught:
        Image(pip=[entry])
    assert advice in str(caught.value)


def test_a_wheel_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built again under the same path it is another image; in another folder it is the same."""
    monkeypatch.chdir(tmp_path)
    path = write_wheel(tmp_path, found="first")
    forms = (f"./{path.name}", path.name, str(path), f"own-thing @ {path}", f"own_thing @ file://{path}", path.as_uri())
    first = Image(pip=[path.name])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert first.pip == (f"own-thing @ file://{path}#sha256={digest}",)
    assert {Image(pip=[form]).content_hash() for form in forms[:4]} == {first.content_hash()}
    assert all(Image(pip=[form]).files == first.files for form in forms)
    assert Image(pip=[f"./{path.name}[gpu] ; python_version > '3'"]).pip == (
        f"own-thing[gpu] @ file://{path}#sha256={digest} ; python_version > '3'",
    )
    (tmp_path / "other folder").mkdir()
    moved = Image(pip=[str(write_wheel(tmp_path / "other folder", found="first"))])
    assert moved.content_hash() == first.content_hash()
    write_wheel(tmp_path, found="second")
    assert Image(pip=[path.name]).content_hash() != first.content_hash()
    with pytest.raises(BadRequest, match="has changed since this image was made"):
        sky.PoolSpec.of(image=first).refuse_what_cannot_be()
    path.unlink()
    with pytest.raises(BadRequest, match="is not on this machine"):
        sky.PoolSpec.of(image=first).refuse_what_cannot_be()
    assert Image.model_validate_json(first.model_dump_json()) == first
    assert Image(pip=["ours @ file:///opt/ours-1.0-py3-none-any.whl"]).files == (), "a file of the nodes themselves"
    script = node_script(sky.PoolSpec.of(image=moved))
    assert f"own-thing @ file://${{SKYWARD_HOME}}/files/{digest}/{path.name}#sha256={digest}" in script
    assert str(tmp_path) not in script


def test_a_machine_that_comes_later_gets_the_same_file(tmp_path: Path) -> None:
    """The first upload keeps a copy, because the file may be built again while the pool is open."""
    first = Image(pip=[str(write_wheel(tmp_path, found="first"))]).files[0]
    kept = code_upload.shipped_file(first).read_bytes()
    second = Image(pip=[str(write_wheel(tmp_path, found="second"))]).files[0]
    assert code_upload.shipped_file(first).read_bytes() == kept
    write_wheel(tmp_path, found="third")
    with pytest.raises(code_upload.FileChanged, match="has changed since"):
        code_upload.shipped_file(second)
    second.path.unlink()
    with pytest.raises(code_upload.FileChanged, match="is not on this machine"):
        code_upload.shipped_file(second)


def tree(folder: Path) -> Path:
    """Make a folder `data` with two files, a program, an empty folder and what never travels."""
    for name in ("data/raw", "data/out", "data/__pycache__", "data/.git"):
        (folder / name).mkdir(parents=True)
    for name in ("data/vocab.txt", "data/raw/big.ckpt", "data/run.sh", "data/__pycache__/a.pyc", "data/.git/config"):
        (folder / name).write_text(name)
    (folder / "data/run.sh").chmod(0o755)
    return folder / "data"


def packed(image: Image, folder: Path) -> dict[str, tarfile.TarInfo]:
    """Return the entries of the archive that nodes get, after the archive was written."""
    (files,) = image.included
    with tarfile.open(code_upload.shipped_file(files)) as archive:
        return {entry.name: entry for entry in archive}


@pytest.mark.parametrize(
    ("includes", "excludes", "places"),
    [
        (["data"], [], ["data", "data/out", "data/raw", "data/raw/big.ckpt", "data/run.sh", "data/vocab.txt"]),
        (["./data/"], ["*.ckpt", "out"], ["data", "data/raw", "data/run.sh", "data/vocab.txt"]),
        (["data"], ["data/raw", "data/*.sh"], ["data", "data/out", "data/vocab.txt"]),
        (["data/vocab.txt"], ["vocab.txt"], ["data/vocab.txt"]),
        (["../{here}/data/vocab.txt"], [], ["vocab.txt"]),
        (["{folder}/data/raw"], [], ["raw", "raw/big.ckpt"]),
    ],
)
def test_included_files_lie_at_the_same_relative_path(
    includes: list[str], excludes: list[str], places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is named travels, whatever is excluded; one from elsewhere lies under its last name."""
    monkeypatch.chdir(tmp_path)
    tree(tmp_path)
    named = [entry.format(folder=tmp_path, here=tmp_path.name) for entry in includes]
    found = packed(Image(includes=named, excludes=excludes), tmp_path)
    assert sorted(found) == places
    assert all(bool(entry.mode & 0o100) == (name.endswith(".sh") or entry.isdir()) for name, entry in found.items())
    assert {(entry.uid, entry.uname) for entry in found.values()} == {(0, "")}


def test_another_content_is_another_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages are the same. A pool is not opened with files that have changed since the image was made."""
    monkeypatch.chdir(tmp_path)
    data = tree(tmp_path)
    (data / "own.txt").write_text("of this test: what was shipped before is in the cache")
    first = Image(includes=["data"])
    assert first.includes[0].startswith(f"data @ file://{data}#sha256=")
    assert Image(includes=["data"]) == first == Image.model_validate_json(first.model_dump_json())
    assert (first.content_hash(), first.uploads) == (Image().content_hash(), first.included)
    (data / "__pycache__" / "b.pyc").write_text("")
    assert Image(includes=["data"]) == first
    (data / "vocab.txt").write_text("other")
    second = Image(includes=["data"])
    assert second != first
    assert second.included[0].place != first.included[0].place
    with pytest.raises(BadRequest, match=r"data has changed since this image was made: make the image again"):
        sky.PoolSpec.of(image=first).refuse_what_cannot_be()
    with pytest.raises(code_upload.FileChanged, match="data has changed"):
        code_upload.shipped_file(first.included[0])
    shipped = code_upload.shipped_file(second.included[0])
    shutil.rmtree(data)
    with pytest.raises(BadRequest, match="data is not on this machine"):
        sky.PoolSpec.of(image=second).refuse_what_cannot_be()
    assert code_upload.shipped_file(second.included[0]) == shipped, "a machine that comes later gets the same files"
    assert str(tmp_path) not in node_script(sky.PoolSpec.of(image=second))


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"includes": ["no/such.txt"]}, "there is no file or folder {folder}/no/such.txt on this machine"),
        ({"includes": ["/"]}, "which has no name"),
        ({"includes": ["data", "{folder}/other/data"]}, "both would be data on a node"),
        ({"includes": ["links"]}, "links/data is a link to a folder"),
        ({"includes": ["broken"]}, "broken/nowhere is no file and no folder"),
        ({"includes": ["large"]}, "the includes have 101 MB, and 100 MB is the limit"),
        ({"includes": ["large"]}, "The largest of 2 files is {folder}/large/a.bin, 101 MB. Leave files out"),
        ({"excludes": ["./data"]}, "excludes has './data'"),
        ({"shell": [" "]}, "shell has ' '"),
        ({"shell": ["git clone https://me:secret@x.org/a"]}, "put it into env, and write $NAME in the command"),
        ({"setup": ["true"]}, "did you mean 'shell'"),
    ],
)
def test_what_cannot_be_included_or_run_is_refused_when_the_image_is_made(
    fields: dict[str, Any], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree(tmp_path)
    tree(tmp_path / "other")
    for name in ("links", "broken", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "links/data").symlink_to("../data")
    (tmp_path / "broken/nowhere").symlink_to("nowhere")
    (tmp_path / "large/b.bin").write_bytes(b"")
    with (tmp_path / "large/a.bin").open("wb") as file:
        file.truncate(101_000_000)
    fields = {name: [entry.replace("{folder}", str(tmp_path)) for entry in fields[name]] for name in fields}
    with pytest.raises(BadRequest) as caught:
        Image(**fields)
    assert advice.format(folder=tmp_path) in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_token_in_a_command_is_named_by_its_variable() -> None:
    assert Image(shell=["git clone https://me:$TOKEN@x.org/a"]).shell == ("git clone https://me:$TOKEN@x.org/a",)


def test_the_lines_of_a_requirements_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    path = write_wheel(tmp_path)
    (tmp_path / "requirements.txt").write_text(
        f"# ours\ntorch>=2.9  # for the model\n\nsix \\\n  ==1.17.0\n./{path.name}\n"
    )
    image = Image(pip=["numpy", f"{tmp_path.name}/requirements.txt"])
    assert image.pip[:3] == ("numpy", "torch>=2.9", "six ==1.17.0")
    assert [file.path for file in image.files] == [path]
