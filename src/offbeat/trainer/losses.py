"""Policy losses, off-policy corrections and KL estimates, per token.

A policy loss takes `Tokens` and returns a value per token to minimise. A correction multiplies the value by an
importance weight, and the step adds up the products, weighted by `step.token_weights`. Notation, for one token:

    p   its probability under the policy being trained
    r   p / (its probability at the start of the step)
    ρ   (its probability at the start of the step) / (its probability when it was sampled)
    A   its advantage

With one update per step, r is 1: no clip is active, and only corrections account for older weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before exp: beyond any clip, but small enough for finite gradients."""


@dataclass(frozen=True)
class Tokens:
    """Response tokens of whole sequences, concatenated; all tensors have one entry per token and lie on one device.

    After `clean`, every number is 0 where `mask` is False, so a masked NaN has no effect on values or gradients.
    """

    logprobs: Tensor
    """Log-probs under the policy being trained: the only tensor with a gradient."""
    proximal: Tensor
    """Log-probs under the policy at the start of the step."""
    behaviour: Tensor
    """Log-probs that the engine reported when it sampled the tokens."""
    advantages: Tensor
    mask: Tensor
    """True where a token is trained on."""
    sequence: Tensor
    """Index of each token's sequence."""
    num_sequences: int
    staleness: Tensor
    """Staleness of each token in steps; meaningless where `mask` is False."""
    reference: Tensor | None = None
    """Log-probs under the initial model; None if the loss has no KL term."""

    @cached_property
    def log_ratio(self) -> Tensor:
        """log r of each token, clamped: its log-prob now minus that at the start of the step."""
        return (self.logprobs - self.proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def log_importance(self) -> Tensor:
        """log ρ of each token, clamped: its log-prob at the start of the step minus that when it was sampled."""
        return (self.proximal - self.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def num_trained(self) -> Tensor:
        """Number of trained tokens in each sequence, but at least 1, because it is a divisor."""
        return self._sums(self.mask.to(self.logprobs.dtype)).clamp(min=1)

    def means(self, values: Tensor) -> Tensor:
        """Returns the mean of `values` over each sequence's trained tokens; 0 for a sequence without trained tokens."""
        return self._sums(values * self.mask) / self.num_trained

    def per_token(self, by_sequence: Tensor) -> Tensor:
        """Returns, for each token, the entry of `by_sequence` for the token's sequence."""
        return by_sequence[self.sequence]

    def _sums(self, values: Tensor) -> Tensor:
        return torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device).index_add(
            0, self.sequence, values
        )


def clean(tokens: Tokens) -> tuple[Tokens, Tensor]:
    """Returns the tokens with all numbers set to 0 where `mask` is False. Trained tokens with NaN or infinity are also
    masked out. The second result is True for these tokens, so that the caller can decide whether to stop."""
    given = [tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages]
    if tokens.reference is not None:
        given.append(tokens.reference)
    is_finite = torch.stack([values.detach().isfinite() for values in given]).all(0)
    mask = tokens.mask & is_finite
    zero = torch.zeros((), dtype=tokens.logprobs.dtype, device=mask.device)
    logprobs, proximal, behaviour, advantages, *reference = [torch.where(mask, values, zero) for values in given]
    cleaned = replace(
        tokens,
        logprobs=logprobs,
        proximal=proximal,
        behaviour=behaviour,
        advantages=advantages,
        mask=mask,
        reference=reference[0] if reference else None,
    )
    return cleaned, tokens.mask & ~is_finite


@dataclass(frozen=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Probability ratio r beyond which the loss of a token with negative advantage is constant; None: no limit."""
    ratio_max: float = 5.0
    """Upper bound on the probability ratio r in the CISPO loss; it bounds r itself, not the distance of r from 1."""


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token; `clipped` is True where a clip made the loss constant, so that the token has no gradient."""

    loss: Tensor
    clipped: Tensor


PolicyLoss = Callable[[Tokens, LossSettings], TokenLoss]


def clip(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """PPO's clip, as GRPO, Dr.GRPO and DAPO use it: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return _clipped(tokens.log_ratio.exp(), tokens.advantages, settings)


def sequence_clip(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """GSPO: PPO's clip, in which r of each token is replaced by the geometric mean of r over its sequence."""
    ratio = tokens.per_token(tokens.means(tokens.log_ratio).exp())
    return _clipped(ratio, tokens.advantages, settings)


def cispo(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """CISPO: -min(r, ratio_max) A log p, with no gradient through the minimum; a clipped token keeps its gradient."""
    weight = tokens.log_ratio.detach().exp().clamp(max=settings.ratio_max)
    loss = -weight * tokens.advantages * tokens.logprobs
    return TokenLoss(loss, torch.zeros_like(tokens.mask))


def reinforce(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """REINFORCE: -A log p."""
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

# Corrections for tokens sampled from older weights or with another engine's arithmetic.
#
# Weighting by ρ makes the gradient right for the policy being trained, whatever the token's version, because each token
# carries the log-prob of its own version. Bounds on ρ trade a little bias for much less variance. The ρ of a
# sequence is the geometric mean over its tokens, because the product would explode with length. No gradient flows
# through a weight. A rejected token has weight 0 and still counts in every denominator.

VETO = 1e-4
"""`sequence_mask` rejects a whole sequence if any of its trained tokens has an importance ratio ρ below this."""


@dataclass(frozen=True)
class CorrectionSettings:
    kind: str = "off"
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True)
class Correction:
    """Weight by which each token's loss is multiplied; `kept` is False where a token was rejected (weight 0)."""

    weight: Tensor
    kept: Tensor


def off(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    return Correction(torch.ones_like(tokens.behaviour), torch.ones_like(tokens.mask))


def decoupled(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """Weight ρ (importance ratio of the token), not truncated: no bias, but full variance."""
    return Correction(_importance(tokens), torch.ones_like(tokens.mask))


def tis(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """Truncated importance sampling: weight min(ρ, high), where ρ is the token's importance ratio."""
    return Correction(_importance(tokens).clamp(max=settings.high), torch.ones_like(tokens.mask))


def icepop(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """IcePop: weight ρ (importance ratio) if it lies within [low, high]; other tokens are rejected."""
    importance = _importance(tokens)
    kept = (importance >= settings.low) & (importance <= settings.high)
    return Correction(importance * kept, kept)


def sequence_tis(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """Truncated importance sampling by sequence: weight min(geometric mean of ρ over the sequence, high)."""
    weight = tokens.per_token(_sequence_importance(tokens)).clamp(max=settings.high)
    return Correction(weight, torch.ones_like(tokens.mask))


def sequence_mask(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """Weight min(ρ, high) for tokens of kept sequences. A sequence is kept if the geometric mean of its ρ lies within
    [low, high] and none of its trained tokens has ρ below `VETO`."""
    importance, whole = _importance(tokens), _sequence_importance(tokens)
    vetoed = tokens.means(((importance < VETO) & tokens.mask).to(importance.dtype)) > 0
    kept = tokens.per_token((whole >= settings.low) & (whole <= settings.high) & ~vetoed)
    return Correction(importance.clamp(max=settings.high) * kept, kept)


def _importance(tokens: Tokens) -> Tensor:
    return tokens.log_importance.detach().exp()


def _sequence_importance(tokens: Tokens) -> Tensor:
    return tokens.means(tokens.log_importance.detach()).exp()


CORRECTIONS: dict[str, Callable[[Tokens, CorrectionSettings], Correction]] = {
    "off": off,
    "decoupled": decoupled,
    "tis": tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_mask": sequence_mask,
}


def correct(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    return CORRECTIONS[settings.kind](tokens, settings)


# Estimates of the KL divergence from a reference. With x = (reference log-prob) - (log-prob) of a sampled token:
# k1 = -x, k2 = x²/2, k3 = e^x - x - 1. k1 and k3 are unbiased; k3 is never negative.

Divergence = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns the KL estimate k1 (log-prob minus the reference's), but with the gradient of k2 (half the square of k1).
    On fresh tokens, the gradient of k2 is on average that of the KL divergence; the gradient of k1 is on average 0."""
    away = k2(logprobs, reference)
    return away - away.detach() - _x(logprobs, reference).detach()


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return _x(logprobs, reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    x = _x(logprobs, reference)
    return torch.expm1(x) - x


def _x(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns x, the reference's log-prob minus the policy's, with an upper bound. It has no lower bound, so that a
    token that is far likelier under the policy than under the reference keeps a gradient."""
    return (reference - logprobs).clamp(max=MAX_LOG_RATIO)


DIVERGENCES: dict[str, Divergence] = {"k1": k1, "k2": k2, "k3": k3}
