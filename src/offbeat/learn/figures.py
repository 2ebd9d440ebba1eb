"""What a step did, in numbers: sums over micro-batches, and what they come to, by staleness too."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from offbeat.learn.audit import SegmentFinding
from offbeat.learn.corrections import Correction
from offbeat.learn.tokens import MAX_LOG_RATIO, Tokens

BUCKET_ENDS = (0, 1, 2, 4, 8)
"""The largest staleness of each bucket but the last, which is open."""
BUCKET_NAMES = ("0", "1", "2", "3-4", "5-8", "9+")


@dataclass(frozen=True)
class BucketFigures:
    """Tokens that are equally old."""

    num_tokens: int
    ess: float
    """Effective sample size: how many equally likely tokens those weighed by importance are worth, as a share."""
    behaviour_kl: float
    """Estimate (k3) of how far the policy at the start of the step is from the one they were sampled from."""
    clip_share: float
    kept_share: float


@dataclass(frozen=True)
class StepFigures:
    """What a step did; means are over trainable tokens."""

    loss: float
    grad_norm: float
    clip_share: float
    kept_share: float
    """Tokens that the correction did not reject."""
    kl: float
    ess: float
    logprob_gap: float
    """Mean absolute difference between the engine's log-probs and the trainer's before the first update, of tokens
    that were sampled from the same weights; NaN where there is none."""
    clamped_share: float
    """Tokens of which a log-ratio was held at `MAX_LOG_RATIO`."""
    entropy: float
    """Estimated by the sampled tokens' own log-probs."""
    num_trained_tokens: int
    num_row_tokens: int
    num_microbatches: int
    signal_share: float
    """Share of samples whose advantage is not 0."""
    value_loss: float | None = None
    audited: tuple[int, ...] = ()
    """Samples that were left out because their log-probs are not those of their version."""
    compared: tuple[SegmentFinding, ...] = ()
    """Segments whose log-probs were compared with those of their own weights."""
    by_staleness: dict[str, BucketFigures] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        """For the metrics; what does not apply is left out."""
        row = {**asdict(self), "audited": len(self.audited)}
        row["compared_tokens"] = sum(segment.num_tokens for segment in self.compared)
        row["off_tokens"] = sum(segment.num_off for segment in self.compared)
        del row["by_staleness"], row["compared"]
        if self.value_loss is None:
            del row["value_loss"]
        for name, bucket in self.by_staleness.items():
            row |= {f"{figure}/staleness_{name}": value for figure, value in asdict(bucket).items()}
        return row


@dataclass
class Sums:
    """Adds up micro-batches."""

    loss: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    fresh_tokens: int = 0
    clamped_tokens: int = 0
    row_tokens: int = 0
    microbatches: int = 0
    audited: list[int] = field(default_factory=list)
    compared: list[SegmentFinding] = field(default_factory=list)
    buckets: np.ndarray = field(default_factory=lambda: np.zeros((6, len(BUCKET_NAMES))))
    """Tokens, ρ, ρ², k3, clipped and kept ones, by bucket."""

    def add(self, tokens: Tokens, correction: Correction, clipped: Tensor | None, fresh: Tensor) -> None:
        """Adds what can be said of trained tokens from the log-probs at the step's start. `fresh` is True where engine
        and trainer had the same weights."""
        mask = tokens.mask.to(torch.float32)
        log_importance = tokens.log_importance.detach()
        importance = log_importance.exp()
        fresh = mask * fresh
        clamped = (tokens.logprobs.detach() - tokens.proximal).abs() > MAX_LOG_RATIO
        clamped |= (tokens.proximal - tokens.behaviour).abs() > MAX_LOG_RATIO
        rows = [mask, importance, importance.square(), torch.expm1(log_importance) - log_importance]
        rows += [torch.zeros_like(mask) if clipped is None else clipped.to(torch.float32)]
        rows += [correction.kept.to(torch.float32)]
        place = torch.bucketize(tokens.staleness, torch.tensor(BUCKET_ENDS, device=mask.device))
        by_bucket = torch.zeros(len(rows), len(BUCKET_NAMES), device=mask.device)
        by_bucket.index_add_(1, place, torch.stack(rows) * mask)
        whole = torch.stack(
            [(log_importance.abs() * fresh).sum(), (tokens.behaviour * mask).sum(), fresh.sum(), (clamped * mask).sum()]
        )
        self.buckets += by_bucket.cpu().numpy()
        gap, behaviour, num_fresh, num_clamped = whole.tolist()
        self.gap, self.entropy = self.gap + gap, self.entropy - behaviour
        self.fresh_tokens += int(num_fresh)
        self.clamped_tokens += int(num_clamped)
        self.tokens = int(self.buckets[0].sum())

    def figures(self, norms: list[float], signal_share: float, *, has_values: bool) -> StepFigures:
        tokens, (counts, rho, squares, kl, clipped, kept) = max(self.tokens, 1), self.buckets
        buckets = {
            name: BucketFigures(int(n), float(r * r / (n * s)) if s else 0.0, float(k / n), float(c / n), float(e / n))
            for name, n, r, s, k, c, e in zip(BUCKET_NAMES, counts, rho, squares, kl, clipped, kept, strict=True)
            if n
        }
        return StepFigures(
            loss=self.loss / len(norms),
            grad_norm=float(np.mean(norms)),
            clip_share=float(clipped.sum()) / tokens,
            kept_share=float(kept.sum()) / tokens if self.tokens else 1.0,
            kl=self.kl / tokens,
            ess=float(rho.sum() ** 2 / (tokens * squares.sum())) if squares.sum() else 1.0,
            logprob_gap=self.gap / self.fresh_tokens if self.fresh_tokens else math.nan,
            clamped_share=self.clamped_tokens / tokens,
            entropy=self.entropy / tokens,
            num_trained_tokens=self.tokens,
            num_row_tokens=self.row_tokens,
            num_microbatches=self.microbatches,
            signal_share=signal_share,
            value_loss=self.value_loss / len(norms) if has_values else None,
            audited=tuple(sorted(self.audited)),
            compared=tuple(sorted(self.compared)),
            by_staleness=buckets,
        )
