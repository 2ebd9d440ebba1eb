"""A server generates only while it serves what we loaded, and a dead one returns only after a verified refresh."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.rules.engine_health import MOVES, Health, State

HEALTHY, SUSPECT, DEAD, STALE = State
DEAD_AFTER_S = 10.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def server(state: State = STALE) -> tuple[Health, Clock]:
    """A server in this state; whatever was loaded into it is called 7."""
    clock = Clock()
    health = Health(clock, DEAD_AFTER_S)
    if state is not STALE:
        health.refreshed("7")
    if state is SUSPECT:
        health.failed("no answer")
    if state is DEAD:
        health.gone("exited")
    assert health.state is state
    return health, clock


def test_a_server_begins_stale_because_nothing_that_we_loaded_is_served_yet():
    health, _ = server()
    assert not health.may_generate
    assert health.why == "nothing was loaded into it yet"


def test_only_a_healthy_server_may_generate_and_only_it_has_nothing_to_explain():
    for state in State:
        health, _ = server(state)
        assert health.may_generate is (state is HEALTHY)
        assert (health.why == "") is (state is HEALTHY)


def test_every_call_returns_the_state_that_it_leads_to():
    health, _ = server()
    calls = [lambda: health.refreshed("7"), lambda: health.failed("x"), lambda: health.gone("x")]
    for call in [*calls, lambda: health.answered("7")]:
        assert call() is health.state


def test_one_call_without_an_answer_makes_a_healthy_server_suspect_and_says_what_was_seen():
    health, _ = server(HEALTHY)
    assert health.failed("no answer\n within  5 s") is SUSPECT
    assert health.why == "no answer within 5 s"


def test_a_suspect_that_answers_with_what_was_loaded_is_healthy_again():
    health, _ = server(SUSPECT)
    assert health.answered("7") is HEALTHY
    assert health.why == ""


@pytest.mark.parametrize("state", [HEALTHY, SUSPECT])
def test_whoever_answers_with_another_label_is_stale_and_both_labels_are_named(state):
    health, _ = server(state)
    assert health.answered("default") is STALE
    assert health.why == "it serves weights labelled 'default', but the worker loaded weights labelled '7'"


def test_a_suspect_is_dead_once_it_has_failed_for_so_long_and_not_before():
    health, clock = server(SUSPECT)
    clock.now_s += DEAD_AFTER_S - 0.1
    assert health.failed("no answer") is SUSPECT
    clock.now_s += 0.1
    assert health.failed("still none") is DEAD
    assert health.why == "still none"


def test_time_alone_kills_nobody():
    health, clock = server(SUSPECT)
    clock.now_s += 100 * DEAD_AFTER_S
    assert health.state is SUSPECT
    assert health.answered("7") is HEALTHY


@pytest.mark.parametrize("recover", [lambda health: health.answered("7"), lambda health: health.refreshed("7")])
def test_failures_before_an_answer_do_not_count(recover):
    health, clock = server(SUSPECT)
    clock.now_s += DEAD_AFTER_S - 0.1
    recover(health)
    clock.now_s += 1
    assert health.failed("no answer") is SUSPECT
    clock.now_s += DEAD_AFTER_S - 0.1
    assert health.failed("no answer") is SUSPECT


@pytest.mark.parametrize("state", State)
def test_whoever_is_known_to_be_gone_is_dead_at_once(state):
    health, _ = server(state)
    assert health.gone("its process ended with status -9") is DEAD
    assert health.why == "its process ended with status -9"


@pytest.mark.parametrize("label", ["7", "default"])
def test_a_dead_server_that_answers_is_stale_whatever_it_calls_its_weights(label):
    health, _ = server(DEAD)
    assert health.answered(label) is STALE
    assert health.why == "it was dead and is back, with weights of unknown age"


def test_a_stale_server_stays_stale_however_it_answers():
    health, _ = server(HEALTHY)
    health.answered("default")
    why = health.why
    for label in ("7", "default", "7", "8"):
        assert health.answered(label) is STALE
        assert health.why == why


def test_a_stale_server_that_fails_and_answers_with_the_label_of_the_last_refresh_is_no_healthier():
    health, _ = server(HEALTHY)
    health.answered("default")
    assert health.failed("no answer") is STALE
    assert health.why == "no answer"
    assert health.answered("7") is STALE
    assert "'default'" in health.why, "what makes it stale is told again"


def test_a_stale_server_that_keeps_failing_is_dead():
    health, clock = server(STALE)
    health.failed("no answer")
    clock.now_s += DEAD_AFTER_S
    assert health.failed("no answer") is DEAD


def test_a_server_that_came_back_has_its_whole_time_to_fail_again():
    health, clock = server(SUSPECT)
    clock.now_s += DEAD_AFTER_S
    health.failed("no answer")
    health.answered("7")
    clock.now_s += DEAD_AFTER_S
    assert health.failed("no answer") is STALE


@pytest.mark.parametrize("state", [STALE, HEALTHY, SUSPECT])
def test_a_refresh_makes_healthy_and_its_label_is_the_one_that_counts_from_then_on(state):
    health, _ = server(state)
    assert health.refreshed("8") is HEALTHY
    assert health.answered("8") is HEALTHY
    assert health.answered("7") is STALE


def test_a_dead_server_that_has_not_answered_cannot_have_been_refreshed():
    health, _ = server(DEAD)
    with pytest.raises(ValueError, match=r"'8'.*dead"):
        health.refreshed("8")
    assert health.state is DEAD
    assert health.why == "exited"
    assert health.answered("8") is STALE, "nor is it remembered as loaded"
    assert health.refreshed("8") is HEALTHY


def test_with_no_patience_the_first_failure_is_a_death():
    health = Health(Clock(), dead_after_s=0.0)
    health.refreshed("7")
    assert health.failed("no answer") is DEAD


def test_a_dead_server_becomes_nothing_but_stale_and_a_stale_one_never_suspect():
    assert MOVES[DEAD] == {STALE}
    assert SUSPECT not in MOVES[STALE]


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, in any order: what is promised is read off the history of events, not off the states."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.health = Health(self.clock, DEAD_AFTER_S)
        self.last = STALE
        self.trusted: str | None = None
        """The label of a refresh since which the server neither died nor showed another one."""
        self.silent_since_s: float | None = None

    labels = st.sampled_from(["7", "8", "default"])

    def is_silent_for_long(self) -> bool:
        return self.silent_since_s is not None and self.clock.now_s - self.silent_since_s >= DEAD_AFTER_S

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 9.5, 10.0]))
    def wait(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def fail(self):
        was = self.health.state
        if self.silent_since_s is None:
            self.silent_since_s = self.clock.now_s
        state = self.health.failed("no answer")
        if self.is_silent_for_long():
            self.trusted = None
            assert state is DEAD
        else:
            assert state is (SUSPECT if self.trusted is not None else was)
        assert not self.health.may_generate

    @rule()
    def vanish(self):
        self.trusted = None
        assert self.health.gone("exited") is DEAD

    @rule(label=labels)
    def answer(self, label):
        self.silent_since_s = None
        if label != self.trusted:
            self.trusted = None
        assert self.health.answered(label) is (STALE if self.trusted is None else HEALTHY)

    @precondition(lambda self: self.health.state is not DEAD)
    @rule(label=labels)
    def refresh(self, label):
        self.silent_since_s, self.trusted = None, label
        assert self.health.refreshed(label) is HEALTHY

    @precondition(lambda self: self.health.state is DEAD)
    @rule(label=labels)
    def claim_a_refresh_of_the_dead(self, label):
        why = self.health.why
        with pytest.raises(ValueError, match="dead"):
            self.health.refreshed(label)
        assert (self.health.state, self.health.why) == (DEAD, why)

    @invariant()
    def a_dead_server_returns_only_after_a_verified_refresh(self):
        if self.trusted is None:
            assert not self.health.may_generate
            assert self.health.state in (DEAD, STALE)

    @invariant()
    def whoever_is_silent_may_not_generate(self):
        assert self.silent_since_s is None or not self.health.may_generate

    @invariant()
    def only_the_listed_moves_are_made(self):
        state = self.health.state
        assert state is self.last or state in MOVES[self.last]
        self.last = state

    @invariant()
    def there_is_a_reason_unless_it_is_healthy(self):
        assert (self.health.why == "") is (self.health.state is HEALTHY)


TestAnyHistory = AnyHistory.TestCase
