from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.leases import OpenGroup, Requester, allowance, assign, culprit, wanted_version


def group(
    number: int,
    *,
    num_open: int = 4,
    is_eval: bool = False,
    version: int | None = None,
    num_losses: int = 0,
    begun: int | None = None,
) -> OpenGroup:
    return OpenGroup(number, number, is_eval, 4, num_open, version, num_losses, begun)


def test_evaluation_comes_first_then_started_groups_then_the_lowest_ordinal():
    groups = [group(1), group(2, num_open=3), group(3, is_eval=True)]
    assert assign(groups, Requester(100, 0, step=0)) == [(3, 4), (2, 3), (1, 4)]


def test_of_groups_that_were_begun_those_that_lie_with_somebody_else_come_last_but_before_new_ones():
    away = group(1, begun=0)._replace(is_away=True)
    groups = [group(4), away, group(2, begun=0), group(3, begun=0), group(5, begun=0)]
    assert assign(groups, Requester(100, 0, step=0)) == [(2, 4), (3, 4), (1, 4), (4, 4), (5, 4)]
    judged = group(6, is_eval=True, version=0)
    assert assign([*groups, judged], Requester(8, 0, step=0)) == [(6, 4), (2, 4)]


def test_capacity_may_end_within_a_group():
    assert assign([group(1), group(2)], Requester(6, 0, step=0)) == [(1, 4), (2, 2)]
    assert assign([group(1)], Requester(0, 0, step=0)) == []


def test_a_group_is_skipped_by_a_worker_without_its_version():
    groups = [group(1, version=8), group(2, version=9), group(3)]
    assert assign(groups, Requester(100, 9, step=5)) == [(2, 4), (3, 4)]


def test_a_worker_that_has_no_version_gets_nothing():
    assert assign([group(1, version=8), group(2)], Requester(100, None)) == []


def test_a_worker_with_an_abandoned_version_gets_only_what_requires_it():
    assert assign([group(1, version=8), group(2)], Requester(100, 8)) == [(1, 4)]


def test_a_group_is_carried_on_only_with_a_version_as_new_as_its_oldest():
    groups = [group(1, begun=4), group(2, begun=5), group(3)]
    assert assign(groups, Requester(100, 7, step=4)) == [(1, 4), (3, 4)]
    assert assign(groups, Requester(100, 8, step=5)) == [(1, 4), (2, 4), (3, 4)]


def test_no_more_groups_are_begun_than_pacing_allows():
    groups = [group(1), group(2, begun=4), group(3, version=7), group(4), group(5)]
    assert assign(groups, Requester(100, 7, step=4, num_begin=1)) == [(1, 4), (2, 4), (3, 4)]
    assert assign(groups, Requester(100, 7, step=4, num_begin=0)) == [(2, 4), (3, 4)]


def test_each_of_several_workers_gets_its_share_of_what_is_open():
    groups = [group(number) for number in range(4)]
    assert assign(groups, Requester(12, 0, step=0, total_slots=24)) == [(0, 4), (1, 4)]
    assert assign(groups, Requester(12, 0, step=0, total_slots=12)) == [(0, 4), (1, 4), (2, 4)]
    assert assign([group(0, num_open=1)], Requester(1, 0, step=0, total_slots=99)) == [(0, 1)], "a share is rounded up"


def test_the_wanted_version_is_that_of_the_first_open_task():
    assert wanted_version([group(2, version=8), group(1, version=7)]) == 7
    assert wanted_version([group(1, version=7), group(2, version=8, is_eval=True)]) == 8
    assert wanted_version([]) is None


def test_suspects_go_out_an_eighth_at_a_time_and_do_not_hold_up_the_others():
    suspect, clean = group(1, num_losses=1), group(2)
    assert assign([suspect, clean], Requester(24, 0, step=0)) == [(1, 3), (2, 4)]
    assert assign([suspect, clean], Requester(8, 0, step=0)) == [(1, 1), (2, 4)]
    assert assign([suspect, clean], Requester(4, 0, step=0, num_held=4, suspects={1: 1})) == [(2, 4)]


def test_a_great_suspect_counts_as_a_lesser_one_too():
    groups = [group(1, num_losses=2), group(2, num_losses=1)]
    assert assign(groups, Requester(16, 0, step=0)) == [(1, 1), (2, 1)]
    assert assign([group(1, num_losses=2)], Requester(8, 0, step=0, num_held=8, suspects={1: 2})) == []


def test_the_culprit_is_the_one_that_is_alone_most_suspect():
    assert culprit({}) is None
    assert culprit({5: 0}) == 5
    assert culprit({5: 0, 6: 0}) is None
    assert culprit({5: 1, 6: 2, 7: 0}) == 6
    assert culprit({5: 2, 6: 2, 7: 0}) is None


open_groups = st.lists(
    st.builds(
        lambda number, size, taken, is_eval, version, losses, begun, is_away: OpenGroup(
            number, number, is_eval, size, max(1, size - taken), version, losses, begun, is_away and not is_eval
        ),
        st.integers(0, 99),
        st.integers(1, 6),
        st.integers(0, 5),
        st.booleans(),
        st.sampled_from([None, 1, 2]),
        st.integers(0, 3),
        st.sampled_from([None, 0, 1]),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda g: g.group,
)
requesters = st.builds(
    Requester,
    capacity=st.integers(0, 40),
    have_version=st.sampled_from([1, 2]),
    step=st.sampled_from([None, 0, 1]),
    num_begin=st.sampled_from([None, 0, 1, 2]),
    total_slots=st.one_of(st.none(), st.integers(1, 2000)),
    num_held=st.integers(0, 600),
)


@given(open_groups, requesters)
def test_nobody_gets_more_than_it_can_hold_and_the_first_come_first(groups, requester):
    given_tasks = assign(groups, requester)
    by_id = {g.group: g for g in groups}
    assert sum(count for _, count in given_tasks) <= requester.capacity
    stay = [by_id[g].order for g, _ in given_tasks if not by_id[g].is_away]
    assert stay == sorted(stay)
    for number, count in given_tasks:
        assert 0 < count <= by_id[number].num_open
        assert suits(by_id[number], requester)
    begun = [g for g, _ in given_tasks if by_id[g].require_version is None and by_id[g].first_step is None]
    assert requester.num_begin is None or len(begun) <= requester.num_begin
    slots = requester.num_held + requester.capacity
    for level in (1, 2, 3):
        num_suspects = sum(count for g, count in given_tasks if by_id[g].num_losses >= level)
        assert num_suspects <= allowance(slots, level)


@given(open_groups, requesters)
def test_a_lonely_worker_that_gets_less_than_it_asked_for_left_nothing_that_it_may_have(groups, requester):
    requester = replace(requester, num_begin=None, total_slots=None)
    given_tasks = dict(assign(groups, requester))
    if sum(given_tasks.values()) < requester.capacity:
        for g in groups:
            if suits(g, requester) and not g.num_losses:
                assert given_tasks.get(g.group) == g.num_open


def suits(group: OpenGroup, requester: Requester) -> bool:
    if group.require_version is not None:
        return group.require_version == requester.have_version
    return requester.step is not None and (group.first_step is None or group.first_step <= requester.step)


@given(
    num_slots=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    num_tasks=st.integers(1, 400),
    group_size=st.integers(1, 16),
    max_attempts=st.integers(1, 3),
    rng=st.integers(0, 2**32).map(random.Random),
)
def test_a_poison_task_is_soon_convicted_and_no_neighbour_is_blamed(
    num_slots, num_tasks, group_size, max_attempts, rng
):
    """Workers take tasks until one dies of the poison, which is known to nobody; the others may end some meanwhile."""
    poison = rng.randrange(num_tasks)
    open_tasks, losses, failures = set(range(num_tasks)), dict.fromkeys(range(num_tasks), 0), 0
    held: dict[int, set[int]] = {worker: set() for worker in range(len(num_slots))}
    num_deaths = 0
    for _ in range(100_000):
        if failures >= max_attempts:
            break
        worker = rng.randrange(len(num_slots))
        take(worker, held, num_slots[worker], open_tasks, losses, group_size)
        if poison in held[worker] and rng.random() < 0.5:
            blamed = culprit({task: losses[task] for task in held[worker]})
            assert blamed in (poison, None), "a neighbour was blamed"
            num_deaths += 1
            failures += blamed == poison
            for task in held[worker]:
                losses[task] += 1
            open_tasks |= held[worker]
            held[worker] = set()
        else:
            ended = {task for task in held[worker] if task != poison and rng.random() < 0.3}
            held[worker] -= ended
    assert failures == max_attempts
    assert num_deaths <= math.ceil(math.log(max(num_slots), 8)) + max_attempts


def take(worker, held, num_slots, open_tasks, losses, group_size):
    """As the ledger does it: groups by the most suspect of their open tasks, tasks by their place in the group."""
    groups: dict[int, list[int]] = {}
    for task in sorted(open_tasks):
        groups.setdefault(task // group_size, []).append(task)
    waiting = [
        OpenGroup(number, number, False, group_size, len(tasks), None, max(losses[task] for task in tasks))
        for number, tasks in groups.items()
    ]
    suspects: dict[int, int] = {}
    for task in held[worker]:
        if losses[task]:
            suspects[losses[task]] = suspects.get(losses[task], 0) + 1
    requester = Requester(num_slots - len(held[worker]), 0, step=0, num_held=len(held[worker]), suspects=suspects)
    for number, count in assign(waiting, requester):
        held[worker] |= set(groups[number][:count])
        open_tasks -= set(groups[number][:count])


GROUPS = st.lists(
    st.builds(
        OpenGroup,
        group=st.integers(1, 99),
        ordinal=st.integers(0, 9),
        is_eval=st.booleans(),
        size=st.just(4),
        num_open=st.integers(1, 4),
        require_version=st.sampled_from([None, None, 7, 8]),
        num_losses=st.sampled_from([0, 0, 0, 1, 2]),
        first_step=st.sampled_from([None, 0, 1]),
        is_away=st.booleans(),
    ).map(lambda group: group._replace(is_away=group.is_away and not group.is_eval)),
    max_size=12,
    unique_by=lambda group: group.group,
)


@given(GROUPS, st.integers(1, 20), st.sampled_from([None, 5, 40]), st.integers(0, 1), st.integers(0, 4))
def test_groups_behind_those_that_fill_a_share_and_pacing_before_any_is_begun_change_nothing(
    groups, capacity, total_slots, step, num_begin
):
    groups.sort(key=lambda group: group.order)
    num_open = sum(group.num_open for group in groups)
    requester = Requester(capacity, 7, step=step, num_begin=num_begin, total_slots=total_slots, num_open=num_open)
    given_of_all = assign(groups, requester)
    for count in range(len(groups) + 1):
        first_ones = groups[:count]
        if count < len(groups) and not any(group.begins for group in first_ones):
            first_ones = [group for group in first_ones if not group.is_away]  # others may come before these
        given_of_them = assign(first_ones, requester)
        if sum(num for _, num in given_of_them) == requester.share(num_open):
            assert given_of_them == given_of_all
        if not any(group.begins for group in first_ones):
            assert assign(first_ones, replace(requester, num_begin=None)) == given_of_them
