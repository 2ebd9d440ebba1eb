"""Reports for people: trajectories, tasks with their history, evaluation results, counts, and the whole run.

Reports only read, so they can be made while the run continues. Every figure is computed from the tables. Text is
reported as tokens; decoding is left to the caller. A pruned trajectory (one whose bytes were deleted) is reported
without its tokens.

In the ledger, the step of a batch is the number of steps that were trained before it. Reports count steps from 1, as
the console and the metrics do: this module converts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from offbeat.ledger import bodies, versions, workers
from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Unknown
from offbeat.ledger.records import Counts, EvalGroup, EvalRound, GroupState, TokenCounts, TrajectoryCounts
from offbeat.ledger.versions import Versions
from offbeat.rules.groups import trained_staleness
from offbeat.trajectory import Reward, Trajectory

ROWS = """
SELECT j.seq, t.id, g.id, g.ordinal, t.member, g.purpose, g.source,
       CASE WHEN r.error IS NULL THEN g.state ELSE 'failed' END,
       COALESCE(b.step + 1, e.step), r.value, r.error, j.num_tokens,
       (SELECT MIN(version) FROM segments s WHERE s.task = t.id),
       (SELECT MAX(version) FROM segments s WHERE s.task = t.id),
       j.worker, j.ended_by, j.accepted_at, j.pruned, r.parts
FROM trajectories j JOIN tasks t ON t.id = j.task JOIN groups g ON g.id = t.group_id
LEFT JOIN batches b ON b.id = g.batch LEFT JOIN evals e ON e.id = g.eval LEFT JOIN rewards r ON r.task = t.id
"""
SPREAD = "ROW_NUMBER() OVER (PARTITION BY g.id, r.value ORDER BY j.seq DESC)"
"""Sort key: among answers with equal rewards, the latest answer of each group comes first, then the second latest of
each group, and so on. So a short list shows different prompts."""
ORDERS = {
    "latest": "ORDER BY j.seq DESC",
    "best": f"AND r.value IS NOT NULL ORDER BY r.value DESC, {SPREAD}, j.seq DESC",
    "worst": f"AND r.value IS NOT NULL ORDER BY r.value, {SPREAD}, j.seq DESC",
    "oldest": "ORDER BY j.seq",
}
SLICE = 500
PLAIN = ("group", "ordinal", "member", "purpose", "source", "state", "reason", "group_state", "group_reason")
"""Fields of `TaskDetail` that are copied unchanged from columns."""


class AnswersInHand(NamedTuple):
    num_train: int
    """Number of stored answers of training groups that are in no batch yet."""
    num_eval: int
    """Number of stored answers of the evaluation in progress."""
    num_eval_wanted: int
    """Number of answers that this evaluation needs in all; 0: no evaluation is in progress."""


@dataclass(frozen=True)
class TrajectoryRow:
    """One row of the list that `offbeat show` prints."""

    seq: int
    task: int
    group: int
    ordinal: int
    member: int
    purpose: str
    source: str
    state: str
    """State of the trajectory's group; `failed` if its reward failed, so that it is in no batch."""
    step: int | None
    """Step, counted from 1, whose batch holds the trajectory; None before it is claimed. For an evaluation: number of
    steps trained before the evaluation."""
    reward: float | None
    error: str | None
    num_tokens: int
    first_version: int | None
    last_version: int | None
    worker: str
    ended_by: str
    accepted_at: float
    is_pruned: bool
    parts: dict[str, float]
    """Parts of the reward by name, before weighting; empty without a reward."""


@dataclass(frozen=True)
class TrajectoryFilter:
    """Conditions on the trajectories to report; a field that is None sets no condition. A trajectory without a reward
    does not fulfil a condition on the reward."""

    purpose: str | None = None
    step: int | None = None
    """Step as in `TrajectoryRow.step`, counted from 1."""
    source: str | None = None
    worker: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    failed: bool | None = None
    """True: only trajectories whose reward failed."""

    @property
    def conditions(self) -> str:
        """SQL conditions of the fields that are set, for a query like `ROWS` with the fields as parameters."""
        found = [f"AND {CONDITIONS[name]}" for name, value in vars(self).items() if value is not None]
        return " ".join(found)


CONDITIONS = {
    "purpose": "g.purpose = :purpose",
    "step": "COALESCE(b.step + 1, e.step) = :step",
    "source": "g.source = :source",
    "worker": "j.worker = :worker",
    "min_reward": "r.value >= :min_reward",
    "max_reward": "r.value <= :max_reward",
    "failed": "(r.error IS NOT NULL) = :failed",
}
EVERYTHING = TrajectoryFilter()


@dataclass(frozen=True)
class Event:
    """Something that happened to a task. `at` is wall time; None: the time was not recorded."""

    at: float | None
    what: str


@dataclass(frozen=True)
class TokenRun:
    """A segment of a trajectory (consecutive tokens of one version), with its staleness at the step of its batch."""

    start: int
    num_tokens: int
    version: int | None
    """Version that sampled the tokens; None: the tokens were given."""
    step: int | None
    """Step of `version`."""
    is_abandoned: bool = False
    staleness: int | None = None
    """Staleness in its batch; None: not trained (masked), or not claimed yet."""


@dataclass(frozen=True)
class TaskDetail:
    """A task with its trajectory and history."""

    task: int
    group: int
    ordinal: int
    member: int
    purpose: str
    source: str
    state: str
    reason: str | None
    group_state: str
    group_reason: str | None
    prompt: np.ndarray
    problem: dict[str, Any]
    trajectory: Trajectory | None
    """Trajectory of the task or, if the task has none yet, its stored partial; None: neither is stored, or the
    trajectory was pruned."""
    is_pruned: bool
    reward: float | None
    rewards: tuple[Reward, ...]
    error: str | None
    step: int | None
    """Step as in `TrajectoryRow.step`, counted from 1."""
    segments: tuple[TokenRun, ...] = ()
    history: tuple[Event, ...] = ()


MAX_VERSIONS = 8


@dataclass(frozen=True)
class Producer:
    """Numbers of trajectories and tokens that one worker has produced."""

    worker: str
    num_trajectories: int
    num_tokens: int
    """Sampled tokens."""
    seconds: float
    """Wall time between the worker's first and its last accepted trajectory."""
    num_leased: int
    num_partials: int = 0
    """Number of partials that it handed back."""
    num_failed: int = 0
    """Number of its failed attempts."""
    num_compared: int = 0
    """Number of its tokens whose log-probs an audit recomputed."""
    num_off: int = 0
    """Number of compared tokens whose recomputed log-prob differs too much from the worker's."""

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled tokens per second; None if `seconds` is 0, for example after a single trajectory."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class OldestLease:
    task: int
    worker: str
    seconds: float
    """Age of the lease in wall time."""


@dataclass(frozen=True)
class VersionMade:
    """A version, and the number of tokens sampled from it in accepted trajectories."""

    number: int
    step: int
    is_abandoned: bool
    num_tokens: int


@dataclass(frozen=True)
class RunReport:
    counts: Counts
    step: int | None
    """Step, counted from 1, that is trained next; None before the first version."""
    version: int | None
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Number of training tasks by state."""
    producers: tuple[Producer, ...] = ()
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of trained tokens by staleness."""
    waits_for: str = ""
    oldest_lease: OldestLease | None = None
    num_partials: int = 0
    """Number of partials that wait to be continued or are being continued."""
    suspects: Mapping[int, int] = field(default_factory=dict)
    """Number of unfinished tasks by the number (at least 1) of workers that vanished while they held the task."""
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """Workers that get no tasks for a while, with the remaining time and the reason."""
    num_abandoned_versions: int = 0
    versions: tuple[VersionMade, ...] = ()
    """The latest `MAX_VERSIONS` versions, oldest first."""


class Reports(Versions):
    def list_trajectories(
        self, limit: int, order: str = "latest", which: TrajectoryFilter = EVERYTHING, after: int = 0
    ) -> list[TrajectoryRow]:
        """Returns up to `limit` trajectories that meet the conditions `which` and whose `seq` (number in order of
        acceptance) is above `after`, sorted by `order`, a key of `ORDERS`."""
        query = f"{ROWS} WHERE j.seq > :after {which.conditions} {ORDERS[order]} LIMIT :limit"
        found = self.execute(query, {**vars(which), "limit": limit, "after": after})
        return [_row(row) for row in found]

    def trajectory_rows(self, numbers: Iterable[int]) -> list[TrajectoryRow]:
        """Returns the trajectories with the given `seq`, oldest first, as they are now."""
        query = f"{ROWS} WHERE j.seq IN (SELECT value FROM json_each(?)) ORDER BY j.seq"
        return [_row(row) for row in self.execute(query, (array(numbers),))]

    def rows_of_tasks(self, tasks: Iterable[int]) -> list[TrajectoryRow]:
        """Returns the trajectories of tasks; those of tasks without one are left out."""
        query = f"{ROWS} WHERE t.id IN (SELECT value FROM json_each(?))"
        return [_row(row) for row in self.execute(query, (array(tasks),))]

    def last_trajectory(self) -> int:
        """Returns the `seq` of the latest trajectory; 0 if there is none."""
        return _one(self, "SELECT COALESCE(MAX(seq), 0) FROM trajectories")

    def num_abandoned_versions(self) -> int:
        """Returns how many versions resumes have abandoned; it grows when a resume undoes steps."""
        return _one(self, "SELECT COUNT(*) FROM versions WHERE abandoned = 1")

    def walk_trajectories(
        self, which: TrajectoryFilter = EVERYTHING
    ) -> Iterator[tuple[TrajectoryRow, Trajectory | None]]:
        """Yields pairs of a row and its trajectory (None if it was pruned), in order of acceptance. Loads `SLICE`
        trajectories at a time."""
        after = 0
        while found := self.list_trajectories(SLICE, "oldest", which, after):
            yield from zip(found, self.load_trajectories(found), strict=True)
            after = found[-1].seq

    def load_trajectories(self, rows: list[TrajectoryRow]) -> list[Trajectory | None]:
        """Loads the trajectories of `rows`; None for each one that was pruned."""
        wanted = array([row.seq for row in rows if not row.is_pruned])
        query = "SELECT seq, digest FROM trajectories WHERE seq IN (SELECT value FROM json_each(?))"
        loaded = self.bodies.load(self.execute(query, (wanted,)).fetchall())
        return [loaded.get(row.seq) for row in rows]

    def load_problems(self, rows: list[TrajectoryRow]) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """Returns, for each of `rows`, the prompt's tokens and the problem as the reward function gets it."""
        query = "SELECT id, prompt, problem FROM groups WHERE id IN (SELECT value FROM json_each(?))"
        found = self.execute(query, (array({row.group for row in rows}),))
        known = {group: (np.frombuffer(prompt, np.int32), json.loads(problem)) for group, prompt, problem in found}
        return [known[row.group] for row in rows]

    def task_detail(self, task: int) -> TaskDetail:
        """Returns a task with its trajectory and history."""
        query = """SELECT g.id, g.ordinal, t.member, g.purpose, g.source, t.state, t.reason, g.state, g.reason,
                          g.prompt, g.problem, j.seq, j.digest, j.pruned, r.value, r.parts, r.error, b.step,
                          b.bound, e.step
                   FROM tasks t JOIN groups g ON g.id = t.group_id LEFT JOIN trajectories j ON j.task = t.id
                   LEFT JOIN rewards r ON r.task = t.id LEFT JOIN batches b ON b.id = g.batch
                   LEFT JOIN evals e ON e.id = g.eval WHERE t.id = ?"""
        row = self.execute(query, (task,)).fetchone()
        if row is None:
            (last,) = self.execute("SELECT MAX(id) FROM tasks").fetchone()
            known = f"tasks 1 to {last}" if last else "no tasks yet"
            raise Unknown(f"task {task} does not exist; this run has {known}")
        prompt, problem, seq, digest, is_pruned, value, parts, error, step, max_staleness, evaluated_step = row[9:]
        trajectory = None if digest is None or is_pruned else self.bodies.load([(seq, digest)])[seq]
        if digest is None:
            query = "SELECT digest, body FROM partials WHERE task = ? AND state = 'kept'"
            trajectory = bodies.load(self.blobs, *(self.execute(query, (task,)).fetchone() or (None, None)))
        return TaskDetail(
            task=task,
            **dict(zip(PLAIN, row[:9], strict=True)),
            prompt=np.frombuffer(prompt, np.int32),
            problem=json.loads(problem),
            trajectory=trajectory,
            is_pruned=bool(is_pruned),
            reward=value,
            rewards=() if parts is None else msgspec.json.decode(parts, type=tuple[Reward, ...]),
            error=error,
            step=evaluated_step if step is None else step + 1,
            segments=_segments(self, task, trajectory, step, max_staleness),
            history=_history(self, task, row[0]),
        )

    def counts(self) -> Counts:
        """Counts groups, trajectories and tokens by what became of them; each generated token is counted once."""
        groups: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        trajectories: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        wasted: Counter[str] = Counter()
        columns = "state, purpose, reason, COUNT(*), SUM(num_trajectories), SUM(num_scored), SUM(num_sampled_tokens)"
        query = f"""SELECT {columns} FROM groups WHERE state <> 'open' GROUP BY state, purpose, reason
                    UNION ALL SELECT {columns} FROM groups WHERE state = 'open' GROUP BY state, purpose, reason"""
        for state, purpose, reason, num_groups, num_trajectories, num_scored, num_tokens in self.execute(query):
            tokens["generated"] += num_tokens
            if purpose == "eval":
                trajectories["evaluated"] += num_trajectories
                tokens["evaluated"] += num_tokens
                continue
            groups[state] += num_groups
            trajectories["accepted"] += num_trajectories
            match GroupState(state):
                case GroupState.TRAINED:
                    trajectories["trained"] += num_scored
                    trajectories["dropped"] += num_trajectories - num_scored
                case GroupState.DROPPED:
                    dropped[reason] += num_groups
                    trajectories["dropped"] += num_trajectories
                    wasted[reason] += num_tokens
                case _:
                    trajectories["waiting"] += num_trajectories
                    tokens["waiting"] += num_tokens
        trained, stale, abandoned, audit, oldest = self.execute(
            "SELECT COALESCE(SUM(num_trained_tokens), 0), COALESCE(SUM(num_stale_tokens), 0), "
            "COALESCE(SUM(num_abandoned_tokens), 0), COALESCE(SUM(num_audit_tokens), 0), "
            "COALESCE(MAX(max_staleness), 0) FROM batches WHERE state = 'trained'"
        ).fetchone()
        left_out = """SELECT t.reason, SUM(j.num_sampled_tokens) FROM tasks t
                      CROSS JOIN groups g ON g.id = t.group_id CROSS JOIN trajectories j ON j.task = t.id
                      WHERE t.state = 'failed' AND g.state = 'trained'
                      GROUP BY t.reason"""
        wasted.update(dict(self.execute(left_out)))  # failed members of groups that were trained
        query = """SELECT state, reason, SUM(num_sampled_tokens) FROM partials WHERE state <> 'continued'
                   GROUP BY state, reason"""
        for state, reason, num_tokens in self.execute(query):
            tokens["generated"] += num_tokens
            (tokens if state == "kept" else wasted)["partial" if state == "kept" else reason] += num_tokens
        return Counts(
            trajectories=TrajectoryCounts(**trajectories),
            tokens=TokenCounts(
                generated=tokens["generated"],
                trained=trained,
                masked={"stale": stale, "abandoned": abandoned, "audit": audit},
                waiting=tokens["waiting"],
                partial=tokens["partial"],
                wasted={reason: count for reason, count in wasted.items() if count},
                evaluated=tokens["evaluated"],
            ),
            groups=dict(groups),
            dropped_groups=dict(dropped),
            failed_tasks=dict(
                self.execute("SELECT reason, COUNT(*) FROM tasks WHERE state = 'failed' GROUP BY reason")
            ),
            num_versions=int(self.execute("SELECT COUNT(*) FROM versions").fetchone()[0]),
            max_staleness_trained=oldest,
        )

    def answers_in_hand(self) -> AnswersInHand:
        """Counts the stored answers that are in no batch yet, and those of the evaluation in progress."""
        train = """SELECT COALESCE(SUM(num_trajectories), 0) FROM groups
                   WHERE (state = 'open' OR state = 'ready') AND purpose = 'train'"""
        evaluation = """SELECT COALESCE(SUM(num_trajectories), 0), COALESCE(SUM(size), 0) FROM groups
                        WHERE eval = (SELECT eval FROM groups WHERE state = 'open' AND purpose = 'eval'
                                      ORDER BY eval LIMIT 1)"""
        return AnswersInHand(_one(self, train), *self.execute(evaluation).fetchone())

    def waiting_for(self) -> str:
        """Describes, in one line for error messages and reports, how far the groups of the next batch are."""
        query = """SELECT state, COUNT(*) FROM groups WHERE (state = 'open' OR state = 'ready') AND purpose = 'train'
                   GROUP BY state"""
        states = dict(self.execute(query))
        open_tasks, unscored = self.execute(
            "SELECT SUM(t.state = 'open'), SUM(t.state = 'accepted') FROM groups g JOIN tasks t ON t.group_id = g.id "
            "WHERE g.state = 'open'"
        ).fetchone()
        workers = self.execute(
            "SELECT worker, COUNT(*) FROM tasks WHERE state = 'leased' GROUP BY worker ORDER BY worker"
        )
        leased = ", ".join(f"{count} by {worker}" for worker, count in workers) or "none"
        return (
            f"groups ready: {states.get('ready', 0)}, unfinished: {states.get('open', 0)}; tasks leased: {leased}; "
            f"open: {open_tasks or 0}; without reward: {unscored or 0}"
        )

    def eval_results(self, step: int | None = None) -> list[EvalRound]:
        """Returns the evaluation rounds of `step`, or all if None, in the order in which they were opened."""
        query = "SELECT id, step, abandoned FROM evals WHERE ? IS NULL OR step = ? ORDER BY id"
        return [
            EvalRound(at, bool(is_abandoned), _eval_groups(self, round_id))
            for round_id, at, is_abandoned in self.execute(query, (step, step)).fetchall()
        ]

    def eval_round(self, step: int) -> EvalRound | None:
        """Returns the evaluation round of `step`; None if it has none, or only rounds that a resume abandoned."""
        return next((found for found in self.eval_results(step) if not found.is_abandoned), None)

    def report(self) -> RunReport:
        """Returns a report of the whole run, read from one snapshot."""
        with self.snapshot():
            newest = self.latest_version()
            return RunReport(
                counts=self.counts(),
                step=newest.step + 1 if newest else None,
                version=newest.number if newest else None,
                tasks=_tasks(self),
                producers=_producers(self),
                staleness=_staleness(self),
                waits_for=self.waiting_for(),
                oldest_lease=_oldest_lease(self),
                num_partials=_one(self, "SELECT COUNT(*) FROM partials WHERE state = 'kept'"),
                suspects=_suspects(self),
                set_aside=_set_aside(self),
                num_abandoned_versions=self.num_abandoned_versions(),
                versions=_versions(self),
            )


def _row(row: tuple[Any, ...]) -> TrajectoryRow:
    return TrajectoryRow(*(*row[:-2], bool(row[-2]), _by_name(row[-1])))


def _segments(
    db: Database, task: int, trajectory: Trajectory | None, step: int | None, max_staleness: int | None
) -> tuple[TokenRun, ...]:
    query = "SELECT start, num_tokens, version FROM segments WHERE task = ? ORDER BY start"
    segments = db.execute(query, (task,)).fetchall()
    if not segments and trajectory is not None:
        segments = [(s.start, len(s.tokens), s.version) for s in trajectory.segments]
    known = versions.lineage(db, {number for _, _, number in segments if number is not None})
    found = []
    for start, num_tokens, number in segments:
        line = None if number is None else known[number]
        if line is None:
            found.append(TokenRun(start, num_tokens, None, None))
        else:
            age = None if step is None else trained_staleness(line.living_step, step, max_staleness or 0)
            found.append(TokenRun(start, num_tokens, number, line.step, line.is_abandoned, age))
    return tuple(found)


def _history(db: Database, task: int, group: int) -> tuple[Event, ...]:
    """Returns the events of a task in order; those without a recorded time come right after its admission."""
    state, ended_at, admitted_at, again, reissued = db.execute(
        "SELECT g.state, g.ended_at, g.admitted_at, g.reissue_of, (SELECT id FROM groups n WHERE n.reissue_of = g.id) "
        "FROM groups g WHERE g.id = ?",
        (group,),
    ).fetchone()
    events = [Event(admitted_at, "issued" + (f" again in place of group {again}" if again is not None else ""))]
    events += _task_events(db, task)
    query = """SELECT b.step, b.state, b.claimed_at, b.trained_at, b.from_version, m.num_trained_tokens,
                      m.num_audit_tokens FROM batch_members m JOIN batches b ON b.id = m.batch
               WHERE m.task = ? ORDER BY b.id"""
    for step, batch, claimed_at, trained_at, number, num_trained, num_audited in db.execute(query, (task,)):
        undone = " (undone by a resume)" if batch == "undone" else ""
        events.append(Event(claimed_at, f"claimed for step {step + 1}{undone}"))
        if trained_at is not None:
            left_out = f"; an audit left out {num_audited} tokens" if num_audited else ""
            trained = f"trained at step {step + 1} from version {number}: {num_trained} tokens{left_out}{undone}"
            events.append(Event(trained_at, trained))
    if state == "dropped":
        events.append(
            Event(ended_at, "its group was dropped" + (f"; issued again as group {reissued}" if reissued else ""))
        )
    return tuple(sorted(events, key=lambda event: event.at or admitted_at))


def _task_events(db: Database, task: int) -> list[Event]:
    worker, fence, leased_at, num_failures, num_losses, detail = db.execute(
        "SELECT worker, fence, leased_at, num_failures, num_losses, detail FROM tasks WHERE id = ?", (task,)
    ).fetchone()
    events = []
    if fence:
        before = f"; number of earlier leases: {fence - 1}" if fence > 1 else ""
        events.append(Event(leased_at, f"leased by {worker}{before}"))
    if num_failures or num_losses:
        why = f": {detail}" if detail else ""
        events.append(
            Event(None, f"failed attempts: {num_failures}; workers lost while they held the task: {num_losses}{why}")
        )
    query = "SELECT stored_at, worker, num_sampled_tokens, state, reason FROM partials WHERE task = ? ORDER BY seq"
    for at, who, num_tokens, state, reason in db.execute(query, (task,)):
        fate = f"{state} ({reason})" if reason else state
        events.append(Event(at, f"handed back unfinished by {who} after {num_tokens} tokens: {fate}"))
    query = "SELECT accepted_at, worker, ended_by, num_tokens FROM trajectories WHERE task = ?"
    for at, who, ended_by, num_tokens in db.execute(query, (task,)):
        events.append(Event(at, f"accepted from {who}: {num_tokens} tokens, ended by {ended_by}"))
    query = "SELECT scored_at, value, error FROM rewards WHERE task = ?"
    for at, value, error in db.execute(query, (task,)):
        events.append(Event(at, f"scored: {value:g}" if error is None else f"could not be scored: {error}"))
    return events


def _eval_groups(db: Database, round_id: int) -> tuple[EvalGroup, ...]:
    rewards: dict[int, list[float]] = {}
    query = """SELECT t.group_id, r.value
               FROM groups g JOIN tasks t ON t.group_id = g.id JOIN rewards r ON r.task = t.id
               WHERE g.eval = ? AND t.state = 'scored' ORDER BY t.id"""
    for group, value in db.execute(query, (round_id,)):
        rewards.setdefault(group, []).append(value)
    query = "SELECT id, ordinal, source, state, reason, num_failed, size FROM groups WHERE eval = ? ORDER BY ordinal"
    return tuple(
        EvalGroup(group, ordinal, source, GroupState(state), reason, tuple(rewards.get(group, ())), num_failed, size)
        for group, ordinal, source, state, reason, num_failed, size in db.execute(query, (round_id,))
    )


def _tasks(db: Database) -> dict[str, int]:
    query = """SELECT t.state, COUNT(*) FROM tasks t JOIN groups g ON g.id = t.group_id
               WHERE g.purpose = 'train' GROUP BY t.state ORDER BY t.state"""
    return dict(db.execute(query))


def _one(db: Database, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _oldest_lease(db: Database) -> OldestLease | None:
    query = "SELECT id, worker, leased_at FROM tasks WHERE state = 'leased' ORDER BY leased_at, id LIMIT 1"
    row = db.execute(query).fetchone()
    return None if row is None else OldestLease(row[0], row[1], max(0.0, db.wall_clock() - row[2]))


def _suspects(db: Database) -> dict[int, int]:
    query = """SELECT num_losses, COUNT(*) FROM tasks WHERE num_losses > 0 AND state IN ('open', 'leased')
               GROUP BY num_losses ORDER BY num_losses"""
    return dict(db.execute(query))


def _set_aside(db: Database) -> dict[str, str]:
    query = "SELECT worker, why, until FROM set_aside WHERE until > ? ORDER BY seq"
    now = db.wall_clock()
    return {worker: f"for another {until - now:.0f} s, {why}" for worker, why, until in db.execute(query, (now,))}


def _versions(db: Database) -> tuple[VersionMade, ...]:
    query = "SELECT number, step, abandoned FROM versions ORDER BY number DESC LIMIT ?"
    latest = db.execute(query, (MAX_VERSIONS,)).fetchall()[::-1]
    query = "SELECT version, SUM(num_tokens) FROM segments WHERE version >= ? GROUP BY version"
    tokens = dict(db.execute(query, (latest[0][0],))) if latest else {}
    return tuple(VersionMade(number, step, bool(gone), tokens.get(number, 0)) for number, step, gone in latest)


def _producers(db: Database) -> tuple[Producer, ...]:
    leased = dict(db.execute("SELECT worker, COUNT(*) FROM tasks WHERE state = 'leased' GROUP BY worker"))
    partials = dict(db.execute("SELECT worker, COUNT(*) FROM partials GROUP BY worker"))
    failed = dict(db.execute("SELECT worker, COUNT(*) FROM failures GROUP BY worker"))
    compared = workers.num_compared(db)
    query = """SELECT worker, COUNT(*), SUM(num_sampled_tokens), MAX(accepted_at) - MIN(accepted_at)
               FROM trajectories GROUP BY worker"""
    made = {worker: (num, tokens, seconds) for worker, num, tokens, seconds in db.execute(query)}
    return tuple(
        Producer(
            worker,
            *made.get(worker, (0, 0, 0.0)),
            num_leased=leased.get(worker, 0),
            num_partials=partials.get(worker, 0),
            num_failed=failed.get(worker, 0),
            num_compared=compared.get(worker, (0, 0))[0],
            num_off=compared.get(worker, (0, 0))[1],
        )
        for worker in sorted({*made, *leased, *partials, *failed})
    )


def _staleness(db: Database) -> dict[int, int]:
    """Returns the number of trained tokens by staleness. Stale and abandoned tokens were masked, so they do not
    count."""
    query = """SELECT v.step, b.step, b.bound, SUM(s.num_tokens)
               FROM batches b JOIN batch_members m ON m.batch = b.id
               JOIN segments s ON s.task = m.task JOIN versions v ON v.number = s.version
               WHERE b.state = 'trained' AND m.num_trained_tokens > 0 AND v.abandoned = 0
               GROUP BY b.id, v.step"""
    found: Counter[int] = Counter()
    for token_step, step, max_staleness, num_tokens in db.execute(query):
        age = trained_staleness(token_step, step, max_staleness)
        if age is not None:
            found[age] += num_tokens
    return dict(sorted(found.items()))


def _by_name(parts: str | None) -> dict[str, float]:
    """Returns the stored parts of a reward as sums by name."""
    found: dict[str, float] = {}
    for part in () if parts is None else msgspec.json.decode(parts, type=tuple[Reward, ...]):
        found[part.name] = found.get(part.name, 0.0) + part.value
    return found
