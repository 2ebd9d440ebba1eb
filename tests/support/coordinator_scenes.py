"""Scenes at a coordinator of which only the engine is left out."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from whole_coordinator import opened

from offbeat.config import from_dict
from offbeat.data.arithmetic import worked_answer
from offbeat.trajectory import End, Segment, Task
from offbeat.weights.version import Version

SOON_S = 60.0


@asynccontextmanager
async def coordinator(tmp_path: Path, keep_leases: bool = False, **sections):
    config = from_dict(
        {
            "run": {"steps": 3},
            "batch": {"groups_per_step": 2, "group_size": 4},
            "eval": {"every": 2, "prompts": 3},
            **sections,
        }
    )
    async with opened(config, tmp_path, keep_leases=keep_leases) as (made, tokens):
        made.tokens = tokens
        yield made


def version(number: int, step: int, parent: int | None = None) -> Version:
    return Version(number, step, parent, f"digest of step {step}", Path("nowhere"))


def answer(made, task: Task, number: int, right: bool):
    tokenizer = made.tokens.tokenizer
    text = worked_answer(tokenizer.decode(task.prompt)) if right else "no idea"
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    trajectory = task.new_trajectory()
    trajectory.append(
        Segment(0, np.array(ids), logprobs=np.full(len(ids), -0.1), version=number, kv_version=number), End.STOP
    )
    return trajectory


async def answer_all(made, number: int, count: int) -> list[Task]:
    lease = await made.lease("w", 100, number, SOON_S)
    assert len(lease.tasks) == count
    await asyncio.gather(
        *(
            made.submit("w", answer(made, task, number, right=i % 2 == 0), task.fence)
            for i, task in enumerate(lease.tasks)
        )
    )
    return list(lease.tasks)
