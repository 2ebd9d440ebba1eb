"""Two sequences small enough to work out by hand, and the loss of an update as the step adds it up.

ratios r      1, 1.5, 0.7      1.25, 0.6, (padding)
importance ρ  3, 1,   0.5      1,    1
advantages    +1               -1
"""

import math
from dataclasses import replace

import numpy as np
import torch

from offbeat.trainer.losses import CorrectionSettings, LossSettings, PolicyLoss, Tokens, clean, correct
from offbeat.trainer.step import Totals, token_weights

RATIOS = [1.0, 1.5, 0.7, 1.25, 0.6]
IMPORTANCE = [3.0, 1.0, 0.5, 1.0, 1.0]
STALENESS = [3, 0, 1, 0, 9]
PROXIMAL = [-1.0, -0.5, -2.0, -1.5, -0.7]
MASKS = [np.array([True, True, True]), np.array([True, True, False])]
NAN = math.nan


def doubles(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fixture() -> Tokens:
    """The tokens, with numbers at the padding that spoil whatever looks at them."""
    proximal = doubles([*PROXIMAL, NAN])
    return Tokens(
        logprobs=(proximal + doubles([*RATIOS, 1.0]).log()).requires_grad_(),
        proximal=proximal,
        behaviour=proximal - doubles([*IMPORTANCE, 1.0]).log(),
        advantages=doubles([1, 1, 1, -1, -1, math.inf]),
        mask=torch.as_tensor(np.concatenate(MASKS)),
        sequence=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_sequences=2,
        staleness=torch.tensor([*STALENESS, -1]),
    )


def masks_of(tokens: Tokens) -> list[np.ndarray]:
    sequence, mask = tokens.sequence.numpy(), tokens.mask.numpy()
    return [mask[sequence == i] for i in range(tokens.num_sequences)]


def total_loss(
    tokens: Tokens,
    loss: PolicyLoss,
    settings: LossSettings | None = None,
    *,
    aggregate: str = "sequence_mean",
    constant: int = 1,
    correction: CorrectionSettings | None = None,
) -> torch.Tensor:
    """What an update on these tokens costs."""
    masks = masks_of(tokens)
    weights = np.concatenate(token_weights(masks, Totals.of(masks), aggregate, constant))
    cleaned, _ = clean(tokens)
    found = loss(cleaned, settings or LossSettings())
    corrected = correct(cleaned, correction or CorrectionSettings())
    return (found.loss * corrected.weight * torch.as_tensor(weights) * cleaned.mask).sum()


def value_and_gradient(tokens: Tokens, *args, **kwargs) -> tuple[float, list[float]]:
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    value = total_loss(replace(tokens, logprobs=leaf), *args, **kwargs)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), gradient.tolist()


def some_tokens(seed: int, lengths: tuple[int, ...] = (4, 1, 6)) -> Tokens:
    """Random tokens whose ratios and importance lie well away from the usual bounds."""
    rng = np.random.default_rng(seed)
    size = sum(lengths)
    ratios = rng.choice([0.3, 0.7, 0.9, 1.1, 1.4, 2.3, 4.0], size) * rng.uniform(0.97, 1.03, size)
    proximal = doubles(rng.uniform(-3, -0.1, size))
    return Tokens(
        logprobs=(proximal + doubles(ratios).log()).requires_grad_(),
        proximal=proximal,
        behaviour=proximal + doubles(rng.normal(0, 0.4, size)),
        advantages=doubles(rng.choice([-1.5, -0.4, 0.6, 2.0], size)),
        mask=torch.as_tensor(rng.random(size) < 0.8),
        sequence=torch.as_tensor(np.repeat(np.arange(len(lengths)), lengths)),
        num_sequences=len(lengths),
        staleness=torch.as_tensor(rng.integers(0, 12, size)),
        reference=proximal + doubles(rng.normal(0, 0.5, size)),
    )
