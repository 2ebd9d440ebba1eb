"""Accounts of a run: a row for each step, and the figures of the measured steps.

The rate is the smaller of two: tokens delivered per second, and samples delivered per second times the mean length of
the tasks begun meanwhile. A schedule that postpones long answers looks fast by the second figure only; one that
delivers answers postponed earlier looks fast by the first only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.partial.samples import Sample


@dataclass
class Row:
    """One step: samples and tokens delivered by its end, and sums of the whole run so far."""

    now_s: float = 0.0
    num_samples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Delivered tokens by staleness."""
    begun_tokens: int = 0
    """Sum of the lengths of the tasks begun in this step, which no policy knows."""
    num_begun: int = 0
    num_wasted: Counter[str] = field(default_factory=Counter)
    """Tokens that will not be trained on, by cause."""
    num_generated: int = 0
    """Tokens that the engine has generated since the run began."""
    num_decode_steps: int = 0
    num_reprefilled: int = 0
    factor: float = 1.0
    """Over-provision factor in this step."""

    def deliver(self, samples: Iterable[Sample], version: int) -> None:
        for sample in samples:
            assert sample.is_done, f"{sample} was delivered before its end"
            self.num_samples += 1
            for sampled_by, num_tokens in sample.spans:
                self.staleness[version - sampled_by] += num_tokens

    @property
    def num_tokens(self) -> int:
        return self.staleness.total()


@dataclass(frozen=True)
class Figures:
    """Figures of the measured steps of a run."""

    rate: float
    """Tokens per second, as the module defines the rate."""
    tokens_per_s: float
    samples_per_s: float
    mean_delivered: float
    mean_begun: float
    off_policy_share: float
    staleness_p50: int
    staleness_p95: int
    staleness_max: int
    waste_share: float
    """Tokens wasted over tokens generated."""
    wasted: dict[str, int]
    reprefill_share: float
    """Share of the time spent on prefilling again, by the model of the engine."""
    mean_rows: float
    mean_factor: float

    def row(self) -> dict[str, object]:
        return {key: round(v, 4) if isinstance(v, float) else v for key, v in asdict(self).items()}


def figures_of(rows: Sequence[Row], num_dropped: int, prefill_s: float) -> Figures:
    """Returns the figures of all steps but the first `num_dropped`, in which the schedule fills up."""
    before, measured, last = rows[num_dropped - 1], rows[num_dropped:], rows[-1]
    seconds = last.now_s - before.now_s
    staleness: Counter[int] = sum((row.staleness for row in measured), Counter())
    wasted: Counter[str] = sum((row.num_wasted for row in measured), Counter())
    num_tokens, num_samples = staleness.total(), sum(row.num_samples for row in measured)
    mean_begun = sum(row.begun_tokens for row in measured) / max(1, sum(row.num_begun for row in measured))
    num_generated = last.num_generated - before.num_generated
    return Figures(
        rate=min(num_tokens, num_samples * mean_begun) / seconds,
        tokens_per_s=num_tokens / seconds,
        samples_per_s=num_samples / seconds,
        mean_delivered=num_tokens / num_samples,
        mean_begun=mean_begun,
        off_policy_share=1 - staleness[0] / num_tokens,
        staleness_p50=_percentile(staleness, 0.5),
        staleness_p95=_percentile(staleness, 0.95),
        staleness_max=max(staleness),
        waste_share=wasted.total() / num_generated,
        wasted=dict(wasted),
        reprefill_share=(last.num_reprefilled - before.num_reprefilled) * prefill_s / seconds,
        mean_rows=num_generated / (last.num_decode_steps - before.num_decode_steps),
        mean_factor=sum(row.factor for row in measured) / len(measured),
    )


def _percentile(counts: Counter[int], share: float) -> int:
    """Returns the smallest value that at least the share `share` of all counts do not exceed."""
    wanted, seen = share * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    raise AssertionError("nothing was counted")
