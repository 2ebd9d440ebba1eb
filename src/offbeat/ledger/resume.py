"""Resuming a trainer from a checkpoint that may be older than the ledger.

Everything after the checkpoint's step is undone. The steps that remain train no group twice, and no prompt is lost.
Versions of later steps are abandoned: their numbers are not reused, and their tokens are never trained.
The batch of the checkpoint's step is claimed again, with the same data. Later batches are undone. Groups that have only
abandoned tokens, or that require an abandoned version, are dropped and re-issued with the same ordinal and seed for the
same step. The new groups wait until that step has a version again.

Groups that were dropped in later steps because their rewards were equal stay dropped: with exact generation
(`run.exact`) they would get the same rewards again. They still count as drawn for their step, so that the same
groups of the step are dropped as before.

With exact generation, the replayed steps see the same groups in the same order with the same tokens. A second resume
from the same checkpoint changes nothing more, unless the run went on in between.
"""

from __future__ import annotations

from dataclasses import replace

from offbeat.errors import UserError
from offbeat.ledger import partials, versions
from offbeat.ledger.batches import Batches, latest_trainer, mark_trained, sum_up, take_over, why_not_from_scratch
from offbeat.ledger.database import Database, transactional
from offbeat.ledger.groups import drop, reissue
from offbeat.ledger.records import Arrival, Drop, Purpose, Reconciled
from offbeat.weights.version import Version

SAME_RUN = "give the ledger and a checkpoint of the same run"


class Resuming(Batches):
    @transactional
    def reconcile(
        self, checkpoint_step: int, checkpoint_version: int | None, arrival: Arrival | None = None
    ) -> Reconciled:
        """Brings the ledger to the step of a trainer's checkpoint and makes that trainer the only one that may change
        the run. Must be called at every start of a trainer, with (0, None) if it has no checkpoint."""
        arrival = arrival or Arrival()
        found = _reconcile(self, checkpoint_step, checkpoint_version, arrival)
        has_checkpoint = checkpoint_step > 0 or checkpoint_version is not None
        return replace(found, generation=take_over(self, arrival, checkpoint_step if has_checkpoint else None))


def _reconcile(db: Batches, step: int, version: int | None, arrival: Arrival) -> Reconciled:
    newest = db.latest_version()
    if newest is None:
        if step > 0:
            raise UserError(f"ledger {db.path} is empty, but the checkpoint is of step {step}; {SAME_RUN}")
        return Reconciled(step=0, parent=None, replays_batch=False)
    if newest.step < step:
        return _complete(db, step, version, newest)
    if step == 0 and version is None:
        why = why_not_from_scratch(latest_trainer(db), arrival, newest.step)
        if why is not None:
            raise UserError(f"ledger {db.path}: {why}")
    _check_checkpoint(db, step, version)
    _check_pruned(db, step)
    abandoned = [
        number for (number,) in db.execute("SELECT number FROM versions WHERE abandoned = 0 AND step > ?", (step,))
    ]
    db.execute("UPDATE versions SET abandoned = 1 WHERE abandoned = 0 AND step > ?", (step,))
    replays_batch = _claim_again(db, step)
    undone = _undo_batches_after(db, step)
    partials.waste_abandoned(db, Drop.ABANDONED)
    num_reissued = _drop_abandoned_groups(db)
    _reset_first_step(db, step)
    db.execute("UPDATE evals SET abandoned = 1 WHERE step > ? AND abandoned = 0", (step,))
    parent = versions.living_at(db, step)
    assert parent is not None
    return Reconciled(
        step=step,
        parent=parent.number,
        replays_batch=replays_batch,
        abandoned_versions=tuple(abandoned),
        undone_steps=undone,
        num_reissued_groups=num_reissued,
    )


def _complete(db: Batches, step: int, version: int | None, newest: Version) -> Reconciled:
    """Marks the last batch as trained if the checkpoint is one step ahead of the ledger: the commit of that batch was
    lost. Raises `UserError` if the checkpoint is further ahead or no such batch was claimed."""
    claimed = db.execute("SELECT id FROM batches WHERE step = ? AND state <> 'undone'", (newest.step,)).fetchone()
    if version is not None and versions.find(db, version) is not None:
        _check_checkpoint(db, step, version)
    if step != newest.step + 1 or claimed is None:
        raise UserError(
            f"ledger {db.path} ends at step {newest.step}, but the checkpoint is of step {step}; resume from a "
            f"checkpoint of step {newest.step} or earlier, or restore the ledger that belongs to this checkpoint"
        )
    mark_trained(db, claimed[0])
    return Reconciled(step=step, parent=newest.number, replays_batch=False, completed_step=newest.step)


def _check_checkpoint(db: Batches, step: int, number: int | None) -> None:
    """Raises `UserError` if the ledger lacks the checkpoint's version, has it at another step, or has abandoned it."""
    if number is None:
        if versions.living_at(db, step) is None:
            raise UserError(f"ledger {db.path} has no version of step {step}, the checkpoint's step; {SAME_RUN}")
        return
    found = versions.find(db, number)
    if found is None:
        raise UserError(
            f"ledger {db.path} has no version {number}, the version of the checkpoint of step {step}; {SAME_RUN}"
        )
    version, is_abandoned = found
    if version.step != step:
        raise UserError(
            f"version {number} is of step {version.step} in ledger {db.path}, but of step {step} in the checkpoint; "
            f"{SAME_RUN}"
        )
    if is_abandoned:
        newest = db.latest_version()
        assert newest is not None
        raise UserError(
            f"ledger {db.path}: the checkpoint of step {step} is of version {number}, which an earlier resume "
            f"abandoned; the run is at step {newest.step}: resume from a checkpoint saved after that resume"
        )


def _check_pruned(db: Database, step: int) -> None:
    query = """SELECT MAX(b.step) FROM batches b CROSS JOIN groups g ON g.batch = b.id
               CROSS JOIN tasks t ON t.group_id = g.id CROSS JOIN trajectories j ON j.task = t.id
               WHERE b.state <> 'undone' AND b.step >= ? AND j.pruned = 1"""
    (pruned,) = db.execute(query, (step,)).fetchone()
    if pruned is not None:
        raise UserError(
            f"ledger {db.path}: the trajectories trained up to step {pruned + 1} were pruned, so the checkpoint of "
            f"step {step} cannot be resumed; resume from a checkpoint of step {pruned + 1} or later"
        )


def _claim_again(db: Database, step: int) -> bool:
    row = db.execute("SELECT id FROM batches WHERE step = ? AND state <> 'undone'", (step,)).fetchone()
    if row is None:
        return False
    db.execute("UPDATE batches SET state = 'claimed', to_version = NULL, trained_at = NULL WHERE id = ?", row)
    db.execute("UPDATE groups SET state = 'claimed', ended_at = NULL WHERE batch = ?", row)
    db.execute(  # the batch will be audited again
        "UPDATE batch_members SET num_trained_tokens = num_trained_tokens + num_audit_tokens, num_audit_tokens = 0 "
        "WHERE batch = ?",
        row,
    )
    sum_up(db, row[0])
    return True


def _undo_batches_after(db: Database, step: int) -> tuple[int, ...]:
    rows = db.execute(
        "SELECT id, step FROM batches WHERE step > ? AND state <> 'undone' ORDER BY step", (step,)
    ).fetchall()
    db.executemany("UPDATE groups SET state = 'ready', batch = NULL WHERE batch = ?", [(batch,) for batch, _ in rows])
    db.executemany("UPDATE batches SET state = 'undone' WHERE id = ?", [(batch,) for batch, _ in rows])
    return tuple(undone for _, undone in rows)


def _drop_abandoned_groups(db: Database) -> int:
    """Drops groups that require an abandoned version or have only abandoned tokens, and re-issues the training groups
    among them. Returns the number re-issued."""
    waiting = """SELECT g.id, g.purpose FROM groups g JOIN versions v ON v.number = g.require_version
                 WHERE (g.state = 'open' OR g.state = 'ready') AND v.abandoned = 1"""
    without_living_token = """
        SELECT g.id, g.purpose FROM groups g WHERE g.state = 'ready' AND g.require_version IS NULL AND NOT EXISTS (
            SELECT 1 FROM tasks t JOIN segments s ON s.task = t.id JOIN versions v ON v.number = s.version
            WHERE t.group_id = g.id AND t.state = 'scored' AND v.abandoned = 0)"""
    dropped = [*db.execute(waiting), *db.execute(without_living_token)]
    drop(db, [group for group, _ in dropped], Drop.ABANDONED)
    again = [group for group, purpose in sorted(dropped) if purpose == Purpose.TRAIN]
    reissue(db, again, with_new_seed=False)
    return len(again)


def _reset_first_step(db: Database, step: int) -> None:
    """Resets `first_step` (the step of the oldest version with which a member was begun) in open and ready groups where
    it is after `step`, the checkpoint's step. In an open group without leased tasks, `first_step` becomes NULL, so that
    any version may begin the group. In all other groups it becomes `step`."""
    db.execute(
        """UPDATE groups SET first_step = IIF(state = 'open' AND NOT EXISTS (
               SELECT 1 FROM tasks WHERE group_id = groups.id AND state = 'leased'), NULL, :step)
           WHERE (state = 'open' OR state = 'ready') AND first_step > :step""",
        {"step": step},
    )
