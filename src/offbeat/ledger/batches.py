"""Batches: claiming the data of a step, committing it, and the trainers that may do so.

Guarantees: a claim selects groups, checks the staleness of their tokens at the step that trains them and stores the
batch, all in one transaction. A token is never trained if it is staler than the bound, was given (not sampled), or was
sampled from an abandoned version.

Only the latest trainer may change a run. A trainer gets the next generation (a number) when it starts, and sends it
with each of its calls. A call with an older generation is refused within the call's own transaction.

With `batch.gate` = "release" or "batch", answers do not wait for their siblings, the other answers to the same prompt.
Each answer is then a group of size 1, and its siblings are the other groups drawn for the prompt. A batch uses only the
sibling rewards that were stored before its claim, so its advantages do not depend on when it is loaded. Rewards of
groups dropped as abandoned do not count: their prompts were issued again with the same seed, so the same answer would
count twice. The reward of a group that was dropped as stale still counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np

from offbeat.errors import RunStopped
from offbeat.ledger import versions
from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.ledger.groups import drop, num_without_signal, reissue
from offbeat.ledger.records import (
    Arrival,
    Batch,
    BatchGroup,
    BatchState,
    ComparedSegment,
    Drop,
    GroupState,
    Member,
)
from offbeat.ledger.versions import Lineage, Versions
from offbeat.ledger.workers import unproven_tasks
from offbeat.rules.groups import (
    Candidate,
    VersionRun,
    is_trainable,
    oldest_trainable_step,
    select_batch,
    trained_staleness,
)
from offbeat.testing.crash_points import crash_here
from offbeat.trajectory import Reward, Trajectory
from offbeat.weights.version import Version

EARLIER = """
SELECT s.ordinal, s.id, r.value
FROM groups o INDEXED BY groups_drawn CROSS JOIN groups s ON s.purpose = 'train' AND s.ordinal = o.ordinal
CROSS JOIN tasks t ON t.group_id = s.id CROSS JOIN rewards r ON r.task = t.id
WHERE o.purpose = 'train' AND o.reissue_of IS NULL AND o.source = :source AND o.source_ordinal = :source_ordinal
    AND s.batch IS NOT :batch AND s.reason IS NOT 'abandoned' AND r.value IS NOT NULL AND r.seq <= :last_reward
"""
"""Query for the rewards of a prompt's groups outside the batch, as far as they were stored when the batch was
claimed."""


class SiblingRewards(NamedTuple):
    """The fields `prompt` and `earlier` of a `BatchGroup`, for an answer with siblings (other answers to its prompt).
    Siblings in the same batch have the same values."""

    prompt: int
    """Id of the first group drawn for the prompt, which identifies the prompt."""
    earlier: tuple[float, ...]
    """Rewards of siblings outside the batch, as far as they were stored before the claim. They are sorted by group
    ordinal, so that the order of scoring does not matter."""


def sibling_rewards(db: Database, batch: int) -> dict[int, SiblingRewards]:
    """Returns the `SiblingRewards` of each group of size 1 in a batch, by group id."""
    query = """SELECT g.source, g.source_ordinal, g.id, o.id
               FROM groups g CROSS JOIN groups o INDEXED BY groups_drawn ON o.purpose = 'train' AND o.reissue_of IS NULL
                   AND o.source = g.source AND o.source_ordinal = g.source_ordinal AND o.sibling = 0
               WHERE g.batch = ? AND g.size = 1"""
    groups = db.execute(query, (batch,)).fetchall()
    (last_reward,) = db.execute("SELECT last_reward FROM batches WHERE id = ?", (batch,)).fetchone()
    earlier: dict[int, tuple[float, ...]] = {}
    for source, source_ordinal, _, prompt in groups:
        if prompt not in earlier:
            values = {"source": source, "source_ordinal": source_ordinal, "batch": batch, "last_reward": last_reward}
            earlier[prompt] = tuple(reward for _, _, reward in sorted(db.execute(EARLIER, values)))
    return {group: SiblingRewards(prompt, earlier[prompt]) for _, _, group, prompt in groups}


Piece = tuple[int, int, int, int | None]
"""Segment of a scored trajectory: group, task, number of tokens, and version that sampled it (None: given tokens)."""
Pieces = dict[int, list[Piece]]
"""Segments by group."""
P = ParamSpec("P")
R = TypeVar("R")
_PARTS = msgspec.json.Decoder(tuple[Reward, ...])


class Batches(Versions):
    @transactional
    def claim(self, step: int, *, in_order: bool = True) -> Batch | None:
        """Returns the batch of `step`; None while too few groups are ready or `rules.groups.select` says to wait. The
        first successful claim chooses the groups: those drawn first if `in_order`, else those begun with the oldest
        versions. Later claims return the same batch. A new batch must be of the latest version's step or, once that
        step has a batch, of the step after it."""
        newest = self.latest_version()
        found = _living_batch(self, step)
        if found is None:
            is_ahead = newest is not None and newest.step + 1 == step and _living_batch(self, newest.step) is not None
            if newest is None or (newest.step != step and not is_ahead):
                at = "no version has been published yet"
                if newest is not None:
                    at = f"the latest version is of step {newest.step}"
                    at += ", and the batch of that step must be claimed first" if newest.step + 1 == step else ""
                raise Refused(f"the batch of step {step} cannot be claimed: {at}")
            return _choose(self, step, None if is_ahead else newest.number, in_order)
        if found["state"] == BatchState.CLAIMED and newest is not None and newest.step == step:
            self.execute("UPDATE batches SET from_version = ? WHERE id = ?", (newest.number, found["id"]))
        return load(self, found["id"])

    @transactional
    def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        """Records that the batch of `step` was trained and produced `version`. `audited` are the tasks that an audit
        left out of the training; `compared` holds the result for each segment that the audit compared. A repeated
        commit changes nothing."""
        batch = _living_batch(self, step)
        if batch is None:
            raise Unknown(f"step {step} cannot be committed: no batch was claimed for it")
        if batch["to_version"] is not None:
            if batch["to_version"] == version.number and versions.is_recorded(self, version):
                return
            raise Conflict(
                f"step {step} was already committed as version {batch['to_version']}, so it cannot be committed again "
                f"as version {version.number}"
            )
        parent = versions.living_parent(self, version)
        if parent.step != step or version.step != step + 1:
            raise Refused(
                f"version {version.number} is of step {version.step} with a parent of step {parent.step}; a commit of "
                f"step {step} needs a version of step {step + 1} with a parent of step {step}"
            )
        if versions.is_recorded(self, version):
            raise Conflict(f"version {version.number} was already published by another call; commit under a new number")
        mark_trained(self, batch["id"])
        _leave_out(self, batch["id"], audited)
        _compare(self, batch["id"], compared)
        versions.record(self, version)

    def current_round(self) -> int | None:
        """Returns the number of the latest version, which began the current round of generation. Returns None between
        rounds: before the first version, and while a claimed batch is not yet trained."""
        newest = self.latest_version()
        return None if newest is None or is_batch_claimed(self) else newest.number

    def as_trainer(self, generation: int, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `call` in one transaction and returns its result. Raises `RunStopped` instead if `generation` (the
        number of a trainer's start) is not the latest, because another trainer has taken over."""
        with self.transaction():
            self.check_generation(generation)
            return call(*args, **kwargs)

    def check_generation(self, generation: int) -> None:
        """Raises `RunStopped` if `generation` (the number of a trainer's start) is not that of the latest trainer.
        Before the first trainer it must be 0."""
        newest = latest_trainer(self)
        known = 0 if newest is None else newest.generation
        if generation < known:
            raise RunStopped(
                f"another trainer has taken over this run: {newest} (generation {known}; this trainer has "
                f"{generation}); end one of the two"
            )
        if generation > known:
            raise RunStopped(
                f"this trainer has generation {generation}, but the latest one in ledger {self.path} is {known}: the "
                "trainer was started with another ledger; start it again"
            )

    @transactional
    def checkpointed(self, step: int) -> None:
        """Records that the latest trainer has a durable checkpoint of `step`."""
        query = "UPDATE trainers SET checkpoint_step = ? WHERE generation = (SELECT MAX(generation) FROM trainers)"
        self.execute(query, (step,))


def is_batch_claimed(db: Database) -> bool:
    """Whether a batch is claimed and not trained yet. Batches are trained in order, so only the latest is checked."""
    row = db.execute("SELECT state FROM batches WHERE state <> 'undone' ORDER BY step DESC LIMIT 1").fetchone()
    return row is not None and row[0] == BatchState.CLAIMED


def _living_batch(db: Database, step: int) -> dict[str, Any] | None:
    query = "SELECT id, state, to_version FROM batches WHERE step = ? AND state <> 'undone'"
    row = db.execute(query, (step,)).fetchone()
    return None if row is None else dict(zip(("id", "state", "to_version"), row, strict=True))


def _choose(db: Database, step: int, from_version: int | None, in_order: bool) -> Batch | None:
    count, max_staleness = db.terms.groups_per_step, db.terms.max_staleness
    assert count is not None, "LedgerTerms.groups_per_step is None, but a claim needs it; this is a bug"
    oldest = oldest_trainable_step(step, max_staleness)
    if not _may_change(db, count, oldest):
        return None
    pieces: Pieces = {}
    known: Mapping[int, Lineage] = {}

    def candidates() -> list[Candidate]:
        nonlocal pieces, known
        groups = _eligible(db, step, count, oldest, in_order)
        pieces = _pieces(db, [group for group, _, state, *_ in groups if state == GroupState.READY])
        known = versions.lineage(db, {piece[3] for found in pieces.values() for piece in found if piece[3] is not None})
        return [
            Candidate(
                group=group,
                ordinal=ordinal,
                ready=state == GroupState.READY,
                require_step=require_step,
                first_step=first_step,
                runs=_version_runs(pieces.get(group, ()), known),
            )
            for group, ordinal, state, require_step, first_step in groups
        ]

    def drop_stale(groups: Sequence[int]) -> None:
        drop(db, groups, Drop.STALE)

    selection, stale = select_batch(candidates, drop_stale, step, count, max_staleness, in_order=in_order)
    reissue(db, stale, with_new_seed=False, for_step=step)
    if not selection.take:
        return None
    batch = _store(db, step, from_version, {group: pieces[group] for group in selection.take}, known)
    crash_here("claim-chosen")
    return load(db, batch)


def _may_change(db: Database, count: int, oldest: int) -> bool:
    """Whether a claim could take or drop groups: at least `count` groups are ready, or a group may have to be dropped,
    because it may have tokens of an abandoned version or from before step `oldest`, or requires a version from before
    that step. This check must be cheap, because a claim is tried after every stored reward."""
    ready = "SELECT 1 FROM groups INDEXED BY groups_alive WHERE state = 'ready' AND purpose = 'train'"
    query = f"""SELECT (SELECT COUNT(*) FROM ({ready} LIMIT :count)) = :count
                    OR EXISTS ({ready} AND first_step IS NULL) OR EXISTS ({ready} AND first_step < :oldest)
                    OR EXISTS (SELECT 1 FROM groups INDEXED BY groups_required
                               WHERE state = 'open' AND require_step < :oldest)
                    OR EXISTS (SELECT 1 FROM versions WHERE abandoned = 1)"""
    return bool(db.execute(query, {"count": count, "oldest": oldest}).fetchone()[0])


def _eligible(db: Database, step: int, count: int, oldest: int, in_order: bool) -> list[tuple[Any, ...]]:
    """Returns the groups from which `select` chooses: all unfinished groups, the first `count` ready groups in the
    order of selection, and all ready groups that may have tokens of an abandoned version or from before step `oldest`.
    Other groups cannot be in the batch. Leaving them out keeps the cost independent of the number of waiting groups."""
    values = {"step": step, "oldest": oldest, "count": count}
    columns, due = "id, ordinal, state, require_step, first_step", "(require_step IS NULL OR require_step <= :step)"
    unfinished = f"SELECT {columns} FROM groups WHERE state = 'open' AND purpose = 'train' AND {due}"
    ready = f"""SELECT {columns} FROM groups INDEXED BY groups_alive
                WHERE state = 'ready' AND purpose = 'train' AND {due}"""
    if db.execute("SELECT 1 FROM versions WHERE abandoned = 1 LIMIT 1").fetchone():
        chosen = [ready]
    else:
        order = "ordinal" if in_order else "first_step, ordinal"  # no two living groups share an ordinal
        first_ones = f"{ready} AND first_step >= :oldest ORDER BY {order} LIMIT :count"
        chosen = [first_ones, f"{ready} AND first_step < :oldest", f"{ready} AND first_step IS NULL"]
    return [row for query in (unfinished, *chosen) for row in db.execute(query, values)]


def _pieces(db: Database, groups: Sequence[int]) -> Pieces:
    query = """SELECT t.group_id, t.id, s.num_tokens, s.version
               FROM json_each(?) e CROSS JOIN tasks t ON t.group_id = e.value CROSS JOIN segments s ON s.task = t.id
               WHERE t.state = 'scored'"""
    found: Pieces = {}
    for piece in db.execute(query, (array(groups),)):
        found.setdefault(piece[0], []).append(piece)
    return found


def _version_runs(pieces: Iterable[Piece], known: Mapping[int, Lineage]) -> tuple[VersionRun, ...]:
    """Sums the tokens of a group's segments (`pieces`) by version. Each sum comes with the version's step, or None for
    abandoned versions and for tokens that were not sampled."""
    num_tokens: dict[int | None, int] = {}
    for _, _, count, version in pieces:
        num_tokens[version] = num_tokens.get(version, 0) + count
    return tuple(
        VersionRun(count, None if version is None else known[version].living_step)
        for version, count in num_tokens.items()
    )


def _store(db: Database, step: int, from_version: int | None, pieces: Pieces, known: Mapping[int, Lineage]) -> int:
    """Stores a batch, counts its sampled tokens as trained, stale or abandoned, and returns the batch id."""
    max_staleness = db.terms.max_staleness
    column = {
        number: 0 if is_trainable(version.living_step, step, max_staleness) else 2 if version.is_abandoned else 1
        for number, version in known.items()
    }
    sums: dict[int, list[int]] = {}
    taken: set[int] = set()
    for _, task, num_tokens, number in itertools.chain.from_iterable(pieces.values()):
        tokens = sums.setdefault(task, [0, 0, 0])
        if number is not None:
            tokens[column[number]] += num_tokens
            taken.add(number)
    ages = (trained_staleness(known[number].living_step, step, max_staleness) or 0 for number in taken)
    totals = [sum(counts) for counts in zip(*sums.values(), strict=True)]
    batch = db.execute(
        "INSERT INTO batches (step, bound, state, from_version, num_trained_tokens, num_stale_tokens, "
        "num_abandoned_tokens, max_staleness, last_reward, claimed_at) "
        "VALUES (?, ?, 'claimed', ?, ?, ?, ?, ?, (SELECT MAX(seq) FROM rewards), ?)",
        (step, max_staleness, from_version, *totals, max(ages, default=0), db.wall_clock()),
    ).lastrowid
    assert batch is not None
    db.insert(
        "batch_members (batch, task, num_trained_tokens, num_stale_tokens, num_abandoned_tokens)",
        [(batch, task, *tokens) for task, tokens in sums.items()],
    )
    query = "UPDATE groups SET state = 'claimed', batch = ? WHERE id IN (SELECT value FROM json_each(?))"
    db.execute(query, (batch, array(pieces)))
    return batch


def load(db: Database, batch: int) -> Batch:
    """Loads a batch as it was claimed, sorted by group ordinal and member index."""
    query = "SELECT step, from_version, bound FROM batches WHERE id = ?"
    step, from_version, max_staleness = db.execute(query, (batch,)).fetchone()
    query = """SELECT t.group_id, t.member, t.id, j.seq, j.digest, r.parts, r.value
               FROM batch_members m CROSS JOIN tasks t ON t.id = m.task CROSS JOIN trajectories j ON j.task = t.id
               CROSS JOIN rewards r ON r.task = t.id WHERE m.batch = ?"""
    rows = sorted(db.execute(query, (batch,)))
    trajectories = db.bodies.load([(row[3], row[4]) for row in rows])
    ages = _ages(db, list(trajectories.values()), step, max_staleness)
    parts = {text: _PARTS.decode(text) for text in {row[5] for row in rows}}
    unproven = unproven_tasks(db, batch)
    members: dict[int, list[Member]] = {}
    for (group, index, task, seq, _, text, value), age in zip(rows, ages, strict=True):
        member = Member(task, index, trajectories[seq], parts[text], value, age, is_proven=task not in unproven)
        members.setdefault(group, []).append(member)
    query = "SELECT ordinal, id, source FROM groups WHERE batch = ?"
    siblings = sibling_rewards(db, batch)
    groups = [
        BatchGroup(group, ordinal, source, tuple(members[group]), *siblings.get(group, ()))
        for ordinal, group, source in sorted(db.execute(query, (batch,)))
    ]
    return Batch(step, from_version, tuple(groups), num_without_signal(db, step))


def _ages(db: Database, trajectories: Sequence[Trajectory], step: int, max_staleness: int) -> list[np.ndarray]:
    """Returns one array per trajectory: the staleness of each response token, or -1 if the token may not be trained.
    The arrays are views of one large array, because most trajectories are short."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    known = versions.lineage(db, {s.version for s in segments if s.version is not None})
    ages = {number: trained_staleness(version.living_step, step, max_staleness) for number, version in known.items()}
    values = [-1 if s.version is None or (age := ages[s.version]) is None else age for s in segments]
    of_all = np.repeat(np.array(values, np.int32), [len(s.tokens) for s in segments])
    ends = itertools.accumulate(trajectory.num_tokens for trajectory in trajectories)
    return [of_all[start:end] for start, end in itertools.pairwise((0, *ends))]


def _leave_out(db: Database, batch: int, tasks: Sequence[int]) -> None:
    """Counts the tokens of `tasks`, which an audit left out of the update, as audited instead of trained."""
    unique = sorted(set(tasks))
    query = """UPDATE batch_members SET num_audit_tokens = num_trained_tokens, num_trained_tokens = 0
               WHERE batch = ? AND task IN (SELECT value FROM json_each(?))"""
    found = db.execute(query, (batch, array(unique))).rowcount
    if found != len(unique):
        raise Refused(f"the audit left out tasks {unique}, but only {found} of these {len(unique)} are in the batch")
    if found:
        sum_up(db, batch)


def _compare(db: Database, batch: int, compared: Sequence[ComparedSegment]) -> None:
    """Stores the audit's results for segments of the batch, replacing earlier results."""
    query = """UPDATE segments SET num_compared = ?, num_off = ? WHERE task = ? AND start = ? AND version IS NOT NULL
               AND num_tokens >= ? AND task IN (SELECT task FROM batch_members WHERE batch = ?)"""
    for task, start, num_tokens, num_off in compared:
        if not 0 <= num_off <= num_tokens:
            raise Refused(
                f"the audit of task {task} compared {num_tokens} tokens, but reports num_off = {num_off}; it "
                f"must be 0 to {num_tokens}"
            )
        if db.execute(query, (num_tokens, num_off, task, start, num_tokens, batch)).rowcount != 1:
            raise Refused(
                f"the audit of task {task} compared {num_tokens} tokens of the segment at position {start}, but the "
                "batch has no sampled segment there with that many tokens"
            )


def sum_up(db: Database, batch: int) -> None:
    """Recomputes the token sums and the largest staleness of a batch after an audit left members out or a resume
    restored them."""
    step, max_staleness = db.execute("SELECT step, bound FROM batches WHERE id = ?", (batch,)).fetchone()
    db.execute(
        """UPDATE batches SET (num_trained_tokens, num_audit_tokens) = (
               SELECT SUM(num_trained_tokens), SUM(num_audit_tokens) FROM batch_members WHERE batch = :batch),
           max_staleness = (
               SELECT COALESCE(MAX(:step - v.step), 0) FROM batch_members m JOIN segments s ON s.task = m.task
               JOIN versions v ON v.number = s.version WHERE m.batch = :batch AND m.num_trained_tokens > 0
               AND v.abandoned = 0 AND v.step BETWEEN :oldest AND :step)
           WHERE id = :batch""",
        {"batch": batch, "step": step, "oldest": oldest_trainable_step(step, max_staleness)},
    )


def mark_trained(db: Database, batch: int) -> None:
    now = db.wall_clock()
    db.execute("UPDATE batches SET state = 'trained', trained_at = ? WHERE id = ?", (now, batch))
    db.execute("UPDATE groups SET state = 'trained', ended_at = ? WHERE batch = ?", (now, batch))


@dataclass(frozen=True)
class TrainerRecord:
    """One start of a trainer. Each restart has its own record and generation."""

    generation: int
    name: str
    host: str
    home: str
    began_at: float
    checkpoint_step: int | None
    """Step of the latest durable checkpoint; None: none was reported."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.began_at))
        return f"{self.name}{f' on {self.host}' if self.host else ''}, since {since}"


def latest_trainer(db: Database) -> TrainerRecord | None:
    """Returns the trainer that may change the run; None before the first trainer."""
    query = "SELECT generation, name, host, home, began_at, checkpoint_step FROM trainers ORDER BY generation DESC"
    row = db.execute(f"{query} LIMIT 1").fetchone()
    return None if row is None else TrainerRecord(*row)


def why_not_from_scratch(before: TrainerRecord | None, arrival: Arrival, step: int) -> str | None:
    """Returns why a trainer without a checkpoint may not undo a run that is at `step`; None if it may.

    `before` is the previous start of a trainer, and `arrival` the new one. If both have the same checkpoint folder
    (`home`), they are starts of the same trainer. If that trainer has never reported a checkpoint, it may undo the run,
    because it can only start over.
    """
    if before is None or arrival.from_scratch or step == 0:
        return None
    if before.checkpoint_step is None and before.home == arrival.home:
        return None
    if before.checkpoint_step is not None and before.home == arrival.home:
        return (
            f"the run is at step {step}, but its checkpoint of step {before.checkpoint_step} is gone from checkpoints/ "
            "in the trainer's folder: bring it back, or start over with --from-scratch, which undoes all steps"
        )
    last = "" if before.checkpoint_step is None else f", which has a checkpoint of step {before.checkpoint_step}"
    return (
        f"the run is at step {step}, but this trainer has no checkpoint; start it with --dir and the folder of the "
        f"previous trainer ({before}){last}, or with --from-scratch to undo all steps"
    )


def take_over(db: Database, arrival: Arrival, checkpoint_step: int | None) -> int:
    """Makes the arriving trainer the only one that may change the run; returns its generation (number of the start).
    `checkpoint_step` is the step of the checkpoint from which it starts; None: it has no checkpoint."""
    before = latest_trainer(db)
    generation = 1 if before is None else before.generation + 1
    db.execute(
        "INSERT INTO trainers (generation, name, host, home, began_at, checkpoint_step) VALUES (?, ?, ?, ?, ?, ?)",
        (generation, arrival.name, arrival.host, arrival.home, db.wall_clock(), checkpoint_step),
    )
    return generation
