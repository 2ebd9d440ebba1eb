"""Judges over HTTP: every status, what crosses the wire, and the judge itself with its own processes."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager

import msgspec
import pytest
from http_run import SOON_S, LiveRun, answer

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteJudge, join
from offbeat.client.protocol import JudgeClient, RewardLease
from offbeat.errors import UserError
from offbeat.launch.judge_role import Judge, next_capacity, rewards_in
from offbeat.ledger.errors import Fenced, Forbidden, Refused, Unknown
from offbeat.ledger.workers import Role, WorkerState
from offbeat.rewards.pool import RewardResult
from offbeat.trajectory import Reward

LEASE, ANSWER = "/v1/rewards/lease", "/v1/rewards"
GOOD = wire.ResultBody(rewards=[wire.RewardBody(value=1.0, name="reward", position=-1)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One whose rewards come from judges alone."""
    with LiveRun(tmp_path_factory.mktemp("run"), reward={"processes": 0}) as live:
        yield live


@pytest.fixture
def judge(run):
    """The secret of a fresh judge."""
    return run.secret("judge", Role.REWARD)


def generate(run, count: int = 1) -> list[int]:
    """Hands in so many answers; returns their tasks."""
    secret = run.secret()
    tasks = run.lease(secret, count)
    assert len(tasks) == count
    for task in tasks:
        assert run.submit(answer(task), task.fence, secret).status == 201
    return [task.id for task in tasks]


def lease(run, secret: str, capacity: int = 1, wait_s: float = 20.0) -> RewardLease:
    response = run.post(LEASE, wire.LeaseRewardsCall(capacity=capacity, wait_s=wait_s), secret)
    assert response.status == 200, response.error
    return response.record(RewardLease)


def tell(run, secret: str, ticket: str, *results: wire.ResultBody):
    return run.post(ANSWER, wire.SubmitRewardsCall(ticket=ticket, results=list(results)), secret)


def stored(run, task: int) -> tuple:
    return run.ledger.execute("SELECT value, parts, error FROM rewards WHERE task = ?", (task,)).fetchone()


def judged(run, secret: str, result: wire.ResultBody):
    """One sample, judged so: the response, and what the ledger has of it."""
    (task,) = generate(run)
    response = tell(run, secret, lease(run, secret).ticket, result)
    return response, stored(run, task)


def test_a_sample_goes_out_with_all_that_a_reward_may_ask_for_and_comes_back_with_named_values(run, judge):
    (task,) = generate(run)
    found = lease(run, judge, 10)
    (given,) = found.inputs
    assert found.reward == "number"
    assert found.timeout_s == run.config.reward.timeout_s
    assert list(given.tokens) == [5, 6, 257]
    assert (given.prompt.endswith("="), given.answer.isdecimal(), type(given.response)) == (True, True, str)
    parts = [wire.RewardBody(value=0.5, name="right", position=-1), wire.RewardBody(value=0.25, name="b", position=2)]
    assert tell(run, judge, found.ticket, wire.ResultBody(rewards=parts)).status == 204
    value, told, error = stored(run, task)
    assert (value, error) == (0.75, None)
    assert msgspec.json.decode(told, type=list[Reward]) == [Reward(0.5, "right"), Reward(0.25, "b", 2)]


def test_a_failure_keeps_its_kind(run, judge):
    response, (value, _, error) = judged(run, judge, wire.ResultBody(error="timeout: no reward within 10 s"))
    assert (response.status, value, error) == (204, None, "timeout: no reward within 10 s")


@pytest.mark.parametrize(
    "result, why",
    [
        (wire.ResultBody(rewards=[wire.RewardBody(value=math.nan, name="r", position=-1)]), "it must be -1e"),
        (wire.ResultBody(rewards=[wire.RewardBody(value=-math.inf, name="r", position=-1)]), "it must be -1e"),
        (
            wire.ResultBody(rewards=[wire.RewardBody(value=1.0, name="r", position=3)]),
            "at position 3, outside its answer of 3 tokens",
        ),
        (wire.ResultBody(), "sent no reward"),
    ],
)
def test_a_result_that_is_no_reward_is_422_and_a_failure_of_its_sample(run, judge, result, why):
    response, (value, _, error) = judged(run, judge, result)
    assert response.status == 422
    assert why in response.error
    assert (value, error.startswith("value: "), why in error) == (None, True, True)


def test_a_ticket_that_was_never_given_out_is_404(run, judge, unchanged):
    for ticket in ("", "1", "0123456789abcdef-1", "x" * 64):
        assert tell(run, judge, ticket, GOOD).status == 404


def test_a_ticket_that_is_over_is_410(run, judge):
    generate(run)
    found = lease(run, judge)
    assert tell(run, judge, found.ticket, GOOD).status == 204
    before = run.content()
    assert tell(run, judge, found.ticket, GOOD).status == 410
    generate(run)
    other = lease(run, judge)
    assert run.post("/v1/leave", wire.Nothing(), judge).status == 204
    assert tell(run, judge, other.ticket, GOOD).status == 410
    again = lease(run, judge)
    assert again.inputs == other.inputs
    assert tell(run, judge, again.ticket, GOOD).status == 204
    assert run.content() != before


def test_the_ticket_of_another_judge_is_403_and_stays_that_judges(run, judge):
    (task,) = generate(run)
    found = lease(run, judge)
    assert tell(run, run.secret("thief", Role.REWARD), found.ticket, GOOD).status == 403
    assert stored(run, task) is None
    assert tell(run, judge, found.ticket, GOOD).status == 204


def test_too_few_or_too_many_results_are_422_and_change_nothing(run, judge):
    (task,) = generate(run)
    found = lease(run, judge)
    assert tell(run, judge, found.ticket).status == 422
    assert tell(run, judge, found.ticket, GOOD, GOOD).status == 422
    assert stored(run, task) is None
    assert tell(run, judge, found.ticket, GOOD).status == 204


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.TRAINER])
def test_only_judges_judge(run, role, unchanged):
    secret = run.secret("other", role)
    assert run.post(LEASE, wire.LeaseRewardsCall(capacity=1, wait_s=0.0), secret).status == 403
    assert tell(run, secret, "t", GOOD).status == 403


def test_strangers_are_401_and_what_cannot_be_read_is_400(run, judge, unchanged):
    assert run.post(LEASE, wire.LeaseRewardsCall(capacity=1, wait_s=0.0)).status == 401
    good = {"ticket": "t", "results": []}
    bad_results = [[{"rewards": [{"value": "1", "name": "r", "position": -1}]}], [{"value": 1.0}], [7], None]
    for body in ({}, {**good, "more": 1}, {**good, "ticket": "x" * 65}, *({**good, "results": r} for r in bad_results)):
        assert run.post(ANSWER, body, judge).status == 400, body
    for body in ({}, {"capacity": -1, "wait_s": 0.0}, {"capacity": 1, "wait_s": -1.0}):
        assert run.post(LEASE, body, judge).status == 400, body


def test_a_judge_may_neither_generate_nor_train(run, judge, unchanged):
    assert run.post("/v1/lease", wire.LeaseCall(capacity=1, have_version=0, wait_s=0.0), judge).status == 403
    assert run.post("/v1/claim", wire.ClaimCall(step=0, wait_s=0.0), judge).status == 403


# --- the client and the judge ---


@asynccontextmanager
async def remote(run, name: str):
    connection = Connection(run.server.url)
    try:
        await join(connection, await asyncio.to_thread(run.token, Role.REWARD), name)
        yield RemoteJudge(connection)
    finally:
        await connection.close()


def test_the_client_raises_what_the_coordinator_raises(run):
    generate(run, 2)

    async def scenario():
        async with remote(run, "a") as a, remote(run, "b") as b:
            checked: JudgeClient = a
            found = await checked.lease_rewards(1, SOON_S)
            good = [RewardResult(1.0, rewards=(Reward(1.0),))]
            with pytest.raises(Forbidden):
                await b.submit_rewards(found.ticket, good)
            with pytest.raises(Unknown):
                await a.submit_rewards("nothing", good)
            with pytest.raises(Refused):
                await a.submit_rewards(found.ticket, [])
            await a.submit_rewards(found.ticket, good)
            with pytest.raises(Fenced):
                await a.submit_rewards(found.ticket, good)
            held = await a.lease_rewards(1, SOON_S)
            await a.leave()
            given = await b.lease_rewards(1, SOON_S)
            assert given.inputs == held.inputs
            await b.submit_rewards(given.ticket, [RewardResult(error="raised: " + "x" * 100_000)])
            assert (await a.lease_rewards(1, 0.0)).ticket == ""
            assert 0.0 < (await a.lease_rewards(0, SOON_S)).ttl_s < SOON_S  # answered at once

    asyncio.run(scenario())
    states = {worker.name: worker.state for worker in run.ledger.list_workers()}
    assert states["a"] is WorkerState.ACTIVE  # it left, and asked again


REWARDS = """
def length(response, tokens):
    if len(tokens) == 4:
        raise ValueError("four")
    return {"tokens": len(tokens), "half": 0.5}
"""


def test_a_judge_judges_until_the_run_is_over_and_then_leaves(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    task = [{"source": "arithmetic", "reward": f"{tmp_path / 'rewards.py'}:length"}]
    with LiveRun(tmp_path / "run", task=task, reward={"processes": 0}) as run:

        async def scenario():
            async with remote(run, "judge") as client:
                made = Judge(client, 2, tmp_path / "rewards.log", own_code=None)
                try:
                    judging = asyncio.create_task(made.run())
                    tasks = await asyncio.to_thread(generate, run, 12)
                    secret = await asyncio.to_thread(run.secret)
                    (bad,) = await asyncio.to_thread(run.lease, secret)
                    await asyncio.to_thread(run.submit, answer(bad, tokens=(5, 6, 7)), bad.fence, secret)
                    while not all(stored(run, task) for task in (*tasks, bad.id)):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    run.ask(ended(run))
                    await asyncio.wait_for(judging, SOON_S)
                finally:
                    await made.close()
                return tasks, bad.id

        tasks, bad = asyncio.run(scenario())
        assert {stored(run, task)[0] for task in tasks} == {3.5}
        value, _, error = stored(run, bad)
        assert value is None
        assert error.startswith("raised: ValueError: four")
        (judge,) = [worker for worker in run.ledger.list_workers() if worker.role is Role.REWARD]
        assert judge.state is WorkerState.LEFT
        assert run.coordinator.rewards.present() == []


async def ended(run):
    run.coordinator.end()


def test_a_judge_that_cannot_load_the_reward_says_so_and_fails_no_sample(tmp_path):
    task = [{"source": "arithmetic", "reward": "only_elsewhere.py:reward"}]
    with LiveRun(tmp_path / "run", task=task, reward={"processes": 0}) as run:
        (task,) = generate(run)

        async def scenario():
            async with remote(run, "judge") as client:
                made = Judge(client, 1, tmp_path / "rewards.log", own_code=["only_elsewhere.py:reward"])
                try:
                    with pytest.raises(
                        UserError, match=r"there is no file only_elsewhere\.py.*on the machine of this judge"
                    ):
                        await made.run()
                finally:
                    await made.close()

        asyncio.run(scenario())
        assert stored(run, task) is None
        assert len(lease(run, run.secret("other", Role.REWARD)).inputs) == 1


def test_a_judge_runs_no_code_that_its_owner_did_not_name(tmp_path):
    """The coordinator names a function of the standard library, which would be called with texts of its choice."""
    task = [{"source": "arithmetic", "reward": "shutil:rmtree"}]
    with LiveRun(tmp_path / "run", task=task, reward={"processes": 0}) as run:
        (task,) = generate(run)

        async def scenario(own_code):
            async with remote(run, "judge") as client:
                made = Judge(client, 1, tmp_path / "rewards.log", own_code)
                try:
                    with pytest.raises(UserError) as caught:
                        await made.run()
                    return str(caught.value)
                finally:
                    await made.close()

        for own_code in (set(), rewards_in(["--task.reward", "mine.py:reward", "--task.0.reward=other:one"])):
            assert asyncio.run(scenario(own_code)) == (
                'task.reward = "shutil:rmtree": comes from the coordinator, which may not choose code for this '
                "machine; allow this reward, with --task.reward shutil:rmtree, or all, with --trust-coordinator"
            )
        assert stored(run, task) is None, "and no sample fails for it"


def test_the_rewards_that_a_command_line_names_may_run():
    words = ["--task.reward", "a.py:f", "--task.1.reward=b:g", "--reward.processes=4"]
    assert rewards_in(words) == {"a.py:f", "b:g"}


def test_a_judge_leases_about_a_second_of_work():
    assert next_capacity(1, 0.001) == 2
    assert next_capacity(2, 0.001) == 4
    assert next_capacity(64, 0.001) == 64
    assert next_capacity(8, 2.0) == 4
    assert next_capacity(1, 60.0) == 1
    assert next_capacity(1, 0.0) == 2
