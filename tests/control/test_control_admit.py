from __future__ import annotations

from offbeat.control.admit import Pace, Standing, admit


def test_nothing_is_drawn_before_the_first_version():
    assert admit(Standing(step=None, num_alive=0), Pace(groups_per_step=32)) == 0


def test_a_step_draws_what_it_trains_and_no_more():
    pace = Pace(groups_per_step=32)
    assert admit(Standing(step=0, num_alive=0), pace) == 32
    assert admit(Standing(step=0, num_alive=32), pace) == 0


def test_a_dropped_group_gives_its_place_back():
    assert admit(Standing(step=3, num_alive=31), Pace(groups_per_step=32)) == 1


def test_more_groups_than_wanted_draw_nothing():
    assert admit(Standing(step=3, num_alive=40), Pace(groups_per_step=32)) == 0


def test_nothing_is_drawn_after_the_last_step():
    pace = Pace(groups_per_step=32, num_steps=10)
    assert admit(Standing(step=9, num_alive=0), pace) == 32
    assert admit(Standing(step=10, num_alive=0), pace) == 0
