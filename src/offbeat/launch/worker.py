"""A worker in a process of its own: `offbeat worker --join URL`.

It works until the run is over. Asked to stop, it hands back what is unfinished and leaves; asked twice, it goes at
once, and what it had finished stays in its spool for the next start. Where its engine is a server, it outlives that:
what was finished is handed in, what ran is given up at once for others to carry on, and the next engine is a new life
under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from offbeat.errors import RunOver
from offbeat.launch.engines import Engines, OwnBase, engines_of
from offbeat.launch.joining import Invitation, Joined, joined, say_over
from offbeat.launch.peers import Site, receiving
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.rollout.engine import Engine, EngineDied, KvMode
from offbeat.rollout.figures import WorkerFigures
from offbeat.rollout.spool import Spool
from offbeat.rollout.worker import DRAIN_WITHIN_S, Worker
from offbeat.serve.client import WorkerClient
from offbeat.serve.http.client import RemoteWorker

T = TypeVar("T")


async def work(
    invitation: Invitation,
    overrides: Sequence[str],
    site: Site,
    *,
    shares_disk: bool = True,
    engine_log: Path | None = None,
) -> str | None:
    """Works until the run is over; returns why it stopped before. The files of a coordinator on this machine that is
    trusted are read where they lie, unless `shares_disk` is False. `engine_log` is for what an engine's server
    prints."""
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        spool = Spool(invitation.folder / "spool" / member.run)
        stack.callback(spool.close)
        with interruptible():
            engines = engines_of(member.config, member.worker, invitation.folder, engine_log)
        stack.push_async_callback(engines.close)
        figures, has_base = WorkerFigures(), OwnBase(engines, member.config)
        cache = invitation.folder / "weights"
        brought = await stack.enter_async_context(
            receiving(member, cache, site, figures.fetched, has_base, allow_plain=invitation.allow_plain)
        )

        def new_client() -> WorkerClient:
            """Each is another life of the same worker: its first heartbeat gives up what the one before held."""
            return RemoteWorker(
                member.connection,
                cache,
                shares_disk=shares_disk and member.connection.is_local and invitation.trusts_coordinator,
                receiving=brought,
                figures=figures.told,
            )

        stopping = Stopping(lambda why: None)
        stack.enter_context(stopping.listening())
        print(f"worker {member.worker}: joined {member.run} at {invitation.url}", flush=True)
        with suppress(RunOver):
            await Lives(member, engines, spool, figures, new_client, stopping).live()
        if stopping.why is None:
            say_over(invitation, member, "worker")
        return stopping.why


@dataclass
class Lives:
    """A worker through the lives of its engines."""

    member: Joined
    engines: Engines
    spool: Spool
    figures: WorkerFigures
    new_client: Callable[[], WorkerClient]
    stopping: Stopping
    num_deaths: int = 0

    async def live(self) -> None:
        """Returns when the run is over, or when asked to stop and everything is handed back."""
        client = self.new_client()
        while engine := await self._unless_stopped(self.engines.open()):
            worker = await self._begin(engine, client)
            try:
                await self._work(worker)
                return
            except EngineDied as error:
                if not self.engines.has_next:
                    raise
                client = self.new_client()
                await self._unless_stopped(self._hand_over(worker, client), grace_s=DRAIN_WITHIN_S)
                await self._unless_stopped(self.engines.bury(error))
            finally:
                await engine.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_WITHIN_S):
                await client.leave()

    async def _begin(self, engine: Engine, client: WorkerClient) -> Worker:
        self.figures.follow(engine)
        if self.num_deaths:
            newest = await client.newer(None, 0.0)
            self.engines.say("back; loading " + (f"version {newest.number}" if newest else "the next version"))
        config = self.member.config
        return Worker(
            self.member.worker,
            engine,
            client,
            spool=self.spool,
            kv=KvMode(config.rollout.kv),
            kv_lag=config.rollout.kv_lag,
            finishes=config.schedule.new_version == "finish",
        )

    async def _hand_over(self, worker: Worker, client: WorkerClient) -> None:
        """What was finished is sent first, under the leases that the next life's first heartbeat gives up."""
        self.num_deaths += 1
        await worker.send_finished()
        await client.heartbeat([])

    async def _work(self, worker: Worker) -> None:
        """Runs a worker until the run is over, or drains it when asked to stop; raises what ended it."""
        working = asyncio.ensure_future(worker.run())
        asked = asyncio.ensure_future(self.stopping.requested.wait())
        gone = asyncio.ensure_future(self.engines.gone())
        try:
            await asyncio.wait({working, asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not working.done():
                working.cancel()
                await asyncio.wait({working})
                raise gone.result()
            if not working.done():
                why = self.stopping.why
                print(f"worker {worker.name}: stopping ({why}): handing back what is unfinished", flush=True)
                await worker.drain()
            await working
        finally:
            for waiting in (asked, gone, working):
                waiting.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({working})

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
        """Does something that may take long; None where it was not over so long after someone asked to stop."""
        if self.stopping.requested.is_set() and not grace_s:
            work.close()
            return None
        doing, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.stopping.requested.wait())
        try:
            await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({doing}, timeout=grace_s)
            return await doing if doing.done() else None
        finally:
            asked.cancel()
            doing.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({doing})
