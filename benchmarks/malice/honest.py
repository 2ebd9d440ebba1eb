"""The honest workers of a run, all in this process: `python -m benchmarks.malice.honest`, controlled by its input.

Workers, clients and spools are real; the engine is the embedded one at a modelled pace. The first line of input is a
`HonestPlan` as JSON. The workers run until the input ends. Then a line of JSON says why any of them ended before.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from benchmarks.malice.model import MAX_CONTEXT_TOKENS, tiny_model
from benchmarks.malice.pace import SteadyEngine
from benchmarks.malice.plans import HonestPlan
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker, join
from offbeat.worker.spool import Spool
from offbeat.worker.worker import Worker


async def work(plan: HonestPlan) -> dict[str, str]:
    """Works until the input ends; returns the errors of workers that ended before, by name."""
    async with AsyncExitStack() as stack:
        workers = {}
        for name, token in plan.tokens.items():
            workers[name] = await _joined(plan, name, token, stack)
        working = {name: asyncio.create_task(worker.run()) for name, worker in workers.items()}
        await asyncio.to_thread(sys.stdin.read)
        errors = {
            name: f"{type(error).__name__}: {error}"
            for name, task in working.items()
            if task.done() and (error := task.exception()) is not None
        }
        for task in working.values():
            task.cancel()
        await asyncio.gather(*working.values(), return_exceptions=True)
        return errors


async def _joined(plan: HonestPlan, name: str, token: str, stack: AsyncExitStack) -> Worker:
    folder, connection = Path(plan.folder) / name, Connection(plan.url)
    stack.push_async_callback(connection.close)
    await join(connection, token, name)
    engine = SteadyEngine(
        tiny_model(seed=0), plan.step_s, num_slots=plan.num_slots, max_context_tokens=MAX_CONTEXT_TOKENS, worker=name
    )
    stack.push_async_callback(engine.close)
    spool = Spool(folder / "spool")
    stack.callback(spool.close)
    return Worker(name, engine, RemoteWorker(connection, folder / "weights", shares_disk=True), spool=spool)


def main() -> None:
    torch.set_num_threads(1)
    plan = HonestPlan(**json.loads(sys.stdin.readline()))
    print(json.dumps(asyncio.run(work(plan))), flush=True)


if __name__ == "__main__":
    main()
