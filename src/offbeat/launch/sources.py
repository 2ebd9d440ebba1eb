"""Opens a run's tasks and rewards. That needs no torch, so what is wrong with them can be told at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.reward.pool import RewardInput, RewardPool
from offbeat.reward.shaping import Shaping
from offbeat.tasks.mixture import Mixture, build_mixture


def make_mixture(config: Config, reward: Callable[..., Any] | None) -> Mixture:
    return build_mixture(config.task, seed=config.run.seed, reward=reward)


def make_shaping(config: Config) -> Shaping:
    reward = config.reward
    return Shaping(reward.weights, config.rollout.max_new_tokens, reward.overlong_tokens, reward.overlong_penalty)


async def open_pool(config: Config, mixture: Mixture, log: Path) -> RewardPool:
    """A pool whose rewards were each tried on a problem of theirs; one without processes has judges elsewhere try."""
    pool = RewardPool(config.reward.processes, config.reward.timeout_s, mixture.rewards, log)
    if not config.reward.processes:
        return pool
    trials = {}
    for member in mixture.members.values():
        problem = member.problem(0)
        trials[member.reward] = RewardInput(problem.answer or "", problem.answer, problem.prompt, problem.info)
    try:
        make_shaping(config).check_names(await pool.check(trials))
    except BaseException:
        await pool.close()
        raise
    return pool


def need_processes(config: Config, why: str) -> None:
    """Refuses to leave all rewards to judges elsewhere where there can be none."""
    if not config.reward.processes:
        raise UserError(f"reward.processes = 0: allowed 1 or more here, because {why}")
