"""What every engine promises to a worker, tested against the engine itself and, mostly, its model's forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from typing import TypeVar

import numpy as np
import pytest
import torch
from served_engine import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Served

from offbeat.engines.protocol import Engine, EngineError, Finish, Generation, KvMode, Request
from offbeat.trajectory import Sampling

pytestmark = pytest.mark.timeout(900)  # the first test of a server starts it, which takes minutes on busy cores
Result = TypeVar("Result")
IDS = count()
LONG = 1500
"""Tokens that take an engine long enough to be interrupted."""
DELAYS_S = (0.02, 0.1, 0.5, 2.0, 8.0)
"""How long to wait before an interruption; the next is tried when one came too early or too late to show anything."""


def ask(tokens, *, seed: int = 0, position: int = 0, **sampling) -> Request:
    sampling.setdefault("max_new_tokens", 24)
    return Request(f"r{next(IDS)}", np.asarray(tokens), seed, Sampling(**sampling), position)


def prompt(seed: int, num_tokens: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_tokens)


def with_engine(served: Served, scenario: Callable[[Engine], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        engine = await served.open()
        try:
            await engine.load(served.versions[0])
            return await asyncio.wait_for(scenario(engine), timeout=120)
        finally:
            await engine.close()

    return asyncio.run(run())


def generate(served: Served, *requests: Request) -> list[Generation]:
    async def scenario(engine: Engine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return with_engine(served, scenario)


def tokens_of(generation: Generation) -> np.ndarray:
    return np.concatenate([s.tokens for s in generation.segments]) if generation.segments else np.zeros(0, np.int32)


def assert_logprobs_are_the_models(served: Served, request: Request, generation: Generation) -> None:
    """Each segment's log-probs against the forward pass of the version that it names."""
    response = tokens_of(generation)
    for segment in generation.segments:
        expected = served.logprobs(segment.version, request, response)
        mine = slice(segment.start - request.position, segment.end - request.position)
        np.testing.assert_allclose(segment.logprobs, expected[mine], atol=served.logprob_tolerance)


def again(request: Request) -> Request:
    return replace(request, id=f"r{next(IDS)}")


@pytest.mark.smoke
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_models_forward_pass(served, temperature):
    requests = [ask(prompt(i, 1 + 2 * i), seed=i, temperature=temperature) for i in range(12)]
    for request, generation in zip(requests, generate(served, *requests), strict=True):
        assert_logprobs_are_the_models(served, request, generation)


def test_greedy_tokens_are_those_of_generate(served):
    if served.models is None:
        pytest.skip("this engine has no model")
    requests = [ask(prompt(i, 3 + i), temperature=0.0) for i in range(6)]
    for request, generation in zip(requests, generate(served, *requests), strict=True):
        tokens = torch.tensor(request.tokens).unsqueeze(0)
        with torch.no_grad():
            expected = served.models[0].generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert tokens_of(generation).tolist() == expected[0, len(request.tokens) :].tolist()


def test_a_generation_is_as_long_as_was_asked_and_says_so(served):
    lengths = [1, 2, 17, 40]
    requests = [ask(prompt(3), seed=i, max_new_tokens=length) for i, length in enumerate(lengths)]
    for length, generation in zip(lengths, generate(served, *requests), strict=True):
        (segment,) = generation.segments
        assert (generation.finish, segment.start, segment.end) == (Finish.LENGTH, 0, length)
        assert (segment.version, segment.kv_version) == (0, 0)
        assert segment.engine
        assert segment.logprobs.dtype == np.float32


def test_a_stop_token_ends_a_generation_and_is_its_last_token(served):
    free = ask(prompt(4), seed=5, max_new_tokens=40)
    stop = int(tokens_of(generate(served, free)[0])[20])
    request = ask(prompt(4), seed=5, max_new_tokens=40, stop_token_ids=(VOCAB_SIZE - 1, stop))
    (generation,) = generate(served, request)
    tokens = tokens_of(generation)
    assert generation.finish is Finish.STOP
    assert tokens[-1] in request.sampling.stop_token_ids
    assert not np.isin(tokens[:-1], request.sampling.stop_token_ids).any()
    assert len(tokens) <= 21


def test_seeds_reproduce_tokens_and_other_seeds_do_not(served):
    async def scenario(engine: Engine) -> list[list[int]]:
        if not engine.capabilities.is_seeded:
            pytest.skip("this engine takes no seeds")
        asked = [ask(prompt(6), seed=seed) for _ in range(2) for seed in (1, 1, 2)]
        first = await asyncio.gather(*map(engine.generate, asked[:3]))
        return [tokens_of(answer).tolist() for answer in (*first, *[await engine.generate(r) for r in asked[3:]])]

    a, b, c, *again = with_engine(served, scenario)
    assert a == b == again[0] == again[1] != c == again[2]


def test_a_group_of_equal_prompts_gives_different_answers_with_right_logprobs(served):
    requests = [ask(prompt(7, 30), seed=seed, max_new_tokens=10 + seed) for seed in range(8)]
    generations = generate(served, *requests)
    assert len({tuple(tokens_of(g)[:8]) for g in generations}) == 8
    for request, generation in zip(requests, generations, strict=True):
        assert_logprobs_are_the_models(served, request, generation)


def test_more_requests_than_the_engine_can_run_at_a_time_all_end(served):
    requests = [ask(prompt(i % 9), seed=i, max_new_tokens=1 + i % 13) for i in range(70)]
    generations = generate(served, *requests)
    assert [g.id for g in generations] == [r.id for r in requests]
    assert [len(tokens_of(g)) for g in generations] == [r.sampling.max_new_tokens for r in requests]


@pytest.mark.smoke
def test_abort_returns_what_was_sampled_so_far(served):
    request = ask(prompt(8), seed=3, max_new_tokens=LONG)

    async def scenario(engine: Engine) -> Generation:
        for delay_s in DELAYS_S:
            task = asyncio.create_task(engine.generate(again(request)))
            await asyncio.sleep(delay_s)
            await engine.abort()
            generation = await task
            if generation.finish is Finish.ABORT and generation.segments:
                return generation
        raise AssertionError("no abort came halfway")

    generation = with_engine(served, scenario)
    assert 0 < len(tokens_of(generation)) < LONG
    assert_logprobs_are_the_models(served, request, generation)


def test_abort_ends_the_named_requests_and_no_other(served):
    async def scenario(engine: Engine) -> tuple[Generation, Generation]:
        for _ in DELAYS_S:
            doomed, spared = ask(prompt(1), max_new_tokens=LONG), ask(prompt(2), max_new_tokens=200)
            tasks = [asyncio.create_task(engine.generate(request)) for request in (doomed, spared)]
            await asyncio.sleep(0.02)
            if not tasks[0].done():  # where this process stood still, the engine did not
                break
            await tasks[1]
        await engine.abort([doomed.id, "nobody"])
        return await tasks[0], await tasks[1]

    doomed, spared = with_engine(served, scenario)
    assert doomed.finish is Finish.ABORT
    assert (spared.finish, len(tokens_of(spared))) == (Finish.LENGTH, 200)


def test_abort_with_nothing_running_is_harmless(served):
    async def scenario(engine: Engine) -> Generation:
        await engine.abort()
        await engine.abort(["nobody"])
        return await engine.generate(ask(prompt(1)))

    assert with_engine(served, scenario).finish is Finish.LENGTH


def test_a_partial_is_carried_on_where_it_ended(served):
    request = ask(prompt(9), seed=4, max_new_tokens=40)
    (whole,) = generate(served, request)
    for cut in (1, 7, 39):
        prefix = tokens_of(whole)[:cut]
        rest = ask(np.concatenate([request.tokens, prefix]), seed=4, position=cut, max_new_tokens=40 - cut)
        (generation,) = generate(served, rest)
        assert generation.segments[0].start == cut
        assert generation.segments[-1].end == 40
        assert_logprobs_are_the_models(served, rest, generation)


def test_a_continuation_does_not_replay_its_prefixs_noise(served):
    """Where every token is equally likely, noise alone chooses, and replayed noise shows as replayed tokens."""

    async def scenario(engine: Engine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        await engine.load(served.flat)
        request = ask(prompt(10), seed=11, max_new_tokens=16)
        prefix = tokens_of(await engine.generate(request))
        again = tokens_of(await engine.generate(ask(prompt(9), seed=11, max_new_tokens=16)))
        carried_on = ask(np.concatenate([request.tokens, prefix]), seed=11, position=16, max_new_tokens=16)
        return prefix, again, tokens_of(await engine.generate(carried_on))

    prefix, again, continuation = with_engine(served, scenario)
    assert prefix.tolist() == again.tolist()
    assert (continuation == prefix).sum() <= 3


@pytest.mark.smoke
def test_a_load_in_flight_splits_the_generation_by_version(served):
    request = ask(prompt(12), seed=6, max_new_tokens=LONG)

    async def scenario(engine: Engine) -> Generation:
        for delay_s in DELAYS_S:
            await engine.load(served.versions[0])
            task = asyncio.create_task(engine.generate(again(request)))
            await asyncio.sleep(delay_s)
            await engine.load(served.versions[1])
            assert engine.version == 1
            await asyncio.sleep(3 * delay_s)  # an exact engine first feeds again what it had sampled, token by token
            await engine.abort()
            generation = await task
            if len(generation.segments) > 1:
                return generation
        raise AssertionError("no load came halfway")

    generation = with_engine(served, scenario)
    before, after = generation.segments
    assert (before.version, after.version, after.kv_version) == (0, 1, 1)
    assert (before.start, before.end) == (0, after.start)
    assert_logprobs_are_the_models(served, request, generation)
    response = tokens_of(generation)
    for segment, other in ((before, 1), (after, 0)):
        wrong = served.logprobs(other, request, response)[segment.start : segment.end]
        assert np.abs(segment.logprobs - wrong).mean() > 0.1


@pytest.mark.smoke
def test_no_kv_of_older_weights_is_used_after_a_load(served):
    async def scenario(engine: Engine) -> list[tuple[Request, Generation]]:
        answered = []
        for version in (*served.versions, served.versions[0]):
            await engine.load(version)
            requests = [ask(prompt(13, 40), seed=seed) for seed in range(3)]
            answered += zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True)
        return answered

    for request, generation in with_engine(served, scenario):
        assert len(generation.segments) == 1
        assert_logprobs_are_the_models(served, request, generation)


def test_what_does_not_fit_the_context_is_refused_with_figures(served):
    room = MAX_CONTEXT_TOKENS
    with pytest.raises(EngineError, match=rf"{room + 1}\b.*\b{room}\b"):
        generate(served, ask(prompt(1, room - 9), max_new_tokens=10))
    (fits,) = generate(served, ask(prompt(1, room - 10), max_new_tokens=10))
    assert len(tokens_of(fits)) == 10


def test_an_empty_prompt_is_refused(served):
    with pytest.raises(EngineError, match="empty"):
        generate(served, ask([]))
    with pytest.raises(EngineError, match="empty"):
        generate(served, ask(prompt(1, 4), position=4))


def test_a_refilled_answer_is_the_one_that_a_shared_prefix_gives(served):
    shared = [ask(prompt(14, 40), seed=seed, temperature=0.0) for seed in range(3)]
    anew = [replace(again(request), kv=KvMode.REFILL) for request in shared]
    answers = generate(served, *shared, *anew)
    assert [tokens_of(answer).tolist() for answer in answers[:3]] == [tokens_of(a).tolist() for a in answers[3:]]
    for request, answer in zip((*shared, *anew), answers, strict=True):
        assert_logprobs_are_the_models(served, request, answer)


def test_a_way_with_kv_that_an_engine_does_not_have_is_refused(served):
    async def scenario(engine: Engine) -> None:
        for mode in KvMode:
            request = replace(ask(prompt(1)), kv=mode, kv_lag=1)
            if mode in engine.capabilities.kv_modes:
                assert (await engine.generate(request)).finish is Finish.LENGTH
            else:
                with pytest.raises(EngineError, match=f"kv = {mode.value}: .* supports "):
                    await engine.generate(request)

    with_engine(served, scenario)


def test_kept_kv_is_told_and_given_up_when_it_lags_too_far(served):
    request = replace(ask(prompt(15, 30), seed=7, max_new_tokens=LONG), kv=KvMode.STALE, kv_lag=1)

    async def scenario(engine: Engine) -> Generation | None:
        if KvMode.STALE not in engine.capabilities.kv_modes:
            return None
        for delay_s in DELAYS_S:
            await engine.load(served.versions[0])
            task = asyncio.create_task(engine.generate(again(request)))
            for version in (served.versions[1], served.flat):
                await asyncio.sleep(delay_s)
                await engine.load(version)
            await asyncio.sleep(delay_s)
            await engine.abort()
            generation = await task
            # A request that has no token yet has no KV to keep: then the next, longer wait is tried.
            if [s.kv_version for s in generation.segments[1:2]] == [0] and len(generation.segments) == 3:
                return generation
        raise AssertionError("nothing was kept")

    generation = with_engine(served, scenario)
    if generation is None:
        pytest.skip("this engine cannot keep KV across a load")
    assert [(s.version, s.kv_version) for s in generation.segments] == [(0, 0), (1, 0), (2, 2)]
    first, kept, refilled = generation.segments
    response = tokens_of(generation)
    np.testing.assert_allclose(
        first.logprobs, served.logprobs(0, request, response)[: first.end], atol=served.logprob_tolerance
    )
    for version in (0, 1):  # neither version alone would have said so: the KV is one's, the weights are the other's
        alone = served.logprobs(version, request, response)[kept.start : kept.end]
        assert np.abs(kept.logprobs - alone).max() > 10 * served.logprob_tolerance
    np.testing.assert_allclose(refilled.logprobs, -np.log(VOCAB_SIZE), atol=served.logprob_tolerance)
