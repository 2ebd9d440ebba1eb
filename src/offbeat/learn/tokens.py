"""What a loss sees: the response tokens of a micro-batch, one after the other, each with its sequence.

Guarantees: where `mask` is False every number is 0, so that whatever stood there, infinite or not a number, has no
effect on a value or a gradient; differences of log-probs are bounded before anything is exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is beyond any ratio that a clip lets through; a larger exponent would turn a gradient into NaN."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of whole sequences; all tensors have one entry per token and lie on one device."""

    logprobs: Tensor
    """Of the policy being trained: the only one with a gradient."""
    proximal: Tensor
    """Of the policy at the start of the step."""
    behaviour: Tensor
    """Of the policy, or policies, that the tokens were sampled from, as the engine told."""
    advantages: Tensor
    mask: Tensor
    """True where a token is trained on."""
    sequence: Tensor
    """Which sequence a token belongs to, counted from 0."""
    num_sequences: int
    staleness: Tensor
    """In steps; meaningless where `mask` is False."""
    reference: Tensor | None = None
    """Of the starting model, where the loss has a KL term."""

    @cached_property
    def log_ratio(self) -> Tensor:
        """How much likelier the policy makes a token now than at the start of the step."""
        return (self.logprobs - self.proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def log_importance(self) -> Tensor:
        """How much likelier the policy at the start of the step makes a token than the one it was sampled from."""
        return (self.proximal - self.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def num_trained(self) -> Tensor:
        """Trained tokens of each sequence, at least 1."""
        return self._sums(self.mask.to(self.logprobs.dtype)).clamp(min=1)

    def means(self, values: Tensor) -> Tensor:
        """The mean over each sequence's trained tokens; 0 for one that has none."""
        return self._sums(values * self.mask) / self.num_trained

    def per_token(self, by_sequence: Tensor) -> Tensor:
        """Gives every token its sequence's value."""
        return by_sequence[self.sequence]

    def _sums(self, values: Tensor) -> Tensor:
        return torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device).index_add(
            0, self.sequence, values
        )


def clean(tokens: Tokens) -> tuple[Tokens, Tensor]:
    """The tokens with 0 wherever they are not trained on, and which trained ones had a number that is not finite: those
    are no longer trained on, and it is for the caller to stop or to count them."""
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
