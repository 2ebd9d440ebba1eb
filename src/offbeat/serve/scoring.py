"""Gets trajectories their rewards: decodes them, asks the pool, and watches how many fail.

A reward is computed once and stored. One that fails is a failure, with its reason; when too large a share of the latest
rewards failed, the run stops and says so instead of training on what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from offbeat.errors import RunStopped
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Scored, Unscored
from offbeat.reward.failures import FailureWatch
from offbeat.reward.pool import RewardInput, RewardPool

TAKE_AT_MOST = 4096
"""Trajectories fetched from the ledger at a time."""


class Scorer:
    """Stands between the ledger and the reward pool."""

    def __init__(
        self,
        pool: RewardPool,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        watch: FailureWatch,
        samples_per_call: int = 64,
    ):
        self.pool, self.decode, self.watch, self.samples_per_call = pool, decode, watch, samples_per_call
        self._last_seq = 0
        self.num_failed = 0

    def take_unscored(self, ledger: Ledger) -> list[list[Unscored]]:
        """What arrived since the last call, in portions that share a reward; runs on the ledger's thread."""
        by_reward: dict[str, list[Unscored]] = {}
        for unscored in ledger.unscored(TAKE_AT_MOST, after=self._last_seq):
            by_reward.setdefault(unscored.reward, []).append(unscored)
            self._last_seq = unscored.seq
        size = self.samples_per_call
        return [found[i : i + size] for found in by_reward.values() for i in range(0, len(found), size)]

    async def score(self, portion: Sequence[Unscored]) -> list[Scored]:
        """Rewards, or the reasons why there are none, for trajectories that share a reward."""
        texts = self.decode([unscored.response_tokens for unscored in portion])
        inputs = [
            RewardInput(
                prompt=unscored.problem["prompt"],
                response=text,
                answer=unscored.problem["answer"],
                info=unscored.problem["info"],
                tokens=unscored.response_tokens.tolist(),
            )
            for unscored, text in zip(portion, texts, strict=True)
        ]
        results = await self.pool.score(portion[0].reward, inputs)
        scored = []
        for unscored, result in zip(portion, results, strict=True):
            if result.error is None:
                self.watch.record(failed=False)
                scored.append(Scored(unscored.task, result.rewards))
            else:
                self.failed(result.error)
                scored.append(Scored(unscored.task, error=result.error))
        return scored

    def failed(self, reason: str) -> None:
        """Counts a sample without a reward, whoever is to blame."""
        self.num_failed += 1
        self.watch.record(failed=True, reason=reason)

    def stop_if_failing(self) -> None:
        """Raises once too many rewards failed."""
        if reason := self.watch.verdict():
            raise RunStopped(f"{reason}; mend it (see {self.pool.log_path}), then --resume the run")
