"""Turns problems into groups: draws them in order, renders their prompts, gives every group its seed.

What is drawn next is a function of the ledger's cursor alone, so a restart neither skips nor repeats a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.ledger.records import Cursor, Drawn, NewGroup, Purpose, derive_seed
from offbeat.tasks.mixture import Member, Mixture
from offbeat.tasks.prompts import Renderer
from offbeat.tasks.source import Problem
from offbeat.trajectory import Sampling


@dataclass(frozen=True)
class EvalPlan:
    """When the held-out split is looked at, and how."""

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
        """Renders a problem of every source and all that evaluation asks: what is wrong is told before training."""
        for source in self.mixture.members.values():
            self.renderer.tokens(source, source.problem(0), 0)
        if self.eval_plan.every:
            self.held_out(version=0)

    def draw(self, cursor: Cursor, count: int, version: int | None) -> list[NewGroup]:
        """The next `count` training groups after the cursor, which require a version or none; every prompt is drawn as
        `num_siblings` of them, each with a seed of its own."""
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

    def _next(self, drawn: Mapping[str, int], last: Drawn | None) -> Drawn:
        if last is not None and last.sibling + 1 < self.num_siblings:
            return last._replace(sibling=last.sibling + 1)
        source, source_ordinal = self.mixture.next(drawn)
        return Drawn(source.name, source_ordinal, 0)

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

    def _group(self, source: Member, problem: Problem, source_ordinal: int, **fields: Any) -> NewGroup:
        return NewGroup(
            source=source.name,
            source_ordinal=source_ordinal,
            prompt_tokens=self.renderer.tokens(source, problem, source_ordinal),
            problem=problem_record(problem),
            reward=self.mixture.reward_of(source.name),
            **fields,
        )


def problem_record(problem: Problem) -> Mapping[str, Any]:
    """What the ledger keeps of a problem, and the reward gets."""
    return {"prompt": problem.prompt, "answer": problem.answer, "info": dict(problem.info)}
