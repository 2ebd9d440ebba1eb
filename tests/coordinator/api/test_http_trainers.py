"""Two trainers at one run: the one that came last trains, the other is told so by every call."""

import asyncio

import pytest
from http_run import SOON_S, LiveRun, headers_of

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteTrainer
from offbeat.coordinator.api.trainer_routes import ROUTES
from offbeat.errors import RunStopped, UserError
from offbeat.ledger.workers import Role


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that two trainers have begun to train, one after the other."""
    with LiveRun(tmp_path_factory.mktemp("run")) as live:
        for name in ("first", "second"):
            call = wire.ReconcileCall(step=0, version=0, host=f"host of {name}")
            assert live.post("/v1/reconcile", call, live.secret(name, Role.TRAINER)).status == 200
        yield live


@pytest.mark.parametrize("route", [route for route in ROUTES if route.path != "/v1/reconcile"], ids=lambda r: r.path)
@pytest.mark.parametrize("generation", [None, "0", "1", "-7", "two", "9" * 40])
def test_every_call_of_a_trainer_that_was_replaced_is_refused_by_name_whatever_it_holds(run, route, generation):
    before = run.content()
    path = route.path.format(number=1, file="f", digest="0" * 64)
    headers = {} if generation is None else {wire.GENERATION: generation}
    answer = run.send(route.method, path, b"", headers, run.secret("first", Role.TRAINER))
    assert answer.status == 410
    assert "another trainer has taken over this run: second on host of second, since " in answer.error
    assert run.content() == before
    assert run.reports == []


def test_the_latest_trainer_is_let_through(run):
    body = wire.encode(wire.Nothing())
    headers = headers_of(body, **{wire.GENERATION: "2"})
    answer = run.send("POST", "/v1/next-version", body, headers, run.secret("t", Role.TRAINER))
    assert answer.record(wire.NextVersion).number == 1


def test_a_trainer_that_waits_for_a_batch_learns_at_once_that_another_has_begun(tmp_path):
    async def scenario(live: LiveRun) -> None:
        connections = [Connection(live.server.url, live.secret(name, Role.TRAINER)) for name in ("first", "second")]
        first, second = map(RemoteTrainer, connections)
        await first.reconcile(0, 0)
        waiting = asyncio.create_task(first.claim(0, SOON_S))
        await asyncio.sleep(0.2)
        await second.reconcile(0, 0)
        with pytest.raises(RunStopped, match="another trainer has taken over this run: second"):
            await asyncio.wait_for(waiting, SOON_S / 4)
        with pytest.raises(RunStopped):
            await first.commit(0, live.version_on_disk(1, 1, 0))
        assert await second.next_version() == 1
        for connection in connections:
            await connection.close()

    with LiveRun(tmp_path / "run") as live:
        asyncio.run(scenario(live))


def test_what_a_trainer_did_wrong_is_its_users_to_mend(tmp_path):
    async def scenario(live: LiveRun) -> None:
        connection = Connection(live.server.url, live.secret("t", Role.TRAINER))
        try:
            with pytest.raises(UserError, match="ends at step 0, but the checkpoint is of step 7"):
                await RemoteTrainer(connection).reconcile(7, 7)
        finally:
            await connection.close()

    with LiveRun(tmp_path / "run") as live:
        asyncio.run(scenario(live))
