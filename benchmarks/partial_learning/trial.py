"""One trial: a whole run through the command line, with partial rollouts or without, whose weights are judged.

The task is the hard arithmetic of the learning benchmarks with a long tail: sums, and worked multiplications whose
answers have log-normal lengths. Answers to one prompt have similar lengths, so a step of 8 groups of 4 draws twice as
many lengths as one of 4 groups of 8. Without partial rollouts, a step waits for its longest answer. Weights are kept
every few steps and judged after the run, on held-out problems with the same distribution. Only training is timed.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.runs import Job, train_with_offbeat
from benchmarks.common.sample_and_score import Scorer
from offbeat.data.arithmetic import Arithmetic

MODEL = "offbeat-tiny"
TAIL: dict[str, Any] = {"tail_median": 10, "tail_sigma": 1.0}
MAX_NEW_TOKENS = 288
"""Largest number of new tokens: the longest worked multiplication has forty lines of up to seven characters."""
MAX_CONTEXT_TOKENS = 320


@dataclass(frozen=True)
class Size:
    """How much is trained and judged."""

    steps: int
    judge_every: int
    prompts: int
    seeds: int
    level: int = 3
    tail: float = 0.3
    lr: float = 1.5e-4
    """Learning rate, so low that 80 % of the gain takes some eighty steps, because in the first ten or so the run still
    searches for the best over-provision factor."""
    beta2: float = 0.95
    groups: int = 8
    group_size: int = 4
    max_staleness: int = 4
    """Staleness bound with partial rollouts; without them it is 0. Keys and values are kept over as many versions."""


@dataclass(frozen=True)
class Plan:
    """One trial to run."""

    loss: str
    is_partial: bool
    seed: int


@dataclass(frozen=True)
class Trial:
    """Result of a trial: held-out reward by samples and by seconds, and the age of the training data."""

    plan: Plan
    samples: list[int]
    seconds: list[float]
    rewards: list[float]
    generate_share: float
    """Share of the time for which the trainer waited for batches."""
    off_policy_share: float
    max_staleness: int

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Trial:
        return cls(**{**row, "plan": Plan(**row["plan"])})


def run_trial(plan: Plan, size: Size) -> Trial:
    """Runs one trial on one thread, so that several can run at the same time."""
    torch.set_num_threads(1)
    job = _job(plan, size)
    with tempfile.TemporaryDirectory(prefix="offbeat-recycling-") as folder:
        run = train_with_offbeat(job, Path(folder) / "trained")
        states = [None, *(run.weights(step) for step in job.save_at)]
        rewards = asyncio.run(_judge(states, size, Path(folder) / "judged"))
    rows = run.rows
    ends_s = [0.0, *itertools.accumulate(row["seconds"] for row in rows)]
    at = [0, *job.save_at]
    return Trial(
        plan,
        [step * job.samples_per_step for step in at],
        [round(ends_s[step], 3) for step in at],
        [round(reward, 4) for reward in rewards],
        sum(row["time_wait_s"] for row in rows) / ends_s[-1],
        1 - sum(_fresh(row) for row in rows) / sum(row["num_trained_tokens"] for row in rows),
        int(max(row["staleness_max"] for row in rows)),
    )


async def _judge(states: Sequence[Mapping[str, torch.Tensor] | None], size: Size, folder: Path) -> list[float]:
    """Returns the held-out reward of each set of weights; None stands for the model as it is loaded."""
    scorer = Scorer(MODEL, folder, MAX_NEW_TOKENS, MAX_CONTEXT_TOKENS)
    problems = Arithmetic(level=size.level, tail=size.tail, **TAIL).held_out(size.prompts)
    rewards = []
    try:
        for state in states:
            if state is not None:
                await scorer.load(state)
            rewards.append(await scorer.judge(problems))
    finally:
        await scorer.engine.close()
    return rewards


def _fresh(row: Mapping[str, float]) -> float:
    return row.get("num_tokens/staleness_0", 0)


def _job(plan: Plan, size: Size) -> Job:
    return Job(
        seed=plan.seed,
        steps=size.steps,
        tail=size.tail,
        max_new_tokens=MAX_NEW_TOKENS,
        level=size.level,
        groups_per_step=size.groups,
        group_size=size.group_size,
        lr=size.lr,
        beta2=size.beta2,
        loss=plan.loss,
        max_staleness=size.max_staleness if plan.is_partial else 0,
        task=TAIL,
        rollout={"kv": "stale", "kv_lag": size.max_staleness} if plan.is_partial else {},
        threads=1,
        save_every=size.judge_every,
    )
