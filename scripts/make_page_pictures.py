"""Draws the pictures of the page in README.md and docs/page.md, from a run that this script trains first:
`python scripts/make_page_pictures.py [RUN]`.

Needs Chromium and the Python package playwright. With RUN, a run's folder, it takes that run instead. The run is the
demo, which takes a minute or two.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.page.browser import started

PICTURES = Path(__file__).resolve().parent.parent / "docs"
WORDS = ("--run.name=demo", "--log.console=quiet")
VIEWS = {"learning": 760, "time": 520, "answers": 760}
"""Views that are drawn, with the heights of their pictures."""
WIDTH = 1100
COLOURS = 200
"""Colours of a picture: the page has few, and a PNG with a palette is a third of the size."""


def train(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "offbeat", "train", *WORDS], cwd=folder, check=True)
    return folder / "runs" / "demo"


def draw(run: Path, folder: Path) -> None:
    file = folder / "demo.html"
    subprocess.run([sys.executable, "-m", "offbeat", "page", str(run), "--out", str(file)], check=True)
    with started() as browser:
        for view, height in VIEWS.items():
            context = browser.new_context(viewport={"width": WIDTH, "height": height}, color_scheme="light")
            page = context.new_page()
            page.goto(f"{file.as_uri()}#{view}")
            page.wait_for_selector("main section:not([hidden]) :is(canvas, tbody tr)")
            _show(page, view)
            page.wait_for_timeout(500)
            shot, picture = folder / "shot.png", PICTURES / f"page-{view}.png"
            page.screenshot(path=shot)
            Image.open(shot).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
            print(f"{picture}: {picture.stat().st_size / 1e3:.0f} KB")
            context.close()


def _show(page: Any, view: str) -> None:
    """Goes to what a picture shows of a view."""
    if view == "time":
        page.click("text=newest")
    if view == "answers":
        page.evaluate("location.hash = '#answers?step=0&order=worst'")  # the model makes mistakes before it is trained
        page.wait_for_selector("#view-answers .count")
        page.wait_for_timeout(500)
        page.click("#view-answers tbody a >> nth=0")
        page.wait_for_selector(".response")
        page.check("input[name=shade][value=logprob]")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        draw(Path(sys.argv[1]) if len(sys.argv) > 1 else train(Path(scratch)), Path(scratch))


if __name__ == "__main__":
    main()
