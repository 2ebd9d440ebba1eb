"""A coordinator whose wall clock jumps: no deadline may care, because none lives on it."""

import asyncio
import random
import time

import pytest
from http_swarm import GROUP_SIZE, GROUPS_PER_STEP, serving, until

NUM_STEPS = 5
YEAR_S = 365 * 24 * 3600.0


class JumpingClock:
    """A year forward or back at every look, once it is let loose."""

    def __init__(self, seed: int):
        self.is_loose, self.num_jumps = False, 0
        self._rng = random.Random(seed)

    def __call__(self) -> float:
        if not self.is_loose:
            return time.time()
        self.num_jumps += 1
        return time.time() + self._rng.choice((-YEAR_S, YEAR_S))


def test_a_wall_clock_that_jumps_by_years_loses_no_lease_and_ends_none_early(tmp_path):
    clock = JumpingClock(seed=2)

    async def scenario() -> None:
        async with serving(tmp_path, NUM_STEPS, lease_s=2.0, wall_clock=clock) as swarm:
            async with swarm.worker("a", swarm.server.url) as worker:
                clock.is_loose = True
                await asyncio.gather(swarm.train(NUM_STEPS), worker.run())
            assert clock.num_jumps > NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
            assert swarm.ask("SELECT id FROM tasks WHERE num_losses > 0") == []
            assert swarm.ask("SELECT COUNT(*) FROM groups WHERE state = 'trained'") == [(NUM_STEPS * GROUPS_PER_STEP,)]

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.full
def test_a_wall_clock_that_jumps_by_years_keeps_no_lease_of_a_worker_that_vanished(tmp_path):
    clock = JumpingClock(seed=3)

    async def scenario() -> None:
        async with serving(tmp_path, NUM_STEPS, lease_s=1.0, wall_clock=clock) as swarm:
            training = asyncio.create_task(swarm.train(NUM_STEPS))
            async with swarm.worker("gone", swarm.server.url, base_s=0.5) as gone:  # too slow to finish anything
                clock.is_loose = True
                working = asyncio.create_task(gone.run())
                await until(lambda: gone.running)
                working.cancel()
                await asyncio.wait({working})
            clock.is_loose = False
            async with swarm.worker("a", swarm.server.url) as worker:
                clock.is_loose = True
                await asyncio.gather(training, worker.run())
            assert swarm.ask("SELECT COUNT(*) FROM tasks WHERE num_losses > 0") != [(0,)]

    asyncio.run(asyncio.wait_for(scenario(), 120))
