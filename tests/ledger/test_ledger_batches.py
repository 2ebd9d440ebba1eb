"""Batches are claimed by ordinal, within the bound, and committed once; other claims are in `test_ledger_claims.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ledger_run import STOP, answer, claim, data_of, full_step, handed, new_groups, score_all, version, work

from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import ComparedSegment, Scored
from offbeat.ledger.workers import Role, WorkerState, new_secret, secret_hash
from offbeat.rules.quarantine import MIN_PROVEN
from offbeat.trajectory import End, Reward, Segment, Task, Trajectory


def test_nothing_is_claimed_while_too_few_groups_are_ready(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2))
    assert claim(ledger, 0, 2, 0) is None
    work(ledger, 0)
    assert claim(ledger, 0, 2, 0) is None
    score_all(ledger)
    batch = claim(ledger, 0, 2, 0)
    assert batch is not None
    assert (batch.step, batch.from_version, len(batch.groups)) == (0, 0, 2)


def test_a_claim_goes_by_ordinal_however_the_answers_arrive(ledger: Ledger):
    ledger.admit(new_groups(ledger, 3))
    tasks = ledger.lease("w", 9, 0)
    for task in reversed(tasks[2:]):
        ledger.submit([handed(answer(task, [0]))])
    score_all(ledger)
    assert claim(ledger, 0, 2, 0) is None, "ordinals 1 and 2 are ready, but 0 is alive and comes first"
    for task in reversed(tasks[:2]):
        ledger.submit([handed(answer(task, [0]))])
    score_all(ledger)
    batch = claim(ledger, 0, 2, 0)
    assert batch is not None
    assert [(group.ordinal, [m.index for m in group.members]) for group in batch.groups] == [(0, [0, 1]), (1, [0, 1])]


def test_claiming_a_step_again_returns_the_same_batch(ledger: Ledger):
    ledger.admit(new_groups(ledger, 4))
    work(ledger, 0)
    score_all(ledger)
    first = claim(ledger, 0, 2, 0)
    again = claim(ledger, 0, 2, 0)
    assert first is not None
    assert again is not None
    assert data_of(first) == data_of(again)
    ledger.commit(0, version(1, 1, 0))
    late = claim(ledger, 0, 2, 0)
    assert late is not None
    assert data_of(late) == data_of(first)


def test_only_the_step_of_the_latest_version_can_be_claimed(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1))
    work(ledger, 0)
    score_all(ledger)
    with pytest.raises(Refused, match="step 1 cannot be claimed: the latest version is of step 0"):
        claim(ledger, 1, 1, 0)


def test_before_the_first_version_there_is_nothing_to_train_from(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite") as empty, pytest.raises(Refused, match="no version has been published yet"):
        claim(empty, 0, 1, 0)


def test_a_commit_is_idempotent_by_step(ledger: Ledger):
    full_step(ledger, 0)
    ledger.commit(0, version(1, 1, 0))
    assert ledger.counts().groups == {"trained": 2}
    assert ledger.latest_version() == version(1, 1, 0)
    assert ledger.next_version_number() == 2
    with pytest.raises(Conflict, match=r"step 0 was already committed as version 1, .* as version 2"):
        ledger.commit(0, version(2, 1, 0))
    with pytest.raises(Conflict, match="under a new number"):
        ledger.commit(0, version(1, 1, 0, digest="other weights"))


def test_a_commit_needs_a_claim_and_the_right_line_of_versions(ledger: Ledger):
    with pytest.raises(Unknown, match="step 0 cannot be committed: no batch was claimed"):
        ledger.commit(0, version(1, 1, 0))
    ledger.admit(new_groups(ledger, 1))
    work(ledger, 0)
    score_all(ledger)
    claim(ledger, 0, 1, 0)
    with pytest.raises(Refused, match="needs a version of step 1"):
        ledger.commit(0, version(1, 2, 0))
    with pytest.raises(Refused, match="parent 7, which was never published"):
        ledger.commit(0, version(1, 1, 7))
    with pytest.raises(Refused, match="names no parent; only the first version"):
        ledger.commit(0, version(1, 1, None))
    assert ledger.counts().groups == {"claimed": 1}


def test_version_numbers_only_grow(ledger: Ledger):
    ledger.publish(version(5, 0, 0))
    assert ledger.next_version_number() == 6
    with pytest.raises(Refused, match="numbers only grow, and the next is 6"):
        ledger.publish(version(3, 0, 5))
    ledger.publish(version(5, 0, 0))
    with pytest.raises(Refused, match="only a run's first version may have none"):
        ledger.publish(version(6, 0, None))


def test_a_version_without_a_batch_is_the_same_weights_under_a_new_number(ledger: Ledger):
    with pytest.raises(Conflict, match="their weights differ"):
        ledger.publish(version(1, 0, 0, digest="other weights"))
    with pytest.raises(Refused, match="commit the batch of step 0"):
        ledger.publish(version(1, 1, 0))


def test_trained_groups_tokens_and_trajectories_add_up(ledger: Ledger):
    batches = [full_step(ledger, step, count=2, size=3) for step in range(3)]
    ledger.admit(new_groups(ledger, 1, require_version=3))
    work(ledger, 3)
    counts = ledger.counts()
    trained = sum(member.trajectory.num_tokens for b in batches for group in b.groups for member in group.members)
    assert counts.tokens.trained == trained
    assert counts.tokens.generated == trained + counts.tokens.waiting
    assert (counts.trajectories.accepted, counts.trajectories.trained, counts.trajectories.waiting) == (20, 18, 2)
    assert counts.groups == {"trained": 6, "open": 1}
    assert counts.num_versions == 4
    assert counts.max_staleness_trained == 0


# From here on groups require no version, as in schedules that let trajectories grow older.


@pytest.fixture
def patient(ledger: Ledger) -> Ledger:
    """One that takes in what is old, so that claims can judge it."""
    ledger.terms = replace(ledger.terms, max_staleness=9)
    return ledger


def grow_to(ledger: Ledger, step: int) -> None:
    """Trains single groups until the latest version is of `step`; afterwards nothing is alive."""
    latest = ledger.latest_version()
    assert latest is not None
    for at in range(latest.step, step):
        full_step(ledger, at, count=1)


def sampled(task: Task, pieces: Sequence[int]) -> Trajectory:
    """A trajectory with two tokens of each version named."""
    trajectory = task.new_trajectory()
    for number in pieces:
        segment = Segment(
            start=trajectory.num_tokens,
            tokens=np.array([5, STOP]),
            logprobs=-np.ones(2),
            version=number,
            kv_version=number,
        )
        trajectory.append(segment)
    trajectory.finish(End.STOP)
    return trajectory


def _latest(ledger: Ledger) -> int:
    latest = ledger.latest_version()
    assert latest is not None
    return latest.number


def admit_answered(ledger: Ledger, *pieces: Sequence[int]) -> list[Task]:
    """One group whose members were sampled as told."""
    ledger.admit(new_groups(ledger, 1, size=len(pieces), require_version=None))
    tasks = ledger.lease("w", len(pieces), _latest(ledger))
    ledger.submit([handed(sampled(task, p)) for task, p in zip(tasks, pieces, strict=True)])
    ledger.score([Scored(task.id, [Reward(1.0)]) for task in tasks])
    return tasks


def test_tokens_above_the_bound_are_masked(patient: Ledger):
    grow_to(patient, 3)
    admit_answered(patient, [0, 1, 3], [2])
    batch = claim(patient, 3, 1, 2)
    assert batch is not None
    masks = [member.mask.tolist() for member in batch.groups[0].members]
    assert masks == [[False, False, True, True, True, True], [True, True]]
    patient.commit(3, version(4, 4, 3))
    counts = patient.counts()
    assert counts.tokens.masked == {"stale": 2, "abandoned": 0, "audit": 0}
    assert counts.max_staleness_trained == 2


def test_a_member_with_nothing_but_old_tokens_keeps_its_reward_and_trains_nothing(patient: Ledger):
    grow_to(patient, 3)
    admit_answered(patient, [0], [3])
    batch = claim(patient, 3, 1, 1)
    assert batch is not None
    old, fresh = batch.groups[0].members
    assert (old.mask.any(), old.reward) == (False, 1.0)
    assert fresh.mask.all()


def test_a_group_without_a_trainable_token_is_dropped_as_stale_and_issued_again(patient: Ledger):
    grow_to(patient, 3)
    (first, _) = admit_answered(patient, [0], [1])
    assert claim(patient, 3, 1, 1) is None
    assert patient.counts().dropped_groups == {"stale": 1}
    again = patient.lease("w", 9, 3)
    assert len(again) == 2
    assert again[0].group != first.group
    patient.submit([handed(sampled(task, [3])) for task in again])
    score_all(patient)
    batch = claim(patient, 3, 1, 1)
    assert batch is not None
    assert batch.groups[0].ordinal == 3
    assert patient.counts().tokens.wasted == {"stale": 4}


def test_staleness_is_measured_when_the_batch_is_claimed_not_when_the_answer_came(patient: Ledger):
    admit_answered(patient, [0], [0])
    admit_answered(patient, [0], [0])
    assert claim(patient, 0, 1, 0) is not None
    patient.commit(0, version(1, 1, 0))
    assert claim(patient, 1, 1, 0) is None, "the second group waited, and waiting counts"
    assert patient.counts().dropped_groups == {"stale": 1}


def test_a_group_left_over_from_a_past_step_is_issued_again_for_the_present_one(patient: Ledger):
    patient.admit(new_groups(patient, 2))
    work(patient, 0)
    score_all(patient)
    claim(patient, 0, 1, 0)
    patient.commit(0, version(1, 1, 0))
    assert claim(patient, 1, 1, 0) is None
    assert patient.wanted_version() == 1
    work(patient, 1)
    score_all(patient)
    batch = claim(patient, 1, 1, 0)
    assert batch is not None
    assert batch.groups[0].ordinal == 1


def test_tokens_of_abandoned_versions_are_never_trained(patient: Ledger):
    grow_to(patient, 1)
    patient.admit(new_groups(patient, 1, size=2, require_version=None))
    tasks = patient.lease("w", 2, 1)
    patient.submit([handed(sampled(tasks[0], [0, 1])), handed(sampled(tasks[1], [1]))])
    score_all(patient)
    patient.reconcile(0, 0)
    patient.commit(0, version(2, 1, 0))
    batch = claim(patient, 1, 1, 5)
    assert batch is not None
    assert [member.mask.tolist() for member in batch.groups[0].members] == [[True, True, False, False], [False, False]]
    patient.commit(1, version(3, 2, 2))
    assert patient.counts().tokens.masked == {"stale": 0, "abandoned": 4, "audit": 0}


# What the trainer could not believe.


def test_audited_members_train_nothing_and_their_tokens_are_masked_by_that_reason(patient: Ledger):
    grow_to(patient, 2)
    old, _ = admit_answered(patient, [0], [2])
    claim(patient, 2, 1, 2)
    before = patient.counts().tokens.trained
    patient.commit(2, version(3, 3, 2), audited=[old.id])
    counts = patient.counts()
    assert counts.tokens.trained == before + 2
    assert counts.tokens.masked == {"stale": 0, "abandoned": 0, "audit": 2}
    assert counts.max_staleness_trained == 0, "the old tokens had no part in it"
    assert counts.trajectories.dropped == 0


def test_only_members_of_the_batch_can_be_audited(patient: Ledger):
    admit_answered(patient, [0], [0])
    claim(patient, 0, 1, 0)
    with pytest.raises(Refused, match=r"but only . of these . are in the batch"):
        patient.commit(0, version(1, 1, 0), audited=[77])
    assert patient.counts().groups == {"claimed": 1}, "nothing changed"
    patient.commit(0, version(1, 1, 0), audited=[])


def test_a_batch_that_is_trained_again_is_audited_anew(patient: Ledger):
    first, second = admit_answered(patient, [0], [0])
    claim(patient, 0, 1, 0)
    patient.commit(0, version(1, 1, 0), audited=[first.id, second.id, first.id])
    assert patient.counts().tokens.trained == 0
    patient.reconcile(0, 0)
    assert patient.counts().tokens.masked["audit"] == 0
    patient.commit(0, version(2, 1, 0), audited=[second.id])
    counts = patient.counts()
    assert (counts.tokens.trained, counts.tokens.masked["audit"]) == (2, 2)


def compared(patient: Ledger) -> list[tuple[int, int, int]]:
    return patient.execute(
        "SELECT task, num_compared, num_off FROM segments WHERE num_compared > 0 ORDER BY task, start"
    ).fetchall()


def test_what_an_audit_found_is_kept_by_segment_and_replaced_when_a_batch_is_trained_again(patient: Ledger):
    first, second = admit_answered(patient, [0], [0])
    assert claim(patient, 0, 1, 0) is not None
    patient.commit(
        0, version(1, 1, 0), compared=[ComparedSegment(first.id, 0, 2, 1), ComparedSegment(second.id, 0, 1, 0)]
    )
    assert compared(patient) == [(first.id, 2, 1), (second.id, 1, 0)]
    patient.reconcile(0, 0)
    assert claim(patient, 0, 1, 0) is not None
    patient.commit(0, version(2, 1, 0), compared=[ComparedSegment(first.id, 0, 2, 0)])
    assert compared(patient) == [(first.id, 2, 0), (second.id, 1, 0)], "evidence stands until there is better"


@pytest.mark.parametrize(
    "found",
    [
        ComparedSegment(1, 1, 1, 0),
        ComparedSegment(1, 0, 3, 0),
        ComparedSegment(1, 0, 1, 2),
        ComparedSegment(9, 0, 1, 0),
    ],
)
def test_an_audit_of_what_is_not_in_the_batch_is_refused(patient: Ledger, found: ComparedSegment):
    admit_answered(patient, [0], [0])
    claim(patient, 0, 1, 0)
    with pytest.raises(Refused, match="audit of task"):
        patient.commit(0, version(1, 1, 0), compared=[found])


def test_blame_goes_by_segment_to_workers_that_may_come_back_the_latest_segments_last(patient: Ledger):
    for name in ("liar", "honest"):
        patient.redeem(patient.issue_token(Role.ROLLOUT, 5.0), name, {}, secret_hash(new_secret()))
    patient.admit(new_groups(patient, 1, size=2))
    begun, other = patient.lease("liar", 2, 0)
    partial = answer(begun, [0], end=None)
    patient.submit([handed(partial, "liar"), handed(answer(other, [0]), "liar")])
    (again,) = patient.lease("honest", 1, 0)
    patient.submit([handed(answer(again, [0]), "honest", again.fence)])
    score_all(patient)
    claim(patient, 0, 1, 0)
    at = partial.num_tokens
    found = [
        ComparedSegment(begun.id, 0, at, at),
        ComparedSegment(begun.id, at, 1, 0),
        ComparedSegment(other.id, 0, 1, 1),
    ]
    patient.commit(0, version(1, 1, 0), compared=found)
    assert patient.audit_results([begun.id]) == {"liar": [(at, at), (1, 1)], "honest": [(1, 0)]}
    assert patient.audit_results([other.id]) == {"liar": [(at, at), (1, 1)]}
    patient.move_worker("liar", WorkerState.LEFT)
    assert "liar" in patient.audit_results([begun.id]), "leaving in time does not help"
    patient.move_worker("liar", WorkerState.QUARANTINED)
    assert patient.audit_results([begun.id]) == {"honest": [(1, 0)]}


def test_a_member_is_proven_once_audits_have_found_all_honest_who_sampled_it(patient: Ledger):
    patient.admit(new_groups(patient, 1, size=MIN_PROVEN))
    tasks = patient.lease("known", MIN_PROVEN, 0)
    patient.submit([handed(answer(task, [0]), "known") for task in tasks])
    score_all(patient)
    first = claim(patient, 0, 1, 0)
    assert not any(member.is_proven for member in first.groups[0].members), "at first nobody is"
    patient.commit(0, version(1, 1, 0), compared=[ComparedSegment(task.id, 0, 1, 0) for task in tasks])
    patient.admit(new_groups(patient, 1, size=3, require_version=1))
    whole, begun = patient.lease("known", 2, 1)
    (fresh,) = patient.lease("newcomer", 1, 1)
    patient.submit([handed(answer(whole, [1]), "known"), handed(answer(fresh, [1]), "newcomer")])
    patient.submit([handed(answer(begun, [1], end=None), "known")])
    (again,) = patient.lease("newcomer", 1, 1)
    patient.submit([handed(answer(again, [1]), "newcomer", again.fence)])
    score_all(patient)
    second = claim(patient, 1, 1, 0)
    assert [member.task for member in second.groups[0].members if member.is_proven] == [whole.id]
