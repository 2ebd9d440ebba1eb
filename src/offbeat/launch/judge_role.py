"""A judge's process: `offbeat worker --role reward --join URL`.

It leases samples, scores them in killable processes and submits the rewards until the run is over; meanwhile it sends
heartbeats. When asked to stop, it returns unscored samples at once.

Rewards are loaded by name on this machine. If a reward cannot be loaded, the judge returns its samples unscored and
exits with an error. It does the same if the reward is code that this machine's owner did not allow. Without this rule,
a coordinator could call any function of any module with any text.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from offbeat.client.http_client import RemoteJudge
from offbeat.client.protocol import JudgeClient, RewardLease
from offbeat.config.explain import show
from offbeat.config.load import typed_keys
from offbeat.errors import RunInterrupted, RunOver, UserError
from offbeat.launch.joining import Invitation, joined, report_run_over
from offbeat.launch.stopping import Stopping
from offbeat.ledger.errors import Fenced, Unknown
from offbeat.rewards.pool import RewardPool

LEASE_WAIT_S = 300.0
"""Longest wait in seconds for samples to score; the client splits it into several shorter calls."""
LEASE_WORK_S = 1.0
"""Seconds of work that one lease should hold: few, so that little is lost if a judge dies, but enough to save calls."""
MAX_SAMPLES = 64
"""Largest number of samples in one lease (samples handed to a judge for scoring). A reward process scores samples of an
async reward concurrently."""
LEAVE_WITHIN_S = 5.0
REWARD = re.compile(r"task(\.\d+)?\.reward")
NOT_LOADED = "start:"
"""Prefix of the error of a sample whose reward could not be loaded."""


class Judge:
    """Scores samples for one coordinator; `run` returns when the run is over."""

    def __init__(self, client: JudgeClient, processes: int, log_path: Path, own_code: Collection[str] | None):
        """`own_code` holds the rewards of the form module:function or file.py:function that this judge may run; None:
        it may run all."""
        self.client, self.processes, self.log_path, self._own_code = client, processes, log_path, own_code
        self.run_over: RunOver | None = None
        """Why the run is over; None: the coordinator has not said that it is."""
        self._pools: dict[tuple[str, float], RewardPool] = {}

    async def run(self) -> None:
        await self.client.leave()  # frees samples that an earlier process held
        parts = [asyncio.ensure_future(self._beat())]
        for _ in range(self.processes + 1):  # one more, so that no process waits for the network
            parts.append(asyncio.ensure_future(self._score_leases()))
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:  # the run is over, or this judge failed
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def close(self) -> None:
        """Returns unscored samples to the coordinator and ends all processes."""
        try:
            with suppress(TimeoutError):  # coordinator unreachable: the leases expire
                async with asyncio.timeout(LEAVE_WITHIN_S):
                    await self.client.leave()
        finally:
            await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _beat(self) -> None:
        """Sends heartbeats until the run is over."""
        while True:
            lease = await self.client.lease_rewards(0, 0.0)
            if self._is_over(lease):
                return
            await asyncio.sleep(lease.ttl_s / 3)

    async def _score_leases(self) -> None:
        """Leases samples, scores them and submits the rewards, one lease after the other, until the run is over."""
        capacity = 1
        while True:
            lease = await self.client.lease_rewards(capacity, LEASE_WAIT_S)
            if self._is_over(lease):
                return
            if lease.ticket:
                start_s = time.monotonic()
                await self._judge(lease)
                capacity = next_capacity(len(lease.inputs), time.monotonic() - start_s)

    def _is_over(self, lease: RewardLease) -> bool:
        if lease.is_over:
            self.run_over = RunInterrupted(lease.interrupted) if lease.interrupted else RunOver("the run is over")
        return lease.is_over

    async def _judge(self, lease: RewardLease) -> None:
        results = await self._pool(lease).score(lease.reward, lease.inputs)
        for result in results:
            if result.error is not None and result.error.startswith(NOT_LOADED):
                why = result.error.removeprefix(NOT_LOADED).strip()
                raise UserError(f"{why}; the run's rewards must be installed on the machine of this judge")
        with suppress(Fenced, Unknown):  # too late, or the coordinator restarted: another judge gets them
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
    """Returns how many samples to lease next: about as many as can be scored in `LEASE_WORK_S`, but at most twice
    `num_samples`. The previous lease had `num_samples` samples, whose scoring took `seconds`."""
    wanted = int(num_samples * LEASE_WORK_S / seconds) if seconds > 0 else MAX_SAMPLES
    return max(1, min(wanted, 2 * num_samples, MAX_SAMPLES))


def rewards_in(overrides: Sequence[str]) -> set[str]:
    """Returns the rewards that are named in command-line options such as --task.reward or --task.0.reward."""
    return {text for key, text in typed_keys(overrides).items() if text and REWARD.fullmatch(key)}


async def judge(invitation: Invitation, overrides: Sequence[str]) -> str | None:
    """Joins a run and scores samples until the run is over. Returns None, or the reason if this judge was stopped
    before."""
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        processes = member.config.reward.processes
        own_code = None if invitation.trusts_coordinator else rewards_in(overrides)
        made = Judge(RemoteJudge(member.connection), max(processes, 1), invitation.folder / "rewards.log", own_code)
        stack.push_async_callback(made.close)
        stopping = Stopping()
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
            report_run_over(invitation, member, "judge", made.run_over)
        return stopping.why
