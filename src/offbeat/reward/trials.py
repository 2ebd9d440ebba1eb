"""What `RewardPool.check` shows to each reward: a real problem, answered with its own answer."""

from __future__ import annotations

from offbeat.reward.pool import RewardInput
from offbeat.tasks.mixture import Mixture


def trials(mixture: Mixture) -> dict[str, RewardInput]:
    """The first problem of a source of every reward, by the reward's name."""
    found: dict[str, RewardInput] = {}
    for member in mixture.members.values():
        if member.reward not in found:
            problem = member.problem(0)
            found[member.reward] = RewardInput(problem.answer or "", problem.answer, problem.prompt, problem.info)
    return found
