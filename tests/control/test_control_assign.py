from __future__ import annotations

from offbeat.control.assign import OpenGroup, assign, wanted_version


def group(number: int, *, num_open: int = 4, is_eval: bool = False, version: int | None = None) -> OpenGroup:
    return OpenGroup(number, number, is_eval, 4, num_open, version)


def test_evaluation_comes_first_then_started_groups_then_the_lowest_ordinal():
    groups = [group(1), group(2, num_open=3), group(3, is_eval=True)]
    assert assign(groups, 100, None) == [(3, 4), (2, 3), (1, 4)]


def test_capacity_may_end_within_a_group():
    assert assign([group(1), group(2)], 6, None) == [(1, 4), (2, 2)]
    assert assign([group(1)], 0, None) == []


def test_a_group_is_skipped_by_a_worker_without_its_version():
    groups = [group(1, version=8), group(2, version=9), group(3)]
    assert assign(groups, 100, 9) == [(2, 4), (3, 4)]
    assert assign(groups, 100, None) == [(3, 4)]


def test_the_wanted_version_is_that_of_the_first_open_task():
    assert wanted_version([group(2, version=8), group(1, version=7)]) == 7
    assert wanted_version([group(1, version=7), group(2, version=8, is_eval=True)]) == 8
    assert wanted_version([]) is None
