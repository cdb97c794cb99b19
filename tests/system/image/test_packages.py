"""The index of each package and the hashes of its files: real installations from two small indexes on this machine."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uv

import skyward_core as sky
from skyward_core.errors import BadRequest
from skyward_core.image.image import Image, runtime_pins
from skyward_core.image.packages import lacks, read_lock
from skyward_core.providers.local import installing_environment, kept_environment
from skyward_core.provisioning import bootstrap
from tests.wheels import write_wheel

RUNTIME = ("runtimepkg==2.0",)
type Install = Callable[..., dict[str, str] | str]


class Indexes:
    """Package indexes below one address: the default one, and others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), name="indexes", daemon=True).start()

    def add(self, index: str, name: str, version: str, *needs: str, note: str = "") -> str:
        """Publish a wheel with one module that has its version and its index; return its SHA-256."""
        path = self.folder / index / name / f"{name}-{version}-py3-none-any.whl"
        path.parent.mkdir(parents=True, exist_ok=True)
        needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}.py", f"FOUND = {f'{version} of {index}{note}'!r}\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        indexes = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def do_GET(self) -> None:
                indexes.asked.append(self.path)
                path = indexes.folder / self.path.strip("/")
                files = sorted(path.glob("*.whl")) if path.is_dir() else []
                if not path.is_file() and not files:
                    self.send_error(404)
                    return
                hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
                page = "".join(f'<a href="{name}#sha256={digest}">{name}</a>' for name, digest in hashes.items())
                body = page.encode() or path.read_bytes()
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if files else "application/octet-stream")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # uv requests the size before it requests a part

        return Handler


@pytest.fixture
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Indexes]:
    """Both indexes have a package that only the extra one should have. The extra one has an old version of a package
    that all packages need.
    """
    made = Indexes(tmp_path / "indexes")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{made.url}/default")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    made.add("default", "runtimepkg", "2.0", "common>=1")
    made.add("default", "common", "3.0")
    made.add("default", "ours", "99.0", note=", by a stranger")
    made.add("default", "torchy", "5.0", "common")
    made.add("extra", "runtimepkg", "9.0")
    made.add("extra", "common", "1.0")
    made.add("extra", "ours", "1.0")
    made.add("extra", "torchy", "4.0+cu128", "common")
    yield made
    made.close()


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Run an image's script. Return the output of each given module, or the error."""

    def install(image: Image, *modules: str) -> dict[str, str] | str:
        tell = tmp_path / "tell.py"
        tell.write_text(f"import json; print(json.dumps({{name: __import__(name).FOUND for name in {modules!r}}}))")
        own = {"SKYWARD_HOME": str(tmp_path / "home"), "SKYWARD_UV": uv.find_uv_bin(), "SKYWARD_PYTHON": sys.executable}
        script = image.bootstrap(runtime=RUNTIME) + f'\n"$SKYWARD_ENV_PYTHON" "{tell}"\n'
        run = subprocess.run(
            ["bash"], input=script, env=os.environ | own, capture_output=True, text=True, timeout=120, check=False
        )
        return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else run.stderr

    return install


def test_an_extra_index_has_precedence_except_for_the_nodes_own_packages(indexes: Indexes, install: Install) -> None:
    """A newer foreign package of the same name is not installed (dependency confusion)."""
    image = Image(pip=["torchy", "ours"], pip_extra_index_url=f"{indexes.url}/extra")
    assert install(image, "ours", "torchy", "runtimepkg", "common") == {
        "ours": "1.0 of extra",
        "torchy": "4.0+cu128 of extra",
        "runtimepkg": "2.0 of default",
        "common": "3.0 of default",
    }


@pytest.mark.parametrize("how", ["plain", "with an index", "with hashes"])
def test_a_wheel_that_was_built_again_under_the_same_path_is_installed(
    how: str, indexes: Indexes, install: Install, tmp_path: Path
) -> None:
    """Its environment has another name, and uv checks that the file is the one that the image was made with."""
    more = {
        "plain": {"pip": []},
        "with an index": {"pip": ["torchy"], "pip_indexes": {f"{indexes.url}/extra": ["torchy"]}},
        "with hashes": {"pip": [], "require_hashes": True},
    }[how]

    def image() -> Image:
        made = Image(**{**more, "pip": [str(tmp_path / "own_thing-1.0-py3-none-any.whl"), *more["pip"]]})
        return made.locked(runtime=RUNTIME)

    write_wheel(tmp_path, found="first")
    first = image()
    assert install(first, "own_thing", "runtimepkg") == {"own_thing": "first", "runtimepkg": "2.0 of default"}
    write_wheel(tmp_path, found="second")
    assert install(image(), "own_thing") == {"own_thing": "second"}
    assert install(first, "own_thing") == {"own_thing": "first"}, "its environment is complete"
    shutil.rmtree(tmp_path / "home")
    assert "Hash mismatch" in install(first, "own_thing")


def test_only_pinned_packages_come_from_their_index(indexes: Indexes, install: Install) -> None:
    pins = {f"{indexes.url}/extra": ["Torchy"]}
    assert install(Image(pip=["torchy", "common"], pip_indexes=pins), "torchy", "runtimepkg", "common") == {
        "torchy": "4.0+cu128 of extra",
        "runtimepkg": "2.0 of default",
        "common": "3.0 of default",
    }
    assert {path.split("/")[2] for path in indexes.asked if path.startswith("/extra/")} == {"torchy"}
    indexes.add("third", "ours", "2.0")
    both = Image(pip=["torchy", "ours"], pip_indexes=pins, pip_extra_index_url=f"{indexes.url}/third")
    assert install(both, "torchy", "ours") == {"torchy": "4.0+cu128 of extra", "ours": "2.0 of third"}


def test_with_hashes_only_files_with_the_locked_hashes_are_installed(
    indexes: Indexes, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own packages are locked too. Another file of the same version is refused."""
    image = Image(pip=["torchy"], pip_indexes={f"{indexes.url}/extra": ["torchy"]}, require_hashes=True)
    with pytest.raises(BadRequest, match="no hashes yet"):
        image.bootstrap(runtime=RUNTIME)
    locked = image.locked(runtime=RUNTIME)
    pins = [line.split()[0] for line in str(locked.lock).splitlines()]
    assert pins == ["common==3.0", "runtimepkg==2.0", "torchy==4.0+cu128"]
    assert locked.locked(runtime=RUNTIME) is locked
    assert Image.model_validate_json(locked.model_dump_json()) == locked
    hashes = {image.content_hash(runtime=RUNTIME), locked.content_hash(runtime=RUNTIME)}
    indexes.add("extra", "torchy", "4.0+cu128", "common", note=", and altered")
    assert "Hash mismatch" in install(locked, "torchy")
    monkeypatch.setenv("UV_NO_VERIFY_HASHES", "1")  # nodes of this machine inherit it, and an image's env may set it
    assert "Hash mismatch" in install(locked, "torchy")
    assert len(hashes | {image.locked(runtime=RUNTIME).content_hash(runtime=RUNTIME)}) == 3
    indexes.add("extra", "torchy", "4.0+cu128", "common")
    again = image.locked(runtime=RUNTIME)
    assert install(again, "torchy", "runtimepkg") == {"torchy": "4.0+cu128 of extra", "runtimepkg": "2.0 of default"}
    with pytest.raises(BadRequest, match=r"cannot be locked: [\s\S]*nowhere"):
        Image(pip=["nowhere"], require_hashes=True).locked(runtime=RUNTIME)


def test_a_lock_is_completed_with_the_nodes_own_packages(indexes: Indexes, install: Install, tmp_path: Path) -> None:
    """The user's versions and hashes stay. With a complete lock no index is used."""
    common, ours = indexes.add("default", "common", "3.0"), indexes.add("extra", "ours", "1.0")
    (tmp_path / "requirements.lock").write_text(
        f"# made by hand\ncommon==3.0 \\\n    --hash=sha256:{common}\nours==1.0 --hash=sha256:{ours}  # via us\n"
    )
    image = Image(lock=str(tmp_path / "requirements.lock"), pip_extra_index_url=f"{indexes.url}/extra")
    assert image.lock == f"common==3.0 --hash=sha256:{common}\nours==1.0 --hash=sha256:{ours}\n"
    assert lacks(image.lock, RUNTIME) == list(RUNTIME)
    locked = image.locked(runtime=RUNTIME)
    assert str(locked.lock).startswith(image.lock)
    assert str(locked.lock).splitlines()[-1].startswith("runtimepkg==2.0 --hash=sha256:")
    assert install(locked, "ours", "runtimepkg") == {"ours": "1.0 of extra", "runtimepkg": "2.0 of default"}
    indexes.asked.clear()
    assert locked.locked(runtime=RUNTIME) is locked
    assert indexes.asked == []
    wrong = Image(lock=f"common==3.0 --hash=sha256:{'0' * 64}").locked(runtime=RUNTIME)
    assert "Hash mismatch" in install(wrong, "common")


def test_a_pylock_and_an_export_of_uv_are_read(tmp_path: Path) -> None:
    """The standard's format (PEP 751): names, versions, markers and the hashes of all files."""
    (tmp_path / "pylock.toml").write_text("""lock-version = "1.0"
created-by = "uv"
[[packages]]
name = "six"
version = "1.17.0"
marker = "python_version < '4'"
sdist = { url = "https://x.org/six.tar.gz", hashes = { sha256 = "bb" } }
wheels = [{ url = "https://x.org/six.whl", hashes = { sha256 = "aa" } }]
""")
    expected = "six==1.17.0 ; python_version < '4' --hash=sha256:aa --hash=sha256:bb\n"
    assert Image(lock=str(tmp_path / "pylock.toml")).lock == expected
    export = expected.replace(" --", " \\\n    --")
    assert read_lock(read_lock(export)) == read_lock(export) == expected
    assert lacks(expected, ["Six==1.17.0", "six==1.16.0"]) == ["six==1.16.0"]


@pytest.mark.nightly
def test_a_pool_with_an_image_that_requires_hashes_runs() -> None:
    """All packages of a node are installed from the real package index, by their hashes."""

    @sky.compute
    def found() -> str:
        import six

        return six.__version__

    image = Image(pip=["six==1.17.0"], require_hashes=True)
    with sky.ComputePool(provider=sky.Local(), image=image, display="quiet") as pool:
        assert found() >> pool == "1.17.0"
    assert lacks(str(image.locked().lock), runtime_pins()) == []


SECRETS = {
    "UV_INDEX_URL": "https://me:hunter2@index.example.org/simple",
    "UV_INDEX": "ours=https://token-hunter2@index.example.org/simple",
    "UV_INDEX_OURS_PASSWORD": "hunter2",
    "HTTPS_PROXY": "http://me:hunter2@proxy:3128",
    "http_proxy": "me:hunter2@proxy:3128",
}
KEPT = {
    "UV_CACHE_DIR": "/home/me@corp/uv",
    "XDG_CACHE_HOME": "/home/me@corp/.cache",
    "ALL_PROXY": "http://proxy:3128",
    "PIP_INDEX_URL": "https://x.org/simple",
}


def test_passwords_of_indexes_and_proxies_are_only_for_the_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No process of a node has them, except uv, on this machine too. Calls see variables of the image's `env`."""
    for name, value in {**SECRETS, **KEPT, "NVIDIA_VISIBLE_DEVICES": "all"}.items():
        monkeypatch.setenv(name, value)
    keys = {"NVIDIA_API_KEY", "XDG_SECRET_TOKEN", "LC_API_KEY", "SSL_CERT_PASSWORD", "MY_PASSWORD_PROXY"}
    for name in keys:
        monkeypatch.setenv(name, "nvapi-123")
    assert not keys & (kept_environment() | installing_environment()).keys()
    assert not SECRETS.keys() & kept_environment().keys()
    assert kept_environment().items() >= {**KEPT, "NVIDIA_VISIBLE_DEVICES": "all"}.items()
    python = f"#!/bin/bash\\nenv -0 >{tmp_path}/node\\n"
    stub = tmp_path / "uv"
    stub.write_text(f"""#!/bin/bash
env -0 >{tmp_path}/uv-$1
[ "$1" = venv ] || exit 0
mkdir -p "${{@: -1}}/bin"; printf '{python}' >"${{@: -1}}/bin/python"; chmod 755 "${{@: -1}}/bin/python"
""")
    stub.chmod(0o755)
    monkeypatch.setattr(uv, "find_uv_bin", lambda: str(stub))
    asked = {"PIP_INDEX": "https://you:asked@index"}, {"HTTPS_PROXY": "http://you:asked@proxy"}
    spec = sky.PoolSpec.of(image=Image(pip=["six"], env=asked[0]), env=asked[1])
    own = {"SKYWARD_HOME": str(tmp_path / "home"), "SKYWARD_INSTANCE_DIRECTORY": str(tmp_path)}
    script = bootstrap.startup_script(spec, sky.Local())
    subprocess.run(["bash"], input=script, env=kept_environment() | own, text=True, check=True, capture_output=True)

    def seen(process: str) -> dict[str, str]:
        return dict(item.partition("=")[::2] for item in (tmp_path / process).read_text().split("\0") if item)

    assert seen("uv-pip").items() >= {**SECRETS, **KEPT, **asked[0]}.items()
    assert "hunter2" not in str(seen("node"))
    assert seen("node").items() >= {**KEPT, **asked[0], **asked[1]}.items()
