"""Submissions: trajectories, whole or partial, that workers hand in.

Guarantees: a task never has more than one trajectory. Submitting the same bytes again changes nothing; other bytes
under the same fence are a conflict, and an old fence is refused. A refused submission does not affect the others.

Trajectories and partials (unfinished trajectories) pass the same checks. Prompt and `max_new_tokens` are those of the
task. The trajectory begins with the partial that its task was leased with, if any. All its tokens are sampled, unless
its task is an episode, and each sampled segment names a published version. If the task requires a version
(`require_version`), all segments are of that version's step; otherwise at least one segment's version is within the
staleness bound at the run's current step. A whole trajectory must also have ended as it claims: an answer by a stop
token or at full length, an episode mostly behind a finished turn.

Each segment is stored with the worker that submitted it first. After a task has failed or was dropped, a partial is
refused, but a whole trajectory is stored, and its tokens count as wasted. It need not begin with the task's partial,
and its versions may be of any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from offbeat.ledger import bodies, partials, versions
from offbeat.ledger.bodies import store
from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, LedgerError, Refused, Unknown
from offbeat.ledger.leasing import check_lease, sampling_of
from offbeat.ledger.records import Outcome, Submission
from offbeat.rules.groups import is_trainable
from offbeat.trajectory import ANSWER_ENDS, End, EpisodeRecord, Origin, Sampling, Trajectory

ANSWER = EpisodeRecord(num_turns=1)
"""What the tables say of a trajectory that is no episode."""
ENDED = ("failed", "dropped")
"""States of tasks for which a trajectory arrives too late."""


class Issued(NamedTuple):
    """Row of the query `ISSUED`: a task for which a submission arrived, with its stored trajectory and latest partial.
    States are plain strings to save time, because a row is built for every trajectory of a run."""

    task: int
    state: str
    worker: str | None
    fence: int
    group: int
    prompt: bytes
    sampling: str
    source: str
    require_step: int | None
    digest: bytes | None
    """Digest of the task's trajectory; None before it is stored."""
    ended_fence: int | None
    ended_worker: str | None
    partial_digest: bytes | None
    """Digest of the task's latest partial in any state; None: no partial was stored."""
    partial_fence: int | None
    partial_worker: str | None
    partial_state: str | None
    partial_body: bytes | None


ISSUED = """
SELECT t.id, t.state, t.worker, t.fence, g.id, g.prompt, g.sampling, g.source, g.require_step,
       j.digest, j.fence, j.worker, p.digest, p.fence, p.worker, p.state, p.body
FROM tasks t JOIN groups g ON g.id = t.group_id LEFT JOIN trajectories j ON j.task = t.id
LEFT JOIN partials p ON p.seq = (SELECT MAX(seq) FROM partials WHERE task = t.id)
WHERE t.id IN (SELECT value FROM json_each(?))
"""
TRAJECTORIES = (
    "trajectories (task, trajectory_index, digest, ended_by, num_tokens, num_sampled_tokens, num_turns, wait_ms, "
    "claimed, worker, fence, accepted_at, body)"
)


class Fresh(NamedTuple):
    """A submission that passed all checks and will be stored: `body` is its encoding, `digest` the hash of `body`."""

    submission: Submission
    body: bytes
    digest: bytes
    outcome: Outcome


class SubmissionValidator:
    """Checks the submissions of a transaction one by one; collects those to store in `fresh`, by task."""

    def __init__(self, db: Database, submissions: Sequence[Submission]):
        self.db = db
        rows = db.execute(ISSUED, (array([s.trajectory.task for s in submissions]),))
        self.issued = {row[0]: row for row in map(Issued._make, rows)}
        numbers = {s.version for t, _, _ in submissions for s in t.segments if s.version is not None}
        self.known, self.step = versions.lineage_and_step(db, numbers)
        self.trainable = {
            number
            for number, line in self.known.items()
            if is_trainable(line.living_step, self.step, db.terms.max_staleness)
        }
        self.fresh: dict[int, Fresh] = {}

    def take(self, submission: Submission) -> Outcome:
        """Returns the outcome of a submission and adds it to `fresh` if it must be stored; raises if it is refused."""
        trajectory, worker, fence = submission
        number = trajectory.task
        task = self.issued.get(number)
        if task is None:
            raise Unknown(f"task {number} does not exist in this run")
        body = trajectory.encode()
        digest = blake3(body).digest()
        earlier = self.fresh.get(number)
        if earlier is not None and earlier.submission.fence == fence:
            return _again(submission, digest, earlier.submission.worker, earlier.digest)
        if task.ended_fence == fence:
            return _again(submission, digest, task.ended_worker, task.digest)
        if task.partial_fence == fence:
            return _again(submission, digest, task.partial_worker, task.partial_digest)
        check_lease(number, worker, fence, holder=task.worker, newest=task.fence)
        if task.digest is not None:
            raise Fenced(f"task {number} has ended: its trajectory was submitted under lease {task.ended_fence}")
        is_late, is_partial = task.state in ENDED, trajectory.end is None
        if is_late and is_partial:
            raise Fenced(f"task {number} has ended ({task.state}), so its partial trajectory is no longer needed")
        if problem := self._problem(trajectory, task, is_late):
            raise Refused(f"trajectory of task {number}: {problem}")
        outcome = Outcome.PARTIAL if is_partial else Outcome.LATE if is_late else Outcome.STORED
        self.fresh[number] = Fresh(submission, body, digest, outcome)
        return outcome

    def _problem(self, trajectory: Trajectory, task: Issued, is_late: bool) -> str | None:
        """Returns why a trajectory may not be stored; None if it may."""
        if trajectory.index != 0:
            return f"its index is {trajectory.index}; it must be 0, because a task has one trajectory"
        if trajectory.max_version_drop != 0:
            return f"its max_version_drop is {trajectory.max_version_drop}; it must be 0, because versions only rise"
        if trajectory.prompt.tobytes() != task.prompt:
            return "its prompt differs from the prompt of its task"
        sampling = sampling_of(task.sampling)
        if trajectory.max_new_tokens != sampling.max_new_tokens:
            return f"its max_new_tokens is {trajectory.max_new_tokens}, but the task has {sampling.max_new_tokens}"
        is_episode = task.source in self.db.terms.episodes
        if (trajectory.episode is not None) != is_episode:
            return "it has no notes, but its task is an episode" if is_episode else "it has notes, but is no episode"
        if is_episode and trajectory.end is None and trajectory.episode != EpisodeRecord():
            return "it is unfinished, so it may not have notes yet: they come with its end"
        problem = _episode_end_problem(trajectory, sampling) if is_episode else _end_problem(trajectory, sampling)
        if problem:
            return problem
        if task.partial_state == "kept" and not is_late and not self._continues(trajectory, task):
            return "it does not begin with the partial trajectory that is stored for its task"
        numbers: list[int] = []
        for segment in trajectory.segments:
            if segment.origin is not Origin.SAMPLED:
                if is_episode:
                    continue
                return f"its tokens at position {segment.start} are not sampled; the task allows only sampled tokens"
            if segment.version is None or segment.version not in self.known:
                return f"it was sampled from version {segment.version}, which was never published"
            if (lag := segment.version - (segment.kv_version or 0)) > self.db.terms.max_kv_lag:
                return (
                    f"its KV cache is {lag} versions older than its weights; the limit is {self.db.terms.max_kv_lag} "
                    '(rollout.kv_lag if rollout.kv = "stale", else 0)'
                )
            numbers.append(segment.version)
        if not numbers:
            return "it has no sampled token"
        return None if is_late else self._age_problem(numbers, task.require_step)  # a late one is never trained

    def _continues(self, trajectory: Trajectory, task: Issued) -> bool:
        prefix = bodies.load(self.db.blobs, task.partial_digest, task.partial_body)
        return prefix is None or trajectory.segments[: len(prefix.segments)] == prefix.segments

    def _age_problem(self, numbers: Sequence[int], require_step: int | None) -> str | None:
        if require_step is None:
            if not self.trainable.isdisjoint(numbers):
                return None
            number, newest = numbers[-1], self.known[numbers[-1]]
            if newest.is_abandoned:
                return f"it was sampled from version {number}, which a resume has abandoned"
            return (
                f"it was sampled from version {number} of step {newest.step}, but the run is at step {self.step}: "
                f"too old for max_staleness = {self.db.terms.max_staleness}"
            )
        for number in numbers:
            version = self.known[number]
            if version.is_abandoned:
                return f"it was sampled from version {number}, which a resume has abandoned"
            if version.step != require_step:
                at_step = f"version {number} of step {version.step}"
                return f"it was sampled from {at_step}, but the task requires step {require_step}"
        return None


def _end_problem(trajectory: Trajectory, sampling: Sampling) -> str | None:
    """Returns why an answer cannot have ended as it claims; None if it can."""
    if trajectory.end is not None and trajectory.end not in ANSWER_ENDS:
        return f"it claims to have ended by {trajectory.end.value}, but its task has no environment"
    if trajectory.end is End.STOP and trajectory.num_tokens:
        last = int(trajectory.segments[-1].tokens[-1])
        if last not in sampling.stop_token_ids:
            return f"it claims to have ended by a stop token, but its last token, {last}, is not one"
    if trajectory.end is End.LENGTH and trajectory.num_tokens < sampling.max_new_tokens:
        return f"it claims to have ended by length, but has {trajectory.num_tokens} of {sampling.max_new_tokens} tokens"
    return None


def _episode_end_problem(trajectory: Trajectory, sampling: Sampling) -> str | None:
    """Returns why an episode cannot have ended as it claims; None if it can. Only after a finished turn may it end by
    anything but length."""
    if trajectory.end in (None, End.LENGTH, End.TIME, End.OVERFLOW) or not trajectory.segments:
        return None
    last = trajectory.segments[-1]
    if last.origin is not Origin.SAMPLED or int(last.tokens[-1]) not in sampling.stop_token_ids:
        return f"it claims to have ended by {trajectory.end}, but its last token does not end a turn"
    return None


class Submissions(Database):
    @transactional
    def submit(self, submissions: Sequence[Submission]) -> list[Outcome | LedgerError]:
        """Stores trajectories and partials; returns, for each, its outcome or the error with which it was refused."""
        validator = SubmissionValidator(self, submissions)
        outcomes: list[Outcome | LedgerError] = []
        for submission in submissions:
            try:
                outcomes.append(validator.take(submission))
            except LedgerError as error:
                outcomes.append(error)
        whole, unfinished = [], []
        for number, fresh in validator.fresh.items():
            task = validator.issued[number]
            wasted = task.partial_digest if task.partial_state == "wasted" else None
            if wasted is not None and partials.begins_with(fresh.submission.trajectory, wasted):
                partials.rescue(self, number)
            if fresh.outcome is Outcome.PARTIAL:
                unfinished.append((fresh, task))
            else:
                self.bodies.keep(fresh.digest, fresh.body)
                whole.append((fresh, task))
        if whole:
            _store(self, whole)
        for (submission, body, digest, _), task in unfinished:
            partials.keep(self, *submission, body, digest)
            if task.state == "leased":
                self.execute("UPDATE tasks SET state = 'open' WHERE id = ?", (task.task,))
                self.execute("UPDATE groups SET num_open = num_open + 1 WHERE id = ?", (task.group,))
        return outcomes


def _again(submission: Submission, digest: bytes, worker: str | None, stored: bytes | None) -> Outcome:
    """Compares a submission with the earlier one under the same fence. `worker` sent the earlier one, and `stored` is
    its digest. Returns `REPEATED` if both are equal and of the same worker; raises if not."""
    task, fence = submission.trajectory.task, submission.fence
    if worker != submission.worker:
        raise Forbidden(f"lease {fence} of task {task} belongs to {worker}, not to {submission.worker}")
    if stored != digest:
        raise Conflict(f"a different trajectory is already stored for lease {fence} of task {task}")
    return Outcome.REPEATED


def _store(db: Database, fresh: Sequence[tuple[Fresh, Issued]]) -> None:
    now = db.wall_clock()
    rows, segments = [], []
    added: dict[int, list[int]] = {}
    for ((trajectory, worker, fence), body, digest, _), issued in fresh:
        task, num_sampled = trajectory.task, 0
        by = [] if issued.partial_digest is None else partials.contributors(db, task)
        for s in trajectory.segments:
            num_tokens = len(s.tokens)
            num_sampled += num_tokens if s.origin is Origin.SAMPLED else 0
            first = next((name for name, end in by if s.end <= end), worker)
            segments.append((task, trajectory.index, s.start, num_tokens, s.version, first))
        record = trajectory.episode or ANSWER
        claimed = sum(claim.value for claim in record.claims) if record.claims else None
        counted = (str(trajectory.end), trajectory.num_tokens, num_sampled, record.num_turns, record.wait_ms, claimed)
        rows.append((task, trajectory.index, digest, *counted, worker, fence, now, store(db.blobs, digest, body)))
        sums = added.setdefault(issued.group, [0, 0])
        sums[0] += 1
        sums[1] += num_sampled
    db.insert(TRAJECTORIES, rows)
    db.insert("segments (task, trajectory_index, start, num_tokens, version, worker)", segments)
    db.execute(
        "UPDATE tasks SET state = 'accepted' "
        "WHERE id IN (SELECT value FROM json_each(?)) AND state IN ('open', 'leased')",
        (array([row[0] for row in rows]),),
    )
    db.executemany(
        "UPDATE groups SET num_trajectories = num_trajectories + ?, num_sampled_tokens = num_sampled_tokens + ? "
        "WHERE id = ?",
        [(*sums, group) for group, sums in added.items()],
    )
    reopened = [(issued.group,) for _, issued in fresh if issued.state == "open"]
    if reopened:  # their trajectories arrived after the lease was lost and before the next one
        db.executemany("UPDATE groups SET num_open = num_open - 1 WHERE id = ?", reopened)
    continued = [issued.task for _, issued in fresh if issued.partial_state == "kept"]
    if continued:
        partials.mark_continued(db, continued)
