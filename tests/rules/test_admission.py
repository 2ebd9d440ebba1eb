from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.groups import AdmissionState, AdmissionTarget, admit, may_begin


def test_nothing_is_drawn_before_the_first_version():
    assert admit(AdmissionState(step=None, num_alive=0), AdmissionTarget(groups_per_step=32)) == 0


def test_a_step_draws_what_it_trains_and_no_more():
    pace = AdmissionTarget(groups_per_step=32)
    assert admit(AdmissionState(step=0, num_alive=0), pace) == 32
    assert admit(AdmissionState(step=0, num_alive=32), pace) == 0


def test_a_dropped_group_gives_its_place_back():
    assert admit(AdmissionState(step=3, num_alive=31), AdmissionTarget(groups_per_step=32)) == 1


def test_more_groups_than_wanted_draw_nothing():
    assert admit(AdmissionState(step=3, num_alive=40), AdmissionTarget(groups_per_step=32)) == 0


def test_nothing_is_drawn_after_the_last_step():
    pace = AdmissionTarget(groups_per_step=32, num_steps=10)
    assert admit(AdmissionState(step=9, num_alive=0), pace) == 32
    assert admit(AdmissionState(step=10, num_alive=0), pace) == 0


def test_over_provisioned_a_round_tops_up_what_was_carried_over():
    pace = AdmissionTarget(groups_per_step=110, over_provision=1.1)
    assert admit(AdmissionState(step=0, num_alive=0), pace) == 121
    assert admit(AdmissionState(step=1, num_alive=11), pace) == 110
    assert admit(AdmissionState(step=1, num_alive=0), AdmissionTarget(groups_per_step=3, over_provision=1.5)) == 5


def test_a_factor_that_falls_draws_nothing_until_what_is_under_way_has_fallen_too():
    assert admit(AdmissionState(step=4, num_alive=30), AdmissionTarget(groups_per_step=10, over_provision=2)) == 0
    assert admit(AdmissionState(step=5, num_alive=20), AdmissionTarget(groups_per_step=10, over_provision=2)) == 0
    assert admit(AdmissionState(step=6, num_alive=10), AdmissionTarget(groups_per_step=10, over_provision=2)) == 10


def test_with_overlap_as_much_is_under_way_as_the_bound_allows():
    pace = AdmissionTarget(groups_per_step=8, over_provision=3)
    assert admit(AdmissionState(step=5, num_alive=0), pace) == 24
    assert admit(AdmissionState(step=5, num_alive=20), pace) == 4


def test_towards_the_end_no_more_is_drawn_than_the_run_will_train():
    pace = AdmissionTarget(groups_per_step=8, num_steps=10, over_provision=5)
    assert admit(AdmissionState(step=5, num_alive=0), pace) == 40
    assert admit(AdmissionState(step=7, num_alive=0), pace) == 24
    assert admit(AdmissionState(step=9, num_alive=0), pace) == 8
    assert admit(AdmissionState(step=12, num_alive=0), pace) == 0


@given(
    groups_per_step=st.integers(1, 5),
    num_steps=st.integers(1, 8),
    factors=st.lists(st.floats(1, 4), min_size=1, max_size=8),
    drops=st.lists(st.integers(0, 3), max_size=30),
)
def test_a_run_trains_every_step_and_ends_with_nothing_left_over(groups_per_step, num_steps, factors, drops):
    """Whatever is dropped is drawn again, so that every batch can be filled; at the end exactly as much is alive as was
    wanted, whichever factor was in force when."""
    alive, most, drops = 0, 0, list(drops)
    for step in range(num_steps):
        pace = AdmissionTarget(groups_per_step, num_steps, factors[step % len(factors)])
        most = max(math.ceil(pace.over_provision * groups_per_step), alive)
        alive += admit(AdmissionState(step, alive), pace)
        while drops and drops[-1] <= alive:
            alive -= drops.pop()
            alive += admit(AdmissionState(step, alive), pace)
        assert groups_per_step <= alive <= most
        assert alive <= (num_steps - step) * groups_per_step
        alive -= groups_per_step
    assert alive + admit(AdmissionState(num_steps, alive), pace) == 0


def test_as_much_may_be_begun_as_later_steps_can_train_in_time():
    assert may_begin(5, {}, next_step=5, groups_per_step=8, max_staleness=2) == 24
    assert may_begin(5, {5: 4, 4: 10}, next_step=5, groups_per_step=8, max_staleness=2) == 10
    assert may_begin(5, {}, next_step=6, groups_per_step=8, max_staleness=2) == 16, "one batch is chosen already"


def test_a_worker_that_lags_may_begin_less_and_at_last_nothing():
    assert [may_begin(step, {}, next_step=5, groups_per_step=8, max_staleness=2) for step in (5, 4, 3, 2)] == [
        24,
        16,
        8,
        0,
    ]


def test_what_lags_must_leave_room_for_what_was_begun_since():
    assert may_begin(4, {5: 20}, next_step=5, groups_per_step=8, max_staleness=2) == 4
    assert may_begin(5, {4: 20}, next_step=5, groups_per_step=8, max_staleness=2) == 4
