"""The worker's loop when it leaves, is cancelled or cannot hand in: nothing that was sampled is lost."""

from __future__ import annotations

import asyncio
import logging
import shutil

import pytest
from fake_coordinator import Desk, a_task
from worker_scenes import at_work, open_engine, scene

from benchmarks.common.clock import now_s
from offbeat.worker.spool import Spool
from offbeat.worker.worker import LEASE_WAIT_S, Worker


def test_a_drained_worker_hands_back_what_is_unfinished_and_leaves(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100), a_task(2, 15), a_task(3, 100))
        worker = Worker("w", open_engine(), desk)
        async with at_work(worker) as running:
            await desk.until(lambda: 2 in desk.done)
            await worker.drain()
            await running
            desk.add(a_task(4))
            await asyncio.sleep(3 * LEASE_WAIT_S)

    desk = scene(script)
    assert {p.task: p.num_tokens for p in desk.partials} == {1: 15, 3: 15}
    assert desk.calls[-1][1] == "leave"
    assert set(desk.open) == {1, 3, 4}


def test_a_worker_ends_when_the_run_is_over(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100))
        async with at_work(Worker("w", open_engine(), desk)) as running:
            await asyncio.sleep(20.5)
            desk.end()
            await running
            assert now_s() < 30

    desk = scene(script)
    assert [p.num_tokens for p in desk.partials] == [21]
    assert desk.names("leave") == [None]


def test_a_worker_whose_slots_are_all_taken_hears_of_the_end_too(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 5000))
        async with at_work(Worker("w", open_engine(num_slots=1), desk)) as running:
            await asyncio.sleep(20.5)
            desk.end()
            await running
            assert now_s() < 30

    desk = scene(script)
    assert [p.num_tokens for p in desk.partials] == [21]
    assert desk.calls[-1][1] == "leave"


def test_a_drained_worker_gives_up_what_has_no_new_token(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100))
        worker = Worker("w", open_engine(), desk)
        async with at_work(worker) as running:
            await worker._changes.wait_for(lambda: worker.running)
            await worker.drain()
            await running

    desk = scene(script)
    assert set(desk.open) == {1}
    assert desk.failures == {}
    assert desk.names("leave") == [None]


def test_draining_gives_up_on_a_coordinator_that_does_not_answer_and_keeps_its_spool(versions, tmp_path):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 10), a_task(2, 1000))
        spool = Spool(tmp_path / "spool")
        worker = Worker("w", open_engine(), desk, spool=spool)
        async with at_work(worker) as running:
            desk.submit_s = 10_000.0
            await asyncio.sleep(20)
            await worker.drain(within_s=100)
            assert now_s() == pytest.approx(120, abs=1)
            await running
        assert sorted(unsent.key for unsent in spool.left()) == [(1, 1), (2, 1)]
        spool.close()

        desk.submit_s, desk.calls = 1.0, []
        desk.add(a_task(3))
        async with at_work(Worker("w", open_engine(), desk, spool=Spool(tmp_path / "spool"))):
            await desk.until(lambda: {1, 2, 3} == desk.done.keys())

    desk = scene(script)
    names = [name for _, name, _ in desk.calls if name in ("submit", "lease")]
    assert names[:3] == ["submit", "submit", "lease"]
    assert list((tmp_path / "spool").glob("*.trajectory")) == []


def test_what_is_sent_is_on_disk_before_and_gone_after(versions, tmp_path):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1), a_task(2))
        desk.refuse = {2}
        desk.submit_s = 5.0
        spool = Spool(tmp_path)
        async with at_work(Worker("w", open_engine(), desk, spool=spool)):
            await desk.until(lambda: len(desk.names("submit")) == 2)
            assert len(list(tmp_path.glob("*.trajectory"))) == 2
            await desk.until(lambda: 1 in desk.done and desk.discarded)
            await asyncio.sleep(1)
            assert list(tmp_path.glob("*.trajectory")) == []

    scene(script)


def test_a_full_disk_does_not_keep_a_trajectory_from_being_sent(versions, tmp_path, caplog):
    spool = Spool(tmp_path / "spool")
    shutil.rmtree(tmp_path / "spool")

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1))
        async with at_work(Worker("w", open_engine(), desk, spool=spool)):
            await desk.until(lambda: 1 in desk.done)

    with caplog.at_level(logging.WARNING):
        scene(script)
    assert "the answer to task 1 cannot be written to the spool" in caplog.text


def test_a_cancelled_worker_hands_nothing_back_and_lets_a_load_finish(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 1000))
        engine = open_engine(load_s=30.0)
        async with at_work(Worker("w", engine, desk)) as running:
            await asyncio.sleep(50)
            desk.publish(versions[2])
            await asyncio.sleep(10)
            running.cancel()
            await asyncio.sleep(1)
            running.cancel()
            await asyncio.wait({running})
            assert engine.version == 2
            assert now_s() == pytest.approx(81, abs=2)

    desk = scene(script)
    assert desk.names("submit") == []
    assert desk.names("leave") == []


def test_draining_a_worker_that_never_ran_returns(versions):
    async def script(desk: Desk) -> None:
        await Worker("w", open_engine(), desk).drain()

    scene(script)
