"""Bytes go, rows stay: nothing is pruned that a resume from the checkpoint, or a newer one, could ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_life import GROUPS_PER_STEP, NUM_STEPS, Disk, live, undisturbed
from ledger_run import (
    answer,
    claim,
    data_of,
    eval_groups,
    full_step,
    handed,
    new_groups,
    quick_folder,
    score_all,
    version,
    work,
)

from offbeat.errors import UserError
from offbeat.ledger import bodies, maintenance
from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome


@pytest.fixture(params=["in rows", "in files"])
def ledger(request: pytest.FixtureRequest, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of the other tests, with a clock that goes on."""
    monkeypatch.setattr(bodies, "MAX_ROW_BYTES", 0 if request.param == "in files" else bodies.MAX_ROW_BYTES)
    now = iter(range(1, 10**9))
    ledger.wall_clock = lambda: float(next(now))
    return ledger


def kept_steps(ledger: Ledger) -> dict[int, bool]:
    """By step of the surviving batches, whether their bodies are there; none is there in part."""
    query = """SELECT b.step, MIN(j.pruned), MAX(j.pruned) FROM batches b JOIN groups g ON g.batch = b.id
               JOIN tasks t ON t.group_id = g.id JOIN trajectories j ON j.task = t.id GROUP BY b.step"""
    rows = ledger.execute(query).fetchall()
    assert all(least == most for _, least, most in rows)
    return {step: not pruned for step, pruned, _ in rows}


def num_files(ledger: Ledger) -> int:
    return len(list(ledger.blobs.all()))


def test_what_was_trained_before_the_checkpoint_is_pruned_and_its_own_batch_is_not(ledger: Ledger):
    batches = [full_step(ledger, step) for step in range(4)]
    before = ledger.counts()
    pruned = ledger.prune(2)
    assert pruned.num_bodies == 8
    assert pruned.num_bytes > 0
    assert kept_steps(ledger) == {0: False, 1: False, 2: True, 3: True}
    assert ledger.counts() == before
    assert num_files(ledger) in (0, 8)
    assert ledger.prune(2) == maintenance.Pruned(0, 0)
    resumed = ledger.reconcile(2, None)
    assert resumed.replays_batch
    again = claim(ledger, 2, 2, 0)
    assert again is not None
    assert data_of(again) == data_of(batches[2])


def test_the_last_steps_may_be_spared(ledger: Ledger):
    for step in range(4):
        full_step(ledger, step)
    ledger.prune(3, keep=2)
    assert kept_steps(ledger) == {0: False, 1: True, 2: True, 3: True}


def test_a_checkpoint_whose_batch_was_pruned_is_refused_before_anything_changes(ledger: Ledger):
    for step in range(3):
        full_step(ledger, step)
    ledger.prune(2)
    before = ledger.counts()
    with pytest.raises(
        UserError, match=r"trained up to step 2 were pruned, .* resume from a checkpoint of step 2 or later"
    ):
        ledger.reconcile(1, None)
    assert ledger.counts() == before


def test_what_still_waits_is_never_pruned(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 3, size=2, require_version=1))
    tasks = ledger.lease("w", 5, 1)
    ledger.submit([handed(answer(task, [1])) for task in tasks[:4]])
    ledger.submit([handed(answer(tasks[4], [1], end=None))])
    score_all(ledger)
    claim(ledger, 1, 1, 0)
    assert ledger.prune(1).num_bodies == 4
    assert ledger.prune(99).num_bodies == 0, "claimed, ready, open and partial bodies stay whatever is asked"


def test_dropped_and_evaluated_bodies_go_once_the_checkpoint_lies_past_their_end(ledger: Ledger):
    ledger.admit(eval_groups(1))
    work(ledger, 0)
    ledger.admit(new_groups(ledger, 1, size=2))
    doomed = work(ledger, 0)
    score_all(ledger, failing=[task.id for task in doomed])
    work(ledger, 0)
    score_all(ledger)
    claim(ledger, 0, 1, 0)
    assert ledger.prune(0).num_bodies == 0
    ledger.commit(0, version(1, 1, 0))
    ledger.admit(new_groups(ledger, 1, size=2, require_version=1))
    score_all(ledger, failing=[task.id for task in work(ledger, 1)])
    ledger.admit(eval_groups(1, require_version=1))
    work(ledger, 1)
    score_all(ledger)
    assert ledger.prune(1).num_bodies == 2 + 2 + 2, "evaluated, dropped and trained"
    left = ledger.execute(
        "SELECT DISTINCT g.purpose, g.state FROM trajectories j JOIN tasks t ON t.id = j.task "
        "JOIN groups g ON g.id = t.group_id WHERE pruned = 0 ORDER BY 1, 2"
    ).fetchall()
    assert left == [("eval", "evaluated"), ("train", "dropped"), ("train", "ready")]


def test_a_late_answer_is_spared_until_a_checkpoint_lies_past_it(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    late, *others = ledger.lease("w", 3, 0)
    ledger.submit([handed(answer(task, [0])) for task in others])
    score_all(ledger, failing=[task.id for task in others])
    full_step(ledger, 0, count=2)
    assert ledger.submit([handed(answer(late, [0]))]) == [Outcome.LATE]
    assert ledger.prune(1).num_bodies == 2 + 5, "the failed ones, and three and two that were trained"
    full_step(ledger, 1)
    assert ledger.prune(2).num_bodies == 1 + 2 + 4, (
        "the late one, one that was dropped as stale meanwhile, and the trained"
    )


def test_what_was_pruned_is_told_apart_from_what_is_missing(ledger: Ledger):
    for step in range(2):
        full_step(ledger, step)
    ledger.prune(1)
    ledger.bodies = bodies.Bodies(ledger.execute, ledger.blobs)
    with pytest.raises(LedgerError, match=r"the trajectory of task . was pruned"):
        claim(ledger, 0, 2, 0)
    query = "SELECT pruned, COUNT(*), COUNT(digest) FROM trajectories GROUP BY pruned"
    assert ledger.execute(query).fetchall() == [(0, 4, 4), (1, 4, 4)]


def test_a_repeat_of_what_was_pruned_is_still_known(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=2))
    tasks = ledger.lease("w", 4, 0)
    sent = [handed(answer(task, [0])) for task in tasks]
    ledger.submit(sent)
    score_all(ledger)
    claim(ledger, 0, 2, 0)
    ledger.commit(0, version(1, 1, 0))
    ledger.prune(1)
    assert ledger.submit(sent) == [Outcome.REPEATED] * 4


def test_long_prunings_go_slice_by_slice(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maintenance, "SLICE", 3)
    for step in range(3):
        full_step(ledger, step)
    assert ledger.prune(2).num_bodies == 8


@settings(max_examples=10, deadline=None)
@given(
    lives=st.lists(st.integers(10, 80), max_size=4),
    save_every=st.integers(1, 3),
    saves_before_commit=st.booleans(),
    keep=st.integers(0, 2),
)
@pytest.mark.full
def test_a_run_that_prunes_at_every_checkpoint_and_is_killed_anywhere_trains_the_same_data(
    lives, save_every, saves_before_commit, keep
):
    """Every life prunes by the checkpoint that it finds, as late as it may."""
    how = {"save_every": save_every, "saves_before_commit": saves_before_commit, "capacity": 4, "order": 3}
    with quick_folder() as folder:
        expected = undisturbed(folder / "undisturbed.sqlite")
        disk = Disk(folder / "ledger.sqlite")
        for num_events in [*lives, 10**6]:
            life = live(disk, **how)
            for _, _ in zip(range(num_events), life, strict=False):
                with Ledger(disk.path, LedgerTerms(min_group=2)) as other:
                    other.prune(disk.checkpoint[0], keep)
            life.close()
        assert disk.trained == expected
        with Ledger(disk.path) as done:
            kept = kept_steps(done)
            assert len(kept) == NUM_STEPS
            assert [step for step, is_kept in kept.items() if not is_kept] == [
                *range(max(0, disk.checkpoint[0] - keep))
            ]
            assert done.counts().groups["trained"] == GROUPS_PER_STEP * NUM_STEPS


def test_pruning_frees_room_for_what_follows(tmp_path: Path):
    """The file stops growing: pages of pruned bodies are used again."""
    sizes = {}
    for prunes in (False, True):
        path = tmp_path / f"{prunes}.sqlite"
        with Ledger(path, LedgerTerms(min_group=1)) as ledger:
            ledger.publish(version(0, 0))
            for step in range(30):
                full_step(ledger, step, count=1, size=40)
                if prunes:
                    ledger.prune(step + 1)
        sizes[prunes] = path.stat().st_size
    assert sizes[True] < sizes[False]
