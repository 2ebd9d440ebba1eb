"""The coordinator with a real ledger, a real reward pool and the shipped tokenizer; only the engine is left out."""

import asyncio
import re
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
from coordinator_scenes import SOON_S, answer, answer_all, coordinator, version
from faulty_disk import no_file_over

from offbeat.coordinator import coordinator as coordinator_module
from offbeat.errors import DeadlineError, DiskError, RunInterrupted, RunOver, RunStopped
from offbeat.ledger.errors import Damaged, LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import ComparedSegment, Outcome, Submission
from offbeat.ledger.workers import Role, WorkerState, new_secret, secret_hash
from offbeat.trajectory import End, Segment


def test_a_worker_is_given_the_version_first_and_then_the_tasks_that_require_it(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            early = await made.lease("w", 8, None, 0.0)
            assert (early.tasks, early.idle) == ((), "the trainer has published no weights yet")
            await made.publish(version(0, 0))
            assert (await made.lease("w", 8, None, SOON_S)).version == version(0, 0)
            lease = await made.lease("w", 100, 0, SOON_S)
            assert len(lease.tasks) == 3 + 2 * 4  # the evaluation of step 0 comes first
            assert {task.require_version for task in lease.tasks} == {0}
            assert (await made.lease("v", 8, 0, 0.0)).idle == "all tasks that may run now are with other workers"

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
            idle = (await made.lease("w", 8, 0, 0.0)).idle
            assert idle == "enough answers are generated for now; the trainer is at step 1"
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
            with pytest.raises(DeadlineError, match=r"step 1: no batch within .*leased"):
                await made.claim(0, 0.2)

    asyncio.run(scenario())


def test_a_run_of_one_process_whose_engine_fails_too_often_stops_and_says_why(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 16, "group_size": 4}) as made:
            made.only_worker = "w"
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
            await made.call(made.ledger.execute, "DROP TABLE segments")
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
            with pytest.raises(LedgerError, match="token id 999999 is not below the vocabulary size"):
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


def test_when_the_run_was_stopped_workers_are_told_where(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            made.end("stopped at step 3 of 12")
            assert (await made.lease("w", 1, 0, 0.0)).interrupted == "stopped at step 3 of 12"
            with pytest.raises(RunInterrupted, match="stopped at step 3 of 12"):
                await made.newer(0, SOON_S)

    asyncio.run(scenario())


def test_a_ledger_that_cannot_be_written_ends_the_run_whoever_met_it(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            with no_file_over(1), pytest.raises(Damaged, match=r"ledger\.sqlite: .*then resume the run"):
                await made.lease("w", 1, 0, 0.0)
            with pytest.raises(Damaged):
                await asyncio.wait_for(made.wait_failed(), SOON_S)

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
                await asyncio.wait_for(made.wait_failed(), SOON_S)

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
            liar = (await made.call(made.ledger.redeem, token, "liar", {}, secret_hash(new_secret()))).name
            lease = await made.lease(liar, 100, 0, SOON_S)
            for i, task in enumerate(lease.tasks):
                await made.submit(liar, answer(made, task, 0, right=i % 2 == 0), task.fence)
            batch = await made.claim(0, SOON_S)
            members = [member for group in batch.groups for member in group.members]
            off = [ComparedSegment(m.task, 0, m.trajectory.num_tokens, m.trajectory.num_tokens) for m in members[:10]]
            await made.commit(0, version(1, 1, 0), [found.task for found in off], off)
            (worker,) = await made.call(made.ledger.list_workers)
            count = sum(found.num_tokens for found in off)
            assert (worker.state, worker.num_compared, worker.num_off) == (WorkerState.QUARANTINED, count, count)
            how = "differ from the trainer's by more than 0.5"
            assert worker.reason == f"{count} of its latest {count} audited log-probs {how}"
            assert [row["event"] for row in told] == ["quarantine"]
            counts = await made.call(made.ledger.counts)
            assert counts.tokens.masked["audit"] > 0
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


async def joined(made, name: str) -> str:
    token = await made.call(made.ledger.issue_token, Role.ROLLOUT, 5.0)
    return (await made.call(made.ledger.redeem, token, name, {}, secret_hash(new_secret()))).name


def test_who_is_revoked_by_another_process_loses_its_tasks_at_once_and_is_not_called_idle(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_module, "REFUSED_EVERY_S", 0.01)

    async def scenario():
        async with coordinator(tmp_path, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            stolen, honest = await joined(made, "stolen"), await joined(made, "honest")
            tasks = (await made.lease(stolen, 4, 0, SOON_S)).tasks
            assert len((await made.lease(honest, 100, 0, SOON_S)).tasks) == 4
            with Ledger(tmp_path / "ledger.sqlite") as beside:
                beside.move_worker(stolen, WorkerState.REVOKED)
            again = (await made.lease(honest, 100, 0, SOON_S)).tasks
            assert {task.id for task in again} == {task.id for task in tasks}
            held = {worker.name: worker.num_leased for worker in await made.call(made.ledger.list_workers)}
            assert held == {"stolen": 0, "honest": 8}
            figures = made.step_figures()
            assert (figures["workers"], figures["idle_workers"]) == (1, 0)

    asyncio.run(scenario())


def test_a_worker_that_is_silent_is_not_called_idle_although_its_lease_would_last(tmp_path, monkeypatch):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.lease("w", 1, None, 0.0)
            assert made.step_figures()["idle_workers"] == 1
            monkeypatch.setattr(coordinator_module, "PRESENT_S", 0.0)
            figures = made.step_figures()
            assert (figures["workers"], figures["idle_workers"]) == (1, 0)

    asyncio.run(scenario())


def test_who_carried_on_forged_beginnings_is_not_blamed_for_them(tmp_path):
    """The forger hands back beginnings; the honest worker finishes them, and its own tokens are right."""

    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 4, "group_size": 4}, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            forger, honest = await joined(made, "forger"), await joined(made, "honest")
            for task in (await made.lease(forger, 100, 0, SOON_S)).tasks:
                begun = task.new_trajectory()
                begun.append(Segment(0, np.array([5, 6]), logprobs=-np.ones(2), version=0, kv_version=0))
                await made.submit(forger, begun, task.fence)
            await made.leave(forger)
            for task in (await made.lease(honest, 100, 0, SOON_S)).tasks:
                stop, whole = np.array(task.sampling.stop_token_ids[:1]), replace(task.prefix)
                whole.append(Segment(2, stop, logprobs=-np.ones(1), version=0, kv_version=0), End.STOP)
                await made.submit(honest, whole, task.fence)
            batch = await made.claim(0, SOON_S)
            tasks = [member.task for group in batch.groups for member in group.members]
            found = [ComparedSegment(task, *of) for task in tasks for of in ((0, 2, 2), (2, 1, 0))]
            await made.commit(0, version(1, 1, 0), tasks, found)
            states = {worker.name: worker.state for worker in await made.call(made.ledger.list_workers)}
            assert states == {"forger": WorkerState.QUARANTINED, "honest": WorkerState.ACTIVE}
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_tokens_that_were_not_compared_do_not_water_down_those_that_are_off(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 16, "group_size": 4}, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            forger = await joined(made, "forger")
            for i, task in enumerate((await made.lease(forger, 100, 0, SOON_S)).tasks):
                await made.submit(forger, answer(made, task, 0, right=i % 2 == 0), task.fence)
            batch = await made.claim(0, SOON_S)
            members = [member for group in batch.groups for member in group.members]
            assert len(members) == 64
            found = [ComparedSegment(m.task, 0, m.trajectory.num_tokens, m.trajectory.num_tokens) for m in members[:5]]
            await made.commit(0, version(1, 1, 0), compared=found)
            (worker,) = await made.call(made.ledger.list_workers)
            assert worker.state is WorkerState.QUARANTINED

    asyncio.run(scenario())


BROKEN = "EngineError: CUDA error: an illegal memory access was encountered"


def test_a_broken_worker_is_set_aside_and_the_others_finish_the_run(tmp_path):
    """Fifty failed leases of one machine once stopped the run, as if rewards had failed."""

    async def scenario():
        told = []
        async with coordinator(tmp_path, batch={"groups_per_step": 16, "group_size": 4}, eval={"every": 0}) as made:
            made.on_report = told.append
            await made.publish(version(0, 0))
            broken = (await made.lease("broken", 64, 0, SOON_S)).tasks
            assert len(broken) == 64
            for task in broken:
                await made.fail("broken", task.id, task.fence, BROKEN)
            (event,) = told
            assert (event["event"], event["worker"]) == ("set_aside", "broken")
            assert event["why"] == f"8 of the latest 8 tasks of broken failed, the last one with: {BROKEN}"
            refused = await made.lease("broken", 50, 0, 0.0)
            assert refused.tasks == ()
            pause = rf"the coordinator gives this worker no tasks for another (29\d|300) s: {re.escape(event['why'])}"
            assert re.fullmatch(pause, refused.idle)
            story = await made.call(made.ledger.report)
            assert BROKEN in story.set_aside["broken"]
            query = "SELECT COUNT(*) FROM tasks WHERE num_failures > 0"
            assert (await made.call(lambda: made.ledger.execute(query).fetchone())) == (0,)
            waiting = asyncio.create_task(made.claim(0, SOON_S))
            await asyncio.sleep(0)
            await answer_all(made, 0, 64)
            assert len((await waiting).groups) == 16
            assert made.rewards.scorer.num_failed == 64
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_a_task_that_one_worker_failed_goes_to_another_and_back_only_where_there_is_none(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 1, "group_size": 2}, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            first, second = (await made.lease("flaky", 2, 0, SOON_S)).tasks
            await made.fail("flaky", first.id, first.fence, BROKEN)
            assert [task.id for task in (await made.lease("flaky", 1, 0, SOON_S)).tasks] == [first.id], "it is alone"
            await made.fail("flaky", first.id, first.fence + 1, BROKEN)
            assert (await made.lease("other", 1, 0, 0.0)).tasks[0].id == first.id
            await made.give_back("other", [(first.id, first.fence + 2)])
            await made.fail("flaky", second.id, second.fence, BROKEN)
            lease = (await made.lease("flaky", 2, 0, 0.0)).tasks
            assert [task.id for task in lease] == [first.id], "the other's to try, and its own"

    asyncio.run(scenario())


def test_a_worker_that_was_started_again_may_work_again(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 16, "group_size": 4}, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            await made.heartbeat("w", [], life="one")
            for task in (await made.lease("w", 8, 0, SOON_S)).tasks:
                await made.fail("w", task.id, task.fence, BROKEN)
            assert (await made.lease("w", 8, 0, 0.0)).tasks == ()
            await made.heartbeat("w", [], life="two")
            assert len((await made.lease("w", 8, 0, 0.0)).tasks) == 8

    asyncio.run(scenario())


def test_who_waits_in_vain_for_a_batch_is_told_who_is_set_aside(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, batch={"groups_per_step": 16, "group_size": 4}, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            for task in (await made.lease("w", 8, 0, SOON_S)).tasks:
                await made.fail("w", task.id, task.fence, BROKEN)
            with pytest.raises(
                DeadlineError, match=r"no tasks for now: 8 of the latest 8 tasks of w failed, .*: EngineError"
            ):
                await made.claim(0, 0.0)

    asyncio.run(scenario())
