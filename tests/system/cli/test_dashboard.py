"""`skyward dashboard`: who may read Dask's pages, what a node can do with them, and that they end with the command."""

import http.client
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import psutil
import pytest

import skyward_core as sky
from skyward_core.cli.dashboard import BULMA, DaskPages, DaskServer
from skyward_core.errors import NodeLost
from skyward_core.live.observer import Observer
from skyward_core.live.pool_nodes import PoolNodes
from tests.unit.live.test_live import machine


def get(url: str, path: str | None = None, **headers: str) -> tuple[int, str, Mapping[str, str]]:
    """Return status, text and headers of a page on the server of a URL."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request("GET", parts.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace"), dict(answer.headers)
    finally:
        connection.close()


@contextmanager
def dashboard(pool_id: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the URL that it prints."""
    command = [Path(sys.executable).parent / "skyward", "dashboard", pool_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sky.ComputePool]:
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


def ports_of_nodes(pool_id: str) -> set[int]:
    """The ports on which processes of a pool's nodes listen: Dask's scheduler and workers."""
    found: set[int] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SKYWARD_POOL_ID") == pool_id:
                found |= {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return found


def answers_pages(port: int) -> bool:
    try:
        return get(f"http://127.0.0.1:{port}/info/main/workers.html")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_dasks_pages_need_the_token_and_end_with_the_command(pool: sky.ComputePool) -> None:
    """Without it no path answers. No other port of this machine has the pages, neither while the command runs nor after
    its end or a `kill -9`: on a computer with other users a node's loopback is theirs too.
    """
    before = ports_of_nodes(pool.id)
    assert len(before) >= 2
    with dashboard(pool.id) as (process, url):
        status, text, headers = get(url)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "Scheduler tls://127.0.0.1:" in text
        assert ">logs</a>" in text
        token = urlsplit(url).path.split("/")[1]
        assert len(token) >= 32
        for link in re.findall(r'(?:src|href)="([^"]+)"', text):
            expected = 404 if link == "../../status" or "/proxy/" in link else 200  # pages that need Bokeh
            if not link.startswith(BULMA):
                assert get(urljoin(url, link))[0] == expected, link
        worker = text.split('href="../worker/')[1].split('"')[0]
        for page in (
            f"pages/info/worker/{worker}",
            "pages/info/main/logs.html",
            "statics/js/sortable.min.js",
            "statics/css/base.css",
        ):
            assert get(url, f"/{token}/{page}")[0] == 200, page
        assert get(url, f"/{token}/pages/info/worker/none.html")[0] == 404
        for page in ("", "pages/eventstream", "pages/api/v1/retire_workers", "statics/../../info.py", "pages/metrics"):
            assert get(url, f"/{token}/{page}")[0] == 404, page
        for path in (
            "/pages/info/main/workers.html",
            "/",
            "//pages/info/main/workers.html",
            f"/{token}x/pages/info/main/workers.html",
        ):
            assert get(url, path)[0] in (401, 403), path
            assert get(url, f"{path}?token={token}")[0] in (401, 403), path
        for host in ("evil.example", "127.0.0.1.evil.example"):
            assert get(url, Host=host)[0] == 403
        assert not [port for port in before if answers_pages(port)]
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert "with this URL, every user of this machine can read it" in errors
    with dashboard(pool.id) as (process, url):
        assert get(url)[0] == 200
        process.kill()
        process.wait()
        with pytest.raises(ConnectionRefusedError):
            get(url)
    assert ports_of_nodes(pool.id) == before
    assert not [port for port in before if answers_pages(port)]


class Lying(Observer):
    """An observer of a node whose answers a test writes."""

    def __init__(self, answer: object) -> None:
        super().__init__(PoolNodes("sky-1", (machine(),)))
        self._answer = answer

    def ask(self, operation: str, seconds: float, /, **what: Any) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@contextmanager
def served(answer: object) -> Generator[str]:
    with DaskServer(0, "t" * 32, DaskPages(Lying(answer))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (None, 503),
        ({"status": "200", "text": "x"}, 503),
        ({"status": 200, "text": b"x"}, 503),
        ({"status": 200}, 503),
        ({"status": 200, "text": "x" * (1 << 25) + "x"}, 503),
        ({"status": 302, "text": "x"}, 502),
        (NodeLost("the head is gone"), 503),
    ],
)
def test_an_answer_that_is_no_page_is_an_error(answer: object, status: int) -> None:
    with served(answer) as url:
        assert get(url)[0] == status


def test_a_page_of_a_node_runs_no_script() -> None:
    """It is HTML for which the browser runs only scripts of this machine's Dask, whatever the node says that it is."""
    hostile = "<script>fetch('//evil.example')</script>"
    with served({"status": 200, "media_type": "text/javascript", "text": hostile}) as url:
        status, text, headers = get(url)
    assert (status, text, headers["Content-Type"]) == (200, hostile, "text/html; charset=utf-8")
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["form-action"]) == ("'none'", "'self'", "'none'")
    assert headers["Referrer-Policy"] == "no-referrer"
