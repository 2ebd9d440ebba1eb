"""Draws groups into the ledger: for training as pacing allows, for evaluation as versions come.

Guarantees: one draw at a time, after the ledger's own cursor, so that no prompt is skipped or drawn twice; an
evaluation of a step is opened once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from offbeat.control.admit import Pace, admit
from offbeat.crash import crash_here
from offbeat.ledger.ledger import Ledger
from offbeat.serve.issuing import Issuer
from offbeat.weights.version import Version


class Drawing:
    """`call` runs a function on the ledger's thread."""

    def __init__(
        self, ledger: Ledger, issuer: Issuer, call: Callable[..., Awaitable[Any]], pace: Pace, *, requires_version: bool
    ):
        self.ledger, self.issuer, self._call, self._pace = ledger, issuer, call, pace
        self._requires_version = requires_version
        self._drawing, self._may_draw = asyncio.Lock(), True

    def look_again(self) -> None:
        """Something happened that may allow more groups than before."""
        self._may_draw = True

    async def draw(self, over_provision: float) -> None:
        """Draws as many groups as may be under way now: those that a step trains, times `over_provision`."""
        async with self._drawing:
            if not self._may_draw:
                return
            self._may_draw = False
            try:
                await self._draw(replace(self._pace, over_provision=over_provision))
            except BaseException:
                self._may_draw = True
                raise

    async def _draw(self, pace: Pace) -> None:
        count = admit(await self._call(self.ledger.standing), pace)
        if count:
            version = await self._call(self.ledger.latest_version)
            cursor = await self._call(self.ledger.cursor)
            required = version.number if self._requires_version else None
            groups = await asyncio.to_thread(self.issuer.draw, cursor, count, required)
            await self._call(self.ledger.admit, groups)

    async def open_evaluation(self, version: Version) -> None:
        """Opens the evaluation of a version's step, where one is due and not open yet."""
        if not self.issuer.eval_plan.is_due(version.step, self._pace.num_steps or 0):
            return
        if await self._call(self.ledger.eval_round, version.step) is None:
            groups = await asyncio.to_thread(self.issuer.held_out, version.number)
            await self._call(self.ledger.admit, groups)
            crash_here("evaluation-admitted")
