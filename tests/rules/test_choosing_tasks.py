"""Which groups and tasks a lease call gets, without a look at all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.groups import Candidate, VersionRun, may_retry, select_batch, unclaimed_step
from offbeat.rules.leases import (
    NUM_NEAR,
    Lease,
    OpenGroup,
    OpenTask,
    Requester,
    assign,
    choose_groups,
    choose_tasks,
    ends_task,
    lost_and_kept,
    oldest_first_step,
)
from offbeat.rules.rounds import RoundMembers


class Stored:
    """Open groups of which everything is known."""

    def __init__(self, groups: list[OpenGroup], num_begin: int | None):
        self._groups, self._num_begin = sorted(groups, key=lambda group: group.order), num_begin

    def all(self) -> list[OpenGroup]:
        return self._groups

    def num_open(self) -> int:
        return sum(group.num_open for group in self._groups)

    def num_begin(self) -> int | None:
        return self._num_begin


@st.composite
def open_groups(draw: st.DrawFn) -> list[OpenGroup]:
    groups = []
    for number in range(draw(st.integers(1, 30))):
        size = draw(st.integers(1, 4))
        first_step = draw(st.one_of(st.none(), st.integers(0, 3)))
        is_away = first_step is not None and draw(st.booleans())
        groups.append(OpenGroup(number, number, False, size, draw(st.integers(1, size)), None, 0, first_step, is_away))
    return groups


@given(open_groups(), st.integers(1, 12), st.one_of(st.none(), st.integers(0, 5)), st.one_of(st.none(), st.just(40)))
def test_a_look_at_the_first_groups_gives_what_a_look_at_all_gives(groups, capacity, num_begin, total_slots):
    stored = Stored(groups, num_begin)
    requester = Requester(capacity, 2, step=2, total_slots=total_slots)
    near = stored.all()[: NUM_NEAR + capacity]
    is_all = len(near) < NUM_NEAR + capacity
    expected = assign(stored.all(), replace(requester, num_begin=num_begin, num_open=stored.num_open()))
    assert choose_groups(near, requester, stored, is_all=is_all) == expected


def test_a_workers_own_partials_come_before_those_of_others_unless_it_is_alone():
    tasks = [OpenTask(1, 5, "b"), OpenTask(2, 5, "a"), OpenTask(3)]
    assert choose_tasks(tasks, 3, "a", 5, is_alone=False, skips_failed=False) == [2, 3, 1]
    assert choose_tasks(tasks, 2, "a", 5, is_alone=True, skips_failed=False) == [1, 2]


def test_a_partial_of_a_newer_version_is_left_to_workers_that_serve_it():
    tasks = [OpenTask(1, 5, "b"), OpenTask(2, 4, "b")]
    assert choose_tasks(tasks, 2, "a", 4, is_alone=False, skips_failed=False) == [2]
    assert choose_tasks(tasks, 2, "a", None, is_alone=False, skips_failed=False) == []


def test_a_worker_does_not_get_back_what_it_has_just_failed_if_it_is_to_skip_this():
    tasks = [OpenTask(1, failed_by="a"), OpenTask(2, failed_by="b")]
    assert choose_tasks(tasks, 2, "a", 0, is_alone=False, skips_failed=True) == [2]
    assert choose_tasks(tasks, 2, "a", 0, is_alone=False, skips_failed=False) == [1, 2]


def test_a_group_is_as_old_as_the_oldest_version_that_began_it():
    assert oldest_first_step(None, 3) == 3
    assert oldest_first_step(2, 3) == 2
    assert oldest_first_step(4, 3) == 3
    assert oldest_first_step(2, None) == 2


def test_groups_are_selected_again_after_stale_ones_were_dropped():
    groups = {number: Candidate(number, number, True, first_step=0, runs=(VersionRun(9, 0),)) for number in (0, 1)}
    groups |= {2: Candidate(2, 2, True, first_step=5, runs=(VersionRun(9, 5),))}
    dropped: list[int] = []

    def load() -> list[Candidate]:
        return list(groups.values())[:2]

    def drop(stale: list[int]) -> None:
        dropped.extend(stale)
        for number in stale:
            del groups[number]

    selection, stale = select_batch(load, drop, step=5, count=1, max_staleness=2, in_order=False)
    assert selection.take == (2,)
    assert stale == dropped == [0, 1]


def test_a_lease_counts_as_lost_only_if_its_worker_was_not_heard():
    leases = [Lease(1, 1, "a"), Lease(2, 1, "b"), Lease(3, 1, "a")]
    assert lost_and_kept(leases, {"a"}) == ([leases[1]], [leases[0], leases[2]])


def test_small_limits():
    assert unclaimed_step(None, None) == 0
    assert unclaimed_step(3, 5) == 5
    assert unclaimed_step(4, 2) == 4
    assert not ends_task(2, 3)
    assert ends_task(3, 3)
    assert may_retry(0)
    assert not may_retry(1)


def test_a_worker_takes_part_in_the_next_round_only_with_another_version():
    members = RoundMembers(in_rounds=True)
    members.joined("a", 1, 1)
    assert members.may_join("a", 1, 1)
    assert not members.may_join("a", None, 1)
    assert not members.may_join("a", 2, 1)
    assert members.may_join("a", 3, 2), "it has loaded another version, though not the newest"
    members.left("a")
    assert members.may_join("a", 2, 1)
    assert RoundMembers(in_rounds=False).may_join("a", None, None)
