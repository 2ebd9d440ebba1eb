"""Turns problems into groups: draws them in order, renders their prompts, gives every group its seed.

The next draw is a function of the ledger's cursor alone, so a restart neither skips nor repeats a problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offbeat.data.mixture import Mixture, WeightedSource
from offbeat.data.prompts import Renderer
from offbeat.data.source import Problem
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Cursor, DrawCursor, NewGroup, Purpose, derive_seed
from offbeat.rules.groups import AdmissionTarget, admit
from offbeat.testing.crash_points import crash_here
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version


@dataclass(frozen=True)
class EvalPlan:
    """Schedule and sampling of evaluations on the held-out split."""

    every: int
    num_prompts: int
    num_samples: int
    sampling: Sampling

    def is_due(self, step: int, num_steps: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or step == num_steps)


class Issuer:
    """Draws groups for training and for evaluation."""

    def __init__(
        self,
        mixture: Mixture,
        renderer: Renderer,
        *,
        seed: int,
        group_size: int,
        num_siblings: int = 1,
        sampling: Sampling,
        eval_plan: EvalPlan,
    ):
        self.mixture, self.renderer, self.eval_plan = mixture, renderer, eval_plan
        self.seed, self.group_size, self.num_siblings, self.sampling = seed, group_size, num_siblings, sampling

    def try_out(self) -> None:
        """Renders a problem of every source and all of the evaluation, so that errors show before training."""
        for source in self.mixture.members.values():
            self.renderer.tokens(source, source.problem(0), 0)
        if self.eval_plan.every:
            self.held_out(version=0)

    def draw(self, cursor: Cursor, count: int, version: int | None) -> list[NewGroup]:
        """The next `count` training groups after the cursor. They require `version`, or None: any. Every prompt is
        drawn as `num_siblings` groups, each with its own seed."""
        drawn, last, groups = dict(cursor.drawn), cursor.last, []
        for ordinal in range(cursor.next_ordinal, cursor.next_ordinal + count):
            last = self._next(drawn, last)
            drawn[last.source] = last.source_ordinal + 1
            source = self.mixture.members[last.source]
            groups.append(
                self._group(
                    source,
                    source.problem(last.source_ordinal),
                    last.source_ordinal,
                    sibling=last.sibling,
                    ordinal=ordinal,
                    seed=derive_seed(self.seed, ordinal),
                    size=self.group_size,
                    sampling=self.sampling,
                    require_version=version,
                )
            )
        return groups

    def _next(self, drawn: Mapping[str, int], last: DrawCursor | None) -> DrawCursor:
        if last is not None and last.sibling + 1 < self.num_siblings:
            return last._replace(sibling=last.sibling + 1)
        source, source_ordinal = self.mixture.next(drawn)
        return DrawCursor(source.name, source_ordinal, 0)

    def held_out(self, version: int) -> list[NewGroup]:
        """One evaluation round; the same problems and seeds each time, so that rounds can be compared."""
        return [
            self._group(
                source,
                problem,
                ordinal,
                purpose=Purpose.EVAL,
                ordinal=ordinal,
                seed=derive_seed(self.seed, "eval", ordinal),
                size=self.eval_plan.num_samples,
                sampling=self.eval_plan.sampling,
                require_version=version,
            )
            for ordinal, (source, problem) in enumerate(self.mixture.held_out(self.eval_plan.num_prompts))
        ]

    def _group(self, source: WeightedSource, problem: Problem, source_ordinal: int, **fields: Any) -> NewGroup:
        return NewGroup(
            source=source.name,
            source_ordinal=source_ordinal,
            prompt_tokens=self.renderer.tokens(source, problem, source_ordinal),
            problem=problem_record(problem),
            reward=self.mixture.reward_of(source.name),
            **fields,
        )


def problem_record(problem: Problem) -> Mapping[str, Any]:
    """The fields of a problem that the ledger stores and the reward gets."""
    return {"prompt": problem.prompt, "answer": problem.answer, "info": dict(problem.info)}


class Drawing:
    """Draws groups into the ledger: for training as pacing allows, for evaluation as versions come.

    Guarantees: one draw at a time, from the ledger's own cursor, so that no prompt is skipped or drawn twice; the
    evaluation of a step is opened once. `call` runs a function on the ledger's thread.
    """

    def __init__(
        self,
        ledger: Ledger,
        issuer: Issuer,
        call: Callable[..., Awaitable[Any]],
        pace: AdmissionTarget,
        *,
        requires_version: bool,
    ):
        self.ledger, self.issuer, self._call, self._pace = ledger, issuer, call, pace
        self._requires_version = requires_version
        self._drawing, self._may_draw = asyncio.Lock(), True

    def check_again(self) -> None:
        """Has the next `draw` ask the ledger: more groups may be allowed now."""
        self._may_draw = True

    async def draw(self, over_provision: float) -> None:
        """Draws up to the number of groups of a step times `over_provision`."""
        async with self._drawing:
            if not self._may_draw:
                return
            self._may_draw = False
            try:
                await self._draw(replace(self._pace, over_provision=over_provision))
            except BaseException:
                self._may_draw = True
                raise

    async def _draw(self, pace: AdmissionTarget) -> None:
        count = admit(await self._call(self.ledger.admission_state), pace)
        if count:
            version = await self._call(self.ledger.latest_version)
            cursor = await self._call(self.ledger.cursor)
            required = version.number if self._requires_version else None
            groups = await asyncio.to_thread(self.issuer.draw, cursor, count, required)
            await self._call(self.ledger.admit, groups)

    async def open_evaluation(self, version: Version) -> None:
        """Opens the evaluation of a version's step, if one is due and not open yet."""
        if not self.issuer.eval_plan.is_due(version.step, self._pace.num_steps or 0):
            return
        if await self._call(self.ledger.eval_round, version.step) is None:
            groups = await asyncio.to_thread(self.issuer.held_out, version.number)
            await self._call(self.ledger.admit, groups)
            crash_here("evaluation-admitted")
