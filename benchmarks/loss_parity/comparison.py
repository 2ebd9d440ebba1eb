"""Compares each case's losses and gradients in both systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.loss_parity import ours, theirs
from benchmarks.loss_parity.cases import FEW_TERMS, SMALL, Case, cases
from benchmarks.loss_parity.differences import Difference, differences
from benchmarks.loss_parity.gaps import Gap, gap
from benchmarks.loss_parity.ours import Outcome
from benchmarks.loss_parity.theirs import Job

TARGET = 1e-5
DIGITS = 12
"""Digits kept of each recorded figure."""


def jobs_of(case: Case, *, is_cut: bool = False) -> list[Job]:
    """Returns the jobs for TRL: one batch per update or, with `is_cut`, the whole batch, which TRL splits itself."""
    if is_cut:
        return [Job(case.trl, case.answers, case.is_corrected, num_parts=len(case.updates))]
    return [Job(case.trl, case.part(chosen), case.is_corrected) for chosen in case.updates]


def ask(asked: Sequence[tuple[Case, bool]], python: Path) -> tuple[str, list[list[Outcome]]]:
    """Returns TRL's version, and for each case a list with the outcome of each update."""
    jobs = [jobs_of(case, is_cut=is_cut) for case, is_cut in asked]
    version, answered = theirs.outcomes([job for of_case in jobs for job in of_case], python)
    rest = iter(answered)
    return version, [[outcome for _ in of_case for outcome in next(rest)] for of_case in jobs]


def compare(case: Case, told: Sequence[Outcome]) -> list[Gap]:
    """Returns the gap of every update of a case."""
    found = ours.outcomes(case.ours, case.answers, case.updates)
    return [gap(mine, other) for mine, other in zip(found, told, strict=True)]


def account(difference: Difference, told: Sequence[Outcome]) -> tuple[list[Gap], list[Gap]]:
    """Returns the gaps of all updates, first as they are and then with the known difference taken into account."""
    case = difference.case
    found = ours.outcomes(case.ours, case.answers, case.updates)
    expected = [difference.account(f, case.part(u), case) for f, u in zip(found, case.updates, strict=True)]
    plain, accounted = ([gap(a, b) for a, b in zip(outcomes, told, strict=True)] for outcomes in (found, expected))
    return plain, accounted


def record(file: Path, python: Path) -> None:
    """Records TRL's outcomes of a few small cases in a file, for tests that run without TRL."""
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


def worst_bar(values: Sequence[float]) -> report.Bar:
    """Returns the bar for the worst of `values`. Nothing here is timed, so a quick run decides too."""
    most = max(values)
    holds = all(value <= TARGET for value in values)  # not max(), which may pass over NaN
    return report.Bar(float(shown(most)), TARGET, holds, (float(shown(min(values))), float(shown(most))))


def shown(value: float) -> str:
    return f"{value:.1e}"
