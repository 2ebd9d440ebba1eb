"""A server that plays back recorded exchanges, in their order, over a real socket.

A recording is a JSON file: `from` says where its exchanges come from, `exchanges` lists what is asked and what is
answered. `asked` is method and path; `body`, where there is one, must be what was sent; `json`, `text` or `events` (a
stream) is the answer, of `status` 200 unless it says otherwise. A recorded string `<name>` stands for whatever was sent
in its place, and for the same again in later answers. An exchange that is `whenever` may be asked at any time and as
often as one likes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

FOLDER = Path(__file__).parent / "recorded"


def recording(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    assert recorded["from"]
    return recorded


class Playback:
    """What is left to be asked, and what was asked that nobody recorded."""

    def __init__(self, exchanges: list[dict[str, Any]]):
        self.left = [exchange for exchange in exchanges if not exchange.get("whenever")]
        self.whenever = {exchange["asked"]: exchange for exchange in exchanges if exchange.get("whenever")}
        self.bound: dict[str, str] = {}
        self.unexpected: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = f"{request.method} {request.path_qs}"
        body = json.loads(said) if (said := await request.text()) else None
        if self.left and self.left[0]["asked"] == asked and self._is_same(self.left[0].get("body", body), body):
            return await self._play(self.left.pop(0), request)
        if asked in self.whenever:
            return await self._play(self.whenever[asked], request)
        self.unexpected.append(f"{asked} {json.dumps(body)}, before {json.dumps(self.left[:1])[:500]}")
        return web.Response(status=418, text=self.unexpected[-1])

    def _is_same(self, recorded: Any, asked: Any) -> bool:
        if isinstance(recorded, str) and recorded.startswith("<"):
            return self.bound.setdefault(recorded, str(asked)) == str(asked)
        if isinstance(recorded, dict) and isinstance(asked, dict):
            return recorded.keys() == asked.keys() and all(self._is_same(recorded[key], asked[key]) for key in asked)
        return bool(recorded == asked)

    async def _play(self, exchange: dict[str, Any], request: web.Request) -> web.StreamResponse:
        status = exchange.get("status", 200)
        if "events" in exchange:
            stream = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            for event in exchange["events"]:
                await stream.write(f"data: {event if isinstance(event, str) else self._filled(event)}\n\n".encode())
            return stream
        if "json" in exchange:
            return web.Response(status=status, text=self._filled(exchange["json"]), content_type="application/json")
        return web.Response(status=status, text=exchange["text"])

    def _filled(self, answer: Any) -> str:
        text = json.dumps(answer)
        for name, value in self.bound.items():
            text = text.replace(name, value)
        return text


@asynccontextmanager
async def playing(exchanges: list[dict[str, Any]]) -> AsyncIterator[str]:
    """The URL of a server that plays exchanges back; in the end all of them have been asked for, and nothing else."""
    playback = Playback(exchanges)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", playback.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
    assert not playback.unexpected
    assert not playback.left
