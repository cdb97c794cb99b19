"""Chromium without access to other machines, for tests that look at real pages."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


@contextmanager
def chromium_page(width: int = 1280, height: int = 800, timeout_seconds: float = 60.0) -> Generator[Page]:
    """Yield a page of this size in pixels; close the browser at the end.

    Each wait for something on the page lasts `timeout_seconds` at most.
    """
    chromium = shutil.which("chromium")
    assert chromium is not None, "this test needs Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(timeout_seconds * 1000)
            yield page
        finally:
            browser.close()
