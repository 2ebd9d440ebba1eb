"""Episodes in the ledger: given tokens, notes, ends, and environments that were lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ledger_run import STOP, new_groups, version

from offbeat.ledger.errors import LOST_ENVIRONMENT, Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome, Submission
from offbeat.trajectory import Claim, End, EpisodeRecord, EpisodeStart, Origin, Segment, Task, Trajectory

TERMS = LedgerTerms(min_group=2, max_attempts=2, episodes=frozenset({"games"}))


@pytest.fixture
def games(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", TERMS, wall_clock=lambda: 1e6) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 1, source="games", require_version=None))
        yield ledger
        assert ledger.verify().violations == ()


def sampled(start: int, *tokens: int) -> Segment:
    return Segment(start, np.array(tokens), logprobs=np.full(len(tokens), -1.0), version=0, kv_version=0)


def given(start: int, *tokens: int) -> Segment:
    return Segment(start, np.array(tokens), Origin.GIVEN)


def played(task: Task, *segments: Segment, end: End | None = None, **notes) -> Trajectory:
    trajectory = task.new_trajectory() if task.prefix is None else replace(task.prefix)
    for segment in segments:
        trajectory.append(segment)
    if end is not None:
        trajectory.finish(end)
    trajectory.episode = EpisodeRecord(**notes)
    return trajectory


def one_outcome(ledger: Ledger, trajectory: Trajectory, fence: int, worker: str = "w"):
    (outcome,) = ledger.submit([Submission(trajectory, worker, fence)])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_members_of_a_group_share_the_seed_of_their_environment(games):
    tasks = games.lease("w", 2, 0)
    starts = {(task.episode.source, task.episode.seed) for task in tasks}
    assert len({task.seed for task in tasks}) == len(tasks) == 2
    ((source, seed),) = starts
    assert source == "games"
    assert isinstance(tasks[0].episode, EpisodeStart)
    assert seed not in {task.seed for task in tasks}


def test_an_episode_is_stored_with_its_turns_its_waiting_and_its_claims(games):
    (task, _) = games.lease("w", 2, 0)
    episode = played(
        task,
        *(given(0, 5), sampled(1, 6, STOP), given(3, 7), sampled(4, STOP)),
        end=End.ENVIRONMENT,
        num_turns=2,
        wait_ms=12.5,
        claims=(Claim(0.5, "turn", 2), Claim(1.0)),
    )
    assert one_outcome(games, episode, task.fence) is Outcome.STORED
    row = games.execute(
        "SELECT ended_by, num_tokens, num_sampled_tokens, num_turns, wait_ms, claimed FROM trajectories"
    )
    assert row.fetchone() == ("environment", 5, 3, 2, 12.5, 1.5)
    (unscored,) = games.unscored(10)
    assert unscored.trajectory == episode
    assert unscored.num_sampled == 3


def test_a_changed_count_of_turns_is_found(games):
    (task, _) = games.lease("w", 2, 0)
    one_outcome(games, played(task, sampled(0, STOP), end=End.STOP, num_turns=1), task.fence)
    games.execute("UPDATE trajectories SET num_turns = 2")
    (found,) = games.verify().violations
    assert "differs from the tables in its turns" in found
    games.execute("UPDATE trajectories SET num_turns = 1")


def test_an_episode_may_not_end_as_if_it_had_finished_a_turn(games):
    (task, _) = games.lease("w", 2, 0)
    with pytest.raises(Refused, match="its last token does not end a turn"):
        one_outcome(games, played(task, sampled(0, 6), end=End.ENVIRONMENT), task.fence)


def test_an_answer_may_neither_hold_given_tokens_nor_end_as_an_episode(ledger):
    ledger.admit(new_groups(ledger, 1))
    (task, _) = ledger.lease("w", 2, 0)
    trajectory = replace(played(task, given(0, 5), sampled(1, STOP), end=End.STOP), episode=None)
    with pytest.raises(Refused, match="are not sampled"):
        one_outcome(ledger, trajectory, task.fence)
    trajectory = replace(played(task, sampled(0, STOP), end=End.ENVIRONMENT), episode=None)
    with pytest.raises(Refused, match="its task has no environment"):
        one_outcome(ledger, trajectory, task.fence)


def test_a_partial_that_ends_in_given_tokens_is_carried_on(games):
    (task, _) = games.lease("w", 2, 0)
    assert one_outcome(games, played(task, sampled(0, 6, STOP), given(2, 7)), task.fence) is Outcome.PARTIAL
    (again,) = games.lease("v", 1, 0)
    assert again.prefix is not None
    assert again.prefix.num_tokens == 3
    done = played(again, sampled(3, STOP), given(4, 7), sampled(5, STOP), end=End.STOP, num_turns=3)
    assert one_outcome(games, done, again.fence, "v") is Outcome.STORED
    segments = games.execute("SELECT start, worker FROM segments ORDER BY start").fetchall()
    assert segments == [(0, "w"), (2, "w"), (3, "v"), (4, "v"), (5, "v")]


def test_a_long_opening_belongs_to_the_worker_that_handed_it_in_first(games):
    (task, _) = games.lease("w", 2, 0)
    one_outcome(games, played(task, given(0, 5, 5, 5, 5), sampled(4, 6)), task.fence)
    (again,) = games.lease("v", 1, 0)
    one_outcome(games, played(again, sampled(5, STOP), end=End.STOP, num_turns=1), again.fence, "v")
    assert games.execute("SELECT worker FROM segments WHERE start = 0").fetchone() == ("w",)


def test_notes_come_with_the_end_only(games):
    (task, _) = games.lease("w", 2, 0)
    with pytest.raises(Refused, match="may not have notes yet"):
        one_outcome(games, played(task, sampled(0, 6, STOP), num_turns=1), task.fence)


def test_the_tokens_of_a_lost_environment_are_wasted_and_nobody_is_blamed(games):
    (task, _) = games.lease("w", 2, 0)
    one_outcome(games, played(task, sampled(0, 6, STOP)), task.fence)
    (again,) = games.lease("v", 1, 0)
    games.fail("v", again.id, again.fence, LOST_ENVIRONMENT, "gone", counts=False)
    assert games.counts().tokens.wasted == {LOST_ENVIRONMENT: 2}
    (anew,) = games.lease("v", 1, 0)
    assert (anew.id, anew.prefix) == (task.id, None)


def test_a_late_episode_that_continues_a_wasted_partial_is_counted_once(games):
    (task, _) = games.lease("w", 2, 0)
    one_outcome(games, played(task, sampled(0, 6, STOP)), task.fence)
    (again,) = games.lease("v", 1, 0)
    games.fail("v", again.id, again.fence, LOST_ENVIRONMENT, "gone", counts=False)
    whole = played(again, sampled(2, STOP), end=End.STOP, num_turns=2, claims=(Claim(1.0),))
    assert one_outcome(games, whole, again.fence, "v") is Outcome.STORED
    assert games.counts().tokens.generated == 3
