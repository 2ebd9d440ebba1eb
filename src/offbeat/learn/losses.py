"""Policy losses: what each token costs.

A loss takes `Tokens` and gives a value per token, which is minimised; corrections multiply it, aggregation adds it up
(see `corrections`, `aggregation`). Notation: r is a token's probability over the one at the start of the step, A its
advantage. With one update per step r is 1 in value, so that every clip rests and only corrections see older weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.learn.tokens import Tokens


@dataclass(frozen=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """The most that r counts where A < 0; None: no limit."""
    ratio_max: float = 5.0
    """CISPO: the most that r counts, as itself and not as a distance from 1."""


@dataclass(frozen=True)
class TokenLoss:
    """What tokens cost, and where the loss holds them back so that they have no gradient."""

    loss: Tensor
    clipped: Tensor


PolicyLoss = Callable[[Tokens, LossSettings], TokenLoss]


def clip(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """PPO's clip, as GRPO, Dr.GRPO and DAPO use it: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return _clipped(tokens.log_ratio.exp(), tokens.advantages, settings)


def sequence_clip(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """GSPO: the same with the whole sequence's ratio, the geometric mean of its tokens', for each of its tokens."""
    ratio = tokens.per_token(tokens.means(tokens.log_ratio).exp())
    return _clipped(ratio, tokens.advantages, settings)


def cispo(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """-sg(min(r, ratio_max)) A log p: a ratio over the limit is cut, and its token still learns."""
    weight = tokens.log_ratio.detach().exp().clamp(max=settings.ratio_max)
    loss = -weight * tokens.advantages * tokens.logprobs
    return TokenLoss(loss, torch.zeros_like(tokens.mask))


def reinforce(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """-A log p."""
    return TokenLoss(-tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.mask))


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLoss:
    free = -ratio * advantages
    held = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    loss, is_held = torch.maximum(free, held), held.detach() > free.detach()
    if settings.dual_clip is not None:
        most = -settings.dual_clip * advantages
        is_over = (advantages < 0) & (loss.detach() > most)
        loss, is_held = torch.where(is_over, most, loss), is_held | is_over
    return TokenLoss(loss, is_held)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": clip,
    "sequence_clip": sequence_clip,
    "cispo": cispo,
    "reinforce": reinforce,
}
