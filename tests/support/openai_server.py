"""A server with the part of OpenAI's API that `offbeat calibrate --engine` calls, whose decode steps take a set
time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class PacedServer:
    """Decodes all running answers together, a token each in a step of `step_s(rows, mean context)` seconds."""

    step_s: Callable[[int, float], float]
    prefill_s: float = 0.0
    """Seconds for a token of a prompt."""
    num_slots: int = 512
    max_context_tokens: int = 4096
    key: str = ""
    tokens_per_event: int = 1
    asked: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Rows of each step, and the seconds that it really took."""
    _running: dict[int, list[Any]] = field(default_factory=dict)
    """By number of the call: context, tokens left, and the queue of its tokens."""
    _waiting: list[Any] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.max_context_tokens}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        tokens: asyncio.Queue[bool] = asyncio.Queue()
        self._waiting.append([len(body["prompt"]), body["max_tokens"], tokens])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        sent = 0
        while sent < body["max_tokens"]:
            num = min(self.tokens_per_event, body["max_tokens"] - sent)
            for _ in range(num):
                await tokens.get()
            sent += num
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sent}
            event = {"choices": [{"text": "a" * num}], "usage": usage}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def run(self) -> None:
        number = 0
        while True:
            filled = 0
            while self._waiting and len(self._running) < self.num_slots:
                self._running[number] = self._waiting.pop(0)
                filled += self._running[number][0]
                number += 1
            if not self._running:
                await asyncio.sleep(0.0005)
                continue
            rows = len(self._running)
            context = sum(each[0] for each in self._running.values()) / rows
            started_s = time.perf_counter()
            await asyncio.sleep(self.prefill_s * filled + self.step_s(rows, context))
            if not filled:
                self.steps.append((rows, time.perf_counter() - started_s))
            for key, each in [*self._running.items()]:
                each[0] += 1
                each[1] -= 1
                each[2].put_nowait(True)
                if not each[1]:
                    del self._running[key]


@contextmanager
def serving(server: PacedServer) -> Iterator[str]:
    """Serves in a thread; yields the server's URL."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> None:
        app = web.Application(client_max_size=2**28)
        app.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.completions)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.append(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        ready.set()
        await server.run()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(start())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
