from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ledger_run import STOP, answer, claim, full_step, handed, new_groups, score_all, send, version, work

from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome
from offbeat.trajectory import End, Origin, Segment, Trajectory


@pytest.fixture
def task(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    return ledger.lease("w", 1, 0)[0]


def test_the_same_trajectory_again_changes_nothing(ledger: Ledger, task):
    trajectory = answer(task, [0])
    assert ledger.submit([handed(trajectory)]) == [Outcome.STORED]
    before = ledger.counts()
    assert ledger.submit([handed(trajectory)]) == [Outcome.REPEATED]
    assert ledger.counts() == before


def test_the_same_trajectory_twice_in_one_call_is_stored_once(ledger: Ledger, task):
    trajectory = answer(task, [0])
    assert ledger.submit([handed(trajectory), handed(trajectory)]) == [Outcome.STORED, Outcome.REPEATED]
    assert ledger.counts().trajectories.accepted == 1


def test_another_trajectory_for_an_answered_task_is_a_conflict(ledger: Ledger, task):
    ledger.submit([handed(answer(task, [0]))])
    with pytest.raises(Conflict, match=f"a different trajectory is already stored for lease . of task {task.id}"):
        send(ledger, answer(task, [0], salt="other"), "w")


def test_one_bad_trajectory_is_refused_alone(ledger: Ledger, task):
    (other,) = ledger.lease("w", 1, 0)
    bad = answer(replace(other, prompt=np.array([9])), [0])
    refused, stored = ledger.submit([handed(bad), handed(answer(task, [0]))])
    assert isinstance(refused, Refused)
    assert "its prompt differs from the prompt of its task" in str(refused)
    assert stored is Outcome.STORED
    (waiting,) = ledger.unscored(9)
    assert waiting.task == task.id
    assert ledger.submit([handed(answer(other, [0]))]) == [Outcome.STORED], "its task is as it was"


def test_a_task_that_was_never_issued_is_unknown(ledger: Ledger, task):
    with pytest.raises(Unknown, match="task 99 does not exist"):
        send(ledger, answer(replace(task, id=99), [0]), "w")


def test_a_trajectory_of_another_length_limit_is_refused(ledger: Ledger, task):
    longer = replace(task, sampling=replace_length(task.sampling, 9))
    with pytest.raises(Refused, match="max_new_tokens is 9, but the task has 8"):
        send(ledger, answer(longer, [0]), "w")


def test_a_trajectory_without_a_token_is_refused(ledger: Ledger, task):
    empty = Trajectory(task.id, task.prompt, 8, end=End.STOP)
    with pytest.raises(Refused, match="no sampled token"):
        send(ledger, empty, "w")


@pytest.mark.parametrize("start", [0, 2])
def test_given_tokens_in_a_task_that_has_none_are_refused(ledger: Ledger, task, start: int):
    """Whoever puts words into the model's mouth would have them judged, and never be audited."""
    words = Trajectory(task.id, task.prompt, 8)
    for given_at in (0, 2):
        is_given = given_at == start
        origin = {"origin": Origin.GIVEN} if is_given else {"logprobs": -np.ones(2), "version": 0, "kv_version": 0}
        words.append(Segment(start=given_at, tokens=np.array([5, STOP]), **origin))
    words.finish(End.STOP)
    with pytest.raises(Refused, match=f"its tokens at position {start} are not sampled"):
        send(ledger, words, "w")


def test_a_stop_without_a_stop_token_at_the_end_is_refused(ledger: Ledger, task):
    with pytest.raises(Refused, match="ended by a stop token, but its last token, 7, is not one"):
        send(ledger, of_tokens(task, [STOP, 7], End.STOP), "w")
    assert send(ledger, of_tokens(task, [7, STOP], End.STOP), "w") is Outcome.STORED


def test_an_end_by_length_before_the_limit_is_refused(ledger: Ledger, task):
    with pytest.raises(Refused, match="ended by length, but has 7 of 8 tokens"):
        send(ledger, of_tokens(task, [5] * 7, End.LENGTH), "w")
    assert send(ledger, of_tokens(task, [5] * 8, End.LENGTH), "w") is Outcome.STORED


def test_a_partial_may_end_anywhere(ledger: Ledger, task):
    assert send(ledger, of_tokens(task, [7], None), "w") is Outcome.PARTIAL


def test_keys_and_values_of_older_weights_are_refused_beyond_the_lag_that_a_run_allows(tmp_path: Path):
    """Their tokens cannot be audited: where nobody keeps them, they would be a way around it."""
    for lag, outcome in ((0, None), (1, Outcome.STORED)):
        with Ledger(tmp_path / f"{lag}.sqlite", LedgerTerms(max_staleness=1, max_kv_lag=lag)) as ledger:
            ledger.publish(version(0, 0))
            full_step(ledger, 0)
            ledger.admit(new_groups(ledger, 1, require_version=None))
            task = ledger.lease("w", 1, 1)[0]
            (found,) = ledger.submit([handed(of_tokens(task, [STOP], End.STOP, number=1, kv_version=0))])
            assert found == outcome or "KV cache is 1 versions older than its weights; the limit is 0" in str(found)


def of_tokens(task, tokens: list[int], end: End | None, number: int = 0, kv_version: int | None = None) -> Trajectory:
    trajectory = task.new_trajectory()
    kv_version = number if kv_version is None else kv_version
    trajectory.append(
        Segment(0, np.array(tokens), logprobs=-np.ones(len(tokens)), version=number, kv_version=kv_version), end
    )
    return trajectory


def test_a_version_that_was_never_published_is_refused(ledger: Ledger, task):
    with pytest.raises(Refused, match="version 3, which was never published"):
        send(ledger, answer(task, [3]), "w")


def test_a_version_of_another_step_than_required_is_refused(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 1, require_version=1))
    (task,) = ledger.lease("w", 1, 1)
    with pytest.raises(Refused, match="version 0 of step 0, but the task requires step 1"):
        send(ledger, answer(task, [0]), "w")


def test_an_abandoned_version_is_refused(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, require_version=None))
    work(ledger, 0)
    score_all(ledger)
    claim(ledger, 0, 1, 0)
    ledger.commit(0, version(1, 1, 0))
    ledger.admit(new_groups(ledger, 1, require_version=None))
    (task,) = ledger.lease("w", 1, 1)
    ledger.reconcile(0, 0)
    with pytest.raises(Refused, match="version 1, which a resume has abandoned"):
        send(ledger, answer(task, [1]), "w")


def test_a_lease_belongs_to_one_worker_under_one_fence(ledger: Ledger, task):
    with pytest.raises(Forbidden, match="leased by w, not by thief"):
        send(ledger, answer(task, [0]), "thief")
    with pytest.raises(Forbidden, match=r"lease 2 of task . was never granted; the latest is lease 1"):
        send(ledger, answer(task, [0]), fence=2)
    assert send(ledger, answer(task, [0])) is Outcome.STORED


def test_what_was_stored_belongs_to_the_worker_that_handed_it_in(ledger: Ledger, task):
    trajectory = answer(task, [0])
    send(ledger, trajectory)
    with pytest.raises(Forbidden, match="lease 1 of task 1 belongs to w, not to thief"):
        send(ledger, trajectory, "thief")
    assert send(ledger, trajectory) is Outcome.REPEATED


def test_a_late_answer_is_welcome_while_nobody_else_has_begun(ledger: Ledger, task):
    ledger.release()
    with pytest.raises(Forbidden, match="leased by w, not by thief"):
        send(ledger, answer(task, [0]), "thief")
    assert send(ledger, answer(task, [0])) is Outcome.STORED
    assert task.id not in {other.id for other in ledger.lease("w", 9, 0)}


def test_a_fence_that_is_over_is_told_so(ledger: Ledger, task):
    ledger.release()
    again = ledger.lease("other", 1, 0)[0]
    assert (again.id, again.fence) == (task.id, 2)
    with pytest.raises(Fenced, match=r"lease 1 of task . is over: the task was leased again .lease 2."):
        send(ledger, answer(task, [0]))
    assert send(ledger, answer(again, [0]), "other", 2) is Outcome.STORED
    with pytest.raises(Fenced, match="lease 1 of task 1 is over"):
        send(ledger, answer(task, [0]))


def test_the_same_task_twice_in_one_call_is_judged_like_one_call_after_the_other(ledger: Ledger, task):
    first, other = answer(task, [0]), answer(task, [0], salt="other")
    stored, conflict, forbidden, repeated = ledger.submit(
        [handed(first), handed(other), handed(first, "thief"), handed(first)]
    )
    assert (stored, repeated) == (Outcome.STORED, Outcome.REPEATED)
    assert isinstance(conflict, Conflict)
    assert isinstance(forbidden, Forbidden)
    assert ledger.counts().trajectories.accepted == 1


def test_a_trajectory_that_nobody_could_train_any_more_is_refused(tmp_path):
    with Ledger(tmp_path / "old.sqlite", LedgerTerms(max_staleness=1)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 1, require_version=None))
        slow, mixed = ledger.lease("w", 2, 0)
        for step in range(2):
            latest = ledger.latest_version()
            ledger.admit(new_groups(ledger, 1, require_version=latest.number))
            ledger.submit(
                [handed(answer(t, [latest.number]), "v", t.fence) for t in ledger.lease("v", 9, latest.number)]
            )
            score_all(ledger)
            assert claim(ledger, step, 1, 9, in_order=False) is not None
            ledger.commit(step, version(step + 1, step + 1, step))
        with pytest.raises(Refused, match="of step 0, but the run is at step 2: too old for max_staleness = 1"):
            send(ledger, answer(slow, [0]))
        assert send(ledger, answer(mixed, [0, 1])) is Outcome.STORED, "one token may still be trained"
        assert ledger.verify().violations == ()


def test_a_trajectory_comes_back_from_the_file_as_it_was_handed_in(ledger: Ledger, tmp_path):
    ledger.admit(new_groups(ledger, 1, size=2))
    sent = {task.id: answer(task, [0]) for task in ledger.lease("w", 2, 0)}
    ledger.submit([handed(trajectory) for trajectory in sent.values()])
    score_all(ledger)
    kept = claim(ledger, 0, 1, 0)
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as fresh:
        loaded = claim(fresh, 0, 1, 0)
    assert kept is not None
    assert loaded is not None
    for members in zip(kept.groups[0].members, loaded.groups[0].members, strict=True):
        for member in members:
            assert member.trajectory == sent[member.task]
            assert member.mask.all()


def test_memory_that_is_used_again_after_submission_changes_nothing(ledger: Ledger, task):
    (other,) = ledger.lease("w", 1, 0)
    trajectory = answer(task, [0])
    tokens, logprobs = trajectory.tokens.tolist(), trajectory.logprobs.tolist()
    ledger.submit([handed(trajectory), handed(answer(other, [0]))])
    for array in (trajectory.segments[0].tokens, trajectory.segments[0].logprobs):
        assert array is not None
        array[:] = 0
    assert ledger.unscored(1)[0].response_tokens.tolist() == tokens
    score_all(ledger)
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    member = batch.groups[0].members[0]
    assert (member.trajectory.tokens.tolist(), member.trajectory.logprobs.tolist()) == (tokens, logprobs)


def replace_length(sampling, max_new_tokens: int):
    return msgspec.structs.replace(sampling, max_new_tokens=max_new_tokens)


def test_a_worker_cannot_allow_itself_to_go_back_in_versions(ledger: Ledger, task):
    trajectory = answer(task, [0])
    trajectory.max_version_drop = 1
    with pytest.raises(Refused, match="max_version_drop is 1; it must be 0"):
        send(ledger, trajectory, "w")
