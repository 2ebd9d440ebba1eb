"""Adversaries whose tokens or log-probs are not those of the weights that they name. The audit has to find them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

import numpy as np

from benchmarks.malice.adversary import Member, with_segments
from benchmarks.malice.model import DIGITS
from offbeat.trajectory import Segment, Task, Trajectory

LIKELY = -0.1
"""A log-prob that makes a forged token look like the model's own choice."""


class Forger(Member):
    """Answers truly, changes the answer, hands it in."""

    forges = True
    pause_s = 1.0
    capacity: ClassVar[int] = 1
    """Tasks that it takes at a time."""

    async def strike(self) -> None:
        await asyncio.gather(*(self._work_on(task) for task in await self.lease(self.capacity)))

    async def _work_on(self, task: Task) -> None:
        await self.client.submit(self.forge(await self.answer(task), task), task.fence)

    def forge(self, true: Trajectory, task: Task) -> Trajectory:
        """Every segment of its own, changed; those that it was to carry on stay as they are, or it would be refused."""
        num_before = len(task.prefix.segments) if task.prefix is not None else 0
        own = [self.changed(segment) for segment in true.segments[num_before:]]
        return with_segments(true, (*true.segments[:num_before], *own))

    def changed(self, segment: Segment) -> Segment:
        raise NotImplementedError

    def digits(self, segment: Segment, share: float) -> np.ndarray:
        """The tokens of a segment, some of them made digits; the last stays, which may be a stop token."""
        rng, tokens = self.scene.rng, segment.tokens.copy()
        count = round(share * len(tokens))
        for position in rng.sample(range(len(tokens)), count) if share < 1 else range(len(tokens) - 1):
            tokens[position] = rng.choice(DIGITS)
        return tokens


class ForgesAFifth(Forger):
    """Replaces a fifth of its tokens by what the reward pays for, under the log-probs of those that it replaced."""

    capacity, pause_s = 4, 0.3

    def changed(self, segment: Segment) -> Segment:
        return replace(segment, tokens=self.digits(segment, 0.2))


class ForgesAll(Forger):
    """Replaces all of its tokens by what the reward pays for, and says that they were likely."""

    def changed(self, segment: Segment) -> Segment:
        return replace(segment, tokens=self.digits(segment, 1.0), logprobs=_constant(segment))


class ConstantLogprobs(Forger):
    """Hands in true tokens with one log-prob for all: ratios, and with them the size of every update."""

    def changed(self, segment: Segment) -> Segment:
        return replace(segment, logprobs=_constant(segment))


class OtherModel(Forger):
    """Samples from another model and says that it was the run's: a wrong file, or a cheaper model."""

    async def _work_on(self, task: Task) -> None:
        trajectory = await self.answer(task, self.scene.other_engine)
        await self.client.submit(self.forge(trajectory, task), task.fence)

    def changed(self, segment: Segment) -> Segment:
        return replace(segment, version=self.scene.version, kv_version=self.scene.version)


class ForgesAsStale(Forger):
    """Replaces all of its tokens and names the version before the newest: an audit that looks at fresh tokens only."""

    def changed(self, segment: Segment) -> Segment:
        before = max((segment.version or 0) - 1, 1)
        return replace(
            segment,
            tokens=self.digits(segment, 1.0),
            logprobs=_constant(segment),
            version=before,
            kv_version=before,
        )

    def forge(self, true: Trajectory, task: Task) -> Trajectory:
        """Versions may not fall, so what is to be carried on is left to others."""
        return true if task.prefix is not None else super().forge(true, task)


class BlamesAnother(Forger):
    """Replaces all of its tokens and names an honest worker as the one that sampled them: that worker's standing."""

    def changed(self, segment: Segment) -> Segment:
        return replace(
            segment,
            tokens=self.digits(segment, 1.0),
            logprobs=_constant(segment),
            worker=self.scene.rng.choice(self.scene.honest),
        )


class HandsBackForged(Forger):
    """Hands back forged beginnings, which honest workers carry on and hand in: their standing, and the audit."""

    def changed(self, segment: Segment) -> Segment:
        half = max(1, len(segment.tokens) // 2)
        cut = _first(segment, half)
        return replace(cut, tokens=np.array(self.scene.rng.choices(DIGITS, k=half), np.int32), logprobs=_constant(cut))

    def forge(self, true: Trajectory, task: Task) -> Trajectory:
        num_before = len(task.prefix.segments) if task.prefix is not None else 0
        own = self.changed(true.segments[num_before])
        return with_segments(true, (*true.segments[:num_before], own), end=None)


def _first(segment: Segment, count: int) -> Segment:
    assert segment.logprobs is not None
    return replace(segment, tokens=segment.tokens[:count], logprobs=segment.logprobs[:count])


def _constant(segment: Segment) -> np.ndarray:
    return np.full(len(segment.tokens), LIKELY, np.float32)


FORGERS: tuple[type[Forger], ...] = (
    ForgesAFifth,
    ForgesAll,
    ConstantLogprobs,
    OtherModel,
    ForgesAsStale,
    BlamesAnother,
    HandsBackForged,
)
