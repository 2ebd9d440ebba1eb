"""Workers and trainers over HTTP: the same calls and the same errors as beside the coordinator, only further away."""

import asyncio
import ssl
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from http_run import SOON_S, LiveRun, answer
from safetensors.numpy import load_file

from offbeat.client.connection import Connection, Outage
from offbeat.client.credentials import load, save
from offbeat.client.http_client import RemoteTrainer, RemoteWorker, join, rejoin
from offbeat.client.protocol import Heartbeat, TrainerClient, WorkerClient
from offbeat.coordinator.api.access import KNOWN_S
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.coordinator.api.server import Address
from offbeat.errors import DeadlineError, RunStopped, UserError
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.ledger.records import ComparedSegment, Outcome, Reconciled
from offbeat.ledger.workers import Role, WorkerState
from offbeat.trajectory import End, Segment
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import FILE_NAME, Version

KEY = SigningKey.generate()


@asynccontextmanager
async def remote(run, token, name, **options):
    connection = Connection(run.server.url, **options)
    try:
        membership = await join(connection, token, name)
        if membership.credentials.role is Role.TRAINER:
            yield RemoteTrainer(connection, store=FolderStore(run.folder.parent / "pieces"), signer=KEY.public)
        else:
            yield RemoteWorker(connection, run.folder / f"cache of {name}")
    finally:
        await connection.close()


def test_a_step_from_lease_to_commit_over_the_wire(tmp_path):
    with LiveRun(tmp_path / "run", batch={"groups_per_step": 2, "group_size": 4}) as run:

        async def scenario():
            async with (
                remote(run, run.token(), "w") as worker,
                remote(run, run.token(Role.TRAINER), "t") as trainer,
            ):
                checked: tuple[WorkerClient, TrainerClient] = (worker, trainer)
                assert checked
                reconciled = await trainer.reconcile(0, 0)
                assert reconciled.step == 0
                lease = await worker.lease(100, None, SOON_S)
                assert (lease.tasks, lease.version.number) == ((), 0)
                await worker.fetch(lease.version)
                lease = await worker.lease(100, 0, SOON_S)
                held = [(task.id, task.fence) for task in lease.tasks]
                assert len(held) == 8
                assert lease.ttl_s == 3600.0
                assert await worker.heartbeat(held) == Heartbeat()
                assert (await worker.heartbeat([(held[0][0], 7)])).lost == (held[0][0],)
                for task in lease.tasks:
                    assert await worker.submit(answer(task), task.fence) is Outcome.STORED
                    assert await worker.submit(answer(task), task.fence) is Outcome.REPEATED
                batch = await trainer.claim(0, SOON_S)
                assert [len(group.members) for group in batch.groups] == [4, 4]
                assert batch.groups[0].members[0].trajectory == answer(lease.tasks[0])
                assert batch.groups[0].members[0].mask.tolist() == [True] * 3
                number = await trainer.next_version()
                left_out = batch.groups[0].members[0].task
                found = [ComparedSegment(left_out, 0, 3, 2)]
                await trainer.commit(0, weights(tmp_path, number, step=1), audited=[left_out], compared=found)
                await trainer.checkpointed(1)
                await trainer.report({"step": 0, "reward": np.float32(0.5)})
                newest = await worker.newer(0, SOON_S)
                assert (newest.number, newest.step) == (number, 1)
                here = await worker.fetch(newest)
                assert load_file(here.path / FILE_NAME)["w"].tolist() == [1.0, 1.0]
                await worker.leave()

        asyncio.run(scenario())
        (row,) = run.reports
        assert (row["step"], row["reward"], row["failures"]) == (0, 0.5, 0)
        assert row.keys() >= {"partials", "over_provision", "time_generate_s", "time_reward_s"}, (
            "and this side's figures"
        )
        assert run.ledger.latest_version().path == run.weights.path(1)
        (worker, *_) = run.ledger.list_workers()
        assert (worker.state, worker.num_compared, worker.num_off) == (WorkerState.LEFT, 3, 2)


def test_a_round_from_its_lease_to_the_next_over_the_wire(tmp_path):
    schedule, batch = {"max_staleness": 1, "over_provision": 2.0}, {"groups_per_step": 1, "group_size": 2}
    with LiveRun(tmp_path / "run", schedule=schedule, batch=batch) as run:

        async def scenario():
            async with (
                remote(run, run.token(), "w") as worker,
                remote(run, run.token(Role.TRAINER), "t") as trainer,
            ):
                await trainer.reconcile(0, 0)
                lease = await worker.lease(100, 0, SOON_S)
                first, second, third, fourth = lease.tasks
                assert lease.round == 0
                assert not await worker.round_over(0, 0.0)
                waiting = asyncio.create_task(worker.round_over(0, SOON_S))
                for task in (first, second):
                    await worker.submit(answer(task), task.fence)
                await trainer.claim(0, SOON_S)
                assert await waiting
                partial = third.new_trajectory()
                partial.append(answer(third).segments[0])
                assert await worker.submit(partial, third.fence) is Outcome.PARTIAL
                await worker.give_back([(fourth.id, fourth.fence)])
                assert (await worker.lease(100, 0, 0.0)).tasks == ()
                await trainer.commit(0, weights(tmp_path, await trainer.next_version(), step=1))
                assert (await worker.lease(100, 0, SOON_S)).version.number == 1
                lease = await worker.lease(100, 1, SOON_S)
                again = {task.id: task for task in lease.tasks}
                assert lease.round == 1
                assert again[third.id].prefix == partial
                assert again[fourth.id].prefix is None

        asyncio.run(scenario())


def weights(folder: Path, number: int, step: int) -> Version:
    publisher = Publisher(folder / "trainer's own", FolderStore(folder / "pieces"), KEY)
    return publisher.write(number, step, number - 1, {"w": torch.full((2,), float(number))})


def test_errors_are_those_of_the_coordinator(tmp_path):
    with LiveRun(tmp_path) as run:

        async def scenario():
            async with remote(run, run.token(), "w") as worker, remote(run, run.token(), "thief") as thief:
                (first, second) = (await worker.lease(2, 0, SOON_S)).tasks
                trajectory = answer(first)
                with pytest.raises(Forbidden, match="not by thief"):
                    await thief.submit(trajectory, first.fence)
                await worker.submit(trajectory, first.fence)
                with pytest.raises(Conflict, match="a different trajectory"):
                    await worker.submit(answer(first, tokens=(9,)), first.fence)
                with pytest.raises(Refused, match="version 7, which was never published"):
                    await worker.submit(answer(second, number=7), second.fence)
                with pytest.raises(Fenced, match="can no longer fail"):
                    await worker.fail(first.id, first.fence, "too late")
                with pytest.raises(Unknown, match="does not exist"):
                    await worker.fail(10**9, 1, "no such task")
                await worker.fail(second.id, second.fence, "out of memory " * 1000)

        asyncio.run(scenario())


def test_a_batch_that_does_not_come_is_a_deadline_that_says_what_was_waited_for(tmp_path):
    with LiveRun(tmp_path) as run:

        async def scenario():
            async with remote(run, run.token(Role.TRAINER), "t") as trainer:
                with pytest.raises(DeadlineError, match=r"step 1: no batch within rollout.deadline_s = 0 s; .*groups"):
                    await trainer.claim(0, 0.1)

        asyncio.run(scenario())


def test_a_run_that_stopped_itself_says_so_to_its_trainer(tmp_path):
    with LiveRun(tmp_path, batch={"groups_per_step": 16, "group_size": 4}) as run:

        async def scenario():
            async with remote(run, run.token(Role.TRAINER), "t") as trainer:
                for _ in range(64):
                    run.coordinator.rewards.scorer.failed("raised: ValueError: no egg")
                with pytest.raises(RunStopped, match=r"64 of the latest 64 rewards failed .*no egg"):
                    await trainer.claim(0, SOON_S)

        asyncio.run(scenario())


def test_a_used_token_is_the_users_to_mend(tmp_path):
    with LiveRun(tmp_path) as run:
        token = run.token()

        async def scenario():
            async with remote(run, token, "first"):
                connection = Connection(run.server.url)
                with pytest.raises(UserError, match="already used by worker first; get another with offbeat"):
                    await join(connection, token, "second")
                await connection.close()

        asyncio.run(scenario())


def test_a_restarted_worker_keeps_its_name_until_it_is_revoked(tmp_path):
    with LiveRun(tmp_path / "run") as run:
        file = tmp_path / "credentials.json"

        async def first():
            connection = Connection(run.server.url)
            membership = await join(connection, run.token(), "box")
            save(file, membership.credentials)
            await connection.close()
            return membership

        async def second():
            credentials = load(file)
            connection = Connection(credentials.url)
            try:
                membership = await rejoin(connection, credentials)
                await RemoteWorker(connection, tmp_path / "cache").lease(1, 0, SOON_S)
                return membership
            finally:
                await connection.close()

        assert asyncio.run(first()) == asyncio.run(second())
        assert run.ledger.num_leased() == {"box": 1}
        run.ask(run.coordinator.call(run.coordinator.ledger.move_worker, "box", WorkerState.REVOKED, "sold"))
        time.sleep(KNOWN_S)
        with pytest.raises(UserError, match="worker box was revoked: sold"):
            asyncio.run(second())


def test_calls_are_made_until_a_coordinator_that_was_away_is_back(tmp_path):
    """Stopped, started again on another port's place and ledger: the worker notices only that it took longer."""
    with LiveRun(tmp_path / "run") as run:
        token, port = run.token(), run.server.port

        async def work(began: asyncio.Event):
            connection = Connection(run.server.url)
            await join(connection, token, "w")
            worker = RemoteWorker(connection, tmp_path / "cache")
            (task,) = (await worker.lease(1, 0, SOON_S)).tasks
            began.set()
            await asyncio.to_thread(stopped.wait)
            outcome = await worker.submit(answer(task), task.fence)
            await connection.close()
            return task, outcome

        import threading

        stopped = threading.Event()

        async def scenario():
            began = asyncio.Event()
            working = asyncio.create_task(work(began))
            await began.wait()
            await asyncio.to_thread(run.__exit__, None, None, None)
            stopped.set()
            await asyncio.sleep(0)  # the worker's first attempt meets nobody
            again = LiveRun(tmp_path / "run", address=Address(port=port))
            await asyncio.to_thread(again.__enter__)
            try:
                return await working
            finally:
                await asyncio.to_thread(again.__exit__, None, None, None)

        task, outcome = asyncio.run(scenario())
        assert outcome is Outcome.STORED
        run.__enter__()
        assert run.ledger.execute("SELECT task FROM trajectories").fetchall() == [(task.id,)]


def test_patience_ends_with_who_was_waited_for(tmp_path):
    async def scenario():
        connection = Connection("http://127.0.0.1:9", "secret", patience_s=0.3)
        try:
            await RemoteWorker(connection, tmp_path).heartbeat([])
        finally:
            await connection.close()

    with pytest.raises(DeadlineError, match=r"127.0.0.1:9: POST /v1/heartbeat: not answered for 0 s: Client"):
        asyncio.run(scenario())


def test_an_outage_is_mentioned_once_for_all_calls_then_ever_more_rarely_and_at_its_end(caplog):
    now_s = start_s = 1000.0
    outage = Outage("http://c:1", 900.0, lambda: now_s)
    said = []
    for second in range(600):
        now_s = start_s + second
        outage.failed("nobody listens")  # of one call
        outage.failed("nobody listens")  # of another
        if caplog.records:
            said.append((second, caplog.records[0].getMessage()))
            caplog.clear()
    assert [second for second, _ in said] == [5, 15, 30, 60, 120, 240, 480]
    assert said[0][1] == (
        "http://c:1: has not answered for 5 s: nobody listens; trying again until 900 s have passed (--patience)"
    )
    assert outage.length_s == 599
    outage.answered()
    assert caplog.records[0].getMessage() == "http://c:1: answers again, after 599 s"
    assert outage.length_s == 0
    caplog.clear()
    outage.failed("a hiccup")
    outage.answered()
    assert not caplog.records


def test_calls_that_fail_say_so_of_their_connection_and_an_answer_ends_it(tmp_path):
    async def scenario():
        with LiveRun(tmp_path / "run") as run:
            connection = Connection(run.server.url, patience_s=0.5)
            lost = Connection("http://127.0.0.1:9", "secret", patience_s=0.5)
            lost.outage = connection.outage
            try:
                with pytest.raises(DeadlineError):
                    await RemoteWorker(lost, tmp_path).heartbeat([])
                assert connection.outage.length_s > 0
                await join(connection, run.token(), "w")
                assert connection.outage.length_s == 0
            finally:
                await lost.close()
                await connection.close()

    asyncio.run(scenario())


def test_who_is_told_to_slow_down_slows_down_and_gets_through(tmp_path):
    with LiveRun(tmp_path, settings=ServerSettings(requests_per_s=4.0, request_burst=2.0)) as run:

        async def scenario():
            async with remote(run, run.token(), "w") as worker:
                await asyncio.gather(*(worker.heartbeat([]) for _ in range(6)))

        asyncio.run(scenario())
        assert 'route="/v1/heartbeat",status="429"' in run.send("GET", "/metrics").body.decode()


def test_a_large_trajectory_crosses_compressed(tmp_path):
    """As to another machine; that this one is the same is overlooked."""
    with LiveRun(tmp_path, rollout={"lease_s": 600.0, "max_new_tokens": 64}) as run:

        async def scenario():
            async with remote(run, run.token(), "w") as worker:
                worker._connection.is_local = False
                (task,) = (await worker.lease(1, 0, SOON_S)).tasks
                trajectory = task.new_trajectory()
                extra = {"scores": np.zeros((64, 500), np.float32)}
                segment = Segment(0, np.full(64, 5), logprobs=np.full(64, -0.1), version=0, kv_version=0, arrays=extra)
                trajectory.append(segment, End.LENGTH)
                assert await worker.submit(trajectory, task.fence) is Outcome.STORED
                return len((await worker.lease(1000, 0, SOON_S)).tasks)

        assert asyncio.run(scenario()) == 127


# --- TLS ---


@pytest.fixture(scope="module")
def authority():
    return pytest.importorskip("trustme").CA()


@pytest.fixture
def tls(authority, tmp_path):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    return Address(certificate=tmp_path / "certificate.pem", key=tmp_path / "key.pem"), tmp_path / "ca.pem"


def test_a_worker_that_knows_the_authority_joins_over_tls(tls, tmp_path):
    address, ca_file = tls
    with LiveRun(tmp_path / "run", address=address) as run:
        assert run.server.url.startswith("https://")

        async def scenario():
            async with remote(run, run.token(), "w", ca_file=ca_file) as worker:
                return len((await worker.lease(1, 0, SOON_S)).tasks)

        assert asyncio.run(scenario()) == 1


def test_a_worker_that_does_not_know_it_sends_nothing(tls, tmp_path):
    address, _ = tls
    with LiveRun(tmp_path / "run", address=address) as run:

        async def scenario():
            async with remote(run, run.token(), "w", patience_s=0.2):
                pass

        with pytest.raises(UserError, match=r"certificate cannot be verified.*--ca-file FILE"):
            asyncio.run(scenario())
        assert run.ledger.list_workers() == []


def test_a_file_that_holds_no_certificates_is_named(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(UserError, match=r"ca\.pem"):
        Connection("https://coordinator:1", ca_file=tmp_path / "ca.pem")


def test_secrets_do_not_cross_the_network_in_the_clear():
    with pytest.raises(UserError, match="would be sent unencrypted; use https"):
        Connection("http://10.0.0.1:80")
    Connection("http://10.0.0.1:80", allow_plain=True)
    for url in ("http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "https://10.0.0.1"):
        Connection(url)


@pytest.mark.parametrize("url", ["", "coordinator:80", "ftp://x", "https://", "file:///etc/passwd"])
def test_what_is_no_url_is_named(url):
    with pytest.raises(UserError, match="not the URL of a coordinator"):
        Connection(url)


# --- credentials ---


def test_all_that_a_trainer_says_of_itself_goes_over_the_wire():
    calls = []

    class Recorded(Connection):
        async def call(self, path, call, kind, **_):
            calls.append(call)
            return Reconciled(step=3, parent=None, replays_batch=False, generation=5)

    async def scenario():
        connection = Recorded("http://127.0.0.1:1")
        await RemoteTrainer(connection, shares_disk=True).reconcile(3, 4, home="/h", from_scratch=True)
        return connection.generation

    assert asyncio.run(scenario()) == 5
    assert [(call.step, call.version, call.home, call.from_scratch) for call in calls] == [(3, 4, "/h", True)]


def test_calls_share_a_session_whose_connections_are_kept():
    async def scenario():
        connection = Connection("http://127.0.0.1:1")
        try:
            return connection._opened() is connection._opened()
        finally:
            await connection.close()

    assert asyncio.run(scenario())


@pytest.fixture
def tls_server(tmp_path):
    """A server that speaks only TLS, with a certificate for coordinator.example; yields its port, and the CA's file."""
    trustme = pytest.importorskip("trustme")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("coordinator.example").configure_cert(tls)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    started = asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    server = asyncio.run_coroutine_threadsafe(started, loop).result(10)
    yield server.sockets[0].getsockname()[1], tmp_path / "ca.pem"
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def told_by_a_call(folder: Path, url: str, ca_file: Path | None = None) -> str:
    async def scenario():
        connection = Connection(url, "secret", ca_file=ca_file, patience_s=2.0)
        try:
            await RemoteWorker(connection, folder).heartbeat([])
        finally:
            await connection.close()

    with pytest.raises(UserError) as error:
        asyncio.run(scenario())
    return str(error.value)


def test_http_to_a_coordinator_with_tls_is_told_at_once(tmp_path, tls_server):
    port, _ = tls_server
    told = told_by_a_call(tmp_path, f"http://127.0.0.1:{port}")
    assert told == f"http://127.0.0.1:{port}: speaks https; join with https://127.0.0.1:{port}"


def test_https_to_a_coordinator_without_tls_is_told_at_once(tmp_path):
    with LiveRun(tmp_path / "run") as run:
        url = run.server.url.replace("http:", "https:")
        assert told_by_a_call(tmp_path, url) == f"{url}: speaks http, not https; join with {run.server.url}"


def test_a_certificate_for_another_name_is_told_with_the_names_that_it_has(tmp_path, tls_server):
    port, ca_file = tls_server
    for host in ("localhost", "127.0.0.1"):
        told = told_by_a_call(tmp_path, f"https://{host}:{port}", ca_file)
        assert told.startswith(f"https://{host}:{port}: its TLS certificate is not for {host}, but for coordinator.ex")
    assert told_by_a_call(tmp_path, f"https://127.0.0.1:{port}").endswith("yourself, pass --ca-file FILE")
