"""A run in a few lines: what the ledger's tests put in and take out.

`generate` and `train` stand for engine and trainer where only their promise matters: with exact generation a trajectory
depends on weights, prompt and seed alone, and new weights on the old ones and the batch alone.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch, NewGroup, Outcome, Purpose, Scored, Submission
from offbeat.trajectory import End, Reward, Sampling, Segment, Task, Trajectory
from offbeat.weights.version import Version

STOP = 0
SAMPLING = Sampling(max_new_tokens=8, temperature=0.9, stop_token_ids=(STOP,))


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is one: for tests with thousands of transactions and no need of a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def version(number: int, step: int, parent: int | None = None, digest: str | None = None) -> Version:
    return Version(number, step, parent, digest or f"weights of step {step}", Path(f"weights/{number}"))


def prompt_of(ordinal: int) -> np.ndarray:
    return np.array([1, 2 + ordinal % 7, 3 + ordinal % 5], np.int32)


def new_groups(
    ledger: Ledger, count: int, *, size: int = 2, require_version: int | None = 0, source: str = "sums"
) -> list[NewGroup]:
    """The next groups after the cursor."""
    cursor = ledger.cursor()
    return [
        NewGroup(
            ordinal=cursor.next_ordinal + i,
            source=source,
            source_ordinal=cursor.drawn.get(source, 0) + i,
            prompt_tokens=prompt_of(cursor.next_ordinal + i),
            problem={"prompt": f"{cursor.next_ordinal + i}+1=", "answer": str(cursor.next_ordinal + i + 1), "info": {}},
            reward="number",
            seed=1000 + cursor.next_ordinal + i,
            size=size,
            sampling=SAMPLING,
            require_version=require_version,
        )
        for i in range(count)
    ]


def released_groups(
    ledger: Ledger, count: int, num_siblings: int, *, require_version: int | None = 0
) -> list[NewGroup]:
    """The next groups of one answer each, `num_siblings` of them for every prompt."""
    groups = new_groups(ledger, count, size=1, require_version=require_version)
    prompts = [divmod(group.ordinal, num_siblings) for group in groups]
    return [
        replace(group, source_ordinal=prompt, sibling=sibling, prompt_tokens=prompt_of(prompt))
        for group, (prompt, sibling) in zip(groups, prompts, strict=True)
    ]


def eval_groups(count: int, *, size: int = 2, require_version: int | None = 0) -> list[NewGroup]:
    return [
        NewGroup(
            purpose=Purpose.EVAL,
            ordinal=ordinal,
            source="held out",
            source_ordinal=ordinal,
            prompt_tokens=prompt_of(ordinal),
            problem={"prompt": f"{ordinal}+2=", "answer": "?", "info": {}},
            reward="number",
            seed=ordinal,
            size=size,
            sampling=SAMPLING,
            require_version=require_version,
        )
        for ordinal in range(count)
    ]


def answer(
    task: Task, versions: Sequence[int], *, salt: str = "", worker: str = "w", end: End | None = End.STOP
) -> Trajectory:
    """A trajectory with one segment per version named, after the beginning that the task came with; which tokens, only
    the task's seed, their place and the salt decide. Without an end it is a partial."""
    return generate(task, salt, versions, worker, end)


def generate(
    task: Task, weights: str, versions: Sequence[int], worker: str = "w", end: End | None = End.STOP
) -> Trajectory:
    trajectory = task.new_trajectory() if task.prefix is None else Trajectory.decode(task.prefix.encode())
    place = [trajectory.num_tokens] if trajectory.num_tokens else []
    rng = random.Random(":".join(map(str, [weights, task.seed, task.prompt.tolist(), *place])))
    room = trajectory.max_new_tokens - trajectory.num_tokens
    for num_before, number in enumerate(versions[:room]):
        left = trajectory.max_new_tokens - trajectory.num_tokens - (min(len(versions), room) - num_before - 1)
        tokens = [rng.randrange(1, 50) for _ in range(min(rng.randint(1, 2), left))]
        if end is End.STOP and num_before == min(len(versions), room) - 1:
            tokens[-1] = STOP
        trajectory.append(
            Segment(
                start=trajectory.num_tokens,
                tokens=np.array(tokens),
                logprobs=np.array([-rng.random() for _ in tokens]),
                version=number,
                kv_version=number,
                worker=worker,
                engine="test",
            )
        )
    if end is not None:
        trajectory.finish(end if room else End.LENGTH)
    return trajectory


def handed(trajectory: Trajectory, worker: str = "w", fence: int = 1) -> Submission:
    return Submission(trajectory, worker, fence)


def reward_of(tokens: Iterable[int]) -> float:
    return float(sum(map(int, tokens)) % 3)


def train(weights: str, batch: Batch) -> str:
    """New weights: a digest of the old ones and of all that training may look at."""
    seen: list[object] = [weights, batch.step]
    for group in batch.groups:
        for member in group.members:
            trajectory = member.trajectory
            seen.append(
                [
                    [group.ordinal, member.index, member.reward],
                    trajectory.prompt.tolist(),
                    trajectory.tokens.tolist(),
                    trajectory.logprobs.tolist(),
                    member.mask.tolist(),
                ]
            )
    return blake3(json.dumps(seen).encode()).hexdigest()


def work(ledger: Ledger, number: int, *, capacity: int = 1000, worker: str = "w") -> list[Task]:
    """Leases, answers and submits whatever may be sampled from one version."""
    tasks = ledger.lease(worker, capacity, number)
    outcomes = ledger.submit([handed(answer(task, [number]), worker, task.fence) for task in tasks])
    assert outcomes == [Outcome.STORED] * len(tasks)
    return tasks


def send(ledger: Ledger, trajectory: Trajectory, worker: str = "w", fence: int = 1) -> Outcome:
    """Submits one trajectory, or raises why it is not stored."""
    (outcome,) = ledger.submit([handed(trajectory, worker, fence)])
    if isinstance(outcome, LedgerError):
        raise outcome
    return outcome


def score_all(ledger: Ledger, *, failing: Iterable[int] = ()) -> int:
    """Scores all that waits; the tasks named fail."""
    bad = set(failing)
    results = [
        Scored(u.task, error="raised") if u.task in bad else Scored(u.task, [Reward(reward_of(u.response_tokens))])
        for u in ledger.unscored(10_000)
    ]
    return ledger.score(results).num_tasks


def claim(ledger: Ledger, step: int, count: int, max_staleness: int, *, in_order: bool = True) -> Batch | None:
    """Claims a step as a ledger that was opened with these terms does."""
    terms = ledger.terms
    ledger.terms = replace(terms, groups_per_step=count, max_staleness=max_staleness)
    try:
        return ledger.claim(step, in_order=in_order)
    finally:
        ledger.terms = terms


def full_step(ledger: Ledger, step: int, *, count: int = 2, size: int = 2) -> Batch:
    """Draws, generates, scores, claims and commits one step."""
    latest = ledger.latest_version()
    assert latest is not None
    ledger.admit(new_groups(ledger, count, size=size, require_version=latest.number))
    work(ledger, latest.number)
    score_all(ledger)
    batch = claim(ledger, step, count, 0)
    assert batch is not None
    ledger.commit(step, version(ledger.next_version_number(), step + 1, latest.number))
    return batch


def data_of(batch: Batch) -> list[tuple[int, int, list[int], float]]:
    """What a batch holds, without the ids that may differ between two runs."""
    return [
        (group.ordinal, member.index, member.trajectory.tokens.tolist(), member.reward)
        for group in batch.groups
        for member in group.members
    ]
