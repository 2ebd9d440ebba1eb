"""Draws one token for each row (running request) from a matrix of logits, without any stored random state.

The noise of a token is a hash of its request's seed and its response position. So a resumed request draws the same
tokens as without the interruption, and never repeats the noise of its prefix. The noise of a row does not depend on
other rows. The hash uses only integer arithmetic, so it is the same on every device.

Log-probs are those of the model's whole distribution after temperature, even if top-p, top-k or min-p restrict the
draw. Greedy rows (temperature 0) report the log-prob at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.trajectory import Sampling

MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
"""The increment of splitmix64: 2**64 over the golden ratio."""
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The multipliers of splitmix64's finaliser."""


def signed(value: int) -> int:
    """Returns the low 64 bits of an integer as a signed number, as torch's int64 stores them."""
    value &= MASK_64
    return value - 2**64 if value >= 2**63 else value


def noise_key(seed: int) -> int:
    """Hashes a seed to 64 bits, so that neighbouring seeds have unrelated noise."""
    x = (int(seed) + GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * MIX_1) & MASK_64
    x = ((x ^ (x >> 27)) * MIX_2) & MASK_64
    return signed(x ^ (x >> 31))


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns one float32 in [0, 1) for each pair of noise key and response position."""
    x = keys + (positions + 1) * signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).to(torch.float32) * 2.0**-24


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int64 numbers right and fills with zeros (a logical shift); torch's own operator repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters, one entry per row. `any_greedy` says whether any row is greedy, and `any_filtered` whether
    any row uses top-p, top-k or min-p. If there is no such row, `draw` skips the work for it."""

    keys: torch.Tensor
    """Noise keys, see `noise_key`."""
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    any_greedy: bool
    any_filtered: bool


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0


def is_filtered(sampling: Sampling) -> bool:
    return not is_greedy(sampling) and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def draw(logits: torch.Tensor, rows: RowSampling, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row of `logits`; returns the tokens and their float32 log-probs. `logits` must be float32
    and may be overwritten; `noise` holds a number in [0, 1) for each row."""
    greedy_tokens = logits.argmax(-1) if rows.any_greedy else None
    temperature = rows.temperature
    if greedy_tokens is not None:
        temperature = torch.where(temperature == 0, 1.0, temperature)
    probs = torch.softmax(logits.div_(temperature.unsqueeze(1)), dim=-1)
    kept = _filtered(probs, rows) if rows.any_filtered else probs
    tokens = _inverse_cdf(kept, noise)
    if greedy_tokens is not None:
        tokens = torch.where(rows.temperature == 0, greedy_tokens, tokens)
    return tokens, probs.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def _inverse_cdf(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draws for each row the first token at which the running sum of `probs` exceeds `noise` times the row's sum."""
    shares = probs.cumsum(-1)
    target = noise.unsqueeze(1) * shares[:, -1:]  # noise is at most 1 - 2**-24, so the target lies below the sum
    tokens = torch.searchsorted(shares, target, right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[1] - 1)


def _filtered(probs: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Sets the probability of tokens cut by top-k, top-p or min-p to 0; the likeliest token always stays. As in vLLM
    and transformers, top-p is a share of the probability that top-k keeps."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, probs.shape[1])
    cut = rank >= top_k.unsqueeze(1)
    left = ordered.masked_fill(cut, 0.0).sum(-1, keepdim=True)
    cut |= (ordered.cumsum(-1) - ordered >= rows.top_p.unsqueeze(1) * left) & (rows.top_p < 1).unsqueeze(1)
    cut |= ordered < rows.min_p.unsqueeze(1) * ordered[:, :1]
    cut[:, 0] = False
    return probs.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), 0.0)
