"""A bad line between a worker and its coordinator: cut for longer than a lease, slow, or saying everything twice."""

import asyncio

import pytest
from http_swarm import GROUP_SIZE, GROUPS_PER_STEP, serving, until

from benchmarks.chaos.fault_proxy import FaultProxy, Line

NUM_STEPS = 6
MEGABIT_PER_S = 125_000.0
TRAINED_TASKS = "SELECT COUNT(*), COUNT(DISTINCT task) FROM batch_members"
NUM_TASKS = NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE


def never_twice(swarm) -> None:
    """All that was to be trained was, each task once; no task has two trajectories."""
    assert swarm.ask(TRAINED_TASKS) == [(NUM_TASKS, NUM_TASKS)]
    assert swarm.ask("SELECT task FROM trajectories GROUP BY task HAVING COUNT(*) > 1") == []


@pytest.mark.full
def test_a_worker_cut_off_for_longer_than_its_leases_is_refused_what_others_did_meanwhile(tmp_path):
    lease_s = 0.5

    async def scenario() -> None:
        async with serving(tmp_path, NUM_STEPS, lease_s=lease_s) as swarm, FaultProxy(swarm.server.port) as proxy:
            async with swarm.worker("far", proxy.url) as far, swarm.worker("near", swarm.server.url) as near:
                training = asyncio.create_task(swarm.train(NUM_STEPS, pause_s=0.2))
                away = asyncio.create_task(far.run())
                await until(lambda: far.running and proxy.seen.acknowledged)  # it holds tasks, and has handed some in
                proxy.cut()
                held = set(far.running)
                at_home = asyncio.create_task(near.run())
                await until(lambda: swarm.ask("SELECT 1 FROM tasks WHERE num_losses > 0"))
                await asyncio.sleep(2 * lease_s)  # others take over; what was generated meanwhile waits in the spool
                proxy.heal()
                await asyncio.gather(training, away, at_home)
                assert held, "there was nothing to lose"
                assert not far.running
                assert not list((tmp_path / "far" / "spool").glob("*.trajectory")), "neither delivered nor refused"
            assert proxy.seen.statuses[410], "nothing came too late"
            never_twice(swarm)
            stored = {
                (task, fence): digest
                for task, fence, digest in swarm.ask("SELECT task, fence, digest FROM trajectories")
            }
            partials = {tuple(row) for row in swarm.ask("SELECT task, fence FROM partials")}
            for key, digest in proxy.seen.acknowledged.items():
                assert key in partials or stored[key] == digest

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.full
def test_a_run_over_one_megabit_a_second_finishes_and_its_leases_are_kept(tmp_path):
    async def scenario() -> None:
        line = Line(delay_s=0.02, bytes_per_s=MEGABIT_PER_S)
        async with serving(tmp_path, NUM_STEPS, lease_s=3.0) as swarm, FaultProxy(swarm.server.port, line) as proxy:
            swarm.num_weights = 20_000  # 80 kB a version: most of a second each
            async with swarm.worker("far", proxy.url, shares_disk=False) as far:
                await asyncio.gather(swarm.train(NUM_STEPS), far.run())
            assert swarm.ask("SELECT id FROM tasks WHERE num_losses > 0") == []
            never_twice(swarm)

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.parametrize("late_s", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_calls_that_come_twice_and_out_of_order_change_nothing(late_s, tmp_path):
    async def scenario() -> None:
        line = Line(twice=0.5, late_s=late_s)  # so tasks are leased to nobody's ear, and nobody is to blame for it
        serves = serving(tmp_path, NUM_STEPS, lease_s=1.0, max_attempts=99)  # on a busy machine leases run out
        async with serves as swarm, FaultProxy(swarm.server.port, line) as proxy:
            async with swarm.worker("a", proxy.url) as one, swarm.worker("b", proxy.url) as other:
                await asyncio.gather(swarm.train(NUM_STEPS), one.run(), other.run())
            proxy.line.twice = 0.0
            before = swarm.ask("SELECT task, fence, digest FROM trajectories")
            answers = [await proxy.replay(call) for call in proxy.seen.submissions]
            assert set(answers) <= {200, 410}
            assert swarm.ask("SELECT task, fence, digest FROM trajectories") == before
            assert sum(proxy.seen.copies.values()) >= 20
            never_twice(swarm)

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.full
def test_connections_that_break_in_the_middle_of_an_answer_cost_nothing_but_time(tmp_path):
    async def scenario() -> None:
        line = Line(break_after_bytes=30_000)
        async with serving(tmp_path, NUM_STEPS, lease_s=3.0) as swarm, FaultProxy(swarm.server.port, line) as proxy:
            swarm.num_weights = 20_000
            async with swarm.worker("far", proxy.url, shares_disk=False) as far:
                await asyncio.gather(swarm.train(NUM_STEPS), far.run())
            never_twice(swarm)

    asyncio.run(asyncio.wait_for(scenario(), 200))
