"""A modelled engine takes the time that its steps take, and loses no token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.simulator.lengths import Lengths, LogNormal, constant
from offbeat.simulator.replica import EngineSpeed, Replica, linear
from offbeat.simulator.tasks import SimulatedGroup, SimulatedTask


def a_task(number: int, length: int, prompt: int = 0) -> SimulatedTask:
    return SimulatedTask(number, SimulatedGroup(0, 0, 1, 1.0), 0, length, prompt)


def run(replica: Replica) -> list[tuple[float, int]]:
    """Lets a replica work until nothing is left; returns when which task ended."""
    ended = []
    while (due_s := replica.due_s()) < math.inf:
        ended += [(replica.now_s, row.task.id) for row in replica.advance(due_s)]
    return ended


def test_rows_share_their_steps_and_leave_as_they_end():
    replica = Replica(EngineSpeed(linear(1.0, 0.5, 4)))
    replica.load(0, 0.0)
    replica.add([a_task(1, 2), a_task(2, 4)], 0.0)
    assert run(replica) == [(4.0, 1), (7.0, 2)]
    assert replica.num_generated == 6
    assert replica.busy_s == 7.0


def test_a_row_that_comes_during_a_step_begins_with_the_next():
    replica = Replica(EngineSpeed(linear(1.0, 0.0, 4)))
    replica.load(0, 0.0)
    replica.add([a_task(1, 3)], 0.0)
    replica.add([a_task(2, 1)], 0.5)
    assert run(replica) == [(2.0, 2), (3.0, 1)]


def test_contexts_make_steps_longer_as_they_grow():
    replica = Replica(EngineSpeed((0.0, 1.0, 1.0, 1.0), per_context_token_s=0.1))
    replica.load(0, 0.0)
    replica.add([a_task(1, 3, prompt=10)], 0.0)
    assert run(replica) == [(pytest.approx(3 + 0.1 * (10 + 11 + 12)), 1)]


def test_a_load_splits_answers_by_version_and_computes_their_context_again():
    replica = Replica(EngineSpeed(linear(1.0, 0.0, 4), prefill_s=0.01, load_s=2.0))
    task = a_task(1, 5, prompt=10)
    replica.load(0, 0.0)
    replica.add([task], 2.0)
    replica.load(1, 2.0 + 0.1 + 1.5)
    assert run(replica)[0][0] == pytest.approx(2.0 + 0.1 + 2.0 + 2.0 + 0.12 + 3.0)
    assert task.runs == [(0, 2), (1, 3)]


@pytest.mark.parametrize("kv_lag, refilled", [(0, 12), (1, 0)])
def test_keys_and_values_are_kept_while_they_are_young_enough(kv_lag, refilled):
    replica = Replica(EngineSpeed(linear(1.0, 0.0, 4), prefill_s=0.01), keeps_kv=True, kv_lag=kv_lag)
    replica.load(0, 0.0)
    replica.add([a_task(1, 5, prompt=10)], 0.0)
    replica.load(1, 1.5)
    assert replica.num_prefilled == 10 + refilled


def test_without_room_the_youngest_row_is_computed_again_later():
    replica = Replica(EngineSpeed(linear(1.0, 0.0, 4)), capacity_tokens=12)
    replica.load(0, 0.0)
    tasks = [a_task(1, 8), a_task(2, 8)]
    replica.add(tasks, 0.0)
    ended = run(replica)
    assert [number for _, number in ended] == [1, 2]
    assert replica.num_preempted > 0
    assert replica.num_generated == 16
    assert ended[-1][0] > 8.0


def test_a_killed_engine_has_the_tokens_of_its_whole_steps():
    replica, task = Replica(EngineSpeed(linear(1.0, 0.0, 4))), a_task(1, 9)
    replica.load(0, 0.0)
    replica.add([task], 0.0)
    assert [row.task for row in replica.kill(3.7)] == [task]
    assert task.num_tokens == replica.num_generated == 3
    assert task.cut(1) == 2
    assert task.runs == [(0, 1)]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 40), st.integers(1, 50)), min_size=1, max_size=30),
    st.lists(st.floats(0, 60), max_size=4),
    st.sampled_from([math.inf, 500.0, 900.0]),
)
def test_every_answer_ends_with_its_length_whatever_comes_between(asked, loads, capacity_tokens):
    replica = Replica(EngineSpeed(linear(0.01, 0.003, 30), 1e-5, 1e-4, load_s=0.2), capacity_tokens=capacity_tokens)
    tasks = [a_task(number, length, prompt) for number, (length, _, prompt) in enumerate(asked)]
    happens = [(0.0, -1, None)] + [(at_s, i, tasks[i]) for i, (_, at_s, _) in enumerate(asked)]
    happens += [(at_s, 100 + i, None) for i, at_s in enumerate(loads)]
    for version, (at_s, _, task) in enumerate(sorted(happens, key=lambda one: one[:2])):
        while replica.due_s() <= at_s:
            replica.advance(replica.due_s())
        if task is None:
            replica.load(version, at_s)
        else:
            replica.add([task], at_s)
    run(replica)
    assert [task.num_tokens for task in tasks] == [task.length for task in tasks]
    assert all(sum(count for _, count in task.runs) == task.length for task in tasks)
    assert all([version for version, _ in task.runs] == sorted({version for version, _ in task.runs}) for task in tasks)
    assert replica.num_generated == sum(task.length for task in tasks)


@pytest.mark.parametrize("rows", [4, 32, 128])
def test_a_full_engine_is_as_fast_as_the_closed_form_says(rows):
    """R(B) = B / (t0 + B (a + b c)), where c is the mean context of a running answer: prompt + E[L²] / (2 E[L])."""
    t0_s, a_s, b_s, prompt = 3e-3, 1e-5, 1.5e-8, 100
    replica = Replica(EngineSpeed(linear(t0_s, a_s, rows), b_s))
    lengths = Lengths(LogNormal(500, 0.8, 4000), 1, prompt=constant(prompt), longest=4000, seed=3)
    drawn = [lengths.draw()[0][0] for _ in range(rows * 120)]
    tasks = [a_task(number, length, prompt) for number, length in enumerate(drawn)]
    replica.load(0, 0.0)
    replica.add(tasks[:rows], 0.0)
    num_given, num_ended, began = rows, 0, None
    while num_given < len(tasks):
        ended = replica.advance(replica.due_s())
        num_ended += len(ended)
        if began is None and num_ended > rows * 20:  # the first answers begin together
            began = replica.now_s, replica.num_generated
        replica.add(tasks[num_given : num_given + len(ended)], replica.now_s)
        num_given += len(ended)
    assert began is not None
    mean, mean_square = sum(drawn) / len(drawn), sum(length**2 for length in drawn) / len(drawn)
    context = prompt + mean_square / (2 * mean)
    closed = rows / (t0_s + rows * (a_s + b_s * context))
    rate = (replica.num_generated - began[1]) / (replica.now_s - began[0])
    assert rate == pytest.approx(closed, rel=0.02)
