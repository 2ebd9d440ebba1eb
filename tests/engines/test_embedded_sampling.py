"""How the embedded engine draws tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from offbeat.engines.embedded.sampling import GOLDEN, MASK_64, MIX_1, MIX_2, RowSampling, draw, noise_key, uniform

torch.set_num_threads(1)
SEEDS = st.integers(0, 2**64 - 1)


def rows(count: int, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0) -> RowSampling:
    return RowSampling(
        keys=torch.zeros(count, dtype=torch.int64),
        temperature=torch.full((count,), temperature),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        top_k=torch.full((count,), top_k),
        any_greedy=temperature == 0,
        any_filtered=top_p < 1 or min_p > 0 or top_k > 0,
    )


def many(logits: torch.Tensor, count: int, **how) -> tuple[torch.Tensor, torch.Tensor]:
    """As many draws from one distribution, with evenly spread noise."""
    noise = (torch.arange(count) + 0.5) / count
    return draw(logits.repeat(count, 1), rows(count, **how), noise)


@given(SEEDS, st.integers(0, 2**31))
def test_noise_is_splitmix64_of_key_and_position_on_any_machine(seed, position):
    x = (noise_key(seed) + (position + 1) * GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * MIX_1) & MASK_64
    x = ((x ^ (x >> 27)) * MIX_2) & MASK_64
    expected = ((x ^ (x >> 31)) >> 40) / 2**24
    assert uniform(torch.tensor([noise_key(seed)]), torch.tensor([position])).item() == expected


def test_noise_is_uniform_and_unrelated_between_neighbouring_seeds_and_positions():
    keys = torch.tensor([noise_key(seed) for seed in range(200)])
    noise = torch.stack([uniform(keys, torch.full_like(keys, position)) for position in range(200)]).numpy()
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 50  # chi-square with 19 degrees of freedom, p < 1e-4
    centred = noise - 0.5
    for neighbour in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1)):
        assert abs((centred * neighbour).mean() * 12) < 0.03


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    tokens, logprobs = many(logits, 4000, temperature=0.5)
    expected = (logits / 0.5).softmax(-1)
    shares = torch.bincount(tokens, minlength=4) / 4000
    torch.testing.assert_close(shares, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_greedy_takes_the_likeliest_token_and_reports_its_probability_at_temperature_one():
    logits = torch.tensor([0.0, 3.0, 1.0])
    tokens, logprobs = many(logits, 5, temperature=0.0)
    assert tokens.tolist() == [1] * 5
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])


@pytest.mark.parametrize(
    "how, kept",
    [
        ({"top_k": 2}, {0, 3}),
        ({"top_k": 1}, {3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.65}, {0, 3}),
        ({"top_p": 0.01}, {3}),
        ({"min_p": 0.3}, {0, 3}),
        ({"min_p": 1.0}, {3}),
        ({"top_p": 0.65, "top_k": 1}, {3}),
    ],
)
def test_filters_keep_the_likeliest_tokens_and_leave_logprobs_alone(how, kept):
    probs = torch.tensor([0.2, 0.1, 0.14, 0.5, 0.06])
    tokens, logprobs = many(probs.log(), 1000, **how)
    assert set(tokens.tolist()) == kept
    torch.testing.assert_close(logprobs, probs.log()[tokens])


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(3, 0.7, 0.0), (20, 0.9, 0.0), (5, 0.5, 0.05), (0, 0.8, 0.1), (8, 1.0, 0.3)]
)
def test_filters_together_draw_from_the_distribution_that_transformers_draws_from(top_k, top_p, min_p):
    """Each filter works on what those before it left, renormalised: top-k, then top-p, then min-p."""
    warpers = [TemperatureLogitsWarper(0.7)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for logits in 3 * torch.randn(20, 50, generator=torch.Generator().manual_seed(top_k)):
        warped = logits[None]
        for warper in warpers:
            warped = warper(None, warped)
        tokens, _ = many(logits, 4000, temperature=0.7, top_p=top_p, min_p=min_p, top_k=top_k)
        shares = torch.bincount(tokens, minlength=50) / 4000
        torch.testing.assert_close(shares, warped[0].softmax(-1), atol=1e-3, rtol=0)


def test_of_equally_likely_tokens_top_k_keeps_k():
    tokens, _ = many(torch.zeros(8), 1000, top_k=3)
    assert set(tokens.tolist()) == {0, 1, 2}


@given(st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=50), st.integers(0, 2**24 - 1))
def test_a_token_of_probability_zero_is_never_drawn(logits, noise):
    matrix = torch.tensor([logits])
    token, logprob = draw(matrix.clone(), rows(1), torch.tensor([noise / 2**24]))
    assert torch.isfinite(logprob).all()
    assert matrix.softmax(-1)[0, token] > 0


def test_a_row_does_not_depend_on_the_rows_beside_it():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    noise = torch.linspace(0.1, 0.9, 6)
    mixed = RowSampling(
        keys=torch.zeros(6, dtype=torch.int64),
        temperature=torch.tensor([1.0, 0.0, 0.7, 1.0, 1.3, 0.0]),
        top_p=torch.tensor([1.0, 1.0, 0.8, 1.0, 1.0, 1.0]),
        min_p=torch.zeros(6),
        top_k=torch.tensor([0, 0, 0, 5, 0, 0]),
        any_greedy=True,
        any_filtered=True,
    )
    tokens, logprobs = draw(logits.clone(), mixed, noise)
    for row, (temperature, top_p, top_k) in enumerate(
        zip(mixed.temperature.tolist(), mixed.top_p.tolist(), mixed.top_k.tolist(), strict=True)
    ):
        alone = draw(logits[row : row + 1].clone(), rows(1, temperature, top_p, 0.0, top_k), noise[row : row + 1])
        assert (tokens[row], logprobs[row]) == (alone[0][0], alone[1][0])
