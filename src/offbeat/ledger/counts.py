"""What there is, for people: counts for the console and the summary, and the results of evaluations. Reads only."""

from __future__ import annotations

from collections import Counter

from offbeat.ledger.database import Database
from offbeat.ledger.records import (
    Counts,
    EvalGroup,
    EvalRound,
    GroupState,
    TokenCounts,
    TrajectoryCounts,
)


def counts(db: Database) -> Counts:
    groups: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    trajectories: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    wasted: Counter[str] = Counter()
    columns = "state, purpose, reason, COUNT(*), SUM(num_trajectories), SUM(num_scored), SUM(num_sampled_tokens)"
    query = f"""SELECT {columns} FROM groups WHERE state <> 'open' GROUP BY state, purpose, reason
                UNION ALL SELECT {columns} FROM groups WHERE state = 'open' GROUP BY state, purpose, reason"""
    for state, purpose, reason, num_groups, num_trajectories, num_scored, num_tokens in db.execute(query):
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
    trained, stale, abandoned, audit, oldest = db.execute(
        "SELECT COALESCE(SUM(num_trained_tokens), 0), COALESCE(SUM(num_stale_tokens), 0), "
        "COALESCE(SUM(num_abandoned_tokens), 0), COALESCE(SUM(num_audit_tokens), 0), "
        "COALESCE(MAX(max_staleness), 0) FROM batches WHERE state = 'trained'"
    ).fetchone()
    left_out = """SELECT t.reason, SUM(j.num_sampled_tokens) FROM tasks t
                  CROSS JOIN groups g ON g.id = t.group_id CROSS JOIN trajectories j ON j.task = t.id
                  WHERE t.state = 'failed' AND g.state = 'trained'
                  GROUP BY t.reason"""
    wasted.update(dict(db.execute(left_out)))  # members that failed, of groups that were trained without them
    query = (
        "SELECT state, reason, SUM(num_sampled_tokens) FROM partials WHERE state <> 'continued' GROUP BY state, reason"
    )
    for state, reason, num_tokens in db.execute(query):
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
        failed_tasks=dict(db.execute("SELECT reason, COUNT(*) FROM tasks WHERE state = 'failed' GROUP BY reason")),
        num_versions=int(db.execute("SELECT COUNT(*) FROM versions").fetchone()[0]),
        max_staleness_trained=oldest,
    )


def waiting_for(db: Database) -> str:
    """What the groups of the step trained next still need, in words."""
    query = """SELECT state, COUNT(*) FROM groups WHERE (state = 'open' OR state = 'ready') AND purpose = 'train'
               GROUP BY state"""
    states = dict(db.execute(query))
    open_tasks, unscored = db.execute(
        "SELECT SUM(t.state = 'open'), SUM(t.state = 'accepted') FROM groups g JOIN tasks t ON t.group_id = g.id "
        "WHERE g.state = 'open'"
    ).fetchone()
    workers = db.execute("SELECT worker, COUNT(*) FROM tasks WHERE state = 'leased' GROUP BY worker ORDER BY worker")
    leased = ", ".join(f"{count} by {worker}" for worker, count in workers) or "none"
    return (
        f"groups ready: {states.get('ready', 0)}, unfinished: {states.get('open', 0)}; tasks leased: {leased}; "
        f"open: {open_tasks or 0}; without reward: {unscored or 0}"
    )


def eval_results(db: Database, step: int | None) -> list[EvalRound]:
    """Rounds in the order they were opened."""
    query = "SELECT id, step, abandoned FROM evals WHERE ? IS NULL OR step = ? ORDER BY id"
    return [
        EvalRound(at, bool(is_abandoned), _eval_groups(db, round_id))
        for round_id, at, is_abandoned in db.execute(query, (step, step)).fetchall()
    ]


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
