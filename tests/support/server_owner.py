"""A process that starts a stand-in server as a worker does, says where it is, and waits to be killed."""

import asyncio
import sys
from pathlib import Path

from test_engine_server import server_in


async def main(folder: Path) -> None:
    server = server_in(folder, "--child")
    await server.start()
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
