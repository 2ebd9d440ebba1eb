"""A person who looks at a worker's terminal sees that it works, at what rate, or why it does not."""

from __future__ import annotations

import asyncio
import re

from fake_coordinator import Desk, a_task
from worker_scenes import at_work, open_engine, scene

from benchmarks.common.clock import now_s
from offbeat.weights.receive import ReceiveFigures
from offbeat.worker.progress import EVERY_S, IDLE_AFTER_S, REMIND_EVERY_S, WorkerProgress
from offbeat.worker.worker import Worker, WorkerMetrics


def said_by(script, *, cut_off: bool = False, metrics: WorkerMetrics | None = None) -> list[str]:
    """What a worker prints while a script plays, without its name."""
    lines: list[str] = []

    async def play(desk: Desk) -> None:
        progress = WorkerProgress("w", metrics or WorkerMetrics(), lines.append, lambda: cut_off, now_s)
        worker = Worker("w", open_engine(), desk)
        async with at_work(worker):
            watching = asyncio.create_task(progress.watch(worker))
            await script(desk)
            watching.cancel()
            await asyncio.wait({watching})
        lines.append(f"worker w: {progress.totals()}")

    scene(play)
    assert all(line.startswith("worker w: ") for line in lines)
    return [line.removeprefix("worker w: ") for line in lines]


def test_a_worker_names_its_version_its_rate_now_and_again_and_what_it_made(versions):
    metrics = WorkerMetrics()
    metrics.fetched(ReceiveFigures(1, {"full": 3_300_000}, fetch_s=0.42))

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(*(a_task(number, 40) for number in range(1, 9)))  # four at a time, a token a second each
        await asyncio.sleep(2 * EVERY_S + 5)

    lines = said_by(script, metrics=metrics)
    assert lines[0] == "serves version 1 (3.3 MB in 0.4 s)"
    rates = [re.match(r"(\d+) tokens/s, (\d+) answers in 30 s, 4 under way; version 1 ", line) for line in lines[1:3]]
    assert [found and int(found[2]) for found in rates] == [0, 4]
    assert lines[3:] == ["4 answers (160 tokens) in 65 s"]


def test_an_idle_worker_says_why_not_too_often_and_when_it_is_at_work_again(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.why_idle = "enough answers are generated for now; the trainer is at step 3"
        await asyncio.sleep(IDLE_AFTER_S + 20)
        for number in range(1, 4):  # short tasks, with idle times between them
            desk.add(a_task(number, 3))
            await asyncio.sleep(2 * IDLE_AFTER_S)

    lines = said_by(script)
    idle = [line for line in lines if line.startswith("idle")]
    assert len(idle) == 2, "of four times, within a minute"
    assert all(line.endswith("s: enough answers are generated for now; the trainer is at step 3") for line in idle)
    assert lines[lines.index(idle[0]) + 1].startswith("at work again after 2")


def test_a_long_wait_is_mentioned_again_but_rarely(versions):
    async def script(desk: Desk) -> None:
        desk.why_idle = "the trainer has published no weights yet"
        await asyncio.sleep(2 * REMIND_EVERY_S + 60)

    idle = [line for line in said_by(script) if line.startswith("idle")]
    assert len(idle) == 3


def test_a_worker_without_its_coordinator_does_not_guess_why_it_is_idle(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        await asyncio.sleep(60)

    assert not [line for line in said_by(script, cut_off=True) if line.startswith("idle")]
