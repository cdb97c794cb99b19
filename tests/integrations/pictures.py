"""Pages of orchestrators in Chromium, and their pictures: `$SCREENSHOTS`, else `$CI_ARTIFACTS/screenshots`, else build."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import FloatRect, Page

from tests.testbed.browser import chromium_page

ROOT = Path(__file__).parents[2]
MOST_BYTES = 250_000
"""Of one picture."""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of Chromium, which finds no other machine than this one."""
    with chromium_page() as page:
        yield page


def shown(page: Page, *expected: str) -> str:
    """Return the text of the page once it has all that is expected."""
    for words in expected:
        page.get_by_text(words).first.wait_for(timeout=60_000)
    page.wait_for_load_state("networkidle")
    return page.inner_text("body")


def take(page: Page, name: str, block: tuple[int, int, int, int] | None = None) -> None:
    """Write the page as a PNG; with `block` (x, y, width, height in pixels) that part too, as NAME-block, for README."""
    kept = os.environ.get("CI_ARTIFACTS", str(ROOT / "build"))
    folder = ROOT / os.environ.get("SCREENSHOTS", f"{kept}/screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    assert len(page.screenshot(path=folder / f"{name}.png", animations="disabled")) < MOST_BYTES
    if block is not None:
        x, y, width, height = block
        clip: FloatRect = {"x": x, "y": y, "width": width, "height": height}
        page.screenshot(path=folder / f"{name}-block.png", animations="disabled", clip=clip)
