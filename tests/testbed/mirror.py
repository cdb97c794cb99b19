"""The mirror from which bare hosts install: a separate process that serves a package index and an interpreter.

    with Mirror(fleet.network.gateway, requirements) as mirror:
        mirror.configure(host)
        host.run("uv venv --python 3.13 /root/venv")

It is on the fleet's own network. Wheels come once from the index that this machine's uv is configured for, and are kept
in uv's cache folder. It needs only the standard library, and `uv` on this machine.
"""

import compileall
import contextlib
import fcntl
import hashlib
import http.server
import json
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

from tests.testbed.command import run
from tests.testbed.host import Host

REPOSITORY = Path(__file__).parents[2]
MINOR = "{}.{}".format(*sys.version_info)
RECIPE = 2
"""Increase this when the content of a mirror's folder changes."""
FILL_SECONDS = 110.0
ARCHIVE, DOWNLOADS = "python/cpython.tar.gz", "python/downloads.json"
NOT_NEEDED = (
    "site-packages dist-packages test tests idlelib tkinter turtledemo ensurepip lib2to3 pydoc_data config-*"
    " _test* _ctypes_test* *.a *.opt-?.pyc EXTERNALLY-MANAGED"
)
"""Modules that no node imports, two thirds of an interpreter: hosts keep their disks in memory."""
ORIGIN = b"$ORIGIN/../lib"
NOT_COMPILED = re.compile("/tests?/")


class Mirror:
    """An index of wheels and an interpreter of this Python's version at `http://address:port`; a context manager.

    The index has `requirements` (as pip takes them) and their dependencies. `folder` keeps them between sessions; the
    first session fills it, which takes as long as a download. Raises RuntimeError with the output of the failed
    command.
    """

    def __init__(self, address: str, requirements: Sequence[str], folder: Path | None = None) -> None:
        site = _filled(folder or default_folder(), requirements)
        argv = [sys.executable, "-m", "tests.testbed.mirror", address, str(site)]
        self._process = subprocess.Popen(
            argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self.url = f"http://{address}:{self._heard()}"
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make uv and pip use this mirror only."""
        return {
            "UV_DEFAULT_INDEX": f"{self.url}/simple/",
            "UV_PYTHON_DOWNLOADS_JSON_URL": f"{self.url}/{DOWNLOADS}",
            "PIP_INDEX_URL": f"{self.url}/simple/",
            "PIP_TRUSTED_HOST": self.url.removeprefix("http://"),
        }

    @property
    def requests(self) -> int:
        """How many requests it got, including refused ones: a cached environment makes none."""
        return int(self._asked("count"))

    def configure(self, host: Host) -> None:
        """Write the host's own settings of uv and pip, as an administrator would.

        Every user of the host then installs from here, with any environment.
        """
        settings = self.environment
        _put(
            host.root / "etc/uv/uv.toml",
            f'python-downloads-json-url = "{settings["UV_PYTHON_DOWNLOADS_JSON_URL"]}"\n[[index]]\nurl = "{settings["UV_DEFAULT_INDEX"]}"\ndefault = true\n',
        )
        _put(
            host.root / "etc/pip.conf",
            f"[global]\nindex-url = {settings['PIP_INDEX_URL']}\ntrusted-host = {settings['PIP_TRUSTED_HOST']}\n",
        )

    def break_(self) -> None:
        """Answer every request with 503 from now on."""
        self._asked("break")

    def mend(self) -> None:
        """Serve again."""
        self._asked("mend")

    def close(self) -> None:
        """End the serving process. May be called twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process.stdout.close()

    def _asked(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the mirror's process is gone: exit code {self._process.wait(10)}")
        return line.strip()


def default_folder() -> Path:
    """Return where mirrors keep their files: in uv's cache, which test sessions share although each has its
    own home.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("UV_CACHE_DIR") or home / "uv") / "skyward-testbed"


# ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _filled(folder: Path, requirements: Sequence[str]) -> Path:
    """Return the folder that holds these wheels and this interpreter. It is filled by one process at a time, and
    atomically.
    """
    requested = [RECIPE, sorted(requirements), sys.version, sys.base_prefix, platform.machine()]
    site = folder / f"mirror-{hashlib.sha256(json.dumps(requested).encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not site.is_dir():
            with tempfile.TemporaryDirectory(dir=folder, prefix="filling-") as filling:
                _download(requirements, Path(filling) / "site/simple")
                _pack_interpreter(Path(filling) / "site", Path(filling) / "interpreter")
                (Path(filling) / "site").rename(site)
    return site


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(requirements: Sequence[str], simple: Path) -> None:
    """Write wheels as a simple index, PEP 503: a folder for each project, with its listing as its page.

    pip does it, because uv downloads no wheels. uv runs pip, because this interpreter may have none. Both use the index
    that this machine is configured for.
    """
    flat = simple.with_name("wheels")
    indexes = (os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL"), os.environ.get("PIP_INDEX_URL"))
    same = {"PIP_INDEX_URL": indexes[0]} if indexes[0] and not indexes[1] else {}
    pip = [_uv(), "tool", "run", "--python", sys.executable, "pip", "download", "--quiet", "--only-binary", ":all:"]
    done = subprocess.run(
        [*pip, "--dest", str(flat), *requirements],
        env={**os.environ, **same},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FILL_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the mirror's wheels could not be downloaded: {done.stderr.strip()}")
    for wheel in flat.iterdir():
        page = simple / re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        page.mkdir(parents=True, exist_ok=True)
        _write_with_bytecode(wheel, page / wheel.name)
        wheel.unlink()
    flat.rmdir()


def _write_with_bytecode(wheel: Path, path: Path) -> None:
    """Write a copy of a wheel that has the bytecode of its modules too.

    Without it each new host compiles what a node imports, for 0.9 s of a processor.
    """
    with tempfile.TemporaryDirectory() as made, zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        folder = Path(made)
        old.extractall(folder)
        compileall.compile_dir(
            folder, quiet=2, rx=NOT_COMPILED, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        compiled = sorted(folder.rglob("*.pyc"))
        rows = "".join(f"{file.relative_to(folder).as_posix()},,\n" for file in compiled)
        for entry in old.infolist():
            is_record = entry.filename.endswith(".dist-info/RECORD")
            new.writestr(entry, old.read(entry) + (rows.encode() if is_record else b""))
        for file in compiled:
            new.write(file, file.relative_to(folder), zipfile.ZIP_DEFLATED)


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise RuntimeError("the mirror needs uv, beside this Python or on the PATH")
    return found


def _pack_interpreter(site: Path, scratch: Path) -> None:
    """Make an archive of this interpreter that runs wherever it is unpacked, and the list of downloads that uv reads
    for it.
    """
    home, packed = Path(sys.base_prefix), scratch / "python"
    name = f"python{MINOR}"
    (packed / "bin").mkdir(parents=True)
    shutil.copy2(home / "bin" / name, packed / "bin" / name)
    for alias in ("python", "python3"):
        (packed / "bin" / alias).symlink_to(name)
    shutil.copytree(
        home / "lib" / name, packed / "lib" / name, symlinks=True, ignore=shutil.ignore_patterns(*NOT_NEEDED.split())
    )
    (packed / "lib" / name / "site-packages").mkdir()
    for library in (home / "lib").glob(f"libpython{MINOR}.so*"):
        shutil.copy2(library, packed / "lib", follow_symlinks=False)
    _make_relocatable(packed / "bin" / name, str(home / "lib").encode())
    if shutil.which("strip"):
        run("strip", "--strip-unneeded", *(str(path) for path in packed.rglob("*.so*") if not path.is_symlink()))
    archive = site / ARCHIVE
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        tar.add(packed, "python")
    (site / DOWNLOADS).write_text(json.dumps(_downloads(hashlib.sha256(archive.read_bytes()).hexdigest())))


def _make_relocatable(binary: Path, library_folder: bytes) -> None:
    """Overwrite the folder in which the binary looks for its libpython, if it has one, with the binary's own folder.

    It does what patchelf does, which may not be installed.
    """
    content = binary.read_bytes()
    old = library_folder + b"\0"
    if old not in content:
        return
    if len(library_folder) < len(ORIGIN):
        raise RuntimeError(
            f"{binary.name} looks for libpython in {library_folder.decode()}, which leaves no room for {ORIGIN.decode()}"
        )
    binary.write_bytes(content.replace(old, ORIGIN.ljust(len(old), b"\0")))


def _downloads(sha256: str) -> dict[str, dict[str, Any]]:
    """Return the JSON that uv expects at UV_PYTHON_DOWNLOADS_JSON_URL; each answer adds the address of the archive."""
    major, minor, patch = sys.version_info[:3]
    family = platform.machine()
    about = {
        "name": "cpython",
        "arch": {"family": family, "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": ARCHIVE,
        "sha256": sha256,
        "variant": None,
    }
    return {f"cpython-{major}.{minor}.{patch}-linux-{family}-gnu": about}


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ── the server process ───────────────────────────────────────────────────────────────────────────────────────────────


class _Server(http.server.ThreadingHTTPServer):
    """Serves one folder, unless it is broken, and counts the requests."""

    daemon_threads = True

    def __init__(self, address: str, site: Path) -> None:
        self.site = site
        self.count = 0
        self.is_broken = False
        self.lock = threading.Lock()
        super().__init__((address, 0), _Answer)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError):  # hosts may die during a download: that is a test's purpose
            _Answer(request, client_address, self, directory=str(self.site))


class _Answer(http.server.SimpleHTTPRequestHandler):
    """The answers to one connection."""

    protocol_version = "HTTP/1.1"

    def send_head(self) -> Any:
        server = cast(_Server, self.server)
        with server.lock:
            server.count += 1
        if server.is_broken:
            self.send_error(503)
            return None
        if self.path == f"/{DOWNLOADS}":
            return self._send_downloads(server.site)
        return super().send_head()

    def _send_downloads(self, site: Path) -> None:
        downloads = json.loads((site / DOWNLOADS).read_text())
        for download in downloads.values():
            download["url"] = f"http://{self.headers['Host']}/{download['url']}"
        text = json.dumps(downloads).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _serve(address: str, site: Path) -> None:
    """Serve until stdin ends, which happens when the parent process has ended.

    Each line of stdin is a command, and is answered by a line.
    """
    server = _Server(address, site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for line in sys.stdin:
        if (word := line.strip()) != "count":
            server.is_broken = word == "break"
        print(server.count, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
