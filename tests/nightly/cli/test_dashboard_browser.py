"""Dask's pages through `skyward dashboard` in a real browser, with a pool that has a call.

Chromium and Playwright are as in test_ui_browser.py; the page is kept as a PNG in the same way.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import skyward_core as sky
from tests.testbed.browser import chromium_page

pytestmark = [pytest.mark.timeout(200)]


def hold(file: str) -> str:
    while not os.path.exists(file):
        time.sleep(0.05)
    return "done"


def test_dasks_pages_work_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links lead from page to page, and tables are sorted. Only Dask's style sheet comes from elsewhere."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    loaded: list[str] = []
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet") as pool:
        call = pool.submit(sky.compute(hold)(str(tmp_path / "end")))
        command = [Path(sys.executable).parent / "skyward", "dashboard", pool.id]
        with chromium_page() as page, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                url = process.stdout.readline().strip()
                page.on("request", lambda request: loaded.append(request.url))
                page.goto(url)
                assert page.inner_text("h1").startswith("Scheduler tls://127.0.0.1:")
                assert page.locator("table.sortable tbody tr").count() == 2
                names = "table.sortable tbody tr td:nth-child(2)"
                before = page.locator(names).all_inner_texts()
                for _ in range(2):  # ascending, and descending
                    page.locator("table.sortable th", has_text="Name").click()
                assert page.locator(names).all_inner_texts() in (before, before[::-1])
                page.screenshot(path=tmp_path / "dashboard.png", full_page=True)
                page.locator("table.sortable tbody tr td a").first.click()
                assert page.inner_text("h1").startswith("Worker: tls://127.0.0.1:")
                page.go_back()
                page.get_by_text("Logs", exact=True).first.click()
                assert page.url.endswith("/info/main/logs.html")
                assert {one.split("/")[2] for one in loaded} <= {url.split("/")[2], "cdnjs.cloudflare.com"}
            finally:
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0
        (tmp_path / "end").touch()
        assert call.result(60) == "done"
