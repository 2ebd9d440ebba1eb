"""One training step: a batch of samples in, updated weights and the step's figures out.

The batch is cut into `updates_per_step` parts by whole groups, in order; each part is one optimizer update.
Denominators are fixed per update before its first micro-batch. With one update the policy at the start of the step is
the policy itself, so its log-probs come for free; with several they are computed once before the first update.

Samples are audited on the way: where the log-probs that came with fresh tokens are far from those of the very weights
that they are said to come from, nothing of the sample is learnt from. Tokens of older weights weigh by how much
likelier the policy at the start of the step makes them, up to a limit.

A sample without an advantage has no gradient (unless a KL term gives it one), so it is not sent backward: late in a run
that is most of them. It is still measured, and still counts in every denominator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.learn.advantages import group_normalised
from offbeat.learn.losses import MAX_LOG_RATIO, clipped_policy_loss, sequence_mean_weights
from offbeat.learn.packing import Microbatch, pack, plan
from offbeat.learn.policy import Policy
from offbeat.learn.samples import Sample


@dataclass(frozen=True)
class StepSettings:
    updates_per_step: int = 1
    tokens_per_microbatch: int = 16384
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    max_importance: float | None = None
    """The most that a token of older weights may count; None: every token counts once."""
    max_sample_gap: float | None = None
    """Samples whose fresh tokens' log-probs are off by more than this on average are left out; None: no audit."""


@dataclass(frozen=True)
class StepFigures:
    """What a step did; means are over trainable tokens."""

    loss: float
    grad_norm: float
    clip_share: float
    kl: float
    logprob_gap: float
    """Mean absolute difference between the engine's log-probs and the trainer's before the first update, of tokens
    that were sampled from the same weights; NaN where there is none."""
    entropy: float
    """Estimated by the sampled tokens' own log-probs."""
    num_trained_tokens: int
    num_row_tokens: int
    num_microbatches: int
    signal_share: float
    """Share of samples whose advantage is not 0."""
    audited: tuple[int, ...] = ()
    """Samples that were left out because their log-probs are not those of their version."""

    def row(self) -> dict[str, float]:
        return {**asdict(self), "audited": len(self.audited)}


@dataclass
class _Sums:
    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    fresh_tokens: int = 0
    row_tokens: int = 0
    microbatches: int = 0
    audited: list[int] = field(default_factory=list)


def train_step(
    policy: Policy,
    samples: Sequence[Sample],
    settings: StepSettings,
    lr: float,
    reference: PreTrainedModel | None = None,
) -> StepFigures:
    """Trains on a batch; `reference` is the frozen starting model where a KL term is wanted."""
    policy.use_threads()
    rewards = np.array([s.reward for s in samples])
    groups = np.array([s.group for s in samples])
    advantages = group_normalised(rewards, groups)
    sums, norms = _Sums(), []
    parts = _parts(groups, settings.updates_per_step)
    proximal = _proximal(policy, samples, parts, settings) if len(parts) > 1 else None
    for part in parts:
        weights = dict(zip(part, sequence_mean_weights([samples[i].mask for i in part]), strict=True))
        learning = [i for i in part if advantages[i] != 0 or settings.kl_coef]
        silent = sorted(set(part) - set(learning))
        for batch in _microbatches(policy, samples, learning, settings):
            old = _known(proximal, batch, policy)
            _train_microbatch(policy, samples, batch, advantages, weights, old, settings, reference, sums)
        for batch in _microbatches(policy, samples, silent, settings):
            old = _known(proximal, batch, policy)
            start = policy.logprobs(batch) if old is None else old
            _measure(samples, batch, start, _believable(samples, batch, start, settings, sums), sums)
        norms.append(policy.update(lr))
    tokens = max(sums.tokens, 1)
    return StepFigures(
        loss=sums.loss / len(parts),
        grad_norm=float(np.mean(norms)),
        clip_share=sums.clipped / tokens,
        kl=sums.kl / tokens,
        logprob_gap=sums.gap / sums.fresh_tokens if sums.fresh_tokens else math.nan,
        entropy=sums.entropy / tokens,
        num_trained_tokens=sums.tokens,
        num_row_tokens=sums.row_tokens,
        num_microbatches=sums.microbatches,
        signal_share=float(np.mean(advantages != 0)) if len(advantages) else 0.0,
        audited=tuple(sorted(sums.audited)),
    )


def _train_microbatch(
    policy: Policy,
    samples: Sequence[Sample],
    batch: Microbatch,
    advantages: np.ndarray,
    weights: dict[int, np.ndarray],
    old: Tensor | None,
    settings: StepSettings,
    reference: PreTrainedModel | None,
    sums: _Sums,
) -> None:
    device = policy.device
    weight = _flat([weights[i] for i in batch.samples], device)
    mask = _flat([samples[i].mask for i in batch.samples], device)
    behaviour = _flat([samples[i].logprobs for i in batch.samples], device)
    lengths = [samples[i].num_tokens for i in batch.samples]
    advantage = _flat([np.repeat(advantages[list(batch.samples)], lengths)], device)
    ref = policy.logprobs(batch, reference) if reference is not None else None
    believable: list[Tensor | None] = [None]

    def loss(logprobs: Tensor) -> Tensor:
        proximal = logprobs.detach() if old is None else old
        believable[0] = _believable(samples, batch, proximal, settings, sums)
        token = clipped_policy_loss(
            logprobs, proximal, advantage, settings.clip_low, settings.clip_high, ref, settings.kl_coef
        )
        counted = weight if believable[0] is None else weight * believable[0]
        if settings.max_importance is not None:
            counted = counted * (proximal - behaviour).clamp(max=MAX_LOG_RATIO).exp().clamp(max=settings.max_importance)
        total = (token.loss * counted).sum()
        figures = torch.stack([total, (token.clipped * mask).sum(), (token.kl * mask).sum()]).tolist()
        sums.loss, sums.clipped, sums.kl = sums.loss + figures[0], sums.clipped + figures[1], sums.kl + figures[2]
        return total

    logprobs = policy.forward_backward(batch, loss)
    _measure(samples, batch, logprobs if old is None else old, believable[0], sums)


def _believable(
    samples: Sequence[Sample], batch: Microbatch, start: Tensor, settings: StepSettings, sums: _Sums
) -> Tensor | None:
    """1 for each token whose sample's log-probs can be believed, otherwise 0; None where all can."""
    if settings.max_sample_gap is None:
        return None
    fresh = np.concatenate([samples[i].is_fresh for i in batch.samples])
    owner = np.repeat(np.arange(len(batch.samples)), [samples[i].num_tokens for i in batch.samples])
    behaviour = np.concatenate([samples[i].logprobs for i in batch.samples])
    gaps = np.abs(start.cpu().numpy() - behaviour) * fresh
    num_fresh = np.bincount(owner, fresh, len(batch.samples))
    wrong = np.bincount(owner, gaps, len(batch.samples)) > settings.max_sample_gap * num_fresh
    if not wrong.any():
        return None
    sums.audited += [i for i, is_wrong in zip(batch.samples, wrong, strict=True) if is_wrong]
    return _flat([~wrong[owner]], start.device)


def _measure(
    samples: Sequence[Sample], batch: Microbatch, start: Tensor, believable: Tensor | None, sums: _Sums
) -> None:
    """Adds up what can be said of a micro-batch from the log-probs at the step's start."""
    mask = _flat([samples[i].mask for i in batch.samples], start.device)
    fresh = _flat([samples[i].is_fresh for i in batch.samples], start.device)
    if believable is not None:
        mask, fresh = mask * believable, fresh * believable
    behaviour = _flat([samples[i].logprobs for i in batch.samples], start.device)
    sums.gap += float(((start - behaviour).abs() * fresh).sum())
    sums.entropy -= float((behaviour * mask).sum())
    sums.tokens += int(mask.sum())
    sums.fresh_tokens += int(fresh.sum())
    sums.row_tokens += batch.num_tokens
    sums.microbatches += 1


def _microbatches(
    policy: Policy, samples: Sequence[Sample], chosen: Sequence[int], settings: StepSettings
) -> Iterator[Microbatch]:
    for local in plan([samples[i] for i in chosen], settings.tokens_per_microbatch):
        yield pack(samples, [chosen[i] for i in local], policy.device)


def _known(proximal: dict[int, np.ndarray] | None, batch: Microbatch, policy: Policy) -> Tensor | None:
    """The log-probs at the step's start, where they were computed before it."""
    return None if proximal is None else _flat([proximal[i] for i in batch.samples], policy.device)


def _proximal(
    policy: Policy, samples: Sequence[Sample], parts: Sequence[Sequence[int]], settings: StepSettings
) -> dict[int, np.ndarray]:
    """Log-probs of every sample under the policy as it is now."""
    found: dict[int, np.ndarray] = {}
    for part in parts:
        for batch in _microbatches(policy, samples, part, settings):
            logprobs = policy.logprobs(batch).cpu().numpy()
            ends = np.cumsum([samples[i].num_tokens for i in batch.samples])
            found.update(zip(batch.samples, np.split(logprobs, ends[:-1]), strict=True))
    return found


def _parts(groups: np.ndarray, count: int) -> list[list[int]]:
    """Cuts a batch by whole groups, in the order in which they appear, into `count` parts as even as can be."""
    ids = list(dict.fromkeys(groups.tolist()))
    part_of = {group: i * count // len(ids) for i, group in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, group in enumerate(groups.tolist()):
        parts[part_of[group]].append(i)
    return [part for part in parts if part]


def _flat(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.as_tensor(np.concatenate(parts).astype(np.float32), device=device)
