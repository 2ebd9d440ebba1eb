"""Samples on their way to a reward, with a ledger, a pool and time; the books alone are in `test_portions.py`."""

from __future__ import annotations

import asyncio
import math
import os
import re
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from whole_coordinator import opened

from offbeat.config import from_dict
from offbeat.coordinator import reward_queue
from offbeat.errors import DeadlineError, UserError
from offbeat.ledger.errors import Fenced, Refused
from offbeat.rewards.pool import RewardResult
from offbeat.trajectory import End, Reward, Segment
from offbeat.weights.version import Version

SOON_S = 60.0
GOOD = RewardResult(1.0, rewards=(Reward(1.0),))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


SLOW = """
import os, time
from pathlib import Path

def gated(response):
    while not Path(os.environ["GATE"]).exists():
        time.sleep(0.01)
    return 1.0
"""


@asynccontextmanager
async def coordinator(folder: Path, function=None, **sections):
    given = {"run": {"steps": 3}, "batch": {"groups_per_step": 2, "group_size": 4}, "eval": {"every": 0}, **sections}
    async with opened(from_dict(given), folder, reward=function) as (made, _):
        await made.publish(Version(0, 0, None, "digest", Path("nowhere")))
        yield made


async def generate(made, count: int) -> int:
    """Answers up to so many tasks as an engine would; returns how many there were."""
    tasks = (await made.lease("w", count, 0, 0.0)).tasks
    for task in tasks:
        trajectory = task.new_trajectory()
        tokens = np.array([5, task.sampling.stop_token_ids[0]])
        trajectory.append(Segment(0, tokens, logprobs=np.full(2, -0.1), version=0, kv_version=0), End.STOP)
        await made.submit("w", trajectory, task.fence)
    return len(tasks)


NOBODY_HERE = {"reward": {"processes": 0, "timeout_s": 1.0}}


def test_without_local_processes_a_judge_elsewhere_judges_all_and_is_told_what_it_needs(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            waiting = asyncio.create_task(made.rewards.lease("j", 100, SOON_S))
            assert await generate(made, 100) == 8
            num_judged = 0
            lease = await waiting
            while num_judged < 8:
                assert (lease.reward, lease.timeout_s) == ("number", 1.0)
                for given in lease.inputs:
                    assert given.prompt.endswith("=")
                    assert given.answer is not None
                    assert given.tokens == [5, 257]
                await made.rewards.submit("j", lease.ticket, [GOOD] * len(lease.inputs))
                num_judged += len(lease.inputs)
                lease = await made.rewards.lease("j", 100, 0.0 if num_judged == 8 else SOON_S)
            batch = await made.claim(0, SOON_S)
            assert {member.reward for group in batch.groups for member in group.members} == {1.0}

    asyncio.run(scenario())


def test_a_step_without_a_judge_ends_with_how_to_start_one(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            await generate(made, 100)
            with pytest.raises(DeadlineError, match=r"reward\.processes = 0: start offbeat worker --role"):
                await made.claim(0, 0.1)
            await made.rewards.lease("j", 1, SOON_S)
            with pytest.raises(DeadlineError, match=r"samples being judged: 1 with j"):
                await made.claim(0, 0.1)

    asyncio.run(scenario())


def test_what_a_judge_did_not_answer_in_time_another_gets_and_the_late_answer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_queue, "SLACK_S", 0.5)
    monkeypatch.setattr(reward_queue, "RESTART_S", 0.0)

    async def scenario():
        async with coordinator(tmp_path, reward={"processes": 0, "timeout_s": 0.01}) as made:
            await generate(made, 1)
            late = await made.rewards.lease("late", 4, SOON_S)
            other = await made.rewards.lease("other", 4, SOON_S)  # waits until the first is overdue
            assert other.ticket != late.ticket
            with pytest.raises(Fenced):
                await made.rewards.submit("late", late.ticket, [GOOD] * len(late.inputs))
            await made.rewards.submit("other", other.ticket, [GOOD] * len(other.inputs))

    asyncio.run(scenario())


def test_a_judge_that_falls_silent_loses_what_it_holds_and_one_that_is_heard_of_keeps_it(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            await generate(made, 2)
            clock = made.rewards._clock = Clock()
            for judge in ("silent", "busy"):
                assert len((await made.rewards.lease(judge, 1, SOON_S)).inputs) == 1
            clock.now_s += reward_queue.SILENT_S
            assert (await made.rewards.lease("busy", 0, SOON_S)).ticket == ""
            clock.now_s += 1.0
            assert made.rewards._silent() == ["silent"]
            assert len((await made.rewards.lease("other", 2, SOON_S)).inputs) == 1
            assert made.rewards.pending.held == {"busy": 1, "other": 1}

    asyncio.run(scenario())


def test_what_a_judge_held_when_it_left_another_gets_at_once(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            await generate(made, 1)
            first = await made.rewards.lease("first", 4, SOON_S)
            waiting = asyncio.create_task(made.rewards.lease("second", 4, SOON_S))
            await asyncio.sleep(0)
            await made.leave("first")
            second = await waiting
            assert second.inputs == first.inputs
            assert made.rewards.present() == ["second"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "told, why",
    [
        (RewardResult(math.nan, rewards=(Reward(math.nan),)), "nan; it must be -1e"),
        (RewardResult(math.inf, rewards=(Reward(1.0), Reward(math.inf, "style"))), "'style' is inf"),
        (RewardResult(1e200, rewards=(Reward(1.0), Reward(1e200, "b"))), "'b' is 1e\\+200"),
        (RewardResult(-1.5e6, rewards=(Reward(-1.5e6),)), "'reward' is -1500000.0"),
        (RewardResult(0.0, rewards=()), "sent no reward"),
        (RewardResult(1.0, rewards=(Reward(1.0, position=2),)), "at position 2, outside its answer of 2 tokens"),
    ],
)
def test_a_result_that_is_no_reward_fails_its_sample_alone_and_is_never_a_value(tmp_path, told, why):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            await generate(made, 100)
            leases = []
            while sum(len(lease.inputs) for lease in leases) < 8:
                leases.append(await made.rewards.lease("j", 100, SOON_S))
            lease, *others = leases
            with pytest.raises(Refused, match=why):
                await made.rewards.submit("j", lease.ticket, [told] + [GOOD] * (len(lease.inputs) - 1))
            for other in others:
                await made.rewards.submit("j", other.ticket, [GOOD] * len(other.inputs))
            rows = await made.call(lambda: made.ledger.execute("SELECT value, error FROM rewards").fetchall())
            assert sorted(value for value, _ in rows if value is not None) == [1.0] * 7
            (error,) = [error for _, error in rows if error is not None]
            assert re.search(why, error)
            assert made.rewards.scorer.num_failed == 1
            with pytest.raises(Fenced):
                await made.rewards.submit("j", lease.ticket, [GOOD] * len(lease.inputs))

    asyncio.run(scenario())


def test_an_answer_with_too_few_results_is_refused_and_may_be_given_again(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            await generate(made, 1)
            lease = await made.rewards.lease("j", 1, SOON_S)
            with pytest.raises(Refused, match="has 1 samples, but 0 results were sent"):
                await made.rewards.submit("j", lease.ticket, [])
            await made.rewards.submit("j", lease.ticket, [GOOD])

    asyncio.run(scenario())


def test_a_slow_reward_holds_no_engine_and_the_queue_keeps_its_bound(tmp_path, monkeypatch):
    """All that may be generated ahead is handed in while not one reward has come, and then all are judged."""
    monkeypatch.setattr(reward_queue, "MAX_SAMPLES", 10)
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    (tmp_path / "slow.py").write_text(SLOW)
    gate = tmp_path / "gate"

    async def scenario():
        gate.touch()  # for the first try
        sections = {
            "schedule": {"mode": "overlap", "max_staleness": 4},
            "task": [{"source": "arithmetic", "reward": f"{tmp_path / 'slow.py'}:gated"}],
        }
        async with coordinator(tmp_path, **sections) as made:
            os.unlink(gate)
            num_generated = 0
            while count := await generate(made, 5):
                num_generated += count
                assert made.rewards.pending.room >= 0
            assert num_generated == 2 * 2 * 4  # two steps: the queue has room for less
            assert (await made.call(made.ledger.counts)).groups == {"open": 4}
            gate.touch()
            for step in range(2):
                assert len((await made.claim(step, SOON_S)).groups) == 2

    asyncio.run(scenario())


def test_local_processes_and_judges_elsewhere_share_the_work_and_no_sample_is_judged_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    (tmp_path / "slow.py").write_text(SLOW)
    gate = tmp_path / "gate"

    async def scenario():
        gate.touch()
        sections = {
            "batch": {"groups_per_step": 6, "group_size": 4},
            "task": [{"source": "arithmetic", "reward": f"{tmp_path / 'slow.py'}:gated"}],
        }
        async with coordinator(tmp_path, **sections) as made:
            os.unlink(gate)
            assert (await made.rewards.lease("j", 1, 0.0)).ticket == ""  # it is there before the work is
            await generate(made, 100)
            two = RewardResult(2.0, rewards=(Reward(2.0),))
            num_elsewhere = 0
            while num_elsewhere < 24 - reward_queue.SMALL:
                lease = await made.rewards.lease("j", 100, SOON_S)
                await made.rewards.submit("j", lease.ticket, [two] * len(lease.inputs))
                num_elsewhere += len(lease.inputs)
            gate.touch()
            batch = await made.claim(0, SOON_S)
            values = sorted(member.reward for group in batch.groups for member in group.members)
            assert values == [1.0] * (24 - num_elsewhere) + [2.0] * num_elsewhere

    asyncio.run(scenario())


def test_a_reward_from_python_stays_here_and_says_so(tmp_path):
    def own(response):
        return 1.0

    async def scenario():
        async with coordinator(tmp_path, own) as made:
            with pytest.raises(Refused, match=r"reward own is a Python object"):
                await made.rewards.lease("j", 1, SOON_S)
            await generate(made, 100)
            assert len((await made.claim(0, SOON_S)).groups) == 2

    asyncio.run(scenario())


def test_a_reward_from_python_with_judges_elsewhere_alone_is_refused_before_training(tmp_path):
    async def scenario():
        with pytest.raises(UserError, match=r"reward\.processes = 0: it must be at least 1, because reward <lambda>"):
            async with coordinator(tmp_path, lambda response: 1.0, **NOBODY_HERE):
                pass

    asyncio.run(scenario())


def test_when_the_run_is_over_judges_are_told(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **NOBODY_HERE) as made:
            waiting = asyncio.create_task(made.rewards.lease("j", 1, SOON_S))
            await asyncio.sleep(0)
            made.end()
            assert (await waiting).is_over
            assert made.present(SOON_S) == ["j"]
            await made.leave("j")
            assert made.present(SOON_S) == []

    asyncio.run(scenario())
