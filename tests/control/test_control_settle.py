from __future__ import annotations

from offbeat.control.settle import Verdict, settle


def test_a_group_is_ready_when_every_member_ended():
    assert settle(4, num_scored=3, num_failed=0, min_group=2) is Verdict.OPEN
    assert settle(4, num_scored=4, num_failed=0, min_group=2) is Verdict.READY


def test_failed_members_are_left_out_while_enough_remain():
    assert settle(4, num_scored=2, num_failed=2, min_group=2) is Verdict.READY
    assert settle(4, num_scored=0, num_failed=2, min_group=2) is Verdict.OPEN


def test_a_group_fails_as_soon_as_too_few_can_remain():
    assert settle(4, num_scored=0, num_failed=3, min_group=2) is Verdict.FAILED


def test_a_group_smaller_than_the_minimum_needs_all_of_its_members():
    assert settle(1, num_scored=1, num_failed=0, min_group=2) is Verdict.READY
    assert settle(1, num_scored=0, num_failed=1, min_group=2) is Verdict.FAILED
