"""The worker's loop while versions come and go: what is loaded when, and which tokens are of which version."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
from fake_coordinator import Desk, a_task
from worker_scenes import assert_is_true, at_work, open_engine, open_narrow_engine, scene

from offbeat.trajectory import Segment, Trajectory
from offbeat.weights.version import WeightsError
from offbeat.worker.worker import Worker


def test_no_version_is_loaded_while_a_task_runs_that_requires_another(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 50, require_version=1), a_task(2, 80))
        engine = open_engine()
        async with at_work(Worker("w", engine, desk)):
            await asyncio.sleep(10)
            desk.publish(versions[2])
            await desk.until(lambda: len(desk.done) == 2)
            assert engine.version == 2

    desk = scene(script)
    assert [s.version for s in desk.done[1].segments] == [1]
    assert [s.version for s in desk.done[2].segments] == [1, 2]


def test_other_tasks_go_on_across_a_load_and_are_split_by_version(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 40))
        async with at_work(Worker("w", open_engine(), desk)):
            for version in versions[2:4]:
                await asyncio.sleep(10)
                desk.publish(version)
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert [s.version for s in desk.done[1].segments] == [1, 2, 3]
    assert desk.partials == []
    assert_is_true(desk.done[1])


def test_an_engine_that_cannot_split_hands_back_what_runs_before_it_loads(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 40), a_task(2, 40))
        async with at_work(Worker("w", open_engine(splits_by_version=False), desk)):
            await asyncio.sleep(10)
            desk.publish(versions[2])
            await desk.until(lambda: len(desk.done) == 2)

    desk = scene(script)
    assert [p.task for p in desk.partials] == [1, 2]
    for trajectory in desk.done.values():
        assert [s.version for s in trajectory.segments] == [1, 2]
        assert_is_true(trajectory)


def test_what_has_no_token_yet_begins_anew_after_such_a_load(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 40), a_task(2, 40))
        async with at_work(Worker("w", open_narrow_engine(splits_by_version=False), desk)):
            await asyncio.sleep(10)
            desk.publish(versions[2])
            await desk.until(lambda: len(desk.done) == 2)

    desk = scene(script)
    assert [p.task for p in desk.partials] == [1]
    assert [s.version for s in desk.done[2].segments] == [2]


def test_a_lower_version_is_loaded_only_when_nothing_runs_and_left_again(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.publish(versions[3])
        engine = open_engine()
        async with at_work(Worker("w", engine, desk)):
            desk.add(a_task(1, 30))
            await desk.until(lambda: desk.held)
            desk.add(*(a_task(n, 10, require_version=1) for n in range(2, 9)))
            await desk.until(lambda: 1 in desk.done)
            await desk.until(lambda: len(desk.done) == 8)
            desk.add(a_task(10, 10))
            await desk.until(lambda: 10 in desk.done)

    desk = scene(script)
    assert [s.version for s in desk.done[1].segments] == [3]
    assert {s.version for n in range(2, 9) for s in desk.done[n].segments} == {1}


def test_tokens_are_sampled_while_a_version_is_on_its_way_and_it_comes_once(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 200))
        async with at_work(Worker("w", open_engine(load_s=5.0), desk)):
            await asyncio.sleep(50.5)
            desk.fetch_s = 30.0
            desk.publish(versions[2])
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    first, _ = desk.done[1].segments
    assert len(first.tokens) == pytest.approx(75, abs=2)
    assert desk.names("fetch") == [1, 2]


def test_a_prefix_waits_for_a_version_as_new_as_its_last_tokens(versions):
    prefix = Trajectory(1, np.arange(1, 6), max_new_tokens=20)
    prefix.append(Segment(0, np.arange(4), logprobs=np.zeros(4), version=3, kv_version=3))

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 20, prefix=prefix), a_task(2, 20))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 2 in desk.done)
            desk.publish(versions[3])
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert [s.version for s in desk.done[1].segments] == [3, 3]
    assert desk.failures == {}


def test_a_prefix_whose_version_does_not_come_is_handed_back_as_it_was(versions):
    prefix = Trajectory(1, np.arange(1, 6), max_new_tokens=20)
    prefix.append(Segment(0, np.arange(4), logprobs=np.zeros(4), version=3, kv_version=3))

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 20, prefix=prefix))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: desk.partials)

    desk = scene(script)
    assert desk.partials == [prefix]
    assert desk.failures == {}


def test_a_task_without_a_token_outlasts_a_load_of_any_length(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 40), a_task(2, 40))
        async with at_work(Worker("w", open_narrow_engine(splits_by_version=False, load_s=500.0), desk)):
            await desk.until(lambda: len(desk.held) == 2)
            await asyncio.sleep(10)
            desk.publish(versions[2])
            await desk.until(lambda: len(desk.done) == 2)

    desk = scene(script)
    assert desk.failures == {}
    assert [p.task for p in desk.partials] == [1]


def test_a_version_that_was_deleted_is_left_out_when_a_newer_one_replaced_it(versions, tmp_path):
    gone = replace(versions[2], path=tmp_path / "gone")

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100))
        engine = open_engine()
        async with at_work(Worker("w", engine, desk)):
            await asyncio.sleep(10)
            desk.fetch_s = 5.0
            desk.publish(gone)
            await asyncio.sleep(1)
            desk.publish(versions[3])
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert [s.version for s in desk.done[1].segments] == [1, 3]


def test_a_version_that_is_not_what_was_published_ends_the_worker_and_is_never_served(versions, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(versions[2].path, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 1000))
        engine = open_engine()
        async with at_work(Worker("w", engine, desk), dies=True) as running:
            await asyncio.sleep(10)
            desk.publish(replace(versions[2], path=path))
            with pytest.raises(WeightsError, match="digest"):
                await running
        assert engine.version == 1

    scene(script)
