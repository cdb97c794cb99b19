"""The mirror of the test bed: a bare host gets a Python and packages from it, and from no other server."""

import http.client
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uv

from skyward_core.image.image import runtime_pins
from tests.conftest import wait_until
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import PURE_PACKAGE, fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror, _make_relocatable

REPOSITORY = Path(__file__).parents[3]
HERE = "{}.{}".format(*sys.version_info)
PYTHON = "/root/venv/bin/python"


@pytest.fixture
def host(fleet: Fleet) -> Iterator[Host]:
    """A bare host with this client's uv, as the client would install it."""
    host = fleet.create(disk="512M")
    shutil.copy2(uv.find_uv_bin(), host.root / "root/uv")
    yield host
    host.crash()


def said(host: Host, command: str, env: dict[str, str] | None = None) -> str:
    variables = shlex.join(f"{name}={value}" for name, value in (env or {}).items())
    done = host.run(f"env {variables} {command}", seconds=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def answer(url: str, path: str) -> int:
    """Return the status of one request, made here."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", path)
    try:
        return connection.getresponse().status
    finally:
        connection.close()


# ── a bare host ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bare_host_becomes_a_node(host, mirror):
    """A configured host gets this client's Python and a node's requirements without a variable set. Installed packages
    are not requested again.
    """
    mirror.configure(host)
    said(host, f"/root/uv venv --quiet --python {HERE} /root/venv")
    install = f"/root/uv pip install --quiet --python {PYTHON} {shlex.join(runtime_pins())} numpy {PURE_PACKAGE}"
    said(host, install)
    output = said(
        host,
        f"{PYTHON} -c 'import distributed, numpy, six, ssl, sqlite3, sys; print(sys.base_prefix, *sys.version_info[:3])'",
    )
    assert output.split() == [
        f"/root/.local/share/uv/python/cpython-{HERE}-linux-x86_64-gnu",
        *map(str, sys.version_info[:3]),
    ]
    before = mirror.requests
    said(host, install)
    assert mirror.requests == before
    megabytes = int(said(host, "du -sm /root/.local/share/uv/python").split()[0])
    assert 10 < megabytes < 100, "hosts keep their disks in memory"


def test_its_environment_is_enough(host, mirror):
    """uv and pip on an unconfigured host need nothing but the mirror's variables; without them no index is
    reachable.
    """
    assert (
        host.run("UV_HTTP_RETRIES=0 /root/uv venv --quiet --python-preference only-managed /root/none").returncode != 0
    )
    said(host, f"/root/uv venv --quiet --python {HERE} /root/venv", mirror.environment)
    said(host, f"/root/uv pip install --quiet --python {PYTHON} {PURE_PACKAGE}", mirror.environment)
    assert said(host, f"{PYTHON} -c 'import six; print(six.__version__)'") == PURE_PACKAGE.partition("==")[2]
    if host.run("python3 -m pip --version").returncode == 0:
        said(host, "python3 -m pip install --quiet --target /root/tools uv", mirror.environment)
        assert (
            said(host, "/root/tools/bin/uv --version")
            == subprocess.check_output([uv.find_uv_bin(), "--version"], text=True).strip()
        )


def test_it_fails_on_demand(host, mirror):
    """A broken mirror answers 503 to every request, and counts it; a repaired one serves again."""
    mirror.configure(host)
    before = mirror.requests
    mirror.break_()
    try:
        assert "503" in host.run(f"UV_HTTP_RETRIES=0 /root/uv venv --python {HERE} /root/venv").stderr
        assert mirror.requests > before
    finally:
        mirror.mend()
    said(host, f"/root/uv venv --quiet --python {HERE} /root/venv")


# ── its folder, and its end ──────────────────────────────────────────────────────────────────────────────────────────


def test_two_sessions_fill_one_folder(tmp_path):
    """Sessions that start at once download the packages once, and each serves all of them."""
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: Mirror("127.0.0.1", [PURE_PACKAGE], tmp_path), range(2))
    with one, two:
        assert one.url != two.url
        for mirror in (one, two):
            assert [
                answer(mirror.url, path) for path in ("/simple/six/", "/python/cpython.tar.gz", "/simple/flask/")
            ] == [200, 200, 404]
            assert mirror.requests == 3
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["lock", "mirror"]
    with pytest.raises(ConnectionRefusedError):
        answer(one.url, "/simple/")


def test_a_package_that_the_index_lacks_is_an_error(tmp_path):
    """The error has pip's own message, and no half-filled folder is left that a later session would use."""
    with pytest.raises(RuntimeError, match=r"six==0\.0\.1"):
        Mirror("127.0.0.1", ["six==0.0.1"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_it_ends_with_its_owner():
    """When the process that opened it is killed, no process serves any more."""
    program = """\
import time
from tests.testbed.fixtures import requirements
from tests.testbed.mirror import Mirror

mirror = Mirror("127.0.0.1", requirements())
print(mirror.url, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        url = owner.stdout.readline().strip()
        assert answer(url, "/simple/") == 200
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    wait_until(lambda: _is_refused(url), "the mirror to go")


def _is_refused(url: str) -> bool:
    try:
        answer(url, "/simple/")
    except ConnectionError:
        return True
    return False


def test_a_binary_that_cannot_be_relocated_is_an_error(tmp_path):
    """The path of libpython is replaced by the binary's own folder, byte for byte. If it does not fit, the mirror
    raises an error.
    """
    binary = tmp_path / "python"
    binary.write_bytes(b"ELF\0/home/somebody/python/lib\0rest")
    _make_relocatable(binary, b"/home/somebody/python/lib")
    assert binary.read_bytes() == b"ELF\0" + b"$ORIGIN/../lib".ljust(25, b"\0") + b"\0rest"
    binary.write_bytes(b"ELF\0/py/lib\0rest")
    with pytest.raises(RuntimeError, match="no room"):
        _make_relocatable(binary, b"/py/lib")
