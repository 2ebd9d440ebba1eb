"""The books of samples on their way to a reward, in any order of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.coordinator.reward_queue import PendingRewards
from offbeat.ledger.errors import Fenced, Forbidden, Unknown
from offbeat.ledger.records import Purpose, Unscored
from offbeat.trajectory import End

SAMPLE_S, SLACK_S = 2.0, 10.0
REWARDS = ("exact", "number", "judge.py:slow")
JUDGES = ("a", "b", "c")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sample(number: int, reward: str = "exact") -> Unscored:
    return Unscored(number, 0, Purpose.TRAIN, {}, reward, np.array([1, 2, 3]), End.STOP, number)


def portions(max_samples: int = 100, clock: Clock | None = None) -> PendingRewards:
    return PendingRewards(max_samples, SAMPLE_S, SLACK_S, clock or Clock())


def ids(portion) -> list[int]:
    return [found.task for found in portion.samples]


def test_a_portion_has_one_reward_and_no_more_than_the_judge_can_take():
    books = portions()
    books.add([sample(1), sample(2, "number"), sample(3), sample(4), sample(5)])
    first = books.lease("a", 2, REWARDS)
    second = books.lease("a", 9, REWARDS)
    assert (first.reward, ids(first)) == ("exact", [1, 3])
    assert (second.reward, ids(second)) == ("number", [2])  # fewer of these are out
    assert ids(books.lease("b", 9, ["exact"])) == [4, 5]
    assert books.lease("b", 9, REWARDS) is None


def test_what_is_overdue_goes_back_to_the_front_and_its_ticket_is_over():
    clock = Clock()
    books = portions(clock=clock)
    books.add([sample(n) for n in range(1, 7)])
    first, second = books.lease("a", 2, REWARDS), books.lease("b", 2, REWARDS)
    clock.now_s = 2 * SAMPLE_S + SLACK_S - 0.1
    assert books.expire() == 0
    assert books.next_deadline_s() == 2 * SAMPLE_S + SLACK_S
    clock.now_s += 0.2
    assert books.expire() == 4
    assert ids(books.lease("c", 9, REWARDS)) == [1, 2, 3, 4, 5, 6]
    for judge, portion in (("a", first), ("b", second)):
        with pytest.raises(Fenced, match="no longer valid"):
            books.answer(judge, portion.ticket)


def test_a_judge_has_time_for_all_that_it_holds():
    clock = Clock()
    books = portions(clock=clock)
    books.add([sample(n) for n in range(6)])
    assert books.lease("a", 2, REWARDS).deadline_s == 2 * SAMPLE_S + SLACK_S
    assert books.lease("a", 4, REWARDS).deadline_s == 6 * SAMPLE_S + SLACK_S


def test_a_ticket_is_good_once_and_for_its_own_judge_alone():
    books = portions()
    books.add([sample(1)])
    ticket = books.lease("a", 1, REWARDS).ticket
    with pytest.raises(Forbidden):
        books.answer("b", ticket)
    assert ids(books.answer("a", ticket)) == [1]
    with pytest.raises(Fenced):
        books.answer("a", ticket)


def test_a_ticket_of_an_earlier_coordinator_is_nobodys():
    before, after = portions(), portions()
    for books in (before, after):
        books.add([sample(1)])
    old = before.lease("a", 1, REWARDS).ticket
    after.lease("a", 1, REWARDS)
    forged = [old, "", "-", old.partition("-")[0], f"{after._name}-2", f"{after._name}-0", f"{after._name}-" + "9" * 50]
    for ticket in forged:
        with pytest.raises(Unknown):
            after.answer("a", ticket)
    assert after.held == {"a": 1}


class AnyOrder(RuleBasedStateMachine):
    """Whatever the order, a sample waits, is out once, or was answered once."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.books = portions(max_samples=12, clock=self.clock)
        self.num_added = 0
        self.answered: list[int] = []
        self.open: dict[str, tuple[str, list[int]]] = {}
        """By ticket: judge and samples."""
        self.deadlines: dict[str, float] = {}
        self.over: list[tuple[str, str]] = []
        self.returned: list[int] = []
        """Taken back and not leased again since."""

    @rule(count=st.integers(1, 5), reward=st.sampled_from(REWARDS))
    def add(self, count, reward):
        count = min(count, self.books.room)
        self.books.add([sample(self.num_added + n, reward) for n in range(count)])
        self.num_added += count

    @rule(judge=st.sampled_from(JUDGES), capacity=st.integers(1, 4), rewards=st.sets(st.sampled_from(REWARDS)))
    def lease(self, judge, capacity, rewards):
        waits = bool(set(self.books.rewards) & rewards)
        portion = self.books.lease(judge, capacity, rewards)
        assert (portion is not None) == waits
        if portion is not None:
            assert portion.reward in rewards
            assert 1 <= len(portion.samples) <= capacity
            assert {found.reward for found in portion.samples} == {portion.reward}
            assert not set(ids(portion)) & set(self.answered)
            same = [found.task for found in self.books._waiting[portion.reward]]
            assert not set(self.returned) & set(same) or set(ids(portion)) <= set(self.returned)  # those come first
            self.returned = [task for task in self.returned if task not in ids(portion)]
            self.open[portion.ticket] = judge, ids(portion)
            self.deadlines[portion.ticket] = portion.deadline_s

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        judge, tasks = self.open.pop(ticket)
        assert ids(self.books.answer(judge, ticket)) == tasks
        self.answered += tasks
        self.over.append((judge, ticket))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer_for_another(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        with pytest.raises(Forbidden):
            self.books.answer("stranger", ticket)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def answer_again_or_late(self, data):
        with pytest.raises(Fenced):
            self.books.answer(*data.draw(st.sampled_from(self.over)))

    @rule(judge=st.sampled_from(JUDGES))
    def leave(self, judge):
        gone = [ticket for ticket, (holder, _) in self.open.items() if holder == judge]
        assert self.books.leave(judge) == self.take_back(gone)

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds):
        self.clock.now_s += seconds
        late = [ticket for ticket in self.open if self.deadlines[ticket] <= self.clock.now_s]
        assert self.books.expire() == self.take_back(late)
        next_s = self.books.next_deadline_s()
        assert next_s == min((self.deadlines[ticket] for ticket in self.open), default=None)

    def take_back(self, tickets) -> int:
        taken = [(*self.open.pop(ticket), ticket) for ticket in tickets]
        self.over += [(judge, ticket) for judge, _, ticket in taken]
        back = [task for _, tasks, _ in taken for task in tasks]
        self.returned += back
        return len(back)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        waiting = [found.task for queue in self.books._waiting.values() for found in queue]
        out = [task for _, tasks in self.open.values() for task in tasks]
        assert sorted(waiting + out + self.answered) == list(range(self.num_added))
        assert self.books.room == 12 - len(waiting) - len(out) >= 0
        assert sum(self.books.held.values()) == len(out)
        assert self.books.num_waiting == len(waiting)


TestAnyOrder = AnyOrder.TestCase


def test_judges_that_came_and_left_leave_nothing_behind():
    portions = PendingRewards(10, SAMPLE_S, SLACK_S, Clock())
    portions.add([sample(1)])
    for number in range(10_000):
        assert portions.lease(f"judge {number}", 1, REWARDS) is not None
        portions.leave(f"judge {number}")
    assert len(portions._by_judge) == 0
