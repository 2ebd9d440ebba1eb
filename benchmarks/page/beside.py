"""A crowd of paced workers at a coordinator, with and without people who look at the run's page."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.page import browser as browsers
from benchmarks.swarm.load import WARMUP_ANSWERS, WORKERS_CORE, Server, started
from benchmarks.swarm.workers import Crowd

NUM_STREAMS = 5
PACED = 4.0
"""Seconds of an answer: the crowd offers some 350 a second, a quarter of what the coordinator can take."""


class Lengths(Enum):
    """Rounds, and seconds of each part of a round."""

    FULL = (5, 20.0)
    QUICK = (1, 6.0)


def measure(browser: Any, folder: Path, lengths: Lengths) -> dict[str, list[float]]:
    """Returns submissions per second `alone` and `watched`, in turn, and those per second of the server's CPU time."""
    names = ("alone", "watched", "alone, per CPU s", "watched, per CPU s")
    rates: dict[str, list[float]] = {name: [] for name in names}

    def note(name: str) -> None:
        rate, per_cpu_s = _rate(server, seconds)
        rates[name].append(rate)
        rates[f"{name}, per CPU s"].append(per_cpu_s)

    num_rounds, seconds = lengths.value
    token = secrets.token_urlsafe(24)
    with started(folder / "crowd", page=token) as server:
        if len(os.sched_getaffinity(0)) > 1:
            os.sched_setaffinity(0, {WORKERS_CORE})
        for number in range(num_rounds):
            note("alone")
            with _watched(browser, server.url, token):
                note("watched")
            report.say(
                "page", f"round {number + 1}: {rates['alone'][-1]:,.0f}/s, watched {rates['watched'][-1]:,.0f}/s"
            )
        held = server.stop()
    assert not held["violations"], held["violations"][:3]
    return rates


def _rate(server: Server, seconds: float) -> tuple[float, float]:
    async def phase() -> tuple[float, float]:
        async with Crowd(server.url, server.secrets, PACED) as crowd:
            await crowd.warm_up(WARMUP_ANSWERS * len(server.secrets), 60.0)
            before_s = server.cpu_s()
            done = await crowd.work(seconds)
            return done.rate, done.num_submissions / max(server.cpu_s() - before_s, 1e-9)

    with ThreadPoolExecutor(1) as thread:  # this one has an event loop already, that of Playwright
        return thread.submit(lambda: asyncio.run(phase())).result()


@contextmanager
def _watched(browser: Any, url: str, token: str) -> Iterator[None]:
    """Within the block, the page is open in the browser and in `NUM_STREAMS` more event streams."""
    is_over, num_events = threading.Event(), [0] * NUM_STREAMS

    async def listen(number: int, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/page/data/changes", timeout=aiohttp.ClientTimeout(total=None)) as response:
            response.raise_for_status()
            async for _ in response.content.iter_chunked(1 << 16):
                num_events[number] += 1
                if is_over.is_set():
                    return

    async def listen_all() -> None:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            (await session.get(f"{url}/page/?token={token}")).raise_for_status()
            streams = [asyncio.create_task(listen(number, session)) for number in range(NUM_STREAMS)]
            await asyncio.to_thread(is_over.wait)
            for stream in streams:
                stream.cancel()

    listening = threading.Thread(target=lambda: asyncio.run(listen_all()))
    with browsers.opened(browser, f"{url}/page/?token={token}") as page:
        listening.start()
        try:
            browsers.first_picture_s(page)
            yield
        finally:
            is_over.set()
            listening.join()
    assert all(num_events), f"streams without an event: {num_events}"
