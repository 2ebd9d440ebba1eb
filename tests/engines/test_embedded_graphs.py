"""Steps and prefills in few shapes, as CUDA graphs need them, give what steps of exactly the live rows give.

Graphs themselves need a GPU, where the engine contract runs them. Here, whatever comes a second time with the same key
is done as it was the first time, on the same memory: what a graph would replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embedded_stepper import EXACT_REQUESTS, PLANS, new_stepper, response, run, run_interrupted
from tiny_models import ask, tokens

from offbeat.engines.embedded.graphs import padded_rows, padded_tokens
from offbeat.engines.embedded.stepper import ADMIT_EVERY_STEPS, Stepper
from offbeat.engines.protocol import Finish, KvMode

torch.set_num_threads(1)


class FirstTimes:
    """Stands for graphs: does the work of a key as it was when the key first came."""

    def __init__(self, stepper: Stepper):
        self.stepper = stepper
        self.first: dict[Hashable, tuple[Callable, list[int]]] = {}
        self.num_runs = 0

    def run(self, key: Hashable, work: Callable):
        self.num_runs += 1
        first, frozen = self.first.setdefault(key, (work, self.frozen(key)))
        assert frozen == self.frozen(key), f"{key}: a graph of it would do something else"
        return first()

    def frozen(self, key: Hashable) -> list[int]:
        """Returns what a graph fixes: where the lasting tensors lie and, for a step, which kernels it needs."""
        stepper, rows, kv = self.stepper, self.stepper.rows, self.stepper.kv
        held = (rows.tokens, rows.logprobs, rows.mask, rows.ints, rows.floats, *kv.keys, *kv.values)
        needs = (stepper.any_greedy, stepper.any_filtered, stepper.any_stops) if key[0] == "step" else ()
        return [*needs, *(tensor.data_ptr() for tensor in held)]


def graphed(num_slots: int = 4) -> tuple[Stepper, FirstTimes]:
    stepper = new_stepper(num_slots)
    graphs = FirstTimes(stepper)
    stepper.use_graphs(graphs)
    return stepper, graphs


ROUNDED = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 7: 8, 9: 12, 13: 16, 65: 96, 97: 128, 256: 256}


def test_rows_are_rounded_up_by_at_most_a_half():
    assert {number: padded_rows(number) for number in ROUNDED} == ROUNDED
    assert {padded_rows(number, 100) for number in range(65, 101)} == {96, 100}


def test_a_context_has_few_sizes_and_never_more_than_there_is_room():
    assert {padded_tokens(number, 1000) for number in range(1, 1001)} == {64, 96, 128, 192, 256, 384, 512, 768, 1000}


def test_few_graphs_do_for_many_steps():
    stepper, graphs = graphed(num_slots=16)
    run(stepper, *(ask(tokens(i % 5, 1 + i % 7), seed=i, max_new_tokens=20 + i % 9) for i in range(60)))
    assert graphs.num_runs > 5 * len(graphs.first)


@settings(max_examples=8, deadline=None)
@given(
    num_slots=st.integers(1, 9),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=20),
    stops=st.booleans(),
)
def test_tokens_are_those_of_steps_with_live_rows_alone(num_slots, lengths, stops):
    requests = []
    for i, (prompt, new) in enumerate(lengths):
        stop_ids = (3, 4, 5)[: i % 4] if stops else ()
        ways = {"max_new_tokens": new, "temperature": float(i % 2), "stop_token_ids": stop_ids}
        requests.append(ask(tokens(i % 3, prompt), seed=i, **ways))
    expected, found = run(new_stepper(num_slots), *requests), run(graphed(num_slots)[0], *requests)
    for request in requests:
        assert response(found[request.id])[0] == response(expected[request.id])[0]
        np.testing.assert_allclose(response(found[request.id])[1], response(expected[request.id])[1], atol=1e-5)


@cache
def uninterrupted() -> dict[str, tuple[list[int], list[float]]]:
    return {name: response(generation) for name, generation in run(new_stepper(16), *EXACT_REQUESTS).items()}


@pytest.mark.full
@settings(max_examples=8, deadline=None)
@given(num_slots=st.integers(2, 24), plan=PLANS)
def test_interrupted_requests_are_carried_on_with_the_same_tokens(num_slots, plan):
    got = run_interrupted(graphed(num_slots)[0], plan)
    for name, (expected_tokens, expected_logprobs) in uninterrupted().items():
        assert got[name][0] == expected_tokens
        np.testing.assert_allclose(got[name][1], expected_logprobs, atol=1e-5)


def test_what_is_cached_in_a_free_slot_survives_the_steps_of_the_others():
    whole = ask(tokens(1, 9), seed=1, max_new_tokens=24)
    expected = response(run(new_stepper(), whole)[whole.id])
    stepper, _ = graphed()
    others = [ask(tokens(2 + i, 5), seed=7 + i, max_new_tokens=30) for i in range(3)]
    with torch.inference_mode():
        for request in (whole, *others):
            stepper.submit(request)
        for _ in range(10):
            stepper.step()
        [cut] = stepper.abort([whole.id])
        for _ in range(ADMIT_EVERY_STEPS):
            stepper.step()
    assert cut.finish is Finish.ABORT
    so_far = response(cut)
    rest = ask(
        np.concatenate((whole.tokens, so_far[0])), seed=1, position=len(so_far[0]), max_new_tokens=24 - len(so_far[0])
    )
    before = stepper.metrics.num_resumed_tokens
    after = response(run(stepper, rest)[rest.id])
    assert stepper.metrics.num_resumed_tokens > before
    assert so_far[0] + after[0] == expected[0]
    np.testing.assert_allclose(so_far[1] + after[1], expected[1], atol=1e-5)


def test_a_row_that_was_moved_leaves_nothing_alive_behind():
    stepper, _ = graphed(num_slots=16)
    first = [ask(tokens(i, 4), seed=i, max_new_tokens=3 if i < 14 else 30) for i in range(16)]
    later = [ask(tokens(i, 4), seed=i, max_new_tokens=40) for i in range(20, 31)]
    with torch.inference_mode():
        for request in first:
            stepper.submit(request)
        for _ in range(6):
            stepper.step()
    assert set(stepper.running) == {0, 1}
    ended = run(stepper, *later)
    assert {request.id for request in (*first[14:], *later)} == set(ended)
    alone = run(new_stepper(16), *later)
    assert all(response(ended[request.id])[0] == response(alone[request.id])[0] for request in later)


def test_requests_start_together_but_none_waits_long():
    stepper, graphs = graphed(num_slots=32)
    run(stepper, *(ask(tokens(i, 6), seed=i, max_new_tokens=1 + i % 40) for i in range(100)))
    num_prefills = sum(1 for key in graphs.first if key[0] == "prefill")
    assert num_prefills <= 6
    assert stepper.metrics.num_steps < 40 * 100 / 32 * 1.3


def test_a_request_that_asks_for_fresh_keys_and_values_gets_them():
    stepper, _ = graphed()
    requests = [replace(ask(tokens(1, 12), seed=i, max_new_tokens=5), kv=KvMode.REFILL) for i in range(4)]
    run(stepper, *requests)
    assert stepper.metrics.num_resumed_tokens == 0
