"""How the embedded engine fills, shares, shrinks and replays its slots; and what `exact` promises, to the bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT_TOKENS, ask, tiny_model, tokens

from offbeat.engines.embedded.decode_forward import DecodeForward
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.embedded.weights import stage
from offbeat.engines.protocol import Finish, Generation, Request, Version

torch.set_num_threads(1)


def new_stepper(num_slots: int = 4, exact: bool = False, model=None) -> Stepper:
    with torch.inference_mode():
        return Stepper(model or tiny_model(), num_slots, CONTEXT_TOKENS, exact, "worker", "engine", version=0)


def run(stepper: Stepper, *requests: Request) -> dict[str, Generation]:
    with torch.inference_mode():
        for request in requests:
            stepper.submit(request)
        ended: dict[str, Generation] = {}
        while not stepper.is_idle:
            ended |= {generation.id: generation for generation in stepper.step()}
    return ended


def shapes_of_forward_passes(stepper: Stepper) -> list[tuple[int, int]]:
    """Fills up with (rows, tokens) of every forward pass from now on."""
    shapes: list[tuple[int, int]] = []
    stepper._forward = DecodeForward(stepper.model)  # a recording would pass the model by
    stepper.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def response(generation: Generation) -> tuple[list[int], list[float]]:
    return (
        [int(t) for s in generation.segments for t in s.tokens],
        [float(p) for s in generation.segments for p in s.logprobs],
    )


def test_a_groups_prompt_is_prefilled_once_and_several_prompts_together():
    stepper = new_stepper(num_slots=8)
    shapes = shapes_of_forward_passes(stepper)
    first, second = tokens(1, 12), tokens(2, 9)
    run(stepper, *(ask(prompt, seed=seed, max_new_tokens=3) for seed in range(4) for prompt in (first, second)))
    assert shapes == [(2, 11)] + [(8, 1)] * 3


def test_a_member_that_starts_later_copies_its_prompt_from_a_live_sibling():
    stepper = new_stepper(num_slots=2)
    shapes = shapes_of_forward_passes(stepper)
    lengths = (10, 3, 3, 3)
    run(stepper, *(ask(tokens(1, 12), seed=i, max_new_tokens=n) for i, n in enumerate(lengths)))
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 11)]


def test_a_freed_slot_is_filled_before_the_next_step():
    stepper = new_stepper(num_slots=2)
    shapes = shapes_of_forward_passes(stepper)
    run(stepper, *(ask(tokens(i, 1), max_new_tokens=n) for i, n in enumerate((6, 2, 4))))
    assert shapes == [(2, 1)] * 6


def test_a_step_has_as_many_rows_as_live_requests():
    stepper = new_stepper(num_slots=8)
    shapes = shapes_of_forward_passes(stepper)
    run(stepper, *(ask(tokens(i, 1), max_new_tokens=n) for i, n in enumerate((1, 5, 2, 5, 3, 1))))
    assert [rows for rows, _ in shapes] == [6, 4, 3, 2, 2]


def test_exact_steps_always_have_all_rows_and_prompts_are_prefilled_one_at_a_time():
    stepper = new_stepper(num_slots=16, exact=True)
    shapes = shapes_of_forward_passes(stepper)
    run(stepper, ask(tokens(1, 12), max_new_tokens=2), ask(tokens(2, 20), max_new_tokens=1))
    assert sorted(shapes) == [(1, 16), (1, 32), (16, 1), (16, 1)]


def test_requests_that_move_between_slots_keep_their_tokens():
    requests = [ask(tokens(i % 5, 1 + i % 7), seed=i, max_new_tokens=1 + 7 * i % 31) for i in range(40)]
    few, many = run(new_stepper(num_slots=3), *requests), run(new_stepper(num_slots=64), *requests)
    for request in requests:
        assert response(few[request.id])[0] == response(many[request.id])[0]
        np.testing.assert_allclose(response(few[request.id])[1], response(many[request.id])[1], atol=1e-5)


def test_requests_with_different_sampling_run_side_by_side():
    requests = [
        ask(tokens(1, 5), seed=1),
        ask(tokens(1, 5), seed=1, temperature=0.0),
        ask(tokens(1, 5), seed=1, temperature=0.5, top_p=0.7, stop_token_ids=(3, 4, 5)),
        ask(tokens(1, 5), seed=1, top_k=4, min_p=0.01),
    ]
    together = run(new_stepper(), *requests)
    for request in requests:
        assert response(together[request.id])[0] == response(run(new_stepper(), request)[request.id])[0]


@dataclass(frozen=True)
class Plan:
    """Requests and what happens to them: after so many steps, these are aborted and at once carried on."""

    num_slots: int
    order: int
    interruptions: tuple[tuple[int, int], ...]


PLANS = st.builds(
    Plan,
    num_slots=st.sampled_from([16, 17, 24, 64]),
    order=st.integers(0, 10**6),
    interruptions=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 29)), max_size=12).map(tuple),
)
EXACT_REQUESTS = [
    replace(ask(tokens(i % 6, 1 + 5 * (i % 6)), seed=i, max_new_tokens=1 + 11 * i % 37), id=str(i)) for i in range(30)
]


def carried_on(request: Request, done: list[int]) -> Request:
    """The rest of a request of which some tokens are there."""
    rest = request.sampling.max_new_tokens - len(done)
    sampling = replace_sampling(request, rest)
    whole = np.concatenate([request.tokens, np.array(done, np.int64)])
    return Request(request.id, whole, request.seed, sampling, position=len(done))


def replace_sampling(request: Request, max_new_tokens: int):
    fields = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
    return type(request.sampling)(**{**fields, "max_new_tokens": max_new_tokens})


def run_interrupted(stepper: Stepper, plan: Plan) -> dict[str, tuple[list[int], list[float]]]:
    requests = {request.id: request for request in EXACT_REQUESTS}
    got: dict[str, tuple[list[int], list[float]]] = {request_id: ([], []) for request_id in requests}

    def take(generations: list[Generation]) -> None:
        for generation in generations:
            for mine, new in zip(got[generation.id], response(generation), strict=True):
                mine.extend(new)
            if generation.finish is Finish.ABORT:
                stepper.submit(carried_on(requests[generation.id], got[generation.id][0]))

    interruptions = list(plan.interruptions)
    steps_left = interruptions[0][0] if interruptions else 0
    with torch.inference_mode():
        for request in random.Random(plan.order).sample(EXACT_REQUESTS, len(EXACT_REQUESTS)):
            stepper.submit(request)
        while not stepper.is_idle:
            take(stepper.step())
            while interruptions and steps_left == 0:
                take(stepper.abort([str(interruptions.pop(0)[1])]))
                steps_left = interruptions[0][0] if interruptions else 0
            steps_left -= 1
    return got


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[list[int], list[float]]]:
    ended = run(new_stepper(num_slots=16, exact=True), *EXACT_REQUESTS)
    return {request_id: response(generation) for request_id, generation in ended.items()}


@settings(max_examples=12, deadline=None)
@given(plan=PLANS)
def test_exact_tokens_and_logprobs_are_bit_equal_whatever_order_slots_and_interruptions(plan, undisturbed):
    assert run_interrupted(new_stepper(plan.num_slots, exact=True), plan) == undisturbed


def test_an_interrupted_request_draws_the_noise_of_an_uninterrupted_one(undisturbed):
    """Also without `exact`: then log-probs may differ in their last bits, and tokens hardly ever."""
    got = run_interrupted(new_stepper(8), Plan(8, 1, tuple((2, i) for i in range(30))))
    for request_id, (expected_tokens, expected_logprobs) in undisturbed.items():
        assert got[request_id][0] == expected_tokens
        np.testing.assert_allclose(got[request_id][1], expected_logprobs, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_a_load_makes_the_kv_of_every_live_request_anew(exact, tmp_path):
    """After a load, a request goes on as if the new weights had always been there."""
    old, new = tiny_model(seed=1), tiny_model(seed=2)
    new.save_pretrained(tmp_path)
    request = ask(tokens(3, 9), seed=5, max_new_tokens=40)
    others = [ask(tokens(i, 3 + i), seed=i, max_new_tokens=40) for i in range(3)]
    stepper = new_stepper(16, exact, old)
    with torch.inference_mode():
        for submitted in (request, *others):
            stepper.submit(submitted)
        for _ in range(15):
            assert stepper.step() == []
        stepper.load(7, stage(old, Version(7, step=1, parent=0, digest="", path=tmp_path)))
    before, after = run(stepper)[request.id].segments
    assert [(s.start, s.end, s.version, s.kv_version) for s in (before, after)] == [(0, 15, 0, 0), (15, 40, 7, 7)]

    whole = np.concatenate([request.tokens, before.tokens])
    resumed = Request("again", whole, request.seed, replace_sampling(request, 25), position=15)
    (expected,) = run(new_stepper(16, exact, new), resumed)["again"].segments
    assert after.tokens.tolist() == expected.tokens.tolist()
    if exact:
        assert after.logprobs.tolist() == expected.logprobs.tolist()
    else:
        np.testing.assert_allclose(after.logprobs, expected.logprobs, atol=1e-5)


def test_a_small_step_runs_on_one_thread_and_a_large_or_exact_one_on_all(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for exact, limit, wanted in ((False, 1e9, 1), (False, 0.0, 2), (True, 1e9, 2)):
            torch.set_num_threads(2)
            monkeypatch.setattr("offbeat.engines.embedded.stepper.SMALL_STEP_FLOPS", limit)
            stepper = new_stepper(num_slots=16, exact=exact)
            run(stepper, ask(tokens(1, 4), max_new_tokens=2))
            assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)
