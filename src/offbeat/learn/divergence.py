"""Estimates of the KL divergence from a reference, per token, added to the loss with a coefficient.

With x = log ref - log p of a sampled token: k1 = -x, k2 = x²/2, k3 = e^x - x - 1. k1 and k3 are unbiased values, k3 is
never negative. As a loss, k1's own gradient is 0 on average, whatever the divergence; so k1 has its own value and the
gradient of k2, which on fresh tokens is that of the divergence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.learn.tokens import MAX_LOG_RATIO

Divergence = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    away = k2(logprobs, reference)
    return away - away.detach() - _x(logprobs, reference).detach()


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return _x(logprobs, reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    x = _x(logprobs, reference)
    return torch.expm1(x) - x


def _x(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Bounded only where it is exponentiated upwards: a policy that ran far away from its reference is pulled back."""
    return (reference - logprobs).clamp(max=MAX_LOG_RATIO)


DIVERGENCES: dict[str, Divergence] = {"k1": k1, "k2": k2, "k3": k3}
