from __future__ import annotations

from offbeat.rules.groups import GroupVerdict, settle, settle_ready


def test_a_group_is_ready_when_every_member_ended():
    assert settle(4, num_scored=3, num_failed=0, min_group=2) is GroupVerdict.OPEN
    assert settle(4, num_scored=4, num_failed=0, min_group=2) is GroupVerdict.READY


def test_failed_members_are_left_out_while_enough_remain():
    assert settle(4, num_scored=2, num_failed=2, min_group=2) is GroupVerdict.READY
    assert settle(4, num_scored=0, num_failed=2, min_group=2) is GroupVerdict.OPEN


def test_a_group_fails_as_soon_as_too_few_can_remain():
    assert settle(4, num_scored=0, num_failed=3, min_group=2) is GroupVerdict.FAILED


def test_a_group_smaller_than_the_minimum_needs_all_of_its_members():
    assert settle(1, num_scored=1, num_failed=0, min_group=2) is GroupVerdict.READY
    assert settle(1, num_scored=0, num_failed=1, min_group=2) is GroupVerdict.FAILED


def test_a_group_whose_rewards_are_all_equal_has_no_signal():
    assert settle_ready(spread=0.0, num_before=0, max_no_signal=4) is GroupVerdict.NO_SIGNAL
    assert settle_ready(spread=1e-8, num_before=0, max_no_signal=4) is GroupVerdict.NO_SIGNAL
    assert settle_ready(spread=1.1e-8, num_before=0, max_no_signal=4) is GroupVerdict.READY


def test_a_step_that_has_seen_enough_takes_what_has_no_signal():
    assert settle_ready(spread=0.0, num_before=3, max_no_signal=4) is GroupVerdict.NO_SIGNAL
    assert settle_ready(spread=0.0, num_before=4, max_no_signal=4) is GroupVerdict.READY
    assert settle_ready(spread=0.0, num_before=1, max_no_signal=1.5) is GroupVerdict.NO_SIGNAL
    assert settle_ready(spread=0.0, num_before=0, max_no_signal=0) is GroupVerdict.READY
