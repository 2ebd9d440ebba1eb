"""Long rows stand first and are read far, the others are not, which changes nothing but time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONTEXT_TOKENS, ask, tiny_model, tokens

from offbeat.engines.embedded import attention
from offbeat.engines.embedded.attention import MIN_SAVED_TOKENS, exchanges, num_long_rows
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.protocol import Generation, Request

torch.set_num_threads(1)
LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=60)


def reads(lengths: list[int], num_long: int) -> int:
    longest_first = sorted(lengths, reverse=True)
    near = longest_first[num_long:]
    return num_long * longest_first[0] + len(near) * max(near, default=0)


@given(LENGTHS)
def test_rows_are_read_in_the_two_parts_that_read_least_or_all_alike_where_that_saves_too_little(lengths):
    best = min(reads(lengths, num_long) for num_long in range(1, len(lengths) + 1))
    num_long, all_alike = num_long_rows(lengths), reads(lengths, len(lengths))
    assert reads(lengths, num_long) == (best if all_alike - best >= MIN_SAVED_TOKENS else all_alike)


@given(LENGTHS, st.data())
def test_after_the_exchanges_no_row_behind_is_longer_than_one_of_the_long_rows(lengths, data):
    num_long = data.draw(st.integers(1, len(lengths)))
    pairs = exchanges(lengths, num_long)
    placed = list(lengths)
    for one, other in pairs:
        assert lengths[one] > lengths[other], "an exchange that changes nothing"
        placed[one], placed[other] = placed[other], placed[one]
    assert min(placed[:num_long]) >= max(placed[num_long:], default=0)
    assert sorted(placed) == sorted(lengths)


def played(
    waves: list[list[Request]], min_saved: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Generation], int, set[int]]:
    """Answers of several lengths, of which others start in between; the tokens read, and how many parts steps had."""
    monkeypatch.setattr(attention, "MIN_SAVED_TOKENS", min_saved)
    ended: dict[str, Generation] = {}
    num_parts = set()
    with torch.inference_mode():
        stepper = Stepper(tiny_model(), 24, CONTEXT_TOKENS, exact=False, worker="w", fingerprint="e", version=0)
        for wave in waves:
            for request in wave:
                stepper.submit(request)
            for _ in range(20):
                ended |= {generation.id: generation for generation in stepper.step()}
                num_parts.add(len(stepper._parts()))
        while not stepper.is_idle:
            ended |= {generation.id: generation for generation in stepper.step()}
    return ended, stepper.metrics.num_context_tokens, num_parts


def a_wave(wave: int) -> list[Request]:
    """Short ones before long ones, so that they must change places. All waves ask the same prompts, so that a later one
    copies them from slots that have changed places."""
    lengths = [(5, 60), (9, 7), (50, 30), (70, 3), (8, 40)]
    return [
        ask(tokens(kind, num_prompt), seed=100 * wave + member, max_new_tokens=num_new)
        for kind, (num_prompt, num_new) in enumerate(lengths)
        for member in range(2)
    ]


def test_reading_in_two_parts_samples_the_same_and_reads_less(monkeypatch):
    waves = [a_wave(wave) for wave in range(3)]
    whole, num_whole, _ = played(waves, 10**9, monkeypatch)
    parts, num_in_parts, num_parts = played(waves, 1, monkeypatch)
    assert (num_parts, whole.keys()) == ({1, 2}, parts.keys())
    assert num_in_parts < 0.85 * num_whole
    for name, generation in whole.items():
        (one,), (other,) = generation.segments, parts[name].segments
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_the_step_in_parts_is_recorded_and_agrees_with_the_model():
    with torch.inference_mode():
        stepper = Stepper(tiny_model(), 24, CONTEXT_TOKENS, exact=False, worker="w", fingerprint="e", version=0)
        assert type(stepper._in_parts()).__name__ == "RecordedStep", (
            "a recording that differs from the model is not used"
        )
