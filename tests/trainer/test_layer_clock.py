"""A slow rank is found by its own passes, though the others wait for it and take as long."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.trainer.layer_clock import MIN_S, SLOW_STEPS, LayerClock, SlowRanks
from offbeat.trainer.policy import AdamSettings
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepSettings, train_step

EVEN, SLOW = (1.0, 1000), (10.0, 1000)


def test_a_rank_ten_times_slower_is_named_once_and_after_several_steps():
    slow = SlowRanks()
    found = [slow.find([EVEN, SLOW, EVEN]) for _ in range(2 * SLOW_STEPS)]
    assert found == [[]] * (SLOW_STEPS - 1) + [[(1, 10.0)]] + [[]] * SLOW_STEPS


def test_a_rank_with_more_tokens_is_not_slow_and_one_busy_step_names_nobody():
    slow = SlowRanks()
    assert not any(slow.find([EVEN, (10.0, 10_000)]) for _ in range(5))
    assert not any(slow.find([EVEN, SLOW if step % SLOW_STEPS else EVEN]) for step in range(9))
    assert not any(slow.find([(MIN_S / 20, 1000), (MIN_S / 2, 1000)]) for _ in range(5))


def test_the_clock_counts_tokens_and_forgets_a_pass_that_failed():
    model = tiny_model("llama")
    clock = LayerClock(model, torch.device("cpu"))
    tokens, num_layers = torch.arange(6)[None], model.config.num_hidden_layers
    model(input_ids=tokens)
    seconds, num_tokens = clock.take()
    assert num_tokens == 6 * num_layers
    assert seconds > 0
    assert clock.take() == (0, 0)


def passes_with_a_slow_rank(gang, num_steps):
    made = ShardedPolicy(tiny_model("llama"), AdamSettings(), gang=gang)
    if gang.rank == 1:
        made.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    slow, named, walls = SlowRanks(), [], []
    for step in range(num_steps):
        made.layer_clock.take()
        began_s = time.perf_counter()
        train_step(made, make_samples(np.random.default_rng(step), [(5, [3, 9])] * 4), StepSettings(), 1e-3)
        walls.append(time.perf_counter() - began_s)
        own = made.layer_clock.take()
        told = [tuple(map(float, data.split())) for data in gang.gather(f"{own[0] + MIN_S} {own[1]}".encode())]
        named += slow.find([(seconds, int(tokens)) for seconds, tokens in told])
    return [rank for rank, _ in named], walls


@pytest.mark.full
def test_a_slow_rank_is_found_among_ranks_that_take_equally_long():
    (named, walls), (also_named, _) = run_gang(2, passes_with_a_slow_rank, SLOW_STEPS + 1)
    assert named == also_named == [1]
    assert min(walls) > 0.2, "the fast rank waits"
