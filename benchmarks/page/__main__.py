"""The page of a long run, and what looking costs a swarm: `python -m benchmarks.page [--quick]`.

Needs Chromium and the Python package playwright. Measures

- the seconds from opening the link to the first chart on the screen, for a run of 10^5 steps and 10^6 answers: of a
  page that was just started, whose server has read nothing yet, and of one that has read everything;
- the seconds from choosing filters or an order to the list of answers on the screen, of one that has read everything;
- the seconds until the page has read all answers, the first time and with the index that it keeps in a cache;
- submissions per second of a crowd of paced workers at a coordinator whose page five event streams and a browser have
  open, over those without anybody who looks; interleaved;
- the size of the demo run as one file.

The quick form has a tenth of the answers and of the steps, and decides nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.page import browser as browsers
from benchmarks.page.beside import PACED, Lengths, measure
from benchmarks.page.long_run import GROUP_SIZE, make

JUST_STARTED, READ = "first picture, page just started (s)", "first picture, page read (s)"
FILTER, WATCHED, FILE = "slowest filter (s)", "submissions/s, watched over alone", "the demo as one file (MB)"
TARGETS = {JUST_STARTED: 1.0, READ: 1.0, FILTER: 0.5, WATCHED: 0.92, FILE: 3.0}
NUM_STEPS = 100_000
REPEATS = 5
FILTERS = (
    "answers?step={middle}",
    "answers?source=products&min_reward=1",
    "answers?worker=w3&order=best",
    "answers?max_reward=0&order=longest",
    "answers?version={middle}&order=worst",
    "answers?order=oldest&from=5000",
    "answers?state=trained&purpose=train&min_length=12&max_length=12&order=worst",
)
say = partial(report.say, "page")


@contextmanager
def served(run: Path, cache: Path) -> Iterator[str]:
    """Serves the page of a run by a process of its own; yields its link."""
    command = [sys.executable, "-m", "offbeat", "page", str(run)]
    given = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "the page did not start"
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def look_at(browser: browsers.Any, run: Path, num_steps: int, cache: Path, repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("just started", "read", "filter", "index", "cached index")}
    wanted = f"{num_steps * GROUP_SIZE:,} of {num_steps * GROUP_SIZE:,} answers"
    for number in range(repeats):
        with served(run, cache) as link:
            with browsers.opened(browser, link) as page:
                found["just started"].append(browsers.first_picture_s(page))
                start_s = time.monotonic()
                while browsers.shown_answers(page, "answers")[1] != wanted:
                    page.evaluate("location.hash = '#events'")
                    time.sleep(0.5)
                found["cached index" if number else "index"].append(time.monotonic() - start_s)
                page.wait_for_timeout(1000)
                for address in FILTERS:
                    seconds, count, rows = browsers.shown_answers(page, address.format(middle=num_steps // 2))
                    assert rows > 0, f"{address}: {count}"
                    found["filter"].append(seconds)
                    say(f"{address}: {seconds:.3f} s, {count}")
            with browsers.opened(browser, link) as page:
                found["read"].append(browsers.first_picture_s(page))
        say(f"round {number + 1}: {found['just started'][-1]:.2f} s, then {found['read'][-1]:.2f} s")
    return found


def demo_file_mb(folder: Path, quick: bool) -> float:
    """Trains the demo, and returns the megabytes of its page as a file."""
    words = ["--run.name=demo", "--log.console=quiet", *(["--run.steps=20"] if quick else [])]
    subprocess.run([sys.executable, "-m", "offbeat", "train", *words], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "offbeat", "page", "demo", "--out", "demo.html"], cwd=folder, check=True)
    return (folder / "demo.html").stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="The page of a long run, and what looking costs a swarm.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the run, one short round")
    options = parser.parse_args()
    quick, num_steps = options.quick, NUM_STEPS // 10 if options.quick else NUM_STEPS
    load = Load()
    try:
        with report.scratch("page") as folder, browsers.started() as browser:
            start_s = time.monotonic()
            make(folder / "run", num_steps)
            say(
                f"{num_steps:,} steps and {num_steps * GROUP_SIZE:,} answers made in {time.monotonic() - start_s:.0f} s"
            )
            looked = look_at(browser, folder / "run", num_steps, folder / "cache", 1 if quick else REPEATS)
            size_mb = demo_file_mb(folder, quick)
            rates = measure(browser, folder, Lengths.QUICK if quick else Lengths.FULL)
    except browsers.NoBrowser as error:
        say(str(error))
        unmeasured = {name: report.Unmeasured(target) for name, target in TARGETS.items()}
        report.show("page", ("what", "median", "most"), [], unmeasured, quick=quick, **load.shares())
        return
    ratios = [watched / alone for alone, watched in zip(rates["alone"], rates["watched"], strict=True)]
    bars = {
        JUST_STARTED: report.at_most(TARGETS[JUST_STARTED], looked["just started"], quick=quick),
        READ: report.at_most(TARGETS[READ], looked["read"], quick=quick),
        FILTER: report.at_most(TARGETS[FILTER], [max(looked["filter"])], quick=quick),
        WATCHED: report.at_least(TARGETS[WATCHED], ratios, quick=quick),
        FILE: report.at_most(TARGETS[FILE], [size_mb], quick=quick),
    }
    bars = {name: replace(bar, holds=None) if quick else bar for name, bar in bars.items()}
    rows = [
        (name, f"{statistics.median(values):.3g}", f"{max(values):.3g}") for name, values in looked.items() if values
    ]
    rows += [(f"submissions/s, {name}", f"{statistics.median(v):.4g}", f"{max(v):.4g}") for name, v in rates.items()]
    report.show(
        "page", ("what", "median", "most"), rows, bars, quick=quick, num_steps=num_steps, looked=looked, rates=rates,
        answer_s=PACED, **load.shares(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
