"""The worker's loop against a coordinator in memory and a paced engine, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from desk import TTL_S, Desk, a_task
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedules.clock import in_modelled_time, now_s
from offbeat.rollout.engine import EngineDied, Generation, Request
from offbeat.rollout.engines.paced import FixedLength, PacedEngine, PacedSettings, noise
from offbeat.rollout.spool import Spool
from offbeat.rollout.worker import LEASE_WAIT_S, Worker
from offbeat.trajectory import End, Segment, Trajectory
from offbeat.weights.store import WeightsError, WeightStore
from offbeat.weights.version import Version

VOCAB = 1000


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    """Versions 0 to 5, on disk."""
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    return [store.write(n, n, n - 1 if n else None, {"w": torch.full((2,), float(n))}) for n in range(6)]


def open_engine(**settings) -> PacedEngine:
    """A token a second, whatever else runs."""
    settings = {"base_s": 1.0, "per_row_s": 0.0, "num_slots": 4, "vocab_size": VOCAB, **settings}
    return PacedEngine(PacedSettings(lengths=FixedLength(10**6), **settings), worker="w", clock=now_s)


def open_narrow_engine(**settings) -> PacedEngine:
    """An engine that promises more slots than it has, so that requests wait in it without a token."""
    engine = open_engine(num_slots=1, **settings)
    engine._capabilities = replace(engine.capabilities, num_slots=4)
    return engine


@asynccontextmanager
async def at_work(worker: Worker, *, dies: bool = False):
    """The worker runs beside what stands inside, and is cancelled afterwards."""
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(10_000):
            yield running
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not dies and not running.cancelled():
            running.result()


def scene(script: Callable[[Desk], Awaitable[None]]) -> Desk:
    """Plays a script with an empty coordinator."""

    async def scenario() -> Desk:
        desk = Desk()
        await script(desk)
        return desk

    return in_modelled_time(scenario())


def assert_is_true(trajectory: Trajectory) -> None:
    """Tokens and log-probs are what the engine samples at these positions, however the response was cut."""
    for segment in trajectory.segments:
        seed, count = trajectory.task, len(segment.tokens)
        assert segment.tokens.tolist() == noise.tokens(seed, segment.start, count, VOCAB, ()).tolist()
        assert segment.logprobs.tolist() == noise.logprobs(seed, segment.start, count, segment.version).tolist()


def test_tasks_are_leased_by_free_slots_carried_on_and_handed_in(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[0])
        desk.add(*(a_task(n, max_new_tokens=5 + n) for n in range(10)))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: len(desk.done) == 10)

    desk = scene(script)
    assert max(desk.names("lease")) == 4
    assert {n: (t.num_tokens, t.end) for n, t in desk.done.items()} == {n: (5 + n, End.LENGTH) for n in range(10)}
    assert set(desk.names("fetch")) == {0}
    for trajectory in desk.done.values():
        assert_is_true(trajectory)


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


def test_leases_are_renewed_every_third_of_their_time_until_they_are_answered(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.submit_s = 50.0
        desk.add(a_task(1, 40))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 1 in desk.done)
            await asyncio.sleep(100)

    desk = scene(script)
    first, *beats = desk.names("heartbeat")
    assert first == ()  # a new life, which knows of nothing
    assert set(beats) == {((1, 1),)}
    times_s = desk.times_s("heartbeat")[1:]
    assert np.diff(times_s) == pytest.approx(TTL_S / 3)
    assert len(times_s) in (8, 9)


def test_what_is_lost_is_aborted_and_never_sent_and_nothing_else(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100), a_task(2, 100))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(5)
            del desk.held[1]
            await desk.until(lambda: 2 in desk.done)

    desk = scene(script)
    assert desk.names("submit") == [(2, 1)]


def test_a_lost_task_that_comes_back_is_carried_on_under_its_new_fence_alone(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(5)
            desk.lose(1)
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert desk.names("submit") == [(1, 2)]
    assert desk.done[1].num_tokens == 100


def test_what_is_asked_back_comes_as_a_partial_and_is_carried_on(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 60), a_task(2, 60))
        async with at_work(Worker("w", open_engine(), desk)):
            desk.say_hand_back = {1}
            await desk.until(lambda: len(desk.done) == 2)

    desk = scene(script)
    (partial,) = desk.partials
    assert partial.task == 1
    assert partial.num_tokens == pytest.approx(10, abs=1)
    assert partial.is_partial
    assert_is_true(desk.done[1])
    assert desk.done[1].num_tokens == 60


def test_what_is_asked_back_before_its_first_token_goes_on(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 60), a_task(2, 60))
        async with at_work(Worker("w", open_narrow_engine(), desk)):
            desk.say_hand_back = {2}
            await desk.until(lambda: len(desk.done) == 2)

    desk = scene(script)
    assert desk.say_hand_back == set()
    assert desk.partials == []
    assert desk.failures == {}
    assert desk.done[2].num_tokens == 60


def test_a_prefix_that_used_up_its_budget_is_finished_without_generating(versions):
    prefix = Trajectory(1, np.arange(1, 6), max_new_tokens=4)
    prefix.append(Segment(0, np.arange(4), logprobs=np.zeros(4), version=1, kv_version=1))

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 4, prefix=prefix))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert (desk.done[1].end, desk.done[1].tokens.tolist()) == (End.LENGTH, [0, 1, 2, 3])
    assert prefix.is_partial, "the coordinator's own object was changed"


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


def test_a_task_that_does_not_fit_fails_with_the_reason_and_the_worker_goes_on(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100_000), a_task(2, 20))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 2 in desk.done and desk.failures)

    desk = scene(script)
    assert "need 100005 of the context's 8192 tokens" in desk.failures[1]


def test_an_engine_that_dies_ends_the_worker_with_that_error(versions):
    class Dying(PacedEngine):
        async def generate(self, request: Request) -> Generation:
            await super().generate(request)
            raise EngineDied("engine w failed: the device is on fire")

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1), a_task(2))
        engine = Dying(PacedSettings(), clock=now_s)
        with pytest.raises(EngineDied, match="on fire"):
            await Worker("w", engine, desk).run()

    desk = scene(script)
    assert desk.failures == {}


def test_what_is_refused_is_told_discarded_and_not_tried_again(versions, caplog):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1), a_task(2), a_task(3))
        desk.refuse = {1, 2}
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 3 in desk.done)
            await asyncio.sleep(100)

    with caplog.at_level(logging.WARNING):
        desk = scene(script)
    assert sorted(desk.names("submit")) == [(1, 1), (2, 1), (3, 1)]
    assert desk.failures == {1: "task 1: refused", 2: "task 2: refused"}
    assert "task 2: refused" in caplog.text


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


def test_a_drained_worker_gives_up_what_has_no_new_token(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100))
        worker = Worker("w", open_engine(), desk)
        async with at_work(worker) as running:
            await worker._changes.until(lambda: worker.running)
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
    assert "task 1 cannot be spooled" in caplog.text


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


def test_draining_a_worker_that_never_ran_returns(versions):
    async def script(desk: Desk) -> None:
        await Worker("w", open_engine(), desk).drain()

    scene(script)


moments = st.floats(0, 150)


@settings(max_examples=60)
@given(
    tasks=st.lists(st.tuples(moments, st.integers(1, 60), st.sampled_from([None, None, 0, 1, 2])), max_size=14),
    publishes=st.lists(moments, max_size=4),
    losses=st.lists(st.tuples(moments, st.integers(0, 13)), max_size=4),
    backs=st.lists(st.tuples(moments, st.integers(0, 13)), max_size=4),
    delays=st.tuples(st.floats(0, 20), st.floats(0, 5), st.floats(0, 10)),
    splits=st.booleans(),
    drain_at_s=st.none() | moments,
)
def test_whatever_happens_every_task_ends_once_from_versions_that_it_allows(
    versions, tasks, publishes, losses, backs, delays, splits, drain_at_s
):
    """Loads, losses, hand-backs and a worker that leaves at random moments; another one takes its place."""

    async def script(desk: Desk) -> None:
        desk.fetch_s, desk.submit_s, load_s = delays
        desk.publish(versions[0])
        workers = [Worker(name, open_engine(splits_by_version=splits, load_s=load_s), desk) for name in "ab"]

        async def at(moment_s: float, what: Callable[[], object]) -> None:
            await asyncio.sleep(moment_s)
            what()

        async def change_workers() -> None:
            if drain_at_s is not None:
                await asyncio.sleep(drain_at_s)
                await workers[0].drain()
                await workers[1].run()

        def lose(number: int) -> None:
            if number in desk.held:
                desk.lose(number)

        async with asyncio.TaskGroup() as happening:
            for number, at_s in enumerate(sorted(publishes), start=1):
                happening.create_task(at(at_s, lambda number=number: desk.publish(versions[number])))
            for at_s, number in losses:
                happening.create_task(at(at_s, lambda number=number: lose(number)))
            for at_s, number in backs:
                happening.create_task(at(at_s, lambda number=number: desk.say_hand_back.add(number)))
            usable = [(at_s, n, length, v) for n, (at_s, length, v) in enumerate(tasks) if (v or 0) <= len(publishes)]
            for at_s, number, length, required in usable:
                task = a_task(number, length, require_version=required)
                ready_s = max(at_s, sorted(publishes)[required - 1] if required else 0.0)
                happening.create_task(at(ready_s, lambda task=task: desk.add(task)))
            first = happening.create_task(workers[0].run())
            second = happening.create_task(change_workers())
            async with asyncio.timeout(20_000):
                await desk.until(lambda: len(desk.done) == len(usable))
            first.cancel()
            second.cancel()
        assert desk.failures == {}
        for number, (_, length, required) in enumerate(tasks):
            if (required or 0) <= len(publishes):
                trajectory = desk.done[number]
                assert trajectory.num_tokens == length
                assert_is_true(trajectory)
                sampled = [s.version for s in trajectory.segments]
                assert sampled == sorted(sampled)
                assert required is None or set(sampled) == {required}

    scene(script)
