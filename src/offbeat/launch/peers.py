"""A worker's weights from wherever they are nearest: workers of its site, the run's store, the coordinator."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import UserError
from offbeat.launch.joining import Joined
from offbeat.rollout.peer_server import Guests, PeerServer, is_loopback, peer_url
from offbeat.rollout.peers import PeerSources
from offbeat.serve.http import wire
from offbeat.serve.http.fetching import CoordinatorSources
from offbeat.serve.http.receiving import Receiving
from offbeat.weights.pieces import open_store
from offbeat.weights.receive import Figures
from offbeat.weights.sources import Sources, StoreSources

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """Where this worker is, for those that fetch weights from each other."""

    name: str = ""
    """Workers with the same reach each other fast; "": on its own."""
    address: tuple[str, int] | None = None
    """Where it serves them; None: it only asks."""


def read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--peer-address {text!r}: allowed is HOST:PORT, as others of the site reach it; port 0: any")
    return host.strip("[]"), int(port)


@asynccontextmanager
async def receiving(
    member: Joined,
    folder: Path,
    site: Site,
    report: Callable[[Figures], None],
    has_base: Callable[[str], bool],
    *,
    allow_plain: bool = False,
) -> AsyncIterator[Receiving]:
    """Brings versions into `folder`, and hands their pieces on, until it is left. `has_base` says, by its digest,
    whether this worker has what adapters stand on; `allow_plain` whether keys may cross a network in the clear."""
    coordinator = CoordinatorSources(member.connection)
    store = member.config.weights.store
    root: Sources = StoreSources(open_store(store)) if store else coordinator
    if not site.name:
        yield Receiving(member.connection, folder, sources=root, has_base=has_base, report=report)
        return
    async with AsyncExitStack() as stack:
        peers = PeerSources(root)
        stack.push_async_callback(peers.close)
        server: PeerServer | None = None

        async def learn() -> list[str]:
            """Whom to ask for the next version; returns the hashes of the keys that we are to honour."""
            host, port = ("", 0) if server is None else (_own_host(server.host), server.port)
            told = await coordinator.peers(site.name, host, port, peers.root_bytes_per_s)
            peers.use(usable(told.peers, allow_plain=allow_plain))
            return told.guests

        def arrived() -> None:
            if server is not None:
                server.tell()

        found = Receiving(
            member.connection, folder, sources=peers, before=learn, has_base=has_base, report=report, arrived=arrived
        )
        if site.address is not None:
            host, port = site.address
            opened = PeerServer(
                found.store,
                Guests(learn).admits,
                expects=found.expects,
                arrived=found.num_bytes_arrived,
                host=host,
                port=port,
                beyond_loopback=allow_plain,
            )
            await opened.start()
            stack.push_async_callback(opened.stop)
            server = opened
            await learn()  # what is wrong with our address is told at once
        yield found


def usable(peers: Sequence[wire.Peer], *, allow_plain: bool) -> dict[str, str]:
    """The keys of peers that may be asked, by their addresses. Between peers there is no TLS."""
    near = [peer for peer in peers if allow_plain or is_loopback(peer.host)]
    if len(near) < len(peers):
        num_left = len(peers) - len(near)
        log.warning("%d peers are not asked: keys would cross the network in the clear; see --allow-plain", num_left)
    return {peer_url(peer.host, peer.port): peer.key for peer in near}


def _own_host(bound: str) -> str:
    """The address to name for ours; none where we listen at all of them, and the coordinator sees which one."""
    return "" if ipaddress.ip_address(bound).is_unspecified else bound
