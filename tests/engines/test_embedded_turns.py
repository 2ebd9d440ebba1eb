"""Turns of an episode in the embedded engine: the next one goes on from the keys and values of the last one."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from offbeat.engines.embedded.engine import EmbeddedEngine
from offbeat.engines.protocol import Finish, Request
from offbeat.model.loading import TINY, load_model
from offbeat.trajectory import Sampling

GIVEN = np.array([49, 50, 51], np.int64)
EVERYTHING = tuple(range(258))


async def two_turns(*, is_turn: bool, exact: bool = False) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns tokens and log-probs of the second turn, and how many tokens were prefilled for it."""
    model = load_model(TINY, torch.float32, torch.device("cpu"))
    engine = EmbeddedEngine(model, num_slots=16, max_context_tokens=128, exact=exact, version=0)
    try:
        prompt = np.arange(40, 70)
        sampling = Sampling(max_new_tokens=8, stop_token_ids=EVERYTHING)
        first = await engine.generate(Request("1", prompt, 5, sampling, is_turn=is_turn))
        assert first.finish is Finish.STOP
        before = engine.metrics.num_prefilled_tokens
        so_far = np.concatenate([prompt, first.segments[0].tokens, GIVEN])
        again = Request("2", so_far, 5, Sampling(max_new_tokens=8), len(so_far) - len(prompt), is_turn=is_turn)
        second = await engine.generate(again)
        segment = second.segments[0]
        return segment.tokens, segment.logprobs, engine.metrics.num_prefilled_tokens - before
    finally:
        await engine.close()


def test_the_next_turn_prefills_nothing_again_and_says_the_same():
    tokens, logprobs, num_prefilled = asyncio.run(two_turns(is_turn=True))
    plain_tokens, plain_logprobs, num_plain = asyncio.run(two_turns(is_turn=False))
    assert (num_prefilled, num_plain > 30) == (0, True)
    assert tokens.tolist() == plain_tokens.tolist()
    assert np.abs(logprobs - plain_logprobs).max() < 1e-4


def test_with_exact_generation_a_kept_turn_changes_no_bit():
    tokens, logprobs, _ = asyncio.run(two_turns(is_turn=True, exact=True))
    plain_tokens, plain_logprobs, _ = asyncio.run(two_turns(is_turn=False, exact=True))
    assert tokens.tolist() == plain_tokens.tolist()
    assert logprobs.tobytes() == plain_logprobs.tobytes()
