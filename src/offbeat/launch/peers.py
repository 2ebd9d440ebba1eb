"""A worker's weights from wherever they are nearest: workers of its site, the run's store, the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import UserError
from offbeat.launch.joining import Joined
from offbeat.rollout.peer_server import PeerServer
from offbeat.rollout.peers import PeerSources
from offbeat.serve.http.fetching import CoordinatorSources
from offbeat.serve.http.receiving import Receiving
from offbeat.weights.pieces import open_store
from offbeat.weights.receive import Figures
from offbeat.weights.sources import Sources, StoreSources


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
    member: Joined, folder: Path, site: Site, report: Callable[[Figures], None], has_base: Callable[[str], bool]
) -> AsyncIterator[Receiving]:
    """Brings versions into `folder`, and hands their pieces on, until it is left. `has_base` says, by its digest,
    whether this worker has what adapters stand on."""
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

        async def learn() -> str:
            """Whom to ask for the next version; returns what peers want to see."""
            told = await coordinator.peers(site.name, server.url if server else "", peers.root_bytes_per_s)
            peers.use(told.urls, told.key)
            return told.key

        def arrived() -> None:
            if server is not None:
                server.tell()

        found = Receiving(
            member.connection, folder, sources=peers, before=learn, has_base=has_base, report=report, arrived=arrived
        )
        if site.address is not None:
            host, port = site.address
            server = PeerServer(
                found.store, await learn(), expects=found.expects, host=host, port=port, beyond_loopback=True
            )
            await server.start()
            stack.push_async_callback(server.stop)
        yield found
