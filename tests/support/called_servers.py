"""Servers for tests of whoever calls them: real ones on real sockets, which answer well, badly or not at all."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from offbeat.engines.http_calls import Server

LONG_S = 30.0
"""Nobody waits for so long unless a test fails."""


class Visits:
    """What a server saw: its calls, the connections that they came over, and those that were closed on it."""

    def __init__(self) -> None:
        self.calls: list[web.BaseRequest] = []
        self.connections: set[object] = set()
        self.has_come, self.was_left = asyncio.Event(), asyncio.Event()


@contextlib.asynccontextmanager
async def served(answer, **settings):
    """A server that answers as it is told, one who calls it, and what the server saw."""
    visits = Visits()

    async def handle(request):
        visits.calls.append(request)
        visits.connections.add(request.protocol)
        visits.has_come.set()
        try:
            return await answer(request)
        except (asyncio.CancelledError, ConnectionResetError):
            visits.was_left.set()
            raise

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True), shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", **settings)
    try:
        async with asyncio.timeout(LONG_S):
            yield server, visits
    finally:
        await server.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def saying(said: bytes):
    """A server that says these bytes to whoever connects and calls, and hangs up."""

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        async with asyncio.timeout(LONG_S):
            yield server
    finally:
        await server.close()
        listener.close()


def replying(status=200, body=b"", **settings):
    async def answer(request):
        return web.Response(status=status, body=body, **settings)

    return answer


def streaming(*pieces, then=None):
    """Sends pieces as they are cut, each by itself; then whatever `then` does, or a proper end."""

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if then is not None:
            await then(request)
        return response

    return answer


async def hang(request):
    await asyncio.Event().wait()


async def break_off(request):
    request.transport.abort()


async def all_events(server, body=None):
    return [event async for event in server.events("/events", body)]
