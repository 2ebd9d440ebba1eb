"""Figures that the engine benchmark collects, its bars and its table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks import report
from benchmarks.engines.changes import Window, losses
from benchmarks.engines.work import Done

say = partial(report.say, "engines")
IN_PROCESS, WORKER, SERVER, NAIVE, EMBEDDED = WAYS = ("in process", "worker", "server", "naive", "embedded")
BATCH, STREAM, CHANGES = KINDS = ("batch", "stream", "changes")
TARGETS = {WORKER: 0.85, EMBEDDED: 0.5}
"""Tokens per second of a batch that a way has to reach, over those of vLLM in process."""
MOST_EMBEDDED = 256
"""Requests at a time up to which the embedded engine's target holds."""


@dataclass(frozen=True)
class Kind:
    """Kind of work, with its number of requests at a time."""

    name: str
    num_at_once: int

    def __str__(self) -> str:
        return f"{self.name} of {self.num_at_once}" + (" at a time" if self.name == STREAM else "")


@dataclass
class Findings:
    """Rates by kind of work and way, and the windows of version changes."""

    rates: dict[Kind, dict[str, list[float]]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    engine: str = ""
    failure: str = ""
    """Reason that the measurement ended early; empty if it did not."""

    def add(self, kind: Kind, way: str, done: Done) -> None:
        self.rates.setdefault(kind, {}).setdefault(way, []).append(done.tokens_per_s)
        say(f"{kind}, {way}: {done.num_tokens} tokens in {done.seconds:.2f} s: {done.tokens_per_s:.0f} tokens/s")

    def ratios(self, kind: Kind, way: str) -> list[float]:
        """Ratios to the median rate in process; empty if one of the two was not measured."""
        rates = self.rates.get(kind, {})
        if not rates.get(IN_PROCESS):
            return []
        return [rate / statistics.median(rates[IN_PROCESS]) for rate in rates.get(way, ())]


def bar_name(way: str, num_at_once: int) -> str:
    return f"{way} over in process, {Kind(BATCH, num_at_once)}"


def bars_of(
    findings: Findings, concurrency: Sequence[int], *, decides: bool
) -> dict[str, report.Bar | report.Unmeasured]:
    bars: dict[str, report.Bar | report.Unmeasured] = {}
    for num_at_once in concurrency:
        for way, target in TARGETS.items():
            if way == EMBEDDED and num_at_once > MOST_EMBEDDED:
                continue
            ratios = findings.ratios(Kind(BATCH, num_at_once), way)
            if ratios:
                bar = report.at_least(target, ratios, quick=False)
                bars[bar_name(way, num_at_once)] = bar if decides else replace(bar, holds=None)
            else:
                bars[bar_name(way, num_at_once)] = report.Unmeasured(target)
    return bars


def rows_of(findings: Findings) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind, rates in findings.rates.items():
        for way, found in rates.items():
            ratios = findings.ratios(kind, way)
            share = f"{statistics.median(ratios):.2f}" if ratios else ""
            rows.append((f"tokens/s, {kind}, {way}", *spread(found, "{:.0f}"), share))
    for way, lost in losses(findings.windows).items():
        rows.append((f"seconds lost a change, {way}", *spread([loss.lost_s for loss in lost], "{:.2f}"), ""))
        rows.append((f"seconds still a change, {way}", *spread([loss.still_s for loss in lost], "{:.2f}"), ""))
        rows.append((f"seconds of a load, {way}", *spread([loss.load_s for loss in lost], "{:.2f}"), ""))
    return rows


def spread(values: Sequence[float], form: str) -> tuple[str, str]:
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(statistics.median(values)), f"{low} to {high}"


def raw_of(findings: Findings) -> dict[str, Any]:
    return {
        "engine": findings.engine,
        "failure": findings.failure,
        "tokens_per_s": {str(kind): rounded(rates) for kind, rates in findings.rates.items()},
        "over_in_process": {
            str(kind): {way: rounded(findings.ratios(kind, way)) for way in rates if way != IN_PROCESS}
            for kind, rates in findings.rates.items()
        },
        "changes": {way: [rounded(asdict(loss)) for loss in found] for way, found in losses(findings.windows).items()},
        "windows": [rounded(asdict(window)) for window in findings.windows],
    }


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value
