"""Rewards as a stage of its own: samples wait in one bounded queue, and judges pull from it at their own pace.

Judges are the processes of the local pool and whoever joined from elsewhere. Nobody who hands in a trajectory waits for
its reward: what finds no room in the queue waits in the ledger. So a slow judge holds no engine; what it does hold up,
in the end, is the trainer.

A reward is acknowledged once it is stored. What was out with a judge when the coordinator died is unscored in the
ledger, and is judged again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from offbeat.errors import UserError
from offbeat.ledger.errors import Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Scored, Scores, Unscored
from offbeat.reward.pool import RewardPool, RewardResult, RewardSpec
from offbeat.serve.client import RewardLease
from offbeat.serve.portions import Portion, Portions
from offbeat.serve.scoring import Scorer, admissible
from offbeat.serve.waiting import Bell

MAX_SAMPLES = 4096
"""In the queue or out; their tokens are in memory."""
LARGE, SMALL = 64, 8
"""Samples that the local pool takes at a time: many, to save messages; few while others could take the rest."""
LOCAL = ""
"""The local pool's name; no worker has it."""
RESTART_S = 2.0
"""Beside reward.timeout_s, for each sample: what it takes to start a process in place of one that hung."""
SLACK_S = 20.0
"""For the way there and back, and for a judge that is yet to import the reward."""
SILENT_S = 30.0
"""A judge that is not heard of for so long loses what it holds, however much time it would have had."""
PRESENT_S = 60.0
"""A judge that holds nothing and asked for nothing for so long has gone."""
MAX_SLEEP_S = 1.0


class Judging:
    """See the module; lives on the event loop of its coordinator."""

    def __init__(
        self,
        scorer: Scorer,
        pool: RewardPool,
        rewards: Mapping[str, RewardSpec],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scorer, self.pool, self.timeout_s, self._clock = scorer, pool, timeout_s, clock
        self.portions = Portions(MAX_SAMPLES, timeout_s + RESTART_S, SLACK_S, clock)
        self._specs = {name: spec for name, spec in rewards.items() if isinstance(spec, str)}
        self._stay_here = sorted(rewards.keys() - self._specs.keys())
        if self._stay_here and not pool.num_processes:
            raise UserError(
                f"reward.processes = 0: allowed 1 or more, because {_cannot_leave(self._stay_here)} and nobody else "
                "could judge"
            )
        self._look, self._store_now = asyncio.Event(), asyncio.Event()
        self._news = Bell()
        self._heard: dict[str, float] = {}
        """When each judge elsewhere asked for something last."""
        self._answers: list[tuple[list[Scored], asyncio.Future[None]]] = []
        self._last_seq = 0
        self._is_full = False
        """More may wait in the ledger than there was room for."""
        self._is_over = False

    def start(
        self,
        ledger: Ledger,
        call: Callable[..., Awaitable[Any]],
        bell: Bell,
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to judge what waits in the ledger; `call` runs a ledger call. Rings the bell whenever rewards were
        stored, and calls `on_dropped` where groups were dropped on them: others may take their places."""
        self._bell, self._on_dropped = bell, on_dropped
        bell.spawn(self._feed(ledger, call))
        bell.spawn(self._store(ledger, call))
        bell.spawn(self._expire())

    def arrived(self) -> None:
        """There is something new in the ledger."""
        self._look.set()

    def end(self) -> None:
        """Tells judges, whenever they ask, that the run is over."""
        self._is_over = True
        self._news.ring()

    # --- judges elsewhere ---

    async def lease(self, judge: str, capacity: int, wait_s: float) -> RewardLease:
        """Samples that share a reward, as soon as there are any; nothing after `wait_s`, or where none are wanted."""
        if self._stay_here and not self._specs:
            raise Refused(f"{_cannot_leave(self._stay_here)}; put it in a file and write file.py:function")
        deadline_s = time.monotonic() + wait_s
        self._heard[judge] = self._clock()
        while True:
            changed = self._news.changed
            if self._is_over:
                return RewardLease(is_over=True)
            portion = self.portions.lease(judge, capacity, self._specs)
            if portion is not None:
                inputs = tuple(self.scorer.inputs(portion.samples))
                return RewardLease(portion.ticket, self._specs[portion.reward], inputs, self.timeout_s, SILENT_S)
            if not capacity or not await self._news.wait(changed, deadline_s):
                return RewardLease(ttl_s=SILENT_S)

    async def submit(self, judge: str, ticket: str, results: Sequence[RewardResult]) -> None:
        """Takes a judge's answer; returns once it is stored. What is no reward counts as failed, and is refused."""
        self._heard[judge] = self._clock()
        samples = self.portions.find(judge, ticket).samples
        if len(results) != len(samples):
            raise Refused(f"ticket {ticket}: {len(results)} results for {len(samples)} samples")
        found = [admissible(sample, result) for sample, result in zip(samples, results, strict=True)]
        await self._answer(judge, ticket, found)
        for index, (told, taken) in enumerate(zip(results, found, strict=True)):
            if taken is not told:
                raise Refused(f"ticket {ticket}: result {index} counts as failed: {taken.error}")

    def leave(self, judge: str) -> None:
        """Gives what a judge holds to others."""
        self._heard.pop(judge, None)
        if self.portions.leave(judge):
            self._hand_out()

    def forget_silent(self) -> None:
        """Forgets judges that hold nothing and have gone without a word."""
        here = self.present()
        self._heard = {judge: heard_s for judge, heard_s in self._heard.items() if judge in here}

    def present(self, within_s: float = PRESENT_S) -> list[str]:
        """Judges elsewhere that hold samples, or asked for some in this time."""
        since_s = self._clock() - within_s
        heard = {judge for judge, heard_s in self._heard.items() if heard_s >= since_s}
        return sorted((heard | self.portions.held.keys()) - {LOCAL})

    def standing(self) -> str:
        """Who is waited for, in words."""
        if not self.pool.num_processes and not self.present():
            return "no judge is there, and reward.processes = 0: start one with offbeat worker --role reward --join URL"
        out = [f"{count} with {judge or 'reward.processes'}" for judge, count in sorted(self.portions.held.items())]
        return f"rewards asked for: {', '.join(out) or 'none'}"

    # --- the queue ---

    async def _feed(self, ledger: Ledger, call: Callable[..., Awaitable[Any]]) -> None:
        """Fills the queue from the ledger, whenever there may be something new and there is room."""
        while True:
            self._look.clear()
            self._is_full = True
            while (room := self.portions.room) > 0:
                found: list[Unscored] = await call(ledger.unscored, room, after=self._last_seq)
                if found:
                    self._last_seq = found[-1].seq
                    self.portions.add(found)
                    self._hand_out()
                if len(found) < room:
                    self._is_full = False
                    break
            await self._look.wait()

    def _hand_out(self) -> None:
        """What waits, to the local pool as far as it takes more, and to whoever asks."""
        num = self.pool.num_processes
        size, most = (SMALL, SMALL * num) if self.present() else (LARGE, LARGE * (num + 1))
        for reward in self.portions.rewards if num else ():
            # For each reward alone: the pool sees to it that a slow one keeps no quick one waiting.
            while self.portions.held_of(LOCAL, reward) < most:
                portion = self.portions.lease(LOCAL, size, (reward,), timed=False)
                if portion is None:
                    break
                self._bell.spawn(self._judge_here(portion))
        self._news.ring()

    async def _judge_here(self, portion: Portion) -> None:
        results = await self.pool.score(portion.reward, self.scorer.inputs(portion.samples))
        found = [admissible(sample, result) for sample, result in zip(portion.samples, results, strict=True)]
        await self._answer(LOCAL, portion.ticket, found)

    async def _answer(self, judge: str, ticket: str, results: Sequence[RewardResult]) -> None:
        portion = self.portions.answer(judge, ticket)
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.append((self.scorer.scored(portion.samples, results), stored))
        self._store_now.set()
        self._hand_out()
        if self._is_full:
            self._look.set()
        await asyncio.shield(stored)

    async def _store(self, ledger: Ledger, call: Callable[..., Awaitable[Any]]) -> None:
        """Writes answers; those that come while a commit is under way share the next."""
        while True:
            await self._store_now.wait()
            self._store_now.clear()
            answers, self._answers = self._answers, []
            results = [scored for portion, _ in answers for scored in portion]
            try:
                stored: Scores = await call(ledger.score, results)
            except Exception as error:
                for _, is_stored in answers:
                    is_stored.set_exception(error)
                    is_stored.exception()  # looked at: whoever answered may have gone
                raise
            for _, is_stored in answers:
                is_stored.set_result(None)
            self._bell.ring()
            if stored.num_dropped:
                self._on_dropped()

    async def _expire(self) -> None:
        """Takes back what judges did not answer in time, and what those hold that fell silent."""
        while True:
            next_s = self.portions.next_deadline_s()
            left_s = MAX_SLEEP_S if next_s is None else min(max(next_s - self._clock(), 0.0), MAX_SLEEP_S)
            await asyncio.sleep(left_s)
            if self.portions.expire() + sum(self.portions.leave(judge) for judge in self._silent()):
                self._hand_out()

    def _silent(self) -> list[str]:
        since_s = self._clock() - SILENT_S
        return [judge for judge in self.portions.held if judge != LOCAL and self._heard[judge] < since_s]


def _cannot_leave(rewards: Sequence[str]) -> str:
    return f"reward {', '.join(rewards)} was handed in from Python and cannot leave its process"
