"""Episodes of a worker with real environments and an engine whose turns a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent

import numpy as np
from fake_coordinator import Desk
from transformers import AutoTokenizer

from offbeat.engines.protocol import Capabilities, EngineMetrics, Finish, Generation, Request
from offbeat.environments.formats import PlainFormat
from offbeat.environments.pool import EnvironmentPool
from offbeat.environments.wire import PartSpec
from offbeat.model.loading import TINY_FOLDER
from offbeat.trajectory import EpisodeStart, Sampling, Segment, Task
from offbeat.weights.version import Version
from offbeat.worker.episodes import EpisodeLimits, Episodes
from offbeat.worker.worker import Worker

TOKENIZER = AutoTokenizer.from_pretrained(TINY_FOLDER)
EOS = TOKENIZER.eos_token_id
PROMPT = "Q: "
SOURCE = "games"


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def text_of(tokens) -> str:
    return TOKENIZER.decode(tokens)


class WrittenEngine:
    """An engine that says what `say(number, text)` returns for the task with this number, whose response is `text` so
    far. A token takes `token_s`; "<eos>" ends a turn, and so do the request's other stop tokens."""

    def __init__(self, say: Callable[[int, str], str], *, num_slots: int = 64, token_s: float = 0.0):
        self.say, self.token_s = say, token_s
        self.capabilities = Capabilities("written", num_slots, 4096, splits_by_version=True)
        self.version: int | None = None
        self.seconds_still = 0.0
        self.metrics = EngineMetrics()
        self.requests: list[Request] = []
        self.num_running = self.most_running = 0
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        aborted = self._aborts[request.id] = asyncio.Event()
        whole = self.say(request.seed, text_of(request.tokens[len(ids(PROMPT)) :]))
        tokens = ids(whole)
        stops = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
        tokens = tokens[: stops[0] + 1] if stops else tokens
        limit = request.sampling.max_new_tokens
        finish = Finish.STOP if stops and len(tokens) <= limit else Finish.LENGTH
        tokens = tokens[:limit]
        try:
            if self.token_s:
                for count in range(len(tokens)):
                    if aborted.is_set():
                        tokens, finish = tokens[:count], Finish.ABORT
                        break
                    await asyncio.sleep(self.token_s)
            else:
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
            del self._aborts[request.id]
        segment = Segment(
            request.position, np.array(tokens, np.int32), logprobs=np.full(len(tokens), -0.5), version=1, kv_version=1
        )
        return Generation(request.id, (segment,) if tokens else (), finish)

    async def abort(self, ids=None) -> None:
        for name in list(self._aborts) if ids is None else ids:
            if name in self._aborts:
                self._aborts[name].set()

    async def load(self, version: Version) -> None:
        self.version = version.number

    async def close(self) -> None:
        pass


def write_code(folder: Path, code: str, name: str = "games") -> Path:
    file = folder / f"{name}.py"
    file.write_text("from offbeat.environments.protocol import Done, Opening, Reply\n" + dedent(code))
    return file


LIMITS = {"max_turns": 8, "max_turn_tokens": 32, "timeout_s": 60.0, "bad_calls": 1}


@asynccontextmanager
async def environments(folder: Path, spec: PartSpec, **settings) -> AsyncIterator[EnvironmentPool]:
    settings = {"processes": 1, "step_timeout_s": 5.0, "parallel_calls": 4, "memory_mb": 512, **settings}
    pool = EnvironmentPool({SOURCE: spec}, log_path=folder / "environments.log", **settings)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def make_episodes(
    pool: EnvironmentPool, *, at_once: int | None = None, max_observation_tokens=64, **limits
) -> Episodes:
    form = PlainFormat(TOKENIZER, (EOS,), pool.info[SOURCE], SOURCE, max_observation_tokens)
    return Episodes(pool, {SOURCE: form}, EpisodeLimits(**{**LIMITS, **limits}), at_once)


def an_episode(number: int, stops: tuple[int, ...], max_new_tokens: int = 200, seed: int = 7) -> Task:
    return Task(
        id=number,
        group=0,
        prompt=np.array(ids(PROMPT), np.int32),
        seed=number,
        sampling=Sampling(max_new_tokens=max_new_tokens, stop_token_ids=stops),
        episode=EpisodeStart(SOURCE, {"prompt": PROMPT, "answer": None, "info": {}}, seed),
    )


async def play(
    folder: Path,
    spec: PartSpec,
    say: Callable[[int, str], str],
    *,
    count: int = 1,
    max_new_tokens: int = 200,
    version: Version,
    pool: dict | None = None,
    **limits,
) -> Desk:
    """Plays `count` episodes to their end; returns the coordinator that has them or their failures."""
    desk = Desk()
    desk.publish(version)
    async with environments(folder, spec, **(pool or {})) as opened, asyncio.timeout(15):
        episodes = make_episodes(opened, **limits)
        stops = episodes.forms[SOURCE].stop_token_ids
        desk.add(*(an_episode(number, stops, max_new_tokens) for number in range(1, count + 1)))
        worker = Worker("w", WrittenEngine(say), desk, episodes=episodes)
        async with working(worker):
            await desk.until(lambda: len(desk.done) + len(desk.failures) == count)
    return desk


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[None]:
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()
