"""A peer in a process of its own: serves the store in a folder until it is killed; says where on its first line."""

import asyncio
import sys
from pathlib import Path

from offbeat.weights.peer_server import PeerServer
from offbeat.weights.piece_store import FolderStore


async def main(folder: str, key: str) -> None:
    async def admits(shown: str) -> bool:
        return shown == key

    server = PeerServer(FolderStore(Path(folder)), admits)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
