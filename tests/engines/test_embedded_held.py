"""Requests that are cut and carried on in the embedded engine: what is computed again, and what comes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT_TOKENS, ask, tiny_model, tokens
from transformers import DynamicCache, PreTrainedModel

from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.embedded.weights import stage
from offbeat.engines.protocol import EngineMetrics, Generation, KvMode, Request, Version

torch.set_num_threads(1)


def new_stepper(num_slots: int = 4, exact: bool = False, model=None, version: int = 0) -> Stepper:
    with torch.inference_mode():
        return Stepper(model or tiny_model(), num_slots, CONTEXT_TOKENS, exact, "worker", "engine", version)


@torch.inference_mode()
def begin(stepper: Stepper, num_steps: int, *requests: Request) -> None:
    for request in requests:
        stepper.submit(request)
    for _ in range(num_steps):
        assert stepper.step() == []


@torch.inference_mode()
def finish(stepper: Stepper, *requests: Request) -> dict[str, Generation]:
    for request in requests:
        stepper.submit(request)
    ended: dict[str, Generation] = {}
    while not stepper.is_idle:
        ended |= {generation.id: generation for generation in stepper.step()}
    return ended


@torch.inference_mode()
def cut(stepper: Stepper, *requests: Request) -> list[Request]:
    """Aborts requests, and returns what is left of each."""
    ended = {generation.id: generation for generation in stepper.abort([request.id for request in requests])}
    return [rest_of(request, ended[request.id]) for request in requests]


def rest_of(request: Request, generation: Generation) -> Request:
    done = response(generation)
    sampling = type(request.sampling)(max_new_tokens=request.sampling.max_new_tokens - len(done))
    whole = np.concatenate([request.tokens, done])
    return replace(request, tokens=whole, position=request.position + len(done), sampling=sampling)


def response(generation: Generation) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(segment.tokens for segment in generation.segments)])


def logprobs(generation: Generation) -> np.ndarray:
    return np.concatenate([segment.logprobs for segment in generation.segments])


def work_of(stepper: Stepper, before: EngineMetrics) -> tuple[int, int]:
    """Tokens that were prefilled, and those that needed not be."""
    now = stepper.metrics
    prefilled = now.num_prefilled_tokens - before.num_prefilled_tokens
    return prefilled, now.num_resumed_tokens - before.num_resumed_tokens


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Other weights, and where they lie."""
    model, folder = tiny_model(seed=9), tmp_path_factory.mktemp("newer")
    model.save_pretrained(folder)
    return model, folder


@torch.inference_mode()
def load(stepper: Stepper, number: int, folder: Path) -> None:
    stepper.load(number, stage(stepper.model, Version(number, step=number, parent=0, digest="", path=folder)))


@pytest.mark.parametrize("exact", [False, True])
def test_a_cut_request_goes_on_without_prefill_as_if_it_had_not_been_cut(exact):
    request = ask(tokens(1, 12), seed=3, max_new_tokens=30)
    whole = finish(new_stepper(16, exact), request)[request.id]
    stepper = new_stepper(16, exact)
    begin(stepper, 10, request)
    before = stepper.metrics
    (rest,) = cut(stepper, request)
    begin(stepper, 3, ask(tokens(2, 5), seed=4))  # somebody else runs meanwhile
    prefilled = stepper.metrics.num_prefilled_tokens
    again = finish(stepper, rest)[request.id]
    assert stepper.metrics.num_prefilled_tokens == prefilled
    assert work_of(stepper, before)[1] == 12 + 10 - 1
    assert response(again).tolist() == response(whole)[10:].tolist()
    if exact:
        assert logprobs(again).tolist() == logprobs(whole)[10:].tolist()
    else:
        np.testing.assert_allclose(logprobs(again), logprobs(whole)[10:], atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_what_came_after_the_cut_is_fed_and_what_went_back_before_it_is_not_used(exact):
    request = ask(tokens(1, 40), seed=3, max_new_tokens=60)
    for position, resumed in ((27, 64), (20, 59)):  # cut at 25, then carried on elsewhere, or sent back
        whole = finish(new_stepper(16, exact), request)[request.id]
        stepper = new_stepper(16, exact)
        begin(stepper, 25, request)
        cut(stepper, request)
        before = stepper.metrics
        known = np.concatenate([request.tokens, response(whole)[:position]])
        again = ask(known, seed=3, position=position, max_new_tokens=60 - position)
        assert response(finish(stepper, again)[again.id]).tolist() == response(whole)[position:].tolist()
        assert work_of(stepper, before) == (0, resumed)


def test_where_much_is_missing_all_is_computed_anew():
    request = ask(tokens(1, 12), seed=3, max_new_tokens=60)
    whole = response(finish(new_stepper(), request)[request.id])
    stepper = new_stepper()
    begin(stepper, 5, request)
    cut(stepper, request)
    before = stepper.metrics
    again = ask(np.concatenate([request.tokens, whole[:40]]), seed=3, position=40, max_new_tokens=20)
    assert response(finish(stepper, again)[again.id]).tolist() == whole[40:].tolist()
    assert work_of(stepper, before) == (51, 0)


@pytest.mark.parametrize("exact", [False, True])
def test_after_a_load_everything_is_computed_by_the_new_weights(exact, newer):
    _, folder = newer
    request = ask(tokens(1, 12), seed=3, max_new_tokens=30)
    stepper = new_stepper(16, exact)
    begin(stepper, 10, request)
    (rest,) = cut(stepper, request)
    load(stepper, 1, folder)
    before = stepper.metrics
    again, cold = finish(stepper, rest)[request.id], new_stepper(16, exact, tiny_model(seed=9), version=1)
    expected = finish(cold, rest)[request.id]
    assert work_of(stepper, before)[1] == 0
    assert work_of(stepper, before)[0] >= 11
    assert again.segments == expected.segments
    assert [(s.version, s.kv_version) for s in again.segments] == [(1, 1)]


@pytest.mark.parametrize("is_cut", [False, True], ids=["running", "cut"])
def test_weights_that_come_under_the_same_number_are_other_weights(is_cut, newer):
    _, folder = newer
    request = replace(ask(tokens(1, 12), seed=3, max_new_tokens=30), kv_lag=1)  # which only a stale one may use
    stepper = new_stepper()
    begin(stepper, 10, request)
    (rest,) = cut(stepper, request) if is_cut else (None,)
    before = stepper.metrics
    load(stepper, 0, folder)
    finish(stepper, *([rest] if is_cut else []))
    assert work_of(stepper, before) == (21, 0)


def test_an_exact_request_that_is_cut_before_it_was_fed_again_is_carried_on_all_the_same(newer):
    _, folder = newer
    request = ask(tokens(1, 12), seed=3, max_new_tokens=30)
    stepper = new_stepper(16, exact=True)
    begin(stepper, 10, request)
    load(stepper, 1, folder)
    (rest,) = cut(stepper, request)
    again = finish(stepper, rest)[request.id]
    expected = finish(new_stepper(16, True, tiny_model(seed=9), version=1), rest)[request.id]
    assert again.segments == expected.segments


@pytest.mark.parametrize("kvs", [(KvMode.REFILL, KvMode.REFILL), (KvMode.REFILL, KvMode.SAME), ("same", "refill")])
def test_who_wants_all_computed_anew_neither_takes_nor_leaves_anything(kvs):
    first, then = map(KvMode, kvs)
    request = replace(ask(tokens(1, 12), seed=3, max_new_tokens=30), kv=first)
    stepper = new_stepper()
    begin(stepper, 10, request)
    (rest,) = cut(stepper, request)
    before = stepper.metrics
    finish(stepper, replace(rest, kv=then))
    assert work_of(stepper, before) == (21, 0)


def test_new_requests_take_empty_slots_first_and_then_those_cut_longest_ago():
    stepper = new_stepper(num_slots=4)
    requests = [ask(tokens(i, 12), seed=i, max_new_tokens=40) for i in range(3)]
    begin(stepper, 10, *requests)
    rests = [cut(stepper, request)[0] for request in requests]
    begin(stepper, 1, *(ask(tokens(10 + i, 3), seed=i, max_new_tokens=60) for i in range(2)))
    before = stepper.metrics
    begin(stepper, 1, rests[2], rests[1])
    assert work_of(stepper, before) == (0, 21 + 21)
    finish(stepper, rests[0])
    assert work_of(stepper, before) == (21, 21 + 21)


def test_what_a_gap_holds_changes_places_with_the_live_slot_that_moves_in():
    requests = [ask(tokens(i, 6 + i), seed=i, max_new_tokens=50) for i in range(4)]
    wholes = {request.id: finish(new_stepper(), request)[request.id] for request in requests}
    stepper = new_stepper(num_slots=4)
    begin(stepper, 12, *requests)
    rests = cut(stepper, *requests[:2])
    begin(stepper, 5)  # the other two move to the front
    assert sorted(stepper.running) == [0, 1]
    before = stepper.metrics
    ended = finish(stepper, *rests)
    assert work_of(stepper, before) == (0, 6 + 11 + 7 + 11)
    for request in requests:
        num_done = 12 if request in requests[:2] else 0
        assert response(ended[request.id]).tolist() == response(wholes[request.id])[num_done:].tolist()
        np.testing.assert_allclose(logprobs(ended[request.id]), logprobs(wholes[request.id])[num_done:], atol=1e-5)


CROWD = [
    replace(ask(tokens(i % 4, 1 + 4 * (i % 4)), seed=i, max_new_tokens=5 + 7 * i % 41), id=str(i)) for i in range(9)
]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Generation]:
    return finish(new_stepper(16), *CROWD)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(
    num_slots=st.integers(2, 12),
    events=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["cut", "resume"]), st.integers(0, 8)), max_size=25),
)
def test_however_requests_are_cut_and_carried_on_their_answers_are_the_same(num_slots, events, undisturbed):
    stepper, done, left = new_stepper(num_slots), {}, {}
    pieces: dict[str, list[Generation]] = {request.id: [] for request in CROWD}
    inside = {request.id: request for request in CROWD}

    def take(generations: list[Generation]) -> None:
        for generation in generations:
            pieces[generation.id].append(generation)
            done[generation.id] = inside.pop(generation.id)

    with torch.inference_mode():
        for request in CROWD:
            stepper.submit(request)
        for num_steps, what, number in [*events, *((0, "resume", number) for number in range(9))]:
            for _ in range(num_steps):
                take(stepper.step())
            name = str(number)
            if what == "cut" and name in inside:
                (generation,) = stepper.abort([name])
                pieces[name].append(generation)
                left[name] = rest_of(inside.pop(name), generation)
            elif what == "resume" and name in left:
                inside[name] = left.pop(name)
                stepper.submit(inside[name])
        while not stepper.is_idle:
            take(stepper.step())
    for name, whole in undisturbed.items():
        parts = [segment for generation in pieces[name] for segment in generation.segments]
        assert [int(t) for part in parts for t in part.tokens] == response(whole).tolist()
        np.testing.assert_allclose(np.concatenate([p.logprobs for p in parts]), logprobs(whole), atol=1e-5)


def mixed_logprobs(old: PreTrainedModel, new: PreTrainedModel, known: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Of tokens sampled by new weights that attend to what old ones made of all known tokens but the last."""
    with torch.inference_mode():
        cache = DynamicCache()
        old(torch.tensor(known[None, :-1]), past_key_values=cache)
        fed = torch.tensor(np.concatenate([known[-1:], sampled[:-1]])[None])
        logits = torch.cat([new(fed[:, i : i + 1], past_key_values=cache).logits[0] for i in range(fed.shape[1])])
        picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled).unsqueeze(1))
    return picked.squeeze(1).numpy()


@pytest.mark.parametrize("is_cut", [False, True], ids=["running", "cut"])
def test_stale_keys_and_values_are_kept_across_a_load_and_told(is_cut, newer):
    model, folder = newer
    request = replace(ask(tokens(1, 12), seed=3, max_new_tokens=30), kv=KvMode.STALE, kv_lag=1)
    stepper = new_stepper()
    begin(stepper, 10, request)
    (rest,) = cut(stepper, request) if is_cut else (None,)
    before = stepper.metrics
    load(stepper, 1, folder)
    last = finish(stepper, *([rest] if is_cut else []))[request.id].segments[-1]
    assert work_of(stepper, before) == (0, 21 if is_cut else 0)
    assert (last.start, last.version, last.kv_version) == (10, 1, 0)
    first = response(finish(new_stepper(), request)[request.id])[:10]
    known = np.concatenate([request.tokens, first])
    expected = mixed_logprobs(tiny_model(), model, known, last.tokens.astype(np.int64))
    np.testing.assert_allclose(last.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("is_cut", [False, True], ids=["running", "cut"])
def test_what_lags_too_far_is_computed_anew(is_cut, newer):
    _, folder = newer
    request = replace(ask(tokens(1, 12), seed=3, max_new_tokens=30), kv=KvMode.STALE, kv_lag=1)
    stepper = new_stepper()
    begin(stepper, 10, request)
    (rest,) = cut(stepper, request) if is_cut else (None,)
    before = stepper.metrics
    load(stepper, 1, folder)
    load(stepper, 2, folder)
    last = finish(stepper, *([rest] if is_cut else []))[request.id].segments[-1]
    assert work_of(stepper, before) == (21, 0)
    assert (last.start, last.version, last.kv_version) == (10, 2, 2)


def test_beside_stale_requests_others_are_computed_anew_and_share_nothing_with_them(newer):
    _, folder = newer
    stale, same = ask(tokens(1, 12), seed=3, max_new_tokens=30), ask(tokens(1, 12), seed=4, max_new_tokens=30)
    stepper = new_stepper()
    begin(stepper, 10, replace(stale, kv=KvMode.STALE, kv_lag=1), same)
    load(stepper, 1, folder)
    later = ask(tokens(1, 12), seed=5, max_new_tokens=30)
    ended = finish(stepper, later)
    assert [[s.kv_version for s in ended[r.id].segments] for r in (stale, same, later)] == [[0, 0], [0, 1], [1]]
    (expected,) = finish(new_stepper(model=tiny_model(seed=9), version=1), later)[later.id].segments
    assert ended[later.id].segments[0].tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(ended[later.id].segments[0].logprobs, expected.logprobs, atol=1e-5)


def test_figures_are_what_was_done():
    with torch.inference_mode():
        stepper = Stepper(tiny_model(), 4, CONTEXT_TOKENS, False, "w", "e", 0)
    finish(stepper, *(ask(tokens(1, 14), seed=i, max_new_tokens=2 + 4 * i) for i in range(2)))
    # Two steps with two rows and four with one. Slots are read in multiples of 16: the third token is the first that
    # lies beyond. The second of two equal prompts is copied.
    assert stepper.metrics == EngineMetrics(
        num_steps=6,
        num_rows=2 * 2 + 4,
        num_context_tokens=2 * 2 * 16 + 1 * 16 + 3 * 32,
        num_prefilled_tokens=13,
        num_resumed_tokens=13,
    )
