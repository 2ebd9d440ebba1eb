"""Offbeat's losses beside TRL's: `python -m benchmarks.loss_parity [--quick] [--trl-python PATH] [--record FILE]`.

GRPO, Dr.GRPO, DAPO, GSPO and CISPO get the same drawn log-probs, rewards and masks in both systems, through TRL's real
`GRPOTrainer` (advantages, importance weights and loss, in float64) and through Offbeat's real training step (in
float32, as it trains). Compared are the loss of each update and its gradient with respect to every token's log-prob:
with a ratio of 1 and with older log-probs, with and without KL, without and with truncated or masked importance
sampling. Settings of either side bring both to one definition, see `parity.cases`; where none does, TRL's figures must
follow from Offbeat's by a known factor, see `parity.differences`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.parity import ours, theirs
from benchmarks.parity.cases import ALL_TERMS, FEW_TERMS, SHAPES, SMALL, Case, cases
from benchmarks.parity.differences import Difference, differences
from benchmarks.parity.gaps import Gap, gap, worst
from benchmarks.parity.ours import Outcome
from benchmarks.parity.theirs import Job
from benchmarks.peers.environment import trl_python
from offbeat.errors import OffbeatError

TARGET = 1e-5
NUM_SEEDS = 2
DIGITS = 12
"""Of recorded figures."""


def jobs_of(case: Case, *, is_cut: bool = False) -> list[Job]:
    """What TRL is asked: a batch for each update, or one that it cuts itself."""
    if is_cut:
        return [Job(case.trl, case.answers, case.is_corrected, num_parts=len(case.updates))]
    return [Job(case.trl, case.part(chosen), case.is_corrected) for chosen in case.updates]


def ask(asked: Sequence[tuple[Case, bool]], python: Path) -> tuple[str, list[list[Outcome]]]:
    """TRL's version and outcomes, a list of updates for each case."""
    jobs = [jobs_of(case, is_cut=is_cut) for case, is_cut in asked]
    version, answered = theirs.outcomes([job for of_case in jobs for job in of_case], python)
    rest = iter(answered)
    return version, [[outcome for _ in of_case for outcome in next(rest)] for of_case in jobs]


def compare(case: Case, told: Sequence[Outcome]) -> list[Gap]:
    """The gap of every update of a case."""
    found = ours.outcomes(case.ours, case.answers, case.updates)
    return [gap(mine, other) for mine, other in zip(found, told, strict=True)]


def account(difference: Difference, told: Sequence[Outcome]) -> tuple[list[Gap], list[Gap]]:
    """The gap of every update as it is, and once the difference is accounted for."""
    case = difference.case
    found = ours.outcomes(case.ours, case.answers, case.updates)
    expected = [difference.account(f, case.part(u), case) for f, u in zip(found, case.updates, strict=True)]
    plain, accounted = ([gap(a, b) for a, b in zip(outcomes, told, strict=True)] for outcomes in (found, expected))
    return plain, accounted


def record(file: Path, python: Path) -> None:
    """Writes down what TRL says of a few small cases, for tests that run without it."""
    few, known = list(cases([SMALL], 1, FEW_TERMS)), differences(SMALL)
    asked = [(case, False) for case in few] + [(one.case, one.is_cut) for one in known]
    version, told = ask(asked, python)
    names = [case.name for case in few] + [one.name for one in known]
    figures = {name: [_written(update) for update in updates] for name, updates in zip(names, told, strict=True)}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(updates)}" for name, updates in figures.items())
    file.write_text(f'{{"trl": "{version}", "updates": {{\n{lines}\n}}}}\n')


def _written(update: Outcome) -> dict[str, Any]:
    def short(values: Sequence[float]) -> list[float]:
        return [float(f"{value:.{DIGITS}g}") for value in values]

    gradients = [short(gradient.tolist()) for gradient in update.gradients]
    return {"loss": short([update.loss])[0], "gradients": gradients, "advantages": short(update.advantages.tolist())}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_parity", description="Losses beside TRL's.")
    parser.add_argument("--quick", action="store_true", help="one shape, one seed, fewer combinations")
    parser.add_argument("--trl-python", metavar="PATH", help="of an environment with TRL; without it, one is made")
    parser.add_argument("--record", metavar="FILE", type=Path, help="only write down TRL's figures of small cases")
    options = parser.parse_args()
    try:
        python = trl_python(options.trl_python)
        if options.record:
            record(options.record, python)
        else:
            measure(python, quick=options.quick)
    except OffbeatError as error:
        print(f"loss_parity: {error}", file=sys.stderr)
        return 1
    return 0


def measure(python: Path, *, quick: bool) -> None:
    chosen = list(cases(SHAPES[:1], 1, FEW_TERMS) if quick else cases(SHAPES, NUM_SEEDS, ALL_TERMS))
    known = differences(SHAPES[0])
    asked = [(case, False) for case in chosen] + [(one.case, one.is_cut) for one in known]
    version, told = ask(asked, python)
    gaps: dict[str, dict[str, list[Gap]]] = defaultdict(lambda: defaultdict(list))
    for case, of_case in zip(chosen, told, strict=False):
        gaps[case.algorithm.name][case.algorithm.label] += compare(case, of_case)
    accounts = {one.name: account(one, of) for one, of in zip(known, told[len(chosen) :], strict=True)}
    show(gaps, accounts, quick=quick, trl=version)


def show(
    gaps: Mapping[str, Mapping[str, list[Gap]]], accounts: Mapping[str, tuple[list[Gap], list[Gap]]], **raw: Any
) -> None:
    rows, bars = [], {}
    for name, by_label in gaps.items():
        for label, of_label in by_label.items():
            rows.append((label, str(len(of_label)), *(_shown(v) for v in vars(worst(of_label)).values()), ""))
        whole = [one for of_label in by_label.values() for one in of_label]
        bars[f"loss against TRL, {name}"] = _bar([one.loss for one in whole])
        bars[f"gradient against TRL, {name}"] = _bar([one.gradient for one in whole])
    every = [one for by_label in gaps.values() for of_label in by_label.values() for one in of_label]
    bars["advantages against TRL"] = _bar([one.advantages for one in every])
    for name, (plain, accounted) in accounts.items():
        left = worst(accounted)
        rows.append(
            (name, str(len(plain)), _shown(left.loss), _shown(left.gradient), "", _shown(worst(plain).gradient))
        )
    remaining = [one.worst for _, accounted in accounts.values() for one in accounted]
    bars["other definitions, once accounted for"] = _bar(remaining)
    header = ("largest relative difference", "updates", "loss", "gradient", "advantages", "gradient unaccounted")
    report.show("loss_parity", header, rows, bars, **raw)


def _bar(values: Sequence[float]) -> report.Bar:
    """The worst counts; nothing here is timed, so a quick run decides too."""
    most = max(values)
    holds = all(value <= TARGET for value in values)  # not max(), which may pass over NaN
    return report.Bar(float(_shown(most)), TARGET, holds, (float(_shown(min(values))), float(_shown(most))))


def _shown(value: float) -> str:
    return f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
