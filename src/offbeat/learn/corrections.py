"""Corrections: how much a token counts that was sampled from older weights, or by another engine's arithmetic.

ρ is a token's probability at the start of the step over the one it was sampled with. Weighing by ρ makes a gradient
right for the policy that is trained, however old the token is and however many versions its answer was stitched from,
because each token carries the log-prob of its own version; bounds take a little bias for much less variance. A whole
sequence counts by the geometric mean of its tokens' ρ, never by their product, which explodes with length.

Weights are numbers, not functions of the policy: no gradient flows through them. What is rejected has weight 0 and
still counts in every denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.learn.tokens import Tokens

VETO = 1e-4
"""A sequence with a token this much less likely than when it was sampled is not believed as a whole."""


@dataclass(frozen=True)
class CorrectionSettings:
    kind: str = "off"
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True)
class Correction:
    """What each token counts; `kept` is False where it was rejected."""

    weight: Tensor
    kept: Tensor


def off(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    return Correction(torch.ones_like(tokens.behaviour), torch.ones_like(tokens.mask))


def decoupled(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """ρ itself: no bias, and as much variance as there is."""
    return Correction(_importance(tokens), torch.ones_like(tokens.mask))


def tis(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """min(ρ, high)."""
    return Correction(_importance(tokens).clamp(max=settings.high), torch.ones_like(tokens.mask))


def icepop(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """ρ from low to high, otherwise the token is rejected."""
    importance = _importance(tokens)
    kept = (importance >= settings.low) & (importance <= settings.high)
    return Correction(importance * kept, kept)


def sequence_tis(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """The sequence's ρ, up to high."""
    weight = tokens.per_token(_sequence_importance(tokens)).clamp(max=settings.high)
    return Correction(weight, torch.ones_like(tokens.mask))


def sequence_mask(tokens: Tokens, settings: CorrectionSettings) -> Correction:
    """Sequences whose ρ lies from low to high, and without a token that is vetoed; their tokens count min(ρ, high)."""
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
