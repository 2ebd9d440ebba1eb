"""A real browser that looks at the page, and says how long it waited."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offbeat.errors import OffbeatError

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SIZE = {"width": 1280, "height": 800}
WITHIN_MS = 120_000

NOTE_FIRST_PICTURE = """
  const look = () => {
    const drawn = document.querySelector("figure[data-metric=reward] canvas");
    if (!drawn) return false;
    const note = () => { document.documentElement.dataset.drawnMs = performance.now(); };
    requestAnimationFrame(() => requestAnimationFrame(note));
    return true;
  };
  const watching = new MutationObserver(() => { if (look()) watching.disconnect(); });
  const watch = () => watching.observe(document.documentElement, {childList: true, subtree: true});
  addEventListener("DOMContentLoaded", watch);
"""
"""Notes when the first chart has been painted, in milliseconds after the browser set out for the page."""
SHOW_ANSWERS = """
  (address) => new Promise((done) => {
    const view = document.querySelector("#view-answers > div"), start = performance.now();
    const watching = new MutationObserver(() => {
      if (!view.querySelector(".count")) return;
      watching.disconnect();
      requestAnimationFrame(() => requestAnimationFrame(() => done([
        performance.now() - start, view.querySelector(".count").innerText, view.querySelectorAll("tbody tr").length])));
    });
    watching.observe(view, {childList: true});
    location.hash = address;
  })
"""
"""Goes to a list of answers; returns the milliseconds until it is painted, its count in words, and its rows."""


class NoBrowser(OffbeatError):
    """This machine lacks a browser, or what drives it."""


@contextmanager
def started() -> Iterator[Any]:
    """Starts Chromium with Playwright."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowser("this benchmark needs the package playwright: pip install playwright") from error
    if chromium is None:
        raise NoBrowser("this benchmark needs chromium on PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, link: str) -> Iterator[Any]:
    """Opens the page in a window of its own, which has nothing in its cache."""
    context = browser.new_context(viewport=SIZE)
    try:
        page = context.new_page()
        page.set_default_timeout(WITHIN_MS)
        page.add_init_script(NOTE_FIRST_PICTURE)
        page.goto(link)
        yield page
    finally:
        context.close()


def first_picture_s(page: Any) -> float:
    page.wait_for_selector("html[data-drawn-ms]", state="attached")
    return float(page.get_attribute("html", "data-drawn-ms")) / 1e3


def shown_answers(page: Any, address: str) -> tuple[float, str, int]:
    """Goes to a list of answers, such as `answers?step=3`; returns its seconds, its count in words, and its rows."""
    milliseconds, count, rows = page.evaluate(SHOW_ANSWERS, f"#{address}")
    return milliseconds / 1e3, count, rows
