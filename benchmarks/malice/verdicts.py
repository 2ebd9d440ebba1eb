"""Results of calm and attacked runs: the bars, and the fate of each adversary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import report
from benchmarks.malice.arena import HONEST, Outcome
from benchmarks.malice.forgers import ForgesAFifth

THROUGHPUT_TARGET, MEMORY_TARGET, FORGED_TARGET, FOUND_OUT_TARGET, CORE_TARGET = 0.9, 1.5, 0.01, 300, 0.4


def bars_of(calm: Sequence[Outcome], attacked: Sequence[Outcome], quick: bool) -> dict[str, report.Bar]:
    pairs = list(zip(attacked, calm, strict=True))
    speeds = [ours.honest_tokens_per_s / max(other.honest_tokens_per_s, 1e-9) for ours, other in pairs]
    peaks = [ours.peak_bytes / max(other.peak_bytes, 1) for ours, other in pairs]
    shares = [outcome.honest_share for outcome in (*calm, *attacked)]
    gone = [float(len(honest_set_aside(outcome))) for outcome in (*calm, *attacked)]
    forged = [outcome.account.trained.forged_share for outcome in attacked]
    broken = [float(len(outcome.account.violations)) for outcome in (*calm, *attacked)]
    return {
        "honest tokens/s, attacked over calm": _never_lucky(
            report.at_least(THROUGHPUT_TARGET, speeds, quick=quick), quick
        ),
        "coordinator's peak memory, attacked over calm": _never_lucky(
            report.at_most(MEMORY_TARGET, peaks, quick=quick), quick
        ),
        "honest workers set aside": _never_lucky(worst(0, gone), quick),
        "share of trained tokens that are forged": _never_lucky(worst(FORGED_TARGET, forged), quick),
        "answers of one who forges a fifth, until it is set aside": _never_lucky(found_out(attacked), quick),
        "broken laws of the ledger": _never_lucky(worst(0, broken), quick),
        "honest workers' share of a core (the set-up counts)": report.at_most(CORE_TARGET, shares, quick=quick),
    }


def worst(target: float, values: Sequence[float]) -> report.Bar:
    """Compares the largest value of all runs with an upper bound."""
    return report.Bar(
        round(max(values), 4), target, max(values) <= target, (round(min(values), 4), round(max(values), 4))
    )


def _never_lucky(bar: report.Bar, quick: bool) -> report.Bar:
    """Makes a bar that holds undecided in a quick run, because a short window can only show that something is wrong."""
    return replace(bar, holds=None) if quick and bar.holds else bar


def honest_set_aside(outcome: Outcome) -> list[str]:
    return [name for name in HONEST if name in outcome.account.set_aside]


def found_out(attacked: Sequence[Outcome]) -> report.Bar:
    """Returns the bar for the submissions until the forger of a fifth is set aside. It is undecided if the forger was
    not set aside but has not submitted more than the target."""
    counts, verdicts = [], []
    for outcome in attacked:
        named = (found["worker"] for found in outcome.adversaries if found["name"] == ForgesAFifth.title())
        name = next(named, "")  # it may have been left out
        count = outcome.account.submissions.get(name, 0)
        counts.append(float(count))
        verdicts.append(count <= FOUND_OUT_TARGET if name in outcome.account.set_aside else _at_large(count))
    holds = False if False in verdicts else None if None in verdicts else True
    return report.Bar(max(counts), FOUND_OUT_TARGET, holds, (min(counts), max(counts)))


def _at_large(count: int) -> bool | None:
    return False if count > FOUND_OUT_TARGET else None


def rows_of(attacked: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Returns a row for each adversary: its attempts in all runs, the answers to them, and its fate."""
    rows: list[tuple[str, ...]] = []
    for found in zip(*(outcome.adversaries for outcome in attacked), strict=True):
        answers: Counter[str] = Counter()
        for adversary in found:
            answers.update(adversary["answers"])
        rows.append(
            (
                found[0]["name"],
                f"{sum(adversary['attempts'] for adversary in found):,}",
                ", ".join(f"{answer}: {count:,}" for answer, count in answers.most_common(5)),
                _fate(found, attacked),
            )
        )
    return rows


def _fate(found: Sequence[dict[str, Any]], attacked: Sequence[Outcome]) -> str:
    num_gone = sum(
        adversary["worker"] in outcome.account.set_aside for adversary, outcome in zip(found, attacked, strict=True)
    )
    if mistakes := [adversary["broken"] for adversary in found if adversary["broken"]]:
        return f"broke: {mistakes[0][:60]}"
    if num_gone:
        return "set aside" if num_gone == len(found) else f"set aside in {num_gone} of {len(found)}"
    answers = Counter[str]()
    for adversary in found:
        answers.update(adversary["answers"])
    num_taken = sum(count for answer, count in answers.items() if answer.startswith("2"))
    if num_taken:
        return "taken" if num_taken > sum(answers.values()) / 2 else "refused, in part"
    num_refused = sum(count for answer, count in answers.items() if answer.isdigit())
    return "refused" if num_refused else "ignored"
