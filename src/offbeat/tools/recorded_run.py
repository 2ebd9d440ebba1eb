"""A finished run as a scenario to simulate: its rules, its workers with the speeds that its ledger shows, its lengths.

A worker's speed is the median, over its answers that were sampled under one lease, of the seconds from the lease to the
submission per token. It holds for the number of answers that ran beside it. Training and publishing take what the
run's metrics say, per token.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from offbeat.config.load import from_dict
from offbeat.config.schema import Config
from offbeat.errors import UserError
from offbeat.launch.run_folder import LEDGER, stored_config
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.lengths import GivenLengths, Lengths
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, linear
from offbeat.simulator.simulation import CoordinatorModel, Scenario, TrainerModel

METRICS = "metrics.jsonl"
ANSWERS = """SELECT j.worker, j.num_tokens, j.accepted_at - t.leased_at
             FROM tasks t JOIN trajectories j ON j.task = t.id JOIN groups g ON g.id = t.group_id
             WHERE g.purpose = 'train' AND t.leased_at IS NOT NULL AND j.num_tokens > 0
             AND NOT EXISTS (SELECT 1 FROM partials p WHERE p.task = t.id) ORDER BY j.seq"""
GROUPS = """SELECT g.id, LENGTH(g.prompt) / 4, j.num_tokens FROM groups g JOIN tasks t ON t.group_id = g.id
            JOIN trajectories j ON j.task = t.id WHERE g.purpose = 'train' ORDER BY g.ordinal, g.id, t.member"""


def _rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    file = run / LEDGER
    if not file.is_file():
        raise UserError(f"{run} holds no ledger; give the folder of a run")
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return database.execute(query).fetchall()
    except sqlite3.DatabaseError as error:
        raise UserError(f"{file} cannot be read: {error}; check it with offbeat ledger verify {run}") from None
    finally:
        database.close()


def group_lengths(folder: str) -> list[tuple[list[int], int]]:
    """Returns the answer lengths and the prompt length of each training group of a run whose answers are all there."""
    groups: dict[int, tuple[list[int], int]] = {}
    for group, num_prompt_tokens, num_tokens in _rows(Path(folder), GROUPS):
        groups.setdefault(group, ([], num_prompt_tokens))[0].append(num_tokens)
    largest = max((len(lengths) for lengths, _ in groups.values()), default=0)
    whole = [found for found in groups.values() if len(found[0]) == largest]
    if not whole:
        raise UserError(f"{folder} has no finished answers; give a run that has trained at least one step")
    return whole


def recorded_scenario(run: Path) -> tuple[Scenario, Lengths]:
    config = from_dict(stored_config(run))
    lengths = group_lengths(str(run))
    metrics = _metrics(run)
    schedule, batch = config.schedule, config.batch
    overlap, bound = schedule.mode == "overlap", schedule.bound
    size = batch.members
    if size != batch.group_size:
        lengths = [([one], prompt) for answers, prompt in lengths for one in answers]
    scenario = Scenario(
        _fleet(run, config),
        LedgerSettings(
            batch.claims_per_step,
            bound,
            max(int(row["step"]) for row in metrics),
            in_rounds=schedule.stops,
            min_group=min(batch.min_group, size),
            max_attempts=config.rollout.max_attempts,
        ),
        _trainer(metrics),
        CoordinatorModel(reward_delay_s=_median(metrics, "time_reward_s")),
        overlap=overlap,
        over_provision=schedule.factor,
        finishes=schedule.new_version == "finish",
        keeps_kv=config.rollout.kv == "stale",
        kv_lag=config.rollout.kv_lag,
        lease_ttl_s=config.rollout.lease_s,
        num_warmup=max(int(row["step"]) for row in metrics) // 5,
    )
    return scenario, GivenLengths(lengths)


def _metrics(run: Path) -> list[dict[str, Any]]:
    file = run / METRICS
    text = file.read_text() if file.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    rows = [row for row in rows if "time_train_s" in row]
    if not rows:
        raise UserError(f"{run} has no metrics of a trained step; give a run that has trained at least one step")
    return rows


def _median(rows: list[dict[str, Any]], key: str) -> float:
    found = [float(row[key]) for row in rows[len(rows) // 5 :] if row.get(key) is not None]
    return statistics.median(found) if found else 0.0


def _trainer(metrics: list[dict[str, Any]]) -> TrainerModel:
    rows = [
        {**row, "per_token": row["time_train_s"] / max(row.get("num_row_tokens", row["tokens"]), 1)} for row in metrics
    ]
    publish_s = max(_median(rows, "time_publish_s"), _median(rows, "time_publish_behind_s"))
    return TrainerModel(token_s=_median(rows, "per_token"), publish_s=publish_s)


def _fleet(run: Path, config: Config) -> tuple[WorkerClass, ...]:
    slots = config.rollout.slots
    if config.rollout.engine == "paced":
        paced = config.paced
        names = sorted({str(row[0]) for row in _rows(run, ANSWERS)}) or ["worker"]
        speed = EngineSpeed(
            linear(paced.base_s, paced.per_row_s, slots, paced.speed), prefill_s=paced.prefill_s / paced.speed,
            load_s=paced.load_s,
        )  # fmt: skip
        return tuple(WorkerClass(name, 1, slots, speed) for name in names)
    token_s: dict[str, list[float]] = defaultdict(list)
    for worker, num_tokens, seconds in _rows(run, ANSWERS):
        if seconds > 0:
            token_s[str(worker)].append(seconds / num_tokens)
    if not token_s:
        raise UserError(f"{run}: its ledger does not say how long its answers took; give a run of this version")
    return tuple(
        WorkerClass(name, 1, slots, EngineSpeed(linear(statistics.median(found), 0.0, slots)))
        for name, found in sorted(token_s.items())
    )
