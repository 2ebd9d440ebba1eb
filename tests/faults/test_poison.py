"""A prompt that kills every worker which takes it: it is found out and given up, and the run goes on without it."""

import asyncio
import os
import signal
import sqlite3
import sys

import numpy as np
import pytest
from http_swarm import GROUP_SIZE, GROUPS_PER_STEP, Swarm, serving, until
from support_files import SUPPORT

from offbeat.ledger.records import WORKER_LOST

NUM_STEPS = 3
MAX_ATTEMPTS = 2


async def keep(swarm: Swarm, name: str, poison: str, deaths: list[int]) -> None:
    """Starts a worker again and again, until it ends well."""
    folder = swarm.folder / name
    folder.mkdir()
    script = str(SUPPORT / "poisoned_worker.py")
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "POISON": poison, "OFFBEAT_TOKEN": await swarm.token()}
    while True:
        words = (script, swarm.server.url, str(folder), name, str(swarm.vocab_size))
        process = await asyncio.create_subprocess_exec(sys.executable, *words, env=environment)
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if status != -signal.SIGKILL:
            assert status == 0
            return
        deaths.append(process.pid)


async def choose_poison(swarm: Swarm) -> tuple[int, str]:
    """A group and its prompt, which no other group has."""
    await until(lambda: swarm.ask("SELECT 1 FROM versions"))
    await swarm.coordinator.lease("nobody", 0, None, 0.0)  # whoever asks for work has groups drawn
    drawn = swarm.ask("SELECT ordinal, prompt FROM groups WHERE purpose = 'train' ORDER BY ordinal")
    texts = [(ordinal, ",".join(map(str, np.frombuffer(prompt, np.int32).tolist()))) for ordinal, prompt in drawn]
    return next(
        (ordinal, text) for ordinal, text in texts[1:] if sum(other.startswith(text) for _, other in texts) == 1
    )


@pytest.mark.full
@pytest.mark.timeout(280)
def test_a_prompt_that_kills_workers_is_given_up_and_its_neighbours_are_trained(tmp_path):
    deaths: list[int] = []

    async def scenario() -> tuple[int, list[tuple]]:
        async with serving(tmp_path, NUM_STEPS, lease_s=1.0, max_attempts=MAX_ATTEMPTS, min_group=2) as swarm:
            training = asyncio.create_task(swarm.train(NUM_STEPS))
            poisoned, poison = await choose_poison(swarm)
            workers = [asyncio.create_task(keep(swarm, name, poison, deaths)) for name in ("a", "b")]
            try:
                await asyncio.gather(training, *workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            failed = (
                "SELECT g.ordinal, t.reason FROM tasks t JOIN groups g ON g.id = t.group_id WHERE t.state = 'failed'"
            )
            return poisoned, swarm.ask(failed)

    poisoned, failed = asyncio.run(scenario())
    assert deaths, "nobody took the poison"
    assert set(failed) == {(poisoned, WORKER_LOST)}, "neighbours failed, or nobody did"
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    groups = db.execute("SELECT COUNT(*) FROM groups WHERE state = 'trained'").fetchone()[0]
    dropped = db.execute("SELECT DISTINCT ordinal, reason FROM groups WHERE state = 'dropped'").fetchall()
    db.close()
    assert groups == NUM_STEPS * GROUPS_PER_STEP
    assert {ordinal for ordinal, _ in dropped} <= {poisoned}
    assert len(deaths) <= 2 * MAX_ATTEMPTS * (GROUP_SIZE + 2), "it went on for too long"
