"""A worker in a process of its own: `offbeat worker --join URL`.

It works until the run is over. Asked to stop, it hands back what is unfinished and leaves; asked twice, it goes at
once, and what it had finished stays in its spool for the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from offbeat.launch.engines import make_engine
from offbeat.launch.joining import Invitation, joined
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.rollout.spool import Spool
from offbeat.rollout.worker import Worker
from offbeat.serve.http.client import RemoteWorker


async def work(invitation: Invitation, overrides: Sequence[str]) -> str | None:
    """Works until the run is over; returns why it stopped before."""
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        spool = Spool(invitation.folder / "spool" / member.run)
        stack.callback(spool.close)
        with interruptible():
            engine = make_engine(member.config, member.worker)
        stack.push_async_callback(engine.close)
        # On one machine weights are read where they lie; whatever is read is compared with the published digest.
        client = RemoteWorker(member.connection, invitation.folder / "weights", shares_disk=member.connection.is_local)
        worker = Worker(member.worker, engine, client, spool=spool)
        stopping = Stopping(lambda why: None)
        stopping.listen()
        print(f"worker {member.worker}: joined {member.run} at {invitation.url}", flush=True)
        working = asyncio.ensure_future(worker.run())
        asked = asyncio.ensure_future(stopping.requested.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                print(f"worker {member.worker}: stopping ({stopping.why}): handing back what is unfinished", flush=True)
                await worker.drain()
            await working
        finally:
            asked.cancel()
            working.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({working})
        return stopping.why
