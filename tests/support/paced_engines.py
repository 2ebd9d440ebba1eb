"""Paced engines, and requests to them."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.common.clock import now_s
from offbeat.engines.protocol import Generation, Request, Version
from offbeat.testing.paced import FixedLength, PacedEngine, PacedSettings
from offbeat.trajectory import Sampling

IDS = count()


def ask(num_prompt_tokens: int = 3, *, seed: int = 0, position: int = 0, **sampling) -> Request:
    sampling.setdefault("max_new_tokens", 10)
    return Request(f"r{next(IDS)}", np.arange(1, num_prompt_tokens + 1), seed, Sampling(**sampling), position)


def version(number: int) -> Version:
    return Version(number, step=number, parent=None, digest="", path=Path("nowhere"))


def open_engine(**settings) -> PacedEngine:
    settings = {"base_s": 1.0, "per_row_s": 0.5, "num_slots": 4, "lengths": FixedLength(6), **settings}
    return PacedEngine(PacedSettings(**settings), version=1, clock=now_s)


async def timed(engine: PacedEngine, request: Request, after_s: float = 0.0) -> tuple[float, Generation]:
    await asyncio.sleep(after_s)
    generation = await engine.generate(request)
    return now_s(), generation


def num_tokens(generation: Generation) -> int:
    return sum(len(segment.tokens) for segment in generation.segments)
