"""The coordinator with a real ledger, a real reward pool and the shipped tokenizer; only the engine is left out."""

import asyncio
import sqlite3

import numpy as np
import pytest
from coordinator_scenes import SOON_S, answer, answer_all, coordinator, version
from faulty_disk import no_file_over

from offbeat.errors import DeadlineError, DiskError, RunOver, RunStopped
from offbeat.ledger.errors import Damaged, LedgerError
from offbeat.ledger.records import Outcome, Submission
from offbeat.ledger.workers import Role, WorkerState
from offbeat.trajectory import End, Segment


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
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_an_acknowledged_trajectory_is_on_disk(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            tasks = await answer_all(made, 0, 3 + 8)
            other = sqlite3.connect(tmp_path / "ledger.sqlite")
            stored = {task for (task,) in other.execute("SELECT task FROM trajectories")}
            assert stored == {task.id for task in tasks}

    asyncio.run(scenario())


def test_what_was_submitted_before_a_restart_is_scored_after_it(tmp_path):
    async def before():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            made.ledger.submit([Submission(answer(made, task, 0, True), "w", task.fence) for task in lease.tasks])
            # and then it dies

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
                await made.fail("w", task.id, task.fence, "engine w: out of memory")
            with pytest.raises(RunStopped, match="out of memory"):
                await made.claim(0, SOON_S)

    asyncio.run(scenario())


def test_a_refused_trajectory_concerns_its_sender_alone(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            stranger = answer(made, lease.tasks[0], 7, True)  # a version that was never published
            good = answer(made, lease.tasks[1], 0, True)
            refused, stored = await asyncio.gather(
                made.submit("w", stranger, 1), made.submit("w", good, 1), return_exceptions=True
            )
            assert isinstance(refused, LedgerError)
            assert "version 7" in str(refused)
            assert stored is Outcome.STORED
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
                await made.submit("w", answer(made, lease.tasks[0], 0, True), 1)
            with pytest.raises(sqlite3.OperationalError, match="segments"):
                await waiting

    asyncio.run(scenario())


def test_with_overlap_work_goes_on_while_a_step_is_trained_and_the_next_batch_can_be_claimed_ahead(tmp_path):
    async def scenario():
        sections = {"schedule": {"mode": "overlap", "max_staleness": 2}, "eval": {"every": 0}}
        async with coordinator(tmp_path, **sections) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            assert len(lease.tasks) == (1 + 1) * 2 * 4
            assert {task.require_version for task in lease.tasks} == {None}
            for i, task in enumerate(lease.tasks):
                await made.submit("w", answer(made, task, 0, right=i % 2 == 0), task.fence)
            first, ahead = await made.claim(0, SOON_S), await made.claim(1, SOON_S)
            assert (first.from_version, ahead.from_version) == (0, None)
            assert not {g.group for g in first.groups} & {g.group for g in ahead.groups}
            assert {int(a) for g in ahead.groups for m in g.members for a in m.staleness} == {1}
            await made.commit(0, version(1, 1, 0))
            assert (await made.newer(0, SOON_S)) == version(1, 1, 0)
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_with_overlap_as_much_is_under_way_as_was_told(tmp_path):
    async def scenario():
        schedule = {"mode": "overlap", "max_staleness": 2, "over_provision": 2.5}
        async with coordinator(tmp_path, schedule=schedule, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            assert (len(lease.tasks), lease.round) == (5 * 4, None)

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["alternate", "overlap"])
def test_a_group_without_a_signal_gives_its_place_to_another_that_whoever_waits_is_handed_at_once(tmp_path, mode):
    async def scenario():
        batch = {"groups_per_step": 2, "group_size": 4, "drop_no_signal": True, "max_redraws": 1.0}
        schedule = {"mode": mode, "max_staleness": int(mode == "overlap")}
        async with coordinator(tmp_path, batch=batch, schedule=schedule, eval={"every": 0}, run={"steps": 1}) as made:
            await made.publish(version(0, 0))
            tasks = (await made.lease("w", 100, 0, SOON_S)).tasks
            assert len(tasks) == 8
            claim = asyncio.create_task(made.claim(0, SOON_S))
            for _ in range(2):
                waiting = asyncio.create_task(made.lease("w", 100, 0, SOON_S))
                for task in tasks[:4]:
                    await made.submit("w", answer(made, task, 0, right=True), task.fence)
                tasks = [*tasks[4:], *(await waiting).tasks]
                assert len(tasks) == 8
                assert {task.require_version for task in tasks} == {0 if mode == "alternate" else None}
            for task in tasks:  # two were dropped: now what comes is taken
                await made.submit("w", answer(made, task, 0, right=True), task.fence)
            batch = await claim
            assert ([group.ordinal for group in batch.groups], batch.num_no_signal) == ([2, 3], 2)
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            task = (await made.lease("w", 1, 0, SOON_S)).tasks[0]
            bad = task.new_trajectory()
            bad.append(Segment(0, np.array([999_999]), logprobs=np.array([-1.0]), version=0, kv_version=0), End.STOP)
            with pytest.raises(LedgerError, match="token 999999 is none of the model's"):
                await made.submit("w", bad, task.fence)

    asyncio.run(scenario())


def test_when_the_run_is_over_workers_are_told(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            await answer_all(made, 0, 3 + 8)
            waiting = asyncio.create_task(made.lease("w", 1, 0, SOON_S))
            await asyncio.sleep(0)
            made.end()
            assert (await waiting).is_over

    asyncio.run(scenario())


def test_when_the_run_is_over_those_that_only_look_out_for_versions_are_told(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            looking = asyncio.create_task(made.newer(0, SOON_S))
            await asyncio.sleep(0.05)
            made.end()
            with pytest.raises(RunOver):
                await looking
            assert (await made.newer(None, 0.0)).number == 0  # what is there can still be had

    asyncio.run(scenario())


def test_a_ledger_that_cannot_be_written_ends_the_run_whoever_met_it(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            with no_file_over(1), pytest.raises(Damaged, match=r"ledger\.sqlite: .*then --resume the run"):
                await made.lease("w", 1, 0, 0.0)
            with pytest.raises(Damaged):
                await asyncio.wait_for(made.until_broken(), SOON_S)

    asyncio.run(scenario())


def test_a_row_that_cannot_be_written_ends_the_run(tmp_path):
    def full(row):
        raise DiskError("metrics.jsonl: cannot be written")

    async def scenario():
        async with coordinator(tmp_path) as made:
            made.on_report = full
            with pytest.raises(DiskError):
                await made.report({"step": 1})
            with pytest.raises(DiskError):
                await asyncio.wait_for(made.until_broken(), SOON_S)

    asyncio.run(scenario())


def test_a_worker_that_only_renews_its_leases_is_present(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            assert made.present(SOON_S) == []
            await made.heartbeat("w", [])
            assert made.present(SOON_S) == ["w"]
            await made.leave("w")
            assert made.present(SOON_S) == []

    asyncio.run(scenario())


def test_a_worker_whose_answers_fail_the_audit_is_shut_out_and_the_tokens_count_as_such(tmp_path):
    async def scenario():
        told = []
        async with coordinator(tmp_path, batch={"groups_per_step": 4, "group_size": 4}, eval={"every": 0}) as made:
            made.on_report = told.append
            await made.publish(version(0, 0))
            token = await made.call(made.ledger.issue_token, Role.ROLLOUT, 5.0)
            liar = (await made.call(made.ledger.redeem, token, "liar", {})).name
            lease = await made.lease(liar, 100, 0, SOON_S)
            for i, task in enumerate(lease.tasks):
                await made.submit(liar, answer(made, task, 0, right=i % 2 == 0), task.fence)
            batch = await made.claim(0, SOON_S)
            audited = [member.task for group in batch.groups for member in group.members][:10]
            await made.commit(0, version(1, 1, 0), audited)
            (worker,) = await made.call(made.ledger.list_workers)
            assert (worker.state, worker.num_audited, worker.num_audit_failures) == (WorkerState.QUARANTINED, 16, 10)
            assert [row["event"] for row in told] == ["quarantine"]
            counts = await made.call(made.ledger.counts)
            assert counts.tokens.masked["audit"] > 0
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())
