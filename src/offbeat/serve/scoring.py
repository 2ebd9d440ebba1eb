"""What judges are told about trajectories, and what becomes of what they say.

A reward is computed once and stored, with what each part counts. One that fails is a failure, with its reason; when too
large a share of the latest rewards failed, the run stops and says so instead of training on what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from offbeat.errors import RunStopped
from offbeat.ledger.records import Purpose, Scored, Unscored
from offbeat.reward.failures import FailureWatch
from offbeat.reward.pool import RewardInput, RewardResult
from offbeat.reward.shaping import Shaping
from offbeat.trajectory import Reward, reward_problem, total_problem


class Scorer:
    """Turns trajectories into what a reward is asked, and answers into what the ledger stores."""

    def __init__(
        self,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        watch: FailureWatch,
        log_path: Path,
        shaping: Shaping | None = None,
        untried: Collection[str] = (),
    ):
        """`log_path` is where a user finds out more about failures; `untried` are parts that have a weight, and that
        nobody has seen a reward give yet."""
        self.decode, self.watch, self.log_path, self.shaping = decode, watch, log_path, shaping or Shaping()
        self.num_failed = 0
        self._unseen, self._has_seen_some = set(untried), False

    def inputs(self, samples: Sequence[Unscored]) -> list[RewardInput]:
        texts = self.decode([sample.response_tokens for sample in samples])
        return [
            RewardInput(
                prompt=sample.problem["prompt"],
                response=text,
                answer=sample.problem["answer"],
                info=sample.problem["info"],
                tokens=sample.response_tokens.tolist(),
            )
            for sample, text in zip(samples, texts, strict=True)
        ]

    def scored(self, samples: Sequence[Unscored], results: Sequence[RewardResult]) -> list[Scored]:
        """Rewards, or the reasons why there are none."""
        scored = []
        for sample, result in zip(samples, results, strict=True):
            rewards = self._shaped(sample, result.rewards) if result.error is None else ()
            error = result.error
            if problem := total_problem(rewards):  # each part may be sane, and what they count not
                error = f"value: {problem}"
            if error is None:
                self.watch.record(failed=False)
                scored.append(Scored(sample.task, rewards))
            else:
                self.failed(error)
                scored.append(Scored(sample.task, error=error))
        return scored

    def _shaped(self, sample: Unscored, rewards: Sequence[Reward]) -> Sequence[Reward]:
        self._has_seen_some = True
        self._unseen -= {reward.name for reward in rewards}
        if sample.purpose is Purpose.TRAIN:
            return self.shaping.for_training(rewards, len(sample.response_tokens))
        return self.shaping.weighted(rewards)

    def take_unseen(self) -> list[str]:
        """Parts that have a weight and that no reward has given so far; told once, and not before there are any."""
        if not self._has_seen_some:
            return []
        unseen, self._unseen = sorted(self._unseen), set()
        return unseen

    def failed(self, reason: str) -> None:
        """Counts a sample without a reward, whoever is to blame."""
        self.num_failed += 1
        self.watch.record(failed=True, reason=reason)

    def stop_if_failing(self) -> None:
        """Raises once too many rewards failed."""
        if reason := self.watch.verdict():
            raise RunStopped(f"{reason}; mend it (see {self.log_path}), then --resume the run")


def admissible(sample: Unscored, result: RewardResult) -> RewardResult:
    """The result, or the failure that it is: a judge elsewhere may say anything."""
    if result.error is not None:
        return result
    num_tokens = len(sample.response_tokens)
    if problem := reward_problem(result.rewards):
        return RewardResult(error=f"value: the judge says {problem}")
    for reward in result.rewards:
        if not -1 <= reward.position < num_tokens:
            return RewardResult(error=f"value: {reward.name!r} stands at {reward.position} of {num_tokens} tokens")
    return result if result.rewards else RewardResult(error="value: the judge says nothing")
