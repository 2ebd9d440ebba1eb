"""Offbeat's losses beside TRL's: `python -m benchmarks.loss_parity [--quick] [--trl-python PATH] [--record FILE]`.

GRPO, Dr.GRPO, DAPO, GSPO and CISPO get the same random log-probs, rewards and masks in both systems: in TRL's real
`GRPOTrainer` (advantages, importance weights and loss, in float64), and in Offbeat's real training step (in float32, as
it trains). Compares the loss of each update and its gradient with respect to every token's log-prob. The cases cover
ratios of 1 and older log-probs, with and without KL, and without, with truncated and with masked importance sampling.
Where possible, settings bring both systems to the same definition (cases.py). Otherwise TRL's figures must follow from
Offbeat's by a known formula (differences.py).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.common.trl_environment import trl_python
from benchmarks.loss_parity.cases import ALL_TERMS, FEW_TERMS, SHAPES, cases
from benchmarks.loss_parity.comparison import account, ask, compare, record, shown, worst_bar
from benchmarks.loss_parity.differences import differences
from benchmarks.loss_parity.gaps import Gap, worst
from offbeat.errors import OffbeatError


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
        report.say("loss_parity", str(error))
        return 1
    return 0


def show(
    gaps: Mapping[str, Mapping[str, list[Gap]]], accounts: Mapping[str, tuple[list[Gap], list[Gap]]], **raw: Any
) -> None:
    rows, bars = [], {}
    for name, by_label in gaps.items():
        for label, of_label in by_label.items():
            rows.append((label, str(len(of_label)), *(shown(v) for v in vars(worst(of_label)).values()), ""))
        whole = [one for of_label in by_label.values() for one in of_label]
        bars[f"loss against TRL, {name}"] = worst_bar([one.loss for one in whole])
        bars[f"gradient against TRL, {name}"] = worst_bar([one.gradient for one in whole])
    every = [one for by_label in gaps.values() for of_label in by_label.values() for one in of_label]
    bars["advantages against TRL"] = worst_bar([one.advantages for one in every])
    for name, (plain, accounted) in accounts.items():
        left = worst(accounted)
        rows.append((name, str(len(plain)), shown(left.loss), shown(left.gradient), "", shown(worst(plain).gradient)))
    remaining = [one.worst for _, accounted in accounts.values() for one in accounted]
    bars["other definitions, once accounted for"] = worst_bar(remaining)
    header = ("largest relative difference", "updates", "loss", "gradient", "advantages", "gradient unaccounted")
    report.show("loss_parity", header, rows, bars, **raw)


NUM_SEEDS = 2


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


if __name__ == "__main__":
    sys.exit(main())
