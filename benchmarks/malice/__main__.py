"""Offbeat under attack: `python -m benchmarks.malice [--quick]`.

Runs a coordinator and a trainer as a user starts them, and honest workers with a small real model at a modelled pace.
In attacked runs, one niced process that is bound to one core has some fifty adversaries: strangers without a token,
workers that lie or hoard, and forgers of tokens and log-probs (`adversaries`). Calm and attacked runs take turns.
Compares

- tokens per second of honest workers that are accepted, and trained or still waiting;
- the coordinator's peak memory.

Checks in the ledgers of attacked runs that no honest worker is set aside, that almost no forged token is trained, and
that an adversary that forges a fifth of its tokens is soon found out. A quick run has one short window of each kind, so
it can only show that something went wrong.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.malice.adversaries import ADVERSARIES
from benchmarks.malice.arena import Outcome, play
from benchmarks.malice.model import write_model
from benchmarks.malice.verdicts import bars_of, rows_of


@dataclass(frozen=True)
class Size:
    pairs: int
    """Number of pairs of a calm and an attacked run."""
    seconds: float
    """Length of the window in which each run is measured."""


FULL, QUICK = Size(pairs=3, seconds=60.0), Size(pairs=1, seconds=6.0)

say = partial(report.say, "malice")


def outcomes_of(folder: Path, size: Size, titles: Sequence[str]) -> tuple[list[Outcome], list[Outcome]]:
    """Returns the outcomes of the calm runs and of the attacked runs."""
    model = folder / "model"
    write_model(model)
    calm: list[Outcome] = []
    attacked: list[Outcome] = []
    for seed in range(1, size.pairs + 1):
        for kind, found in (("calm", calm), ("attacked", attacked)):
            place = folder / f"{kind}-{seed}"
            is_attacked = kind == "attacked"
            found.append(play(place, model, is_attacked=is_attacked, seconds=size.seconds, seed=seed, titles=titles))
            say(f"{kind} {seed}: {told(found[-1])}")
    return calm, attacked


def told(outcome: Outcome) -> str:
    trained = outcome.account.trained
    return (
        f"{outcome.honest_tokens_per_s:.0f} honest tokens/s, {outcome.account.num_steps} steps, peak "
        f"{outcome.peak_bytes / 1e6:.0f} MB, honest workers {outcome.honest_share:.0%} of a core, coordinator "
        f"{outcome.coordinator_share:.0%}, {trained.num_forged} of {trained.num_tokens} trained tokens forged, "
        f"{len(outcome.account.set_aside)} set aside{f', ended: {outcome.ended}' if outcome.ended else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.malice", description="Offbeat under attack.")
    parser.add_argument("--quick", action="store_true", help="one short window of each kind: ends within a minute")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the runs there")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="one adversary of the table; may be given again"
    )
    options = parser.parse_args()
    known = [kind.title() for kind in ADVERSARIES]
    if unknown := set(options.only) - set(known):
        parser.error(f"--only: no adversary is called {sorted(unknown)[0]!r}; there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    load, quick = Load(), options.quick
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="malice-") as temporary:
        calm, attacked = outcomes_of(options.keep or Path(temporary), QUICK if quick else FULL, options.only)
    for adversary in attacked[0].adversaries:
        print(f"{adversary['name']}: {adversary['attacks']}")
    report.show(
        "malice",
        ("adversary", "attempts", "answers", "what became of it"),
        rows_of(attacked),
        bars_of(calm, attacked, quick),
        quick=quick,
        num_adversaries=len(attacked[0].adversaries),
        honest_tokens_per_s={
            "calm": round(statistics.median(outcome.honest_tokens_per_s for outcome in calm), 1),
            "attacked": round(statistics.median(outcome.honest_tokens_per_s for outcome in attacked), 1),
        },
        **load.shares(),
        calm=[outcome.told() for outcome in calm],
        attacked=[outcome.told() for outcome in attacked],
    )


if __name__ == "__main__":
    main()
