"""The page in a real browser. Needs Chromium and the Python package `playwright`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def started_browser() -> Iterator[Any]:
    """Starts Chromium; skips the test that asks for it on a machine without."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


class Opened:
    """A page that is open in the browser, and everything that went wrong in it."""

    def __init__(self, browser: Any, address: str, *, offline: bool = True, **options: Any):
        self.wrong: list[str] = []
        self.asked: list[str] = []
        context = browser.new_context(offline=offline, **options)
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda told: self.wrong.append(told.text) if told.type == "error" else None)
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.address = self.page.url.split("#")[0]
        self.show("learning")

    def show(self, view: str) -> None:
        """Goes to a view, such as `answers?step=3`, of the page that is open."""
        self.page.evaluate("view => { location.hash = view; }", f"#{view}")
        self.page.wait_for_selector("#state:not(:has-text('loading'))", state="attached")

    def text(self, place: str) -> str:
        return self.page.inner_text(place)

    def rows(self, place: str) -> list[dict[str, str]]:
        """The rows of the first table in `place`, by the names of its columns."""
        return self.page.eval_on_selector(
            f"{place} table:not(.u-legend)",
            """table => [...table.tBodies[0].rows].map(row => Object.fromEntries(
                 [...row.cells].map(cell => [cell.dataset.head, cell.innerText.trim()])))""",
        )

    def values(self, chart: str) -> dict[str, str]:
        """What a chart's legend tells at its cursor, by label."""
        return self.page.eval_on_selector(
            f"figure[data-metric='{chart}'] .u-legend",
            """legend => Object.fromEntries([...legend.querySelectorAll(".u-series")].map(
                 row => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]))""",
        )


def figure(text: str) -> float:
    """The number that a text begins with."""
    return float(text.replace(",", "").split()[0])
