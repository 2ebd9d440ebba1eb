"""Rewards: the trajectories that wait for a reward, and the rewards or failures that are stored for them.

Guarantees: a reward is stored once. A reward that could not be computed, is not finite or is too large (`MAX_REWARD`)
is never stored as a value: its task fails, with the reason. A result for a task that no longer waits is ignored.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from blake3 import blake3

from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Unknown
from offbeat.ledger.groups import settle_groups
from offbeat.ledger.records import REWARD_FAILED, Purpose, Scored, Scores, TaskState, Unscored
from offbeat.trajectory import Reward, Sampling, total, total_problem


class Rewards(Database):
    def unscored(self, limit: int, after: int = 0) -> list[Unscored]:
        """Returns up to `limit` trajectories that wait for their reward, in order of acceptance, with `seq` above
        `after`."""
        if not after:
            after = _before_first(self)
        query = """SELECT j.seq, j.task, j.digest, t.group_id, g.purpose, g.reward, g.problem, g.sampling
                   FROM trajectories j CROSS JOIN tasks t ON t.id = j.task CROSS JOIN groups g ON g.id = t.group_id
                   WHERE t.state = 'accepted' AND j.seq > ? ORDER BY j.seq LIMIT ?"""
        problems: dict[int, dict] = {}
        found: list[Unscored] = []
        rows = self.execute(query, (after, limit)).fetchall()
        trajectories = self.bodies.load([(seq, digest) for seq, _, digest, *_ in rows])
        for seq, task, _, group, purpose, reward, problem, sampling in rows:
            if group not in problems:
                problems[group] = json.loads(problem)
            trajectory = trajectories[seq]
            assert trajectory.end is not None
            sample = Unscored(
                task, group, Purpose(purpose), problems[group], reward, trajectory.tokens, trajectory.end, seq
            )
            if trajectory.episode is not None:
                stop_token_ids = msgspec.json.decode(sampling, type=Sampling).stop_token_ids
                sample = replace(sample, trajectory=trajectory, stop_token_ids=stop_token_ids)
            found.append(sample)
        return found

    @transactional
    def score(self, results: Sequence[Scored]) -> Scores:
        """Stores rewards and failures, and ends the groups that now have all their results. Ignores results for tasks
        that wait for no reward. Returns how many tasks this changed and how many groups it dropped."""
        query = "SELECT id, state, group_id FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
        known = {
            task: (state, group) for task, state, group in self.execute(query, (array([r.task for r in results]),))
        }
        stored: dict[int, Scored] = {}
        for result in results:
            if result.task not in known:
                raise Unknown(f"task {result.task} does not exist in this run")
            if known[result.task][0] == TaskState.ACCEPTED:
                stored.setdefault(result.task, result)
        errors = {task: error_of(result) for task, result in stored.items()}
        _store(self, list(stored.values()), errors)
        num_scored = Counter(known[task][1] for task, error in errors.items() if error is None)
        num_failed = Counter(known[task][1] for task, error in errors.items() if error is not None)
        touched = num_scored.keys() | num_failed.keys()
        self.executemany(
            "UPDATE groups SET num_scored = num_scored + ?, num_failed = num_failed + ? WHERE id = ?",
            [(num_scored[group], num_failed[group], group) for group in touched],
        )
        return Scores(len(stored), settle_groups(self, touched))


def _before_first(db: Database) -> int:
    """Returns one less than the `seq` of the first trajectory that waits for a reward, so that `unscored` can use the
    result as `after`. Returns a huge number if no trajectory waits. Fast, because only open groups are searched."""
    query = """SELECT MIN(j.seq) - 1 FROM groups g CROSS JOIN tasks t ON t.group_id = g.id
               CROSS JOIN trajectories j ON j.task = t.id WHERE g.state = 'open' AND t.state = 'accepted'"""
    (before,) = db.execute(query).fetchone()
    return int(before) if before is not None else sys.maxsize


def error_of(result: Scored) -> str | None:
    """Returns why `result` is not a valid reward; None if it is."""
    if result.error is not None:
        return result.error
    if not result.rewards:
        return "the reward function returned no reward"
    problem = total_problem(result.rewards)
    return None if problem is None else f"invalid rewards: {problem}"


def _parts(rewards: Sequence[Reward]) -> str:
    """Encodes rewards as JSON; numpy numbers, which reward functions may return, become plain numbers."""
    plain = [Reward(float(r.value), r.name, int(r.position), float(r.weight)) for r in rewards]
    return msgspec.json.encode(plain).decode()


def reward_digest(task: int, value: float | None, parts: str | None, error: str | None) -> bytes:
    """Returns the digest of a task's stored reward. -0.0 is treated as 0.0, because SQLite does not store -0.0."""
    stored = [task, None if value is None else value + 0.0, parts, error]
    return blake3(msgspec.json.encode(stored)).digest(length=16)


def _store(db: Database, results: Sequence[Scored], errors: dict[int, str | None]) -> None:
    now = db.wall_clock()
    good = [(r.task, r.rewards) for r in results if errors[r.task] is None and r.rewards is not None]
    rows: list[tuple[int, float | None, str | None, str | None]]
    rows = [(task, total(rewards), _parts(rewards), None) for task, rewards in good]
    rows += [(task, None, None, error) for task, error in errors.items() if error is not None]
    db.insert(
        "rewards (task, value, parts, error, digest, scored_at)", [(*row, reward_digest(*row), now) for row in rows]
    )
    db.execute(
        "UPDATE tasks SET state = 'scored' WHERE id IN (SELECT value FROM json_each(?))",
        (array([task for task, _ in good]),),
    )
    db.executemany(
        "UPDATE tasks SET state = 'failed', reason = ?, detail = ? WHERE id = ?",
        [(REWARD_FAILED, error, task) for task, *_, error in rows if error is not None],
    )
