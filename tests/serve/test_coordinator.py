"""The coordinator with a real ledger, a real reward pool and the shipped tokenizer; only the engine is left out."""

import asyncio
import sqlite3
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from offbeat.config import from_dict
from offbeat.errors import DeadlineError, RunStopped
from offbeat.launch import sources, wiring
from offbeat.ledger.errors import LedgerError
from offbeat.tasks.arithmetic import worked_answer
from offbeat.trajectory import End, Segment, Task
from offbeat.weights.version import Version

SOON_S = 60.0


@asynccontextmanager
async def coordinator(tmp_path: Path, **sections):
    config = from_dict(
        {
            "run": {"steps": 3},
            "batch": {"groups_per_step": 2, "group_size": 4},
            "eval": {"every": 2, "prompts": 3},
            **sections,
        }
    )
    tokens = wiring.load_tokens(config)
    mixture = sources.make_mixture(config, None)
    ledger = wiring.open_ledger(config, tmp_path / "ledger.sqlite")
    pool = await sources.open_pool(config, mixture, tmp_path / "rewards.log")
    made = wiring.make_coordinator(config, ledger, wiring.make_issuer(config, mixture, tokens), pool, tokens)
    made.tokens = tokens
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        await pool.close()
        ledger.close()


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
    trajectories = [answer(made, task, number, right=i % 2 == 0) for i, task in enumerate(lease.tasks)]
    await asyncio.gather(*(made.submit("w", [trajectory]) for trajectory in trajectories))
    return list(lease.tasks)


def test_a_worker_is_given_the_version_first_and_then_the_tasks_that_require_it(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            assert (await made.lease("w", 8, None, 0.0)).tasks == ()
            await made.publish(version(0, 0))
            assert (await made.lease("w", 8, None, SOON_S)).version == version(0, 0)
            lease = await made.lease("w", 100, 0, SOON_S)
            assert len(lease.tasks) == 3 + 2 * 4  # the evaluation of step 0 comes first
            assert {task.require_version for task in lease.tasks} == {0}

    asyncio.run(scenario())


def test_a_batch_is_claimed_trained_and_committed_and_the_next_step_wants_its_version(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            await answer_all(made, 0, 3 + 8)
            batch = await made.claim(0, SOON_S)
            again = await made.claim(0, SOON_S)
            assert [g.group for g in batch.groups] == [g.group for g in again.groups]
            rewards = [m.reward for g in batch.groups for m in g.members]
            assert sorted(set(rewards)) == [0.0, 1.0]
            assert (await made.evaluation(0)).is_complete
            await made.commit(0, version(1, 1, 0))
            assert (await made.lease("w", 8, 0, SOON_S)).version == version(1, 1, 0)
            await answer_all(made, 1, 8)
            assert (await made.claim(1, SOON_S)).from_version == 1
            assert made.ledger.verify().violations == ()

    asyncio.run(scenario())


def test_an_acknowledged_trajectory_is_on_disk(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            tasks = await answer_all(made, 0, 3 + 8)
            import sqlite3

            other = sqlite3.connect(tmp_path / "ledger.sqlite")
            stored = {task for (task,) in other.execute("SELECT task FROM trajectories")}
            assert stored == {task.id for task in tasks}

    asyncio.run(scenario())


def test_what_was_submitted_before_a_restart_is_scored_after_it(tmp_path):
    async def before():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            made.ledger.submit([(answer(made, task, 0, True), "w") for task in lease.tasks])  # and then it dies

    async def after():
        async with coordinator(tmp_path) as made:
            batch = await made.claim(0, SOON_S)
            assert all(m.reward == 1.0 for g in batch.groups for m in g.members)

    asyncio.run(before())
    asyncio.run(after())


def test_a_wait_for_a_batch_ends_with_what_it_waited_for(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            await made.lease("w", 100, 0, SOON_S)
            with pytest.raises(DeadlineError, match=r"step 0: no batch within .*leased"):
                await made.claim(0, 0.2)

    asyncio.run(scenario())


def test_a_run_whose_engine_fails_too_often_stops_and_says_why(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 16, "group_size": 4}) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            for task in lease.tasks:
                await made.fail("w", task.id, "engine w: out of memory")
            with pytest.raises(RunStopped, match="out of memory"):
                await made.claim(0, SOON_S)

    asyncio.run(scenario())


def test_a_refused_trajectory_concerns_its_sender_alone(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            stranger = answer(made, lease.tasks[0], 7, True)  # a version that was never published
            sent = [made.submit("w", [stranger]), made.submit("w", [answer(made, lease.tasks[1], 0, True)])]
            refused, stored = await asyncio.gather(*sent, return_exceptions=True)
            assert isinstance(refused, LedgerError)
            assert "version 7" in str(refused)
            assert stored is None
            assert (await made.call(made.ledger.counts)).trajectories.evaluated == 1

    asyncio.run(scenario())


def test_an_error_behind_the_scenes_reaches_whoever_waits(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            waiting = asyncio.create_task(made.claim(0, SOON_S))
            await asyncio.sleep(0)
            await made.call(made.ledger._db.execute, "DROP TABLE segments")
            with pytest.raises(sqlite3.OperationalError, match="segments"):
                await made.submit("w", [answer(made, lease.tasks[0], 0, True)])
            with pytest.raises(sqlite3.OperationalError, match="segments"):
                await waiting

    asyncio.run(scenario())
