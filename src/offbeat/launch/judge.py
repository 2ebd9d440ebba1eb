"""A judge in a process of its own: `offbeat worker --role reward --join URL`.

It leases samples, has its own killable processes judge them, and answers, until the run is over; busy or not, it lets
the coordinator hear of it. Asked to stop, it gives back at once what it has not answered.

Rewards are found by name on this machine. One that cannot be loaded here is this machine's trouble and no sample's: the
judge gives everything back, leaves, and says so. The same goes for code that this machine's owner did not name: the
coordinator could have any function of any module called with any text.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from offbeat.config.explain import show
from offbeat.config.load import typed_keys
from offbeat.errors import UserError
from offbeat.launch.joining import Invitation, joined, say_over
from offbeat.launch.stopping import Stopping
from offbeat.ledger.errors import Fenced, Unknown
from offbeat.reward.pool import RewardPool
from offbeat.serve.client import JudgeClient, RewardLease
from offbeat.serve.http.client import RemoteJudge

LEASE_WAIT_S = 300.0
"""The client asks again as often as the way there needs it."""
WORTH_S = 1.0
"""Samples leased at a time should take about so long: few are lost with a judge that dies, and few calls are made."""
MOST = 64
"""Samples in one lease; for async rewards, those that a process judges side by side."""
LEAVE_WITHIN_S = 5.0
REWARD = re.compile(r"task(\.\d+)?\.reward")
NOT_LOADED = "start:"
"""How the error of a sample begins whose reward no process could load."""


class Judge:
    """Judges for one coordinator; `run` returns when the run is over."""

    def __init__(self, client: JudgeClient, processes: int, log_path: Path, own_code: Collection[str] | None):
        """`own_code` are the rewards of the form module:function that may run here; None: all of them."""
        self.client, self.processes, self.log_path, self._own_code = client, processes, log_path, own_code
        self._pools: dict[tuple[str, float], RewardPool] = {}

    async def run(self) -> None:
        await self.client.leave()  # what this judge held when it was killed, someone may have at once
        parts = [asyncio.ensure_future(self._beat())]
        for _ in range(self.processes + 1):  # one more than can be judged: no process waits for the way there
            parts.append(asyncio.ensure_future(self._seat()))
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:  # what is still being judged, nobody wants any more, or we can not
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def close(self) -> None:
        """Gives back what is not answered, and ends every process."""
        try:
            with suppress(TimeoutError):  # nobody is there; what we hold is overdue before long
                async with asyncio.timeout(LEAVE_WITHIN_S):
                    await self.client.leave()
        finally:
            await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _beat(self) -> None:
        """Says that we are there, until the run is over."""
        while True:
            told = await self.client.lease_rewards(0, 0.0)
            if told.is_over:
                return
            await asyncio.sleep(told.ttl_s / 3)

    async def _seat(self) -> None:
        """Leases, judges and answers, one portion after the other."""
        capacity = 1
        while True:
            lease = await self.client.lease_rewards(capacity, LEASE_WAIT_S)
            if lease.is_over:
                return
            if lease.ticket:
                start_s = time.monotonic()
                await self._judge(lease)
                capacity = next_capacity(len(lease.inputs), time.monotonic() - start_s)

    async def _judge(self, lease: RewardLease) -> None:
        results = await self._pool(lease).score(lease.reward, lease.inputs)
        for result in results:
            if result.error is not None and result.error.startswith(NOT_LOADED):
                why = result.error.removeprefix(NOT_LOADED).strip()
                raise UserError(f"{why}; this judge must find the run's rewards on its own machine")
        with suppress(Fenced, Unknown):  # we were too slow, or it was started again: someone else judges these
            await self.client.submit_rewards(lease.ticket, results)

    def _pool(self, lease: RewardLease) -> RewardPool:
        key = lease.reward, lease.timeout_s
        if ":" in lease.reward and self._own_code is not None and lease.reward not in self._own_code:
            raise UserError(
                f"task.reward = {show(lease.reward)}: comes from the coordinator, which may not choose code for this "
                f"machine; allow this reward, with --task.reward {lease.reward}, or all, with --trust-coordinator"
            )
        if key not in self._pools:
            named = {lease.reward: lease.reward}
            self._pools[key] = RewardPool(self.processes, lease.timeout_s, named, self.log_path)
        return self._pools[key]


def next_capacity(num_samples: int, seconds: float) -> int:
    """How many samples to lease next, at most twice as many as before."""
    wanted = int(num_samples * WORTH_S / seconds) if seconds > 0 else MOST
    return max(1, min(wanted, 2 * num_samples, MOST))


def rewards_in(overrides: Sequence[str]) -> set[str]:
    """The rewards that a command line names."""
    return {text for key, text in typed_keys(overrides).items() if text and REWARD.fullmatch(key)}


async def judge(invitation: Invitation, overrides: Sequence[str]) -> str | None:
    """Judges until the run is over; returns why it stopped before."""
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        processes = member.config.reward.processes
        own_code = None if invitation.trusts_coordinator else rewards_in(overrides)
        made = Judge(RemoteJudge(member.connection), max(processes, 1), invitation.folder / "rewards.log", own_code)
        stack.push_async_callback(made.close)
        stopping = Stopping(lambda why: None)
        stack.enter_context(stopping.listening())
        print(f"judge {member.worker}: joined {member.run} at {invitation.url}", flush=True)
        judging = asyncio.ensure_future(made.run())
        asked = asyncio.ensure_future(stopping.requested.wait())
        try:
            await asyncio.wait({judging, asked}, return_when=asyncio.FIRST_COMPLETED)
            if judging.done():
                await judging
        finally:
            asked.cancel()
            judging.cancel()
            await asyncio.wait({judging})
        if stopping.why is None:
            say_over(invitation, member, "judge")
        return stopping.why
