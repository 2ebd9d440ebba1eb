"""Workers are as far ahead of the trainer as they must be, and no farther."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.depth import FIRST_PATIENCE, Depth


def run(depth: Depth, needed: int, num_steps: int) -> list[int]:
    """Steps of a run in which the trainer stands still for half of each step below the depth that it needs."""
    seen = []
    for _ in range(num_steps):
        seen.append(depth.steps)
        depth.trained(0.5 if depth.steps < needed else 0.0, 1.0)
    return seen


def test_it_begins_with_one_step():
    assert Depth(4).steps == 1


def test_without_a_bound_there_is_nothing_to_be_ahead_of():
    depth = Depth(0)
    assert run(depth, needed=3, num_steps=5) == [0] * 5


def test_a_trainer_that_stands_still_gets_more_until_it_does_not():
    assert run(Depth(6), needed=4, num_steps=6) == [1, 2, 3, 4, 4, 4]


def test_after_calm_less_is_tried_and_what_was_too_little_is_tried_ever_more_seldom():
    seen = run(Depth(6), needed=3, num_steps=400)
    trials = [i for i in range(1, len(seen)) if seen[i] < seen[i - 1]]
    pauses = [b - a for a, b in itertools.pairwise(trials)]
    assert trials[0] >= FIRST_PATIENCE
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    assert seen[trials[0] :].count(2) == len(trials)  # each costs one step


def test_a_need_that_passes_is_forgotten():
    depth = Depth(6)
    run(depth, needed=6, num_steps=20)
    assert run(depth, needed=1, num_steps=300)[-1] == 1


@given(st.integers(1, 8), st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=60))
def test_it_stays_between_one_and_the_bound_and_moves_one_step_at_a_time(bound, told):
    depth = Depth(bound)
    for still_s, step_s in told:
        before = depth.steps
        depth.trained(still_s, step_s)
        assert 1 <= depth.steps <= bound
        assert abs(depth.steps - before) <= 1
