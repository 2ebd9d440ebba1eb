"""A worker's process: `offbeat worker --join URL`.

It works until the run is over. When asked to stop, it hands back unfinished work and leaves. When asked twice, it ends
at once, and finished work stays in its spool for the next start. If its engine's server dies, the worker submits
finished work, releases running tasks for other workers, and continues with a new engine under the same name.
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
from offbeat.errors import OffbeatError, RunOver, UserError
from offbeat.launch import episode_parts, wiring
from offbeat.launch.engine_choice import announce, with_chosen_engine
from offbeat.launch.engine_parts import Engines, HasAdapterBase, engines_of
from offbeat.launch.joining import Invitation, JoinedRun, joined, report_run_over
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.net import is_loopback
from offbeat.weights.download import Sources, StoreSources
from offbeat.weights.peer_server import Guests, PeerServer, peer_url
from offbeat.weights.peers import PeerSources
from offbeat.weights.piece_store import open_store
from offbeat.weights.receive import ReceiveFigures
from offbeat.worker.episodes import Episodes
from offbeat.worker.progress import WorkerProgress
from offbeat.worker.spool import Spool
from offbeat.worker.worker import DRAIN_WITHIN_S, Worker, WorkerMetrics

log = logging.getLogger(__name__)

LEAVE_WITHIN_S = 5.0
"""Seconds for which a worker that is interrupted while it loads tries to tell the coordinator that it leaves."""


@dataclass(frozen=True)
class Site:
    """Where a worker is in the network, for exchanging weights with other workers."""

    name: str = ""
    """Name of the site, whose workers have a fast network between them; "": fetches from no other worker."""
    address: tuple[str, int] | None = None
    """Host and port at which the worker serves pieces to others of its site; None: it only fetches."""


def read_address(text: str, option: str = "--peer-address") -> tuple[str, int]:
    """Returns host and port of an option's text, such as "10.0.0.1:29500"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        what = (
            "the address at which other workers of the site reach this worker; port 0 stands for any free port"
            if option == "--peer-address"
            else "an address of rank 0's machine that the other machines reach"
        )
        raise UserError(f"{option} {text!r}: write it as HOST:PORT, {what}")
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
    """Yields a receiver that fetches versions into `folder`, from peers of its site first, then from the run's store or
    the coordinator. Within the block, serves the fetched pieces to peers if `site` has an address.

    `report` is called with the costs of each version. `has_base(digest)` returns whether this worker has the adapters'
    base model with that digest. `allow_plain`: whether keys may be sent over a network without TLS.
    """
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
            """Reports this worker's address to the coordinator and learns which peers to fetch from. Returns the hashes
            of the keys with which peers may fetch from this worker's own server."""
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
            await learn()  # reports a wrong address at once
        yield found


def usable(peers: Sequence[wire.Peer], *, allow_plain: bool) -> dict[str, str]:
    """Returns the peers (workers of the same site) that may be asked for pieces: a dict from a peer's URL to the key to
    send with requests to this peer. Peers use no TLS, so without `allow_plain` only peers at loopback addresses are
    returned."""
    near = [peer for peer in peers if allow_plain or is_loopback(peer.host)]
    if len(near) < len(peers):
        num_left = len(peers) - len(near)
        log.warning("%d peers are not used, because keys would be sent unencrypted; --allow-plain allows it", num_left)
    return {peer_url(peer.host, peer.port): peer.key for peer in near}


def _own_host(bound: str) -> str:
    """Returns the host to report to the coordinator: the address `bound` at which this worker's server listens. Returns
    "" if the server listens at all addresses; the coordinator then takes the address that it sees."""
    return "" if ipaddress.ip_address(bound).is_unspecified else bound


T = TypeVar("T")


def _say(text: str) -> None:
    print(text, flush=True)


async def _leave(member: JoinedRun) -> None:
    """Tells the coordinator that this worker, which has no tasks, leaves. Ignores errors, because the coordinator may
    not answer."""
    with suppress(OffbeatError, TimeoutError):
        async with asyncio.timeout(LEAVE_WITHIN_S):
            await member.connection.post("/v1/leave", wire.Nothing())


async def work(
    invitation: Invitation,
    overrides: Sequence[str],
    site: Site,
    *,
    shares_disk: bool = True,
    engine_log: Path | None = None,
    beside_trainer: Path | None = None,
) -> str | None:
    """Joins a run and works until the run is over. Returns None, or the reason if this worker was stopped before.

    Weight files of a trusted coordinator on this machine are read in place, unless `shares_disk` is False. The output
    of an engine's server goes to file `engine_log`; None: to a file in the worker's folder. `beside_trainer` is the
    run's folder if the server shares its GPU with the trainer, else None.
    """
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        config, choice = with_chosen_engine(member.config)
        engine = f"engine {config.rollout.engine}, model {config.model.path}"
        _say(f"worker {member.worker}: joined {member.run} at {invitation.url}; loading {engine}")
        announce(choice, config)
        spool = Spool(invitation.folder / "spool" / member.run)
        stack.callback(spool.close)
        try:
            with interruptible():
                engines = engines_of(
                    config, member.worker, invitation.folder, engine_log, beside_trainer=beside_trainer
                )
        except KeyboardInterrupt:
            await _leave(member)
            raise
        stack.push_async_callback(engines.close)
        metrics, has_base = WorkerMetrics(), HasAdapterBase(engines, config)
        cache = invitation.folder / "weights"
        brought = await stack.enter_async_context(
            receiving(member, cache, site, metrics.fetched, has_base, allow_plain=invitation.allow_plain)
        )

        def new_client() -> WorkerClient:
            """Returns a client for the next engine; its first heartbeat releases the leases of the previous engine."""
            return RemoteWorker(
                member.connection,
                cache,
                shares_disk=shares_disk and member.connection.is_local and invitation.trusts_coordinator,
                receiver=brought,
                figures=metrics.totals,
            )

        tokens = wiring.load_tokens(config) if episode_parts.episode_tasks(config) else None
        log_file = invitation.folder / "logs" / f"environments-{member.worker}.log"
        episodes = await stack.enter_async_context(episode_parts.playing(config, tokens, log_file))
        stopping = Stopping()
        stack.enter_context(stopping.listening())
        progress = WorkerProgress(member.worker, metrics, _say, lambda: member.connection.outage.length_s > 0)
        try:
            over = await WorkerSupervisor(
                member, engines, spool, metrics, new_client, stopping, progress, episodes
            ).run()
        except RunOver as error:
            over = error
        _say(f"worker {member.worker}: made {progress.totals()}")
        if stopping.why is None:
            report_run_over(invitation, member, "worker", over)
        return stopping.why


@dataclass
class WorkerSupervisor:
    """Runs a worker, with a new engine whenever an engine's server dies."""

    member: JoinedRun
    engines: Engines
    spool: Spool
    metrics: WorkerMetrics
    new_client: Callable[[], WorkerClient]
    stopping: Stopping
    progress: WorkerProgress
    episodes: Episodes | None = None
    num_deaths: int = 0

    async def run(self) -> RunOver | None:
        """Works until the run is over, or until asked to stop; then hands all work back. Returns why the run was over;
        None if asked to stop."""
        client = self.new_client()
        while engine := await self._unless_stopped(self.engines.open()):
            worker = await self._begin(engine, client)
            try:
                await self._work(worker)
                return worker.run_over
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
        return None

    async def _begin(self, engine: Engine, client: WorkerClient) -> Worker:
        self.metrics.follow(engine)
        able = engine.capabilities
        _say(f"worker {self.member.worker}: ready: {able.fingerprint}, {able.num_slots} answers at a time")
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
            episodes=self.episodes,
        )

    async def _hand_over(self, worker: Worker, client: WorkerClient) -> None:
        """Submits the finished work of `worker`, whose engine died. Then sends the first heartbeat of `client`, the
        next engine's client, which releases all leases of `worker`."""
        self.num_deaths += 1
        await worker.send_finished()
        await client.heartbeat([])

    async def _work(self, worker: Worker) -> None:
        """Runs a worker until the run is over or, after a request to stop, until it has handed back unfinished work;
        raises the errors of worker and engine."""
        working = asyncio.ensure_future(worker.run())
        asked = asyncio.ensure_future(self.stopping.requested.wait())
        gone = asyncio.ensure_future(self.engines.wait_exited())
        watching = asyncio.ensure_future(self.progress.watch(worker))
        try:
            await asyncio.wait({working, asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not working.done():
                working.cancel()
                await asyncio.wait({working})
                raise gone.result()
            if not working.done():
                why = self.stopping.why
                print(f"worker {worker.name}: stopping ({why}): handing back unfinished work", flush=True)
                await worker.drain()
            await working
        finally:
            for waiting in (watching, asked, gone, working):
                waiting.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({working})

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
        """Awaits `work` without a time limit and returns its result. After a request to stop, `work` gets another
        `grace_s` seconds; if `work` is still running then, cancels it and returns None."""
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
