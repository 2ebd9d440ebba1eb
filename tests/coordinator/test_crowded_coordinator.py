"""Those who wait at a coordinator are woken by what concerns them, and by nothing else: hundreds may wait."""

import asyncio

from coordinator_scenes import SOON_S, answer, coordinator, version

from offbeat.rewards.pool import RewardResult


def count_calls(made, name: str) -> list[None]:
    """Grows by one with every call of a ledger's method."""
    calls: list[None] = []
    method = getattr(made.ledger, name)

    def counted(*args, **kwargs):
        calls.append(None)
        return method(*args, **kwargs)

    setattr(made.ledger, name, counted)
    return calls


def test_who_waits_for_a_version_or_for_tasks_looks_no_further_while_trajectories_come_in(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            waiting = [asyncio.create_task(made.newer(0, SOON_S)) for _ in range(5)]
            asking = [asyncio.create_task(made.lease(f"v{i}", 1, 0, SOON_S)) for i in range(5)]
            versions, leases = count_calls(made, "wanted_version"), count_calls(made, "lease")
            claiming = asyncio.create_task(made.claim(0, SOON_S))
            for number, task in enumerate(lease.tasks):
                await made.submit("w", answer(made, task, 0, right=number % 2 == 0), task.fence)
            await claiming
            assert len(versions) <= 3 * 5  # each once when it came, and those who ask for tasks once after the claim
            assert len(leases) <= 2 * 5
            await made.commit(0, version(1, 1, 0))
            assert {found.number for found in await asyncio.gather(*waiting)} == {1}
            told = await asyncio.gather(*asking)
            assert {lease.version.number for lease in told} == {1}

    asyncio.run(scenario())


def test_a_task_that_is_given_back_goes_to_one_who_waits(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            for give_back in (made.leave("w"), made.fail("v", lease.tasks[0].id, lease.tasks[0].fence + 1, "broke")):
                asking = asyncio.create_task(made.lease("v", 100, 0, SOON_S))
                await asyncio.sleep(0)
                await give_back
                assert (await asking).tasks

    asyncio.run(scenario())


def test_a_group_that_rewards_made_fail_is_issued_again_to_one_who_waits(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, eval={"every": 0}, batch={"groups_per_step": 1, "group_size": 2}) as made:
            await made.publish(version(0, 0))
            made.rewards.scorer.inputs = lambda samples: [None] * len(samples)

            async def fails(name, batch):
                return [RewardResult(error="raised: broken")] * len(batch)

            made.rewards.pool.score = fails
            lease = await made.lease("w", 100, 0, SOON_S)
            asking = asyncio.create_task(made.lease("v", 100, 0, SOON_S))
            for task in lease.tasks:
                await made.submit("w", answer(made, task, 0, right=True), task.fence)
            again = await asking
            assert again.tasks
            assert {task.id for task in again.tasks}.isdisjoint({task.id for task in lease.tasks})

    asyncio.run(scenario())
