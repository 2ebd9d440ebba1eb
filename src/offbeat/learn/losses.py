"""Policy losses per token, and the one rule by which tokens add up to a batch's loss.

Every loss is a sum of token losses times weights whose denominators were fixed for the whole update beforehand, so any
split into micro-batches gives the same loss and the same gradient. Notation: `logprobs` of the policy being trained,
`proximal` of the policy at the start of the step, `advantages` one per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is beyond any ratio that a clip lets through; a larger exponent would turn a gradient into NaN."""


@dataclass(frozen=True)
class TokenLoss:
    """Token losses and what the metrics want to know of them; all of one shape."""

    loss: Tensor
    clipped: Tensor
    """True where the clip holds the token back, so that it has no gradient."""
    kl: Tensor
    """Divergence to the reference, before its coefficient; 0 without a reference."""


def clipped_policy_loss(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> TokenLoss:
    """PPO's clip as GRPO uses it: -min(r A, clip(r, 1 - low, 1 + high) A), plus kl_coef times k3 to a reference."""
    ratio = (logprobs - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(unclipped, clipped)
    kl = k3(logprobs, reference) if reference is not None else torch.zeros_like(loss)
    return TokenLoss(loss + kl_coef * kl, (clipped < unclipped).detach(), kl)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased estimate of KL(policy || reference) that is never negative: e^x - x - 1, x = log ref - log policy."""
    x = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x.exp() - x - 1


def sequence_mean_weights(masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Weights of the sequence mean of token means: 1 / (sequences x trainable tokens of this one).

    Sequences without a trainable token add nothing and stay in the count.
    """
    count = max(len(masks), 1)
    return [mask.astype(np.float32) / (count * max(int(mask.sum()), 1)) for mask in masks]
