"""A worker whose process dies of one prompt: `poisoned_worker.py URL FOLDER NAME VOCAB_SIZE`, its poison and its token
in POISON, tokens with commas between, and OFFBEAT_TOKEN. Everything but the engine's weak spot is real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from offbeat.client.connection import Connection
from offbeat.client.credentials import load, save
from offbeat.client.http_client import RemoteWorker, join, rejoin
from offbeat.engines.protocol import Generation, Request
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.worker.spool import Spool
from offbeat.worker.worker import Worker


class Weak(PacedEngine):
    async def generate(self, request: Request) -> Generation:
        if ",".join(map(str, request.tokens.tolist())).startswith(os.environ["POISON"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(request)


async def main(url: str, folder: str, name: str, vocab_size: str) -> None:
    place, connection = Path(folder), Connection(url)
    known = load(place / "credentials.json")
    if known is None:
        member = await join(connection, os.environ["OFFBEAT_TOKEN"], name)
        save(place / "credentials.json", member.credentials)
    else:
        await rejoin(connection, known)
    lengths = LogNormalLength(median_tokens=20, sigma=0.8, max_tokens=64)
    engine = Weak(PacedSettings(num_slots=6, vocab_size=int(vocab_size), base_s=0.01, lengths=lengths), worker=name)
    client = RemoteWorker(connection, place / "weights", shares_disk=True)
    await Worker(name, engine, client, spool=Spool(place / "spool")).run()
    await connection.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
