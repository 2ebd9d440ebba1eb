"""Keeps account of the full tier of the tests and chooses what of it to run: python scripts/full_tier.py COMMAND.

`record RESULTS.xml` notes in tests/full_tier.json, after `make test-full`, at which commit that was, when each module's
tests of the full tier last passed and how long they took. The file is committed with the change.

`choose` prints the modules whose full tier continuous integration runs beside `make test`: those of packages that have
changed since the recorded commit, as many as fit into a budget, and then the tenth of all that has waited longest. So
a change meets the long tests of what it touches, and every module has its turn.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "full_tier.json"
MARKER = "mark.full"
BUDGET_S = 300.0
"""Wall-clock time for the modules of changed packages, on `CORES` cores."""
CORES = 2
SHARE = 0.1
UNKNOWN_S = 60.0
"""Assumed of a module that was never recorded."""
EVERYWHERE = "faults"
"""Tests of whole runs, which any package that takes part in a run can break."""
APART = ("planner", "cli")
"""Packages that take no part in a run."""


@dataclass(frozen=True)
class Run:
    """When the full tier of a module last passed."""

    date: str
    seconds: float


@dataclass(frozen=True)
class Record:
    """What is in the file."""

    commit: str
    """Where `make test-full` last ran."""
    modules: dict[str, Run]


def packages_touched(files: Iterable[str]) -> set[str]:
    """Folders of tests that go with changed files: of their packages, and of whole runs where these take part."""
    touched = set()
    for file in files:
        match file.split("/"):
            case ["src", "offbeat", package, _, *_]:
                touched |= {package} if package in APART else {package, EVERYWHERE}
            case ["src", "offbeat", _]:
                touched.add(EVERYWHERE)
            case ["tests", package, _, *_]:
                touched.add(package)
            case ["benchmarks", *_]:
                touched.add("benchmarks")
            case ["docs" | "examples", *_] | ["README.md"]:
                touched.add("docs")
    return touched


def in_turn(modules: Iterable[str], runs: Mapping[str, Run], commit: str) -> list[str]:
    """Modules by how long they have waited; those of one date in an order that changes with the commit."""

    def turn(module: str) -> tuple[str, str]:
        date = runs[module].date if module in runs else ""
        return date, hashlib.sha256(f"{commit} {module}".encode()).hexdigest()

    return sorted(modules, key=turn)


def choose(
    modules: Iterable[str], runs: Mapping[str, Run], touched: set[str], commit: str, budget_s: float = BUDGET_S
) -> tuple[list[str], list[str], list[str]]:
    """Modules of touched packages that fit into the budget, those that do not, and a tenth that has waited longest."""
    waiting = in_turn(modules, runs, commit)
    seconds = {module: runs[module].seconds if module in runs else UNKNOWN_S for module in waiting}
    changed: list[str] = []
    left_out: list[str] = []
    for module in waiting:
        if module.split("/")[1] in touched:
            used_s = sum(seconds[other] for other in changed)
            fits = used_s + seconds[module] <= budget_s * CORES
            (changed if fits else left_out).append(module)
    tenth: list[str] = []
    for module in waiting:
        if module not in changed and sum(seconds[other] for other in tenth) < SHARE * sum(seconds.values()):
            tenth.append(module)
    return changed, left_out, tenth


def passed(results: ElementTree.Element) -> dict[str, float]:
    """Seconds that the full tier of each module took, of those modules all of whose tests passed or were skipped."""
    seconds: dict[str, float] = {}
    failed = set()
    for case in results.iter("testcase"):
        tier = {found.get("name"): found.get("value") for found in case.iter("property")}
        if "full" not in tier:
            continue
        module = tier["full"] or ""
        seconds[module] = seconds.get(module, 0.0) + float(case.get("time", 0.0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(module)
    return {module: took_s for module, took_s in seconds.items() if module not in failed}


def read_record() -> Record:
    if not RECORD.exists():
        return Record("", {})
    told = json.loads(RECORD.read_text())
    return Record(told["commit"], {module: Run(**run) for module, run in told["modules"].items()})


def modules_here() -> list[str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if MARKER in file.read_text()]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def files_changed_since(commit: str) -> list[str]:
    """Since a commit, or since the one before this where the clone does not know it; all, where it knows neither."""
    for start in (commit, "HEAD~1"):
        try:
            return git("diff", "--name-only", start, "HEAD").splitlines()
        except subprocess.CalledProcessError:
            continue
    return git("ls-files").splitlines()


def do_record(results: Path) -> None:
    here, today = modules_here(), datetime.date.today().isoformat()
    took = passed(ElementTree.parse(results).getroot())
    runs = {module: run for module, run in read_record().modules.items() if module in here}
    runs |= {module: Run(today, round(seconds, 1)) for module, seconds in took.items()}
    record = Record(git("rev-parse", "HEAD"), dict(sorted(runs.items())))
    RECORD.write_text(json.dumps(asdict(record), indent=1) + "\n")
    print(f"{RECORD.relative_to(ROOT)}: {len(took)} modules recorded; commit it with your change")


def do_choose() -> None:
    if not RECORD.exists():  # whatever were chosen may never have passed, and no change would be to blame
        say(f"nothing is recorded yet, so nothing is chosen; run `make test-full` and commit {RECORD.name}")
        return
    record = read_record()
    touched = packages_touched(files_changed_since(record.commit))
    changed, left_out, tenth = choose(modules_here(), record.modules, touched, git("rev-parse", "HEAD"))
    say(f"{len(changed)} modules of changed packages ({', '.join(sorted(touched)) or 'none'})")
    if left_out:
        say(f"beyond the budget of {BUDGET_S:.0f} s, left to `make test-full`: {' '.join(left_out)}")
    say(f"{len(tenth)} modules that have waited longest: {' '.join(tenth)}")
    print(" ".join([*changed, *tenth]))


def say(text: str) -> None:
    print(f"full tier: {text}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("results", type=Path)
    recording.set_defaults(do=lambda words: do_record(words.results))
    commands.add_parser("choose").set_defaults(do=lambda words: do_choose())
    words = parser.parse_args()
    words.do(words)


if __name__ == "__main__":
    main()
