"""The adversaries of a run, all in this process: `python -m benchmarks.malice.attack`, told what to do on its input.

The process is niced and bound to one core, so that what it costs others is what it makes the coordinator do. The first
line of input is an `AttackPlan` as JSON. Once all have joined it says who they are, as a line of JSON. With the next
line of input the attack begins. In the end it says, as a line of JSON, what each adversary tried and what came back.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.malice.adversaries import chosen
from benchmarks.malice.adversary import Adversary, Member, Scene, whatever
from benchmarks.malice.model import MAX_CONTEXT_TOKENS, tiny_model
from benchmarks.malice.plans import AttackPlan
from benchmarks.malice.strangers import false_size, zstd_bomb
from offbeat.engines.embedded import EmbeddedEngine

NICE = 19
NUM_SLOTS = 8
NEWER_WAIT_S = 5.0
END_WITHIN_S = 5.0


class Accomplice(Member):
    """Member that attacks nobody, but follows the run's versions for adversaries that start from true tokens."""

    async def follow(self, engine: EmbeddedEngine) -> None:
        while True:
            await whatever(self.refresh(engine))

    async def refresh(self, engine: EmbeddedEngine) -> None:
        version = await self.client.newer(engine.version, NEWER_WAIT_S)
        if version is not None:
            await engine.load(await self.client.fetch(version))


async def attack(plan: AttackPlan) -> list[dict[str, Any]]:
    zstd_bomb(), false_size()  # made once, before anything is timed
    place = urlsplit(plan.url)
    async with AsyncExitStack() as stack:
        engines = []
        for seed in (0, 1):
            engine = EmbeddedEngine(
                tiny_model(seed), num_slots=NUM_SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS, version=seed or None
            )
            stack.push_async_callback(engine.close)
            engines.append(engine)
        scene = Scene(
            host=place.hostname or "",
            port=place.port or 0,
            folder=Path(plan.folder),
            honest=tuple(plan.honest),
            used_token=plan.used_token,
            engine=engines[0],
            other_engine=engines[1],
            rng=random.Random(plan.seed),
        )
        kinds, tokens = chosen(plan.titles), iter(plan.tokens)
        accomplice = Accomplice(scene, len(kinds), [next(tokens)])
        adversaries = [
            kind(scene, number, [next(tokens) for _ in range(kind.num_tokens)]) for number, kind in enumerate(kinds)
        ]
        for adversary in (accomplice, *adversaries):
            await adversary.prepare()
            stack.push_async_callback(adversary.close)
        while engines[0].version is None:
            await accomplice.refresh(engines[0])
        following = asyncio.create_task(accomplice.follow(engines[0]))
        print(json.dumps([_told(adversary) for adversary in adversaries]), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await _all(adversaries, time.monotonic() + plan.seconds)
        following.cancel()
        return [_told(adversary) for adversary in adversaries]


async def _all(adversaries: Sequence[Adversary], until_s: float) -> None:
    """Lets all adversaries attack until a time, and abandons those that do not end."""
    attacks = [asyncio.create_task(adversary.attack(until_s)) for adversary in adversaries]
    await asyncio.wait(attacks, timeout=until_s - time.monotonic() + END_WITHIN_S)
    for task in attacks:
        task.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)


def _told(adversary: Adversary) -> dict[str, Any]:
    return {
        "name": adversary.title(),
        "attacks": adversary.attacks(),
        "forges": adversary.forges,
        "worker": adversary.worker,
        "attempts": adversary.tally.num_attempts,
        "answers": dict(adversary.tally.answers.most_common()),
        "broken": adversary.tally.broken,
    }


def main() -> None:
    os.nice(NICE)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    plan = AttackPlan(**json.loads(sys.stdin.readline()))
    print(json.dumps(asyncio.run(attack(plan))), flush=True)


if __name__ == "__main__":
    main()
