"""The page of `skyward ui` in a real browser, with a pool that is open.

Chromium is Debian's, and Playwright drives it. Without them the test fails. The page is kept as a PNG as in
tests/nightly/integrations/test_prefect_browser.py; `make screenshots` makes the one of the docs.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Page

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Attempt
from tests.testbed.browser import chromium_page
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[3]
MOST_BYTES = 200_000
TAGS = "<img src=x onerror=\"document.title='broken'\">"


@contextmanager
def ui(environ: dict[str, str]) -> Generator[str]:
    """A running `skyward ui`: its URL."""
    with subprocess.Popen(
        [Path(sys.executable).parent / "skyward", "ui"], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def note_refusal(url: str, pool_id: str, message: str) -> None:
    what = {"error": "NoCapacity", "code": "InsufficientInstanceCapacity", "message": message}
    place = ("aws", "us-east-1", "p5.48xlarge")
    with Ledger(url) as ledger:
        ledger.note_attempts([Attempt(pool_id, datetime.now(UTC), *place, is_spot=True, seconds=1.5, **what)])


def points(page: Page) -> int:
    return len((page.get_attribute("#nodes polyline", "points") or "").split())


def text_of(page: Page, section: str) -> str:
    return page.inner_text(f"#{section} .content")


def hold(file: str) -> str:
    while not os.path.exists(file):
        time.sleep(0.05)
    return "done"


def test_the_page_shows_an_open_pool_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, end = f"sqlite:///{tmp_path}/ledger.db", tmp_path / "end"
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    local = sky.Local(price_per_hour=36.0)
    work = sky.Work(system="airflow", workflow="nightly", run="2026-11-25", task="train")
    noted: list[str] = []  # all that the page has asked for, and complained of
    with chromium_page() as page:
        page.on("request", lambda request: noted.append(request.url))
        page.on("console", lambda message: noted.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: noted.append(str(error)))
        with ui(dict(os.environ)) as address:
            with sky.ComputePool(provider=local, nodes=2, concurrency=2, display="quiet", work=work) as pool:
                note_refusal(url, pool.id, "no capacity for p5.48xlarge on spot")
                call = pool.submit(sky.compute(hold)(str(end)))
                page.goto(address)
                # a level curve, as of a busy processor, has no height, so it does not count as visible
                page.wait_for_selector("#nodes polyline", state="attached", timeout=60_000)
                wait_until(lambda: "1 of 2" in text_of(page, "nodes") or page.wait_for_timeout(200), "a busy slot", 60)
                wait_until(lambda: points(page) > 2 or page.wait_for_timeout(500), "three samples", 60)
                assert page.locator("#nodes tbody tr").count() == 2
                assert pool.id in text_of(page, "pools")
                assert "airflow / nightly / 2026-11-25 / train" in text_of(page, "pools")
                assert "2 of 2" in text_of(page, "pools")
                assert "InsufficientInstanceCapacity" in text_of(page, "refusals")
                assert page.locator("#days rect").count() == 1
                assert page.locator("#costs tbody tr").count() == 1
                page.locator("#by").select_option("task")
                page.locator("#costs tbody").get_by_text("train").wait_for()
                assert "Task" in page.inner_text("#costs thead")
                assert "72.0000 USD per hour" in page.inner_text("#figures")
                page.get_by_role("button", name=pool.id).click()
                page.wait_for_selector("#receipt tbody tr")
                assert "running calls" in text_of(page, "receipt")
                page.evaluate("scrollTo(0, 0)")
                kept = os.environ.get("CI_ARTIFACTS", str(ROOT / "build"))
                folder = ROOT / os.environ.get("SCREENSHOTS", f"{kept}/screenshots")
                folder.mkdir(parents=True, exist_ok=True)
                image = page.screenshot(path=folder / "page.png", animations="disabled", full_page=True)
                assert len(image) < MOST_BYTES
                note_refusal(url, pool.id, TAGS)
                page.reload()
                page.locator("#refusals").get_by_text(TAGS).wait_for(timeout=60_000)
                assert page.locator("img").count() == 0, "it is a text, and no image"
                end.touch()
                assert call.result(60) == "done"
            page.locator("#receipts").get_by_text(pool.id).wait_for(timeout=60_000)
            assert "There are no open pools." in text_of(page, "pools")
            assert [one for one in noted if not one.startswith((address.partition("?")[0], "data:,"))] == []
        page.locator("#pools").get_by_text("does not answer").wait_for(timeout=60_000)
        assert page.title() == "Skyward"
