"""Admission: draws problems in order, turns them into groups with prompts and seeds, and limits the groups in flight.

The next draw depends only on the ledger's cursor (position in the data), so a restart neither skips nor repeats a
problem. A prompt that cannot be used, for example because it is too long, is left out; the others keep their order.

How many groups are in flight follows from the over-provision factor (`offbeat.rules.over_provision`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from offbeat.data.mixture import Mixture, WeightedSource
from offbeat.data.prompts import BadPrompt, Problem, Renderer
from offbeat.errors import RunStopped
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
    """Number of steps between two evaluations. The last step is evaluated, too. 0: no evaluations."""
    num_prompts: int
    num_samples: int
    sampling: Sampling

    def is_due(self, step: int, num_steps: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or step == num_steps)


MAX_LEFT_OUT = 1000
"""Number of prompts left out in a row after which the run stops, because their source seems to have no usable ones."""


@dataclass(frozen=True)
class LeftOut:
    """A prompt that was left out because it cannot be used, and `why`."""

    source: str
    source_ordinal: int
    why: str


class Issuer:
    """Draws problems and turns them into groups. A training problem gives `num_siblings` groups of `group_size` tasks
    each; a problem for evaluation gives one group."""

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
        skips_long: bool = False,
        stop_token_ids: Mapping[str, tuple[int, ...]] | None = None,
    ):
        """`stop_token_ids` replace those of `sampling` for the sources that it names, whose turns end otherwise."""
        self.skips_long, self.stop_token_ids = skips_long, stop_token_ids or {}
        self.mixture, self.renderer, self.eval_plan = mixture, renderer, eval_plan
        self.seed, self.group_size, self.num_siblings, self.sampling = seed, group_size, num_siblings, sampling

    def draw(self, cursor: Cursor, count: int, version: int | None) -> tuple[list[NewGroup], list[LeftOut]]:
        """Returns the next `count` training groups after `cursor`, and the prompts that were left out on the way. Each
        prompt gives `num_siblings` groups in a row, each with its own seed. Only `version` may generate the groups'
        answers; None: any version may."""
        drawn, last = dict(cursor.drawn), cursor.last
        groups, left_out = list[NewGroup](), list[LeftOut]()
        for ordinal in range(cursor.next_ordinal, cursor.next_ordinal + count):
            last, passed_over = self._next(drawn, last), 0
            while True:
                source = self.mixture.members[last.source]
                try:
                    group = self._group(
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
                    break
                except BadPrompt as error:
                    left_out.append(LeftOut(last.source, last.source_ordinal, error.what))
                    passed_over += 1
                    if passed_over == MAX_LEFT_OUT:
                        raise RunStopped(
                            f"{passed_over} prompts in a row cannot be used; the last: {error.what}; correct the "
                            "cause, then resume the run"
                        ) from error
                    # The same source goes on, so that the ledger's cursor, which knows only groups, ends up behind the
                    # prompts passed over.
                    last = DrawCursor(last.source, last.source_ordinal + 1, 0)
            drawn[last.source] = last.source_ordinal + 1
            groups.append(group)
        return groups, left_out

    def _next(self, drawn: Mapping[str, int], last: DrawCursor | None) -> DrawCursor:
        if last is not None and last.sibling + 1 < self.num_siblings:
            return last._replace(sibling=last.sibling + 1)
        source, source_ordinal = self.mixture.next(drawn)
        return DrawCursor(source.name, source_ordinal, 0)

    def held_out(self, version: int) -> list[NewGroup]:
        """Returns the groups of one evaluation of `version`; all evaluations have the same problems and seeds.
        With `skips_long`, prompts that cannot be used are left out; otherwise the first of them raises `BadPrompt`."""
        groups = []
        for ordinal, (source, problem) in enumerate(self.mixture.held_out(self.eval_plan.num_prompts)):
            with suppress(*[BadPrompt] * self.skips_long):
                group = self._group(
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
                groups.append(group)
        return groups

    def _group(self, source: WeightedSource, problem: Problem, source_ordinal: int, **fields: Any) -> NewGroup:
        if source.name in self.stop_token_ids:
            own = self.stop_token_ids[source.name]
            fields["sampling"] = msgspec.structs.replace(fields["sampling"], stop_token_ids=own)
        return NewGroup(
            source=source.name,
            source_ordinal=source_ordinal,
            prompt_tokens=self.renderer.tokens(source, problem, source_ordinal),
            problem=problem_record(problem),
            reward=source.reward,
            **fields,
        )


def problem_record(problem: Problem) -> Mapping[str, Any]:
    """Returns the fields of a problem that the ledger stores and the reward function gets."""
    return {"prompt": problem.prompt, "answer": problem.answer, "info": dict(problem.info)}


class Drawing:
    """Adds groups to the ledger: for training, as many as `pace` asks for; for evaluation, when a version is published.

    Guarantees: one draw runs at a time, from the ledger's own cursor (position in the data), so that no prompt is
    skipped or drawn twice. The evaluation of a step is opened once. `call` runs a function on the ledger's thread;
    `report` gets an event for each prompt that is left out of the training. With `requires_version`, only the version
    that is the latest when a training group is drawn may generate its answers.
    """

    def __init__(
        self,
        ledger: Ledger,
        issuer: Issuer,
        call: Callable[..., Awaitable[Any]],
        pace: AdmissionTarget,
        report: Callable[[Mapping[str, Any]], None] = lambda row: None,
        *,
        requires_version: bool,
    ):
        self.ledger, self.issuer, self._call, self._pace, self._report = ledger, issuer, call, pace, report
        self._requires_version = requires_version
        self._drawing, self._may_draw = asyncio.Lock(), True

    def check_again(self) -> None:
        """Makes the next `draw` ask the ledger whether more groups are needed. After a `draw` that succeeded, further
        calls of `draw` do nothing until `check_again` is called."""
        self._may_draw = True

    async def draw(self, over_provision: float) -> None:
        """Draws training groups until `over_provision` times the groups of a step are in flight."""
        async with self._drawing:
            if not self._may_draw:
                return
            self._may_draw = False
            try:
                pace = replace(self._pace, over_provision=over_provision)
                if count := admit(await self._call(self.ledger.admission_state), pace):
                    version = await self._call(self.ledger.latest_version)
                    cursor = await self._call(self.ledger.cursor)
                    required = version.number if self._requires_version else None
                    groups, left_out = await asyncio.to_thread(self.issuer.draw, cursor, count, required)
                    await self._call(self.ledger.admit, groups)
                    for prompt in left_out:
                        self._report({"event": "prompt_left_out", **asdict(prompt)})
            except BaseException:
                self._may_draw = True
                raise

    async def open_evaluation(self, version: Version) -> None:
        """Opens the evaluation of the version's step if it is due and was not opened before."""
        if not self.issuer.eval_plan.is_due(version.step, self._pace.num_steps or 0):
            return
        if await self._call(self.ledger.eval_round, version.step) is None:
            groups = await asyncio.to_thread(self.issuer.held_out, version.number)
            await self._call(self.ledger.admit, groups)
            crash_here("evaluation-admitted")
