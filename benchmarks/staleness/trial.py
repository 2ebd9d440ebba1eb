"""One trial: a policy that learns from data that was held back for a fixed number of steps.

The parts are those of a run: the embedded engine samples, `train_step` learns, the arithmetic task gives problems and
rewards. The schedule is fixed: the batch of a step is sampled from the weights of `held_back` steps before, or from the
first weights in the first steps. Held-out problems are answered at temperature 1, with the same random numbers each
time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.sample_and_score import Scorer
from offbeat.config.load import from_dict
from offbeat.data.arithmetic import Arithmetic
from offbeat.launch.model_parts import step_settings
from offbeat.ledger.records import derive_seed
from offbeat.model.loading import load_model, state_tensors
from offbeat.trainer.losses import CorrectionSettings
from offbeat.trainer.packing import Sample
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

MODEL = "offbeat-tiny"
MAX_CONTEXT_TOKENS = 96


@dataclass(frozen=True)
class Size:
    """How much is trained and judged."""

    steps: int
    judge_every: int
    prompts: int
    seeds: int
    level: int = 3
    lr: float = 2.5e-4
    """Learning rate, so large that the policy drifts far in eight steps of small batches, but small enough to learn."""
    beta2: float = 0.95
    """Adam's beta2, with which a large gradient is forgotten within twenty steps instead of a thousand, so that the
    reward does not dip even on fresh data."""
    groups: int = 4
    group_size: int = 8
    max_new_tokens: int = 24

    @property
    def samples_per_step(self) -> int:
        return self.groups * self.group_size


@dataclass(frozen=True)
class Plan:
    """One trial to run."""

    held_back: int
    correction: str
    seed: int


@dataclass(frozen=True)
class Trial:
    """Result of a trial: held-out reward by samples trained, and the effective sample size of the last steps."""

    plan: Plan
    samples: list[int]
    rewards: list[float]
    ess: float
    seconds: float

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Trial:
        return cls(**{**row, "plan": Plan(**row["plan"])})


def settings_of(size: Size, correction: str) -> StepSettings:
    """Returns the settings that a real run with this correction has."""
    config = from_dict(
        {
            "batch": {"groups_per_step": size.groups, "group_size": size.group_size},
            "rollout": {"max_new_tokens": size.max_new_tokens},
            "schedule": {"mode": "overlap", "max_staleness": 8},
            "loss": {} if correction == "off" else {"correction": correction},
        }
    )
    settings = step_settings(config)
    return replace(settings, correction=CorrectionSettings()) if correction == "off" else settings


def run_trial(plan: Plan, size: Size) -> Trial:
    """Runs one trial on one thread, so that several can run at the same time."""
    torch.set_num_threads(1)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offbeat-staleness-") as folder:
        samples, rewards, ess = asyncio.run(_train(plan, size, Path(folder)))
    return Trial(plan, samples, rewards, ess, time.monotonic() - start_s)


async def _train(plan: Plan, size: Size, folder: Path) -> tuple[list[int], list[float], float]:
    model = load_model(MODEL, torch.float32, torch.device("cpu"))
    policy, settings = Policy(model, AdamSettings(beta2=size.beta2)), settings_of(size, plan.correction)
    setup = _Setup(size, folder, plan.seed)
    held: deque[tuple[int, list[Sample]]] = deque()
    samples, rewards, shares = [0], [], []
    try:
        await setup.scorer.load(state_tensors(policy.model))
        rewards.append(await setup.scorer.judge(setup.held_out))
        for ordinal in range(plan.held_back):
            held.append((0, await setup.sample(ordinal)))
        for step in range(size.steps):
            held.append((step, await setup.sample(step + plan.held_back)))
            sampled_at, batch = held.popleft()
            figures = train_step(policy, _aged(batch, step - sampled_at), settings, size.lr)
            shares.append(figures.ess)
            await setup.scorer.load(state_tensors(policy.model))
            if (step + 1) % size.judge_every == 0:
                samples.append((step + 1) * size.samples_per_step)
                rewards.append(await setup.scorer.judge(setup.held_out))
    finally:
        await setup.scorer.engine.close()
    return samples, rewards, float(np.mean(shares[len(shares) // 2 :]))


def _aged(batch: Sequence[Sample], age: int) -> list[Sample]:
    return [replace(sample, staleness=np.full(sample.num_tokens, age)) for sample in batch]


class _Setup:
    """Task and scorer of one trial."""

    def __init__(self, size: Size, folder: Path, seed: int):
        self.size, self.seed = size, seed
        self.task = Arithmetic(seed=seed, level=size.level)
        self.held_out = self.task.held_out(size.prompts)
        self.scorer = Scorer(MODEL, folder, size.max_new_tokens, MAX_CONTEXT_TOKENS)

    async def sample(self, ordinal: int) -> list[Sample]:
        """Samples a batch of answers with rewards. `ordinal` selects the problems, the same for every plan."""
        problems = [self.task.problem(ordinal * self.size.groups + i) for i in range(self.size.groups)]
        asked = [(group, problem, derive_seed(self.seed, ordinal, group, member))
                 for group, problem in enumerate(problems) for member in range(self.size.group_size)]  # fmt: skip
        answers = await self.scorer.answer([(problem, seed) for _, problem, seed in asked])
        return [
            Sample(
                group=group,
                prompt=answer.prompt,
                response=answer.tokens,
                logprobs=answer.logprobs,
                mask=np.ones(len(answer.tokens), bool),
                reward=answer.reward,
            )
            for (group, _, _), answer in zip(asked, answers, strict=True)
        ]
