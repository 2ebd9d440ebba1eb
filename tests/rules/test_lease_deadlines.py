"""A lease ends once, and only its holder under its own fence can renew it."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offbeat.rules.leases import Lease, Leases

TTL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def leases() -> tuple[Leases, Clock]:
    clock = Clock()
    return Leases(TTL_S, clock), clock


def test_a_lease_ends_when_its_time_is_over_and_not_before():
    held, (granted, clock) = Lease(1, 1, "a"), leases()
    granted.grant([held])
    clock.now_s += 9.9
    assert granted.is_held(held)
    assert granted.expired() == []
    clock.now_s += 0.1
    assert granted.expired() == [held]
    assert not granted.is_held(held)
    assert granted.expired() == []
    assert len(granted) == 0


def test_renewing_gives_the_whole_time_again():
    held, (granted, clock) = Lease(1, 1, "a"), leases()
    granted.grant([held])
    clock.now_s += 6
    assert granted.renew([held]) == []
    clock.now_s += 6
    assert granted.expired() == []
    assert granted.next_deadline_s() == 116.0


def test_a_renewal_by_another_or_under_an_old_fence_is_told_that_it_is_lost():
    granted, _ = leases()
    granted.grant([Lease(1, 1, "a")])
    granted.grant([Lease(1, 2, "b")])
    strangers = [Lease(1, 1, "a"), Lease(1, 2, "a"), Lease(7, 1, "a")]
    assert granted.renew([*strangers, Lease(1, 2, "b")]) == strangers


def test_a_late_renewal_saves_a_lease_that_nobody_has_taken_out_yet_and_none_after_that():
    held, (granted, clock) = Lease(1, 1, "a"), leases()
    granted.grant([held])
    clock.now_s += 2 * TTL_S
    assert granted.renew([held]) == []
    assert granted.expired() == []
    clock.now_s += TTL_S
    assert granted.expired() == [held]
    assert granted.renew([held]) == [held]


def test_a_grant_under_an_older_fence_leaves_the_newer_lease_alone():
    older, newer, (granted, clock) = Lease(1, 1, "a"), Lease(1, 2, "b"), leases()
    granted.grant([newer])
    clock.now_s += 6
    granted.grant([older])
    assert granted.is_held(newer)
    clock.now_s += 4
    assert granted.expired() == [newer]


def test_all_leases_have_their_whole_time_again_where_nobody_could_be_heard():
    held, (granted, clock) = [Lease(1, 1, "a"), Lease(2, 1, "b")], leases()
    granted.grant(held)
    clock.now_s += 3 * TTL_S
    granted.renew_all()
    assert granted.expired() == []
    clock.now_s += TTL_S
    assert sorted(granted.expired()) == held


def test_the_leases_of_a_worker_that_has_vanished_expire_together():
    granted, clock = leases()
    first, second, other = Lease(1, 1, "a"), Lease(2, 1, "a"), Lease(3, 1, "b")
    granted.grant([first, other])
    clock.now_s += 4
    granted.grant([second])
    clock.now_s += 6
    assert granted.expired() == [other], "the first was due, too, but its worker was heard of since"
    assert granted.next_deadline_s() == 114.0
    clock.now_s += 4
    assert sorted(granted.expired()) == [first, second]


def test_a_lease_that_its_worker_does_not_name_any_more_expires_alone():
    granted, clock = leases()
    named, forgotten = Lease(1, 1, "a"), Lease(2, 1, "a")
    granted.grant([named, forgotten])
    expired = []
    for _ in range(8):
        clock.now_s += 3
        granted.renew([named])
        expired += granted.expired()
    assert expired == [forgotten]
    assert granted.is_held(named)


def test_leases_granted_in_one_call_expire_in_one_call():
    ticks = itertools.count(100.0, 0.001)
    granted = Leases(TTL_S, lambda: next(ticks))
    granted.grant([Lease(1, 1, "a"), Lease(2, 1, "a")])
    granted.renew([Lease(2, 1, "a"), Lease(1, 1, "a")])
    deadline_s = granted.next_deadline_s()
    granted._clock = lambda: deadline_s
    assert len(granted.expired()) == 2


def test_a_lease_granted_twice_expires_once():
    held, (granted, clock) = Lease(1, 1, "a"), leases()
    granted.grant([held, held])
    clock.now_s += TTL_S
    assert granted.expired() == [held]


def test_renewals_leave_nothing_behind():
    granted, clock = leases()
    held = [Lease(task, 1, "a") for task in range(10)]
    granted.grant(held)
    for _ in range(1000):
        clock.now_s += 1
        assert granted.renew(held) == []
    assert len(granted._queue) < 200


class AgainstAPlainTable(RuleBasedStateMachine):
    """The same calls on a table that is searched from end to end: lease, deadline, and when to look at it next."""

    def __init__(self) -> None:
        super().__init__()
        self.granted, self.clock = leases()
        self.table: dict[int, tuple[Lease, float, float]] = {}
        self.fence = 0

    tasks = st.integers(0, 4)
    workers = st.sampled_from("ab")

    def set(self, held):
        self.table[held.task] = (held, self.clock.now_s + TTL_S, self.clock.now_s + TTL_S)

    @rule(task=tasks, worker=workers)
    def grant(self, task, worker):
        self.fence += 1
        held = Lease(task, self.fence, worker)
        self.granted.grant([held])
        self.set(held)

    @rule(task=tasks, worker=workers, behind=st.integers(0, 1))
    def renew(self, task, worker, behind):
        known = self.table.get(task)
        held = Lease(task, (known[0].fence if known else 0) - behind, worker)
        is_held = known is not None and known[0] == held
        assert self.granted.renew([held]) == ([] if is_held else [held])
        if is_held:
            self.set(held)

    @rule()
    def renew_all(self):
        self.granted.renew_all()
        for held, _, _ in list(self.table.values()):
            self.set(held)

    @rule(task=tasks, worker=workers)
    def grant_under_an_older_fence(self, task, worker):
        if task in self.table:
            self.granted.grant([Lease(task, self.table[task][0].fence - 1, worker)])

    @rule(task=tasks)
    def end(self, task):
        self.granted.end([task])
        self.table.pop(task, None)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0]))
    def wait(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def expire(self):
        over = []
        last_s = {name: max((d for h, d, _ in self.table.values() if h.worker == name), default=0) for name in "ab"}
        for held, deadline_s, due_s in self.table.values():
            if due_s <= self.clock.now_s:
                due_s = min(last_s[held.worker], deadline_s + TTL_S)
                self.table[held.task] = (held, deadline_s, due_s)
                over += [held] if due_s <= self.clock.now_s else []
        assert sorted(self.granted.expired()) == sorted(over)
        for held in over:
            del self.table[held.task]

    @invariant()
    def both_agree(self):
        assert len(self.granted) == len(self.table)
        assert self.granted.next_deadline_s() == min((due_s for _, _, due_s in self.table.values()), default=None)


TestLeasesAgainstAPlainTable = AgainstAPlainTable.TestCase
