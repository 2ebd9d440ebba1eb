"""What a run came to: a row a step, and the figures of the measured part of it.

The rate is the smaller of two: tokens delivered a second, and samples delivered a second times the mean length of the
tasks begun meanwhile. A schedule that puts long answers off looks fast by the second and not by the first; one that
delivers what earlier steps put off, the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.partial.samples import Sample


@dataclass
class Row:
    """One step: what was delivered by its end, and sums of the whole run so far."""

    now_s: float = 0.0
    num_samples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Delivered tokens by staleness."""
    begun_tokens: int = 0
    """Lengths of the tasks begun in this step, which only the accounts know."""
    num_begun: int = 0
    num_wasted: Counter[str] = field(default_factory=Counter)
    """Tokens that nobody will train on, by cause."""
    num_generated: int = 0
    """By the engine, since the run began."""
    num_decode_steps: int = 0
    num_reprefilled: int = 0
    factor: float = 1.0
    """Over-provision in force."""

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
    """A run in numbers, of its measured steps."""

    rate: float
    """Tokens a second: see the module."""
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
    """Of the time, by the engine's model."""
    mean_rows: float
    mean_factor: float

    def row(self) -> dict[str, object]:
        return {key: round(v, 4) if isinstance(v, float) else v for key, v in asdict(self).items()}


def figures_of(rows: Sequence[Row], num_dropped: int, prefill_s: float) -> Figures:
    """The figures after the first steps, in which the schedule fills up."""
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
    """The smallest value that so many are not above."""
    wanted, seen = share * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    raise AssertionError("nothing was counted")
