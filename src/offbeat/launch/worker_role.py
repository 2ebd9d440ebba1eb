"""A worker's process: `offbeat worker --join URL`.

It works until the run is over. Asked to stop, it hands back unfinished work and leaves; asked twice, it ends at once,
and finished work stays in its spool for the next start. It survives the death of its engine's server: finished work is
submitted, running tasks are released for other workers, and the next engine starts under the same name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from offbeat.client import wire
from offbeat.client.http_client import RemoteWorker
from offbeat.client.protocol import WorkerClient
from offbeat.client.weight_transfer import CoordinatorReceiver, CoordinatorSources
from offbeat.engines.protocol import Engine, EngineDied, KvMode
from offbeat.errors import RunOver, UserError
from offbeat.launch.engine_parts import Engines, HasAdapterBase, engines_of
from offbeat.launch.joining import Invitation, JoinedRun, joined, report_run_over
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.net import is_loopback
from offbeat.weights.download import Sources, StoreSources
from offbeat.weights.peer_server import Guests, PeerServer, peer_url
from offbeat.weights.peers import PeerSources
from offbeat.weights.piece_store import open_store
from offbeat.weights.receive import ReceiveFigures
from offbeat.worker.spool import Spool
from offbeat.worker.worker import DRAIN_WITHIN_S, Worker, WorkerMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """The network site of a worker, for workers that fetch weights from each other."""

    name: str = ""
    """Workers of one site have a fast network between them; "": no site."""
    address: tuple[str, int] | None = None
    """Host and port where it serves pieces; None: it only fetches."""


def read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--peer-address {text!r}: allowed is HOST:PORT, as others of the site reach it; port 0: any")
    return host.strip("[]"), int(port)


@asynccontextmanager
async def receiving(
    member: JoinedRun,
    folder: Path,
    site: Site,
    report: Callable[[ReceiveFigures], None],
    has_base: Callable[[str], bool],
    *,
    allow_plain: bool = False,
) -> AsyncIterator[CoordinatorReceiver]:
    """Receives versions into `folder` from the nearest source (workers of its site, the run's store, the coordinator),
    and serves their pieces meanwhile. `has_base(digest)`: whether this worker has the base of adapters; `allow_plain`:
    whether keys may cross a network in the clear."""
    coordinator = CoordinatorSources(member.connection)
    store = member.config.weights.store
    root: Sources = StoreSources(open_store(store)) if store else coordinator
    if not site.name:
        yield CoordinatorReceiver(member.connection, folder, sources=root, has_base=has_base, report=report)
        return
    async with AsyncExitStack() as stack:
        peers = PeerSources(root)
        stack.push_async_callback(peers.close)
        server: PeerServer | None = None

        async def learn() -> list[str]:
            """Asks the coordinator for peers; returns the hashes of the keys that this worker's own server accepts."""
            host, port = ("", 0) if server is None else (_own_host(server.host), server.port)
            answer = await coordinator.peers(site.name, host, port, peers.root_bytes_per_s)
            peers.use(usable(answer.peers, allow_plain=allow_plain))
            return answer.guests

        def arrived() -> None:
            if server is not None:
                server.notify()

        found = CoordinatorReceiver(
            member.connection, folder, sources=peers, before=learn, has_base=has_base, report=report, arrived=arrived
        )
        if site.address is not None:
            host, port = site.address
            opened = PeerServer(
                found.downloads.store,
                Guests(learn).admits,
                expects=found.downloads.expects,
                arrived=found.downloads.num_bytes_arrived,
                host=host,
                port=port,
                beyond_loopback=allow_plain,
            )
            await opened.start()
            stack.push_async_callback(opened.stop)
            server = opened
            await learn()  # a wrong address is an error at once
        yield found


def usable(peers: Sequence[wire.Peer], *, allow_plain: bool) -> dict[str, str]:
    """Keys of the peers that may be asked, by address. Between peers there is no TLS."""
    near = [peer for peer in peers if allow_plain or is_loopback(peer.host)]
    if len(near) < len(peers):
        num_left = len(peers) - len(near)
        log.warning("%d peers are not used: keys would cross the network in the clear; see --allow-plain", num_left)
    return {peer_url(peer.host, peer.port): peer.key for peer in near}


def _own_host(bound: str) -> str:
    """The host to report; empty if the server listens on all addresses: the coordinator sees the right one."""
    return "" if ipaddress.ip_address(bound).is_unspecified else bound


T = TypeVar("T")


async def work(
    invitation: Invitation,
    overrides: Sequence[str],
    site: Site,
    *,
    shares_disk: bool = True,
    engine_log: Path | None = None,
) -> str | None:
    """Works until the run is over; returns the reason if it stopped before. Files of a trusted coordinator on this
    machine are read in place, unless `shares_disk` is False. `engine_log` gets the output of an engine's server."""
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        spool = Spool(invitation.folder / "spool" / member.run)
        stack.callback(spool.close)
        with interruptible():
            engines = engines_of(member.config, member.worker, invitation.folder, engine_log)
        stack.push_async_callback(engines.close)
        metrics, has_base = WorkerMetrics(), HasAdapterBase(engines, member.config)
        cache = invitation.folder / "weights"
        brought = await stack.enter_async_context(
            receiving(member, cache, site, metrics.fetched, has_base, allow_plain=invitation.allow_plain)
        )

        def new_client() -> WorkerClient:
            """A client for the next engine: its first heartbeat releases the leases of the one before."""
            return RemoteWorker(
                member.connection,
                cache,
                shares_disk=shares_disk and member.connection.is_local and invitation.trusts_coordinator,
                receiver=brought,
                figures=metrics.totals,
            )

        stopping = Stopping()
        stack.enter_context(stopping.listening())
        print(f"worker {member.worker}: joined {member.run} at {invitation.url}", flush=True)
        with suppress(RunOver):
            await WorkerSupervisor(member, engines, spool, metrics, new_client, stopping).run()
        if stopping.why is None:
            report_run_over(invitation, member, "worker")
        return stopping.why


@dataclass
class WorkerSupervisor:
    """Runs a worker with one engine after another."""

    member: JoinedRun
    engines: Engines
    spool: Spool
    metrics: WorkerMetrics
    new_client: Callable[[], WorkerClient]
    stopping: Stopping
    num_deaths: int = 0

    async def run(self) -> None:
        """Returns when the run is over, or when asked to stop and all work is handed back."""
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
                await self._unless_stopped(self.engines.dispose(error))
            finally:
                await engine.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_WITHIN_S):
                await client.leave()

    async def _begin(self, engine: Engine, client: WorkerClient) -> Worker:
        self.metrics.follow(engine)
        if self.num_deaths:
            newest = await client.newer(None, 0.0)
            self.engines.log("back; loading " + (f"version {newest.number}" if newest else "the next version"))
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
        """Submits finished work first: the heartbeat of the new client releases its leases."""
        self.num_deaths += 1
        await worker.send_finished()
        await client.heartbeat([])

    async def _work(self, worker: Worker) -> None:
        """Runs a worker until the run is over, or drains it when asked to stop; raises its error."""
        working = asyncio.ensure_future(worker.run())
        asked = asyncio.ensure_future(self.stopping.requested.wait())
        gone = asyncio.ensure_future(self.engines.wait_exited())
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
        """Awaits `work`, however long it takes; None if it has not ended `grace_s` after a request to stop."""
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
