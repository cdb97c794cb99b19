"""What a reader does with the page of `skyward ui`, in Chromium, with a ledger that has pools in all states.

test_ui_browser.py has the command itself and a real pool.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Locator
from playwright.sync_api import Page as Tab

from skyward_core.live.observer import NodeUse
from skyward_core.work import Work
from tests.cli.ledger import FakeUtilisation, Page, Skyward, record_pools, sample
from tests.testbed.browser import chromium_page

pytestmark = [pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[3]
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
LEAST_CONTRAST = 4.5
"""Of text: https://www.w3.org/TR/WCAG22/#contrast-minimum."""
LEAST_GRAPHIC_CONTRAST = 3.0
"""Of curves and bars: https://www.w3.org/TR/WCAG22/#non-text-contrast."""
LEAST_FONT_PIXELS = 12
PHONE = {"width": 360, "height": 740}
READ_AGAIN = "() => Promise.all(Object.keys(PARTS).map((name) => load(name)))"
SELECT_ROW = """(row) => {
  const [first, last] = [row.cells[0], row.cells[9]].map((cell) => cell.querySelector("button")?.firstChild ?? cell.firstChild);
  getSelection().setBaseAndExtent(first, 0, last, last.length);
}"""
CONTRASTS = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.background = "Canvas";
  const channels = (text) => {
    const match = text.match(/^rgba?\\(([^)]*)\\)$/);
    if (!match) throw new Error(`no colour: ${text}`);
    const numbers = match[1].split(/[ ,/]+/).map(Number);
    return [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const canvas = channels(getComputedStyle(probe).backgroundColor);
  probe.remove();
  const over = (top, below) => top.slice(0, 3).map((value, place) => value * top[3] + below[place] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement) {
      if (getComputedStyle(node).opacity !== "1") throw new Error("opacity");
      layers.push(channels(getComputedStyle(node).backgroundColor));
    }
    return layers.reverse().reduce((below, top) => over(top, below), canvas);
  };
  const linear = (value) => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = (colour) => 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]);
  const contrast = (element, paint) => {
    const back = behind(element);
    const [dark, light] = [luminance(over(channels(paint), back)), luminance(back)].sort((left, right) => left - right);
    return (light + 0.05) / (dark + 0.05);
  };
  const texts = [], graphics = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (["SCRIPT", "STYLE", "TITLE", "OPTION"].includes(element.nodeName.toUpperCase())) continue;
    const style = getComputedStyle(element);
    texts.push([contrast(element, element instanceof SVGElement ? style.fill : style.color), walker.currentNode.data]);
  }
  for (const element of document.querySelectorAll("input, select")) {
    texts.push([contrast(element, getComputedStyle(element).color), `the ${element.nodeName} ${element.id}`]);
    if (element.placeholder) {
      texts.push([contrast(element, getComputedStyle(element, "::placeholder").color), element.placeholder]);
    }
  }
  for (const element of document.querySelectorAll("svg polyline, svg rect")) {
    const style = getComputedStyle(element);
    graphics.push([contrast(element.parentElement, style.fill === "none" ? style.stroke : style.fill), element.outerHTML]);
  }
  return [texts, graphics];
}"""
FONT_PIXELS = """() => [...document.querySelectorAll("body *")]
  .filter((element) => !["SCRIPT", "STYLE", "OPTION"].includes(element.nodeName) && element.checkVisibility()
    && [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()))
  .map((element) => parseFloat(getComputedStyle(element).fontSize)
    * (element instanceof SVGElement ? element.getScreenCTM().a : 1))"""
CUT = """() => [...document.querySelectorAll("body *")]
  .filter((element) => !element.closest(".scroll") && element.checkVisibility()
    && (element.getBoundingClientRect().right > innerWidth + 0.5 || element.getBoundingClientRect().left < -0.5))
  .map((element) => element.outerHTML.slice(0, 200))"""


@contextmanager
def tab_of(page: Page, **settings: Any) -> Generator[Tab]:
    """Yield the page in a tab that has read all; an error of its script fails the test."""
    errors: list[str] = []
    with chromium_page() as first:
        assert first.context.browser is not None
        tab = first.context.browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings}).new_page()
        tab.set_default_timeout(20_000)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(page.server.url)
        tab.evaluate(READ_AGAIN)
        yield tab
        assert errors == []


def show_all(skyward: Skyward, utilisation: FakeUtilisation) -> None:
    """Fill all lists of the page, with a node that has a GPU, and a pool out of reach."""
    record_pools(skyward)
    samples = tuple(sample(percent, seconds, gpu=90.0) for percent, seconds in ((10, 100.0), (30, 102.0), (20, 104.0)))
    utilisation.uses = {"sky-live": [NodeUse(0, "i-0", samples, 1, 4)], "sky-dead": "no route to it"}
    skyward.damage("UPDATE skyward_pools SET created_microseconds = 'soon' WHERE id = 'sky-odd'")


def cells(tab: Tab, section: str, column: int) -> list[str]:
    return tab.locator(f"#{section} tbody td:nth-child({column})").all_inner_texts()


def head(tab: Tab, section: str, text: str) -> Locator:
    return tab.locator(f"#{section} th", has=tab.get_by_role("button", name=text, exact=True))


def show_receipt(tab: Tab, pool_id: str) -> None:
    tab.locator("#pools").get_by_role("button", name=pool_id).click()
    tab.wait_for_selector("#receipt tbody tr")


def keep_picture(tab: Tab, name: str) -> None:
    folder = Path(os.environ.get("CI_ARTIFACTS", str(ROOT / "build"))) / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=folder / f"{name}.png", animations="disabled", full_page=True)


def test_a_refresh_keeps_focus_selection_and_scroll_positions(page: Page, skyward: Skyward) -> None:
    """Also with new rows before and after, other numbers, and an order by a column."""
    skyward.open("sky-live", work=Work(system="cron", run="a-run-to-copy"))
    skyward.open("sky-more", age_seconds=9000)
    with tab_of(page, viewport=PHONE) as tab:
        head(tab, "pools", "Cost").get_by_role("button").click()
        button = tab.locator("#pools").get_by_role("button", name="sky-live")
        button.evaluate("(element) => { element.isSame = true; element.focus(); }")
        row = tab.locator("#pools tbody tr", has_text="sky-live")
        row.evaluate(SELECT_ROW)
        selected = tab.evaluate("getSelection().toString()").split("\t")
        tab.evaluate("document.querySelector('#pools .scroll').scrollLeft = 70; scrollTo(0, 90)")
        for pool_id, age_seconds in (("sky-cheap", 60), ("sky-dear", 90_000)):
            skyward.open(pool_id, age_seconds=age_seconds)
        later = f"lease_expires_microseconds = lease_expires_microseconds + {3 * 3600 * 10**6}"
        skyward.damage(f"UPDATE skyward_pools SET {later} WHERE id = 'sky-live'")
        tab.evaluate(READ_AGAIN)
        assert cells(tab, "pools", 1) == ["sky-cheap", "sky-live", "sky-more", "sky-dear"]
        assert tab.evaluate("document.activeElement.isSame && document.activeElement.textContent") == "sky-live"
        again = tab.evaluate("getSelection().toString()").split("\t")
        assert "cron / a-run-to-copy" in again
        assert (again[:-1], again[-1]) == (selected[:-1], "3.0 h"), "its last cell has a new text"
        assert tab.evaluate("[document.querySelector('#pools .scroll').scrollLeft, scrollY]") == [70, 90]
        skyward.open("sky-last", age_seconds=1)
        head(tab, "pools", "Cost").get_by_role("button").evaluate("(element) => element.click()")  # the focus stays
        tab.evaluate(READ_AGAIN)
        assert cells(tab, "pools", 1) == ["sky-dear", "sky-more", "sky-live", "sky-cheap", "sky-last"]
        assert tab.evaluate("document.activeElement.isSame")
        assert tab.evaluate("getSelection().toString()").split("\t") == again


def test_what_is_typed_and_chosen_survives_a_refresh(page: Page, skyward: Skyward) -> None:
    record_pools(skyward)
    with tab_of(page) as tab:
        tab.locator("#by").select_option("pool")
        tab.locator("#filter").press_sequentially("sky")
        tab.evaluate("document.getElementById('filter').setSelectionRange(1, 2)")
        tab.evaluate(READ_AGAIN)
        assert tab.evaluate(
            "(({ id, value, selectionStart }) => [id, value, selectionStart])(document.activeElement)"
        ) == [
            "filter",
            "sky",
            1,
        ]
        assert tab.locator("#by").input_value() == "pool"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_and_curves_can_be_told_from_what_is_behind_them(
    page: Page, skyward: Skyward, utilisation: FakeUtilisation, scheme: Literal["light", "dark"]
) -> None:
    """Everything that the page can show is on it: warnings, a dead pool, a filter that hides all of a list."""
    show_all(skyward, utilisation)
    with tab_of(page, color_scheme=scheme) as tab:
        show_receipt(tab, "sky-live")
        keep_picture(tab, f"page-{scheme}")
        texts, graphics = tab.evaluate(CONTRASTS)
        tab.locator("#filter").fill("no such pool")
        texts += tab.evaluate(CONTRASTS)[0]
        for _ in range(3):
            tab.keyboard.press("Tab")
            texts += tab.evaluate(CONTRASTS)[0]
        tab.goto(tab.url.partition("?")[0])
        refusal = tab.evaluate(CONTRASTS)[0]
    shown = " ".join(text for _, text in texts)
    for text in ("no route to it", "cannot be read", "dead: ", "skyward sweep --yes", "running calls", "No row has"):
        assert text in shown
    assert len(refusal) > 4
    print(f"{scheme}: text {min(texts + refusal)[0]:.2f}, graphics {min(graphics)[0]:.2f}")
    assert [pair for pair in texts + refusal if pair[0] < LEAST_CONTRAST] == []
    assert [pair for pair in graphics if pair[0] < LEAST_GRAPHIC_CONTRAST] == []
    assert len(graphics) > 5


def test_a_filter_keeps_the_rows_of_the_pools_that_have_its_words(
    page: Page, skyward: Skyward, utilisation: FakeUtilisation
) -> None:
    """By name, owner, provider or state. Nodes, calls and refusals follow their pools. Refreshes keep it."""
    show_all(skyward, utilisation)
    with tab_of(page) as tab:
        everything = set(cells(tab, "pools", 1))
        assert {"sky-live", "sky-dead", "sky-gone", "nightly (sky-named)"} == everything
        for words, expected in (
            ("NIGHTLY", {"nightly (sky-named)"}),
            ("dead: its owner", {"sky-dead", "sky-gone"}),
            ("folder ada", {"sky-live", "nightly (sky-named)"}),
            ("ada cron sky-live", {"sky-live"}),
            ("nonesuch", set[str]()),
            ("", everything),
        ):
            tab.locator("#filter").fill(words)
            for _ in range(2):
                assert set(cells(tab, "pools", 1)) == expected, words
                tab.evaluate(READ_AGAIN)
        tab.locator("#filter").fill("sky-live ada@laptop")
        assert (cells(tab, "nodes", 1), set(cells(tab, "refusals", 2))) == (["sky-live"], {"sky-live"})
        assert set(cells(tab, "calls", 2)) == {"sky-live"}
        assert cells(tab, "receipts", 1) == []
        assert "No row has “sky-live ada@laptop”." in tab.inner_text("#receipts")
        assert re.fullmatch(r"\d+ of \d+ rows", tab.inner_text("#matches"))
        tab.locator("#filter").fill("ended")
        assert cells(tab, "receipts", 1) == ["sky-ended"]
        tab.reload()
        tab.locator("#receipts").get_by_text("sky-ended").wait_for()
        assert (tab.locator("#filter").input_value(), cells(tab, "pools", 1)) == ("ended", [])


def test_heads_sort_by_mouse_and_keyboard(page: Page, skyward: Skyward) -> None:
    """Numbers are sorted as numbers. Refreshes, new rows and a reload keep the order."""
    for pool_id, age_seconds in (("sky-b", 900), ("sky-c", 36_000), ("sky-a", 3000)):
        skyward.open(pool_id, age_seconds=age_seconds)
    with tab_of(page) as tab:
        assert cells(tab, "pools", 1) == ["sky-c", "sky-a", "sky-b"], "the oldest first"
        head(tab, "pools", "Pool").get_by_role("button").click()
        assert cells(tab, "pools", 1) == ["sky-a", "sky-b", "sky-c"]
        cost = head(tab, "pools", "Cost")
        cost.get_by_role("button").focus()
        for key, direction, expected in (
            ("Enter", "ascending", ["sky-b", "sky-a", "sky-c"]),
            ("Space", "descending", ["sky-c", "sky-a", "sky-b"]),
        ):
            tab.keyboard.press(key)
            assert cost.get_attribute("aria-sort") == direction
            assert tab.locator("#pools th[aria-sort]").count() == 1
            assert cells(tab, "pools", 1) == expected
            assert tab.evaluate("document.activeElement.textContent") == "Cost"
        skyward.open("sky-d", age_seconds=9000)
        tab.evaluate(READ_AGAIN)
        assert cells(tab, "pools", 1) == ["sky-c", "sky-d", "sky-a", "sky-b"]
        tab.reload()
        tab.locator("#pools").get_by_text("sky-d").wait_for()
        assert cells(tab, "pools", 1) == ["sky-c", "sky-d", "sky-a", "sky-b"]
        assert cost.get_attribute("aria-sort") == "descending"


def test_nothing_is_cut_on_a_phone(page: Page, skyward: Skyward, utilisation: FakeUtilisation) -> None:
    """Tables scroll in their own boxes; the page has no width beyond the screen, and letters have a size."""
    show_all(skyward, utilisation)
    skyward.open("sky-" + "long" * 30)
    with tab_of(page, viewport=PHONE) as tab:
        show_receipt(tab, "sky-live")
        tab.evaluate("scrollTo(0, 0)")
        keep_picture(tab, "page-phone")
        tab.locator("#filter").fill("y" * 100)
        tab.locator("#filter").fill("")
        assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert tab.evaluate(CUT) == []
        assert min(tab.evaluate(FONT_PIXELS)) >= LEAST_FONT_PIXELS
        tab.goto(tab.url.partition("?")[0])
        assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_dead_pool_says_what_to_do(page: Page, skyward: Skyward) -> None:
    record_pools(skyward)
    with tab_of(page) as tab:
        for pool_id in ("sky-dead", "sky-gone"):
            row = tab.locator("#pools tbody tr", has_text=pool_id)
            assert "dead: its owner is dead" in row.inner_text()
            assert row.locator("code").all_inner_texts() == ["skyward sweep --yes"]
        assert tab.locator("#pools tbody tr", has_text="sky-live").locator("code").count() == 0


def test_pools_show_when_they_began_and_ended_in_the_readers_time(page: Page, skyward: Skyward) -> None:
    skyward.clock.now = datetime.now(UTC).replace(microsecond=0)
    record_pools(skyward)
    pools = page.get("/api/pools").json
    with tab_of(page, timezone_id="Asia/Tokyo", locale="en-GB") as tab:
        for section, listed, fields in (
            ("pools", pools["pools"], ["created_at"]),
            ("receipts", pools["ended"], ["created_at", "ended_at"]),
        ):
            assert listed
            for pool in listed:
                row = tab.locator(f"#{section} tbody tr", has_text=pool["pool"])
                for place, field in enumerate(fields):
                    shown = row.locator("time").nth(place)
                    assert shown.get_attribute("title") == shown.get_attribute("datetime") == pool[field]
                    there = datetime.fromisoformat(pool[field]).astimezone(ZoneInfo("Asia/Tokyo"))
                    assert shown.inner_text() == f"{there.day} {there:%b %Y, %H:%M}".replace("Sep ", "Sept ")


def test_without_the_token_the_browser_shows_a_page(page: Page) -> None:
    with chromium_page() as tab:
        for query, status, why in (("", 401, "needs a token"), ("?token=wrong", 403, "not that of the running")):
            reply = tab.goto(f"http://{urlsplit(page.server.url).netloc}/{query}")
            assert reply is not None
            assert reply.status == status
            assert why in tab.inner_text("body")
            assert tab.locator("code").all_inner_texts() == ["skyward ui"] * 3
        keep_picture(tab, "page-without-token")
