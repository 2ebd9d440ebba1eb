"""Peers and roots for tests: real servers on real sockets, honest and otherwise."""

import asyncio
import contextlib

import aiohttp
from aiohttp import web
from blake3 import blake3

from offbeat.weights.download import StoreSources
from offbeat.weights.peer_server import PeerServer
from offbeat.weights.peers import Patience, PeerSources

KEY = "the key of this run"
PATIENT = Patience(poll_s=0.2, answer_within_s=60.0, still_s=60.0, slow_after_s=60.0)
"""Bears with an honest peer on a machine that stands still for seconds."""
HURRIED = Patience(poll_s=0.2, answer_within_s=0.5, still_s=0.5, slow_after_s=0.3)
"""Leaves one that is silent or slow, soon."""


async def knows_key(key):
    return key == KEY


def name(data):
    return blake3(data).hexdigest()


class Root(StoreSources):
    """The root, which counts what it is asked for."""

    def __init__(self, store):
        super().__init__(store)
        self.num_pieces = self.num_manifests = 0

    async def manifest(self, number, digest):
        self.num_manifests += 1
        return await super().manifest(number, digest)

    async def piece(self, digest, num_bytes, into):
        self.num_pieces += 1
        await super().piece(digest, num_bytes, into)


@contextlib.asynccontextmanager
async def serving(store, **settings):
    server = PeerServer(store, settings.pop("admits", knows_key), **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def asking(root, *urls, key=KEY, **settings):
    sources = PeerSources(root, **{"patience": PATIENT, **settings})
    sources.use(dict.fromkeys(urls, key))
    try:
        yield sources
    finally:
        await sources.close()


@contextlib.asynccontextmanager
async def lying(answer):
    """A peer that answers as it likes; how often it was asked is counted."""
    calls = []

    async def handle(request):
        calls.append(request)
        return await answer(request)

    server = web.Server(handle)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", calls
    finally:
        listener.close()
        await server.shutdown(timeout=0.01)


async def get(url, key=KEY, **headers):
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers={"Authorization": f"Bearer {key}", **headers}) as response,
    ):
        return response.status, await response.read(), response.headers


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
