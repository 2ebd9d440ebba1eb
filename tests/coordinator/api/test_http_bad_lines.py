"""Calls over a line that damages, loses and replaces what crosses it: each arrives once and whole, or names who was
waited for. What the line itself does to bytes is real; so are coordinator and callers."""

import asyncio
import logging
import re
from contextlib import asynccontextmanager

import pytest
from http_run import SOON_S, WEIGHTS, LiveRun, answer
from safetensors.torch import load

from benchmarks.chaos.fault_proxy import PAGES, FaultProxy, Line
from offbeat.client import connection, wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteTrainer, RemoteWorker, join
from offbeat.client.protocol import Heartbeat
from offbeat.errors import DeadlineError, OffbeatError
from offbeat.ledger.errors import Forbidden, Refused
from offbeat.ledger.records import Outcome
from offbeat.ledger.workers import Role
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import FILE_NAME

FAULTS = ("damaged", "lost", "strange")


@pytest.fixture(autouse=True)
def soon_again(monkeypatch):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(connection, "TLS_WITHIN_S", 0.2)


@asynccontextmanager
async def over(run, line: Line, **options):
    """A proxy and a connection through it, which has not joined."""
    async with FaultProxy(run.server.port, line) as proxy:
        made = Connection(proxy.url, **options)
        try:
            yield proxy, made
        finally:
            await made.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_joins_once_however_often_it_has_to_ask(run, fault):
    async def scenario():
        line = Line(**{fault: 1.0}, max_faults=3)
        async with over(run, line) as (proxy, made):
            member = await join(made, run.token(), fault)
            assert proxy.seen.faults[fault] == 3
            assert (await RemoteWorker(made, run.folder / fault).heartbeat([])) == Heartbeat()
            return member.credentials.worker

    assert asyncio.run(scenario()) == fault
    assert [w.name for w in run.ledger.list_workers() if w.name.startswith(fault)] == [fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_is_harmed_on_its_way_is_sent_again_and_nobody_is_blamed(run, fault):
    secret = run.secret()
    (task,) = run.lease(secret)

    async def scenario():
        async with over(run, Line(**{fault: 1.0}, max_faults=len(PAGES)), secret=secret) as (proxy, made):
            outcome = await RemoteWorker(made, run.folder).submit(answer(task), task.fence)
            assert proxy.seen.faults[fault] == len(PAGES)
            return outcome

    expected = {"lost": {Outcome.REPEATED}, "strange": {Outcome.STORED}, "damaged": {Outcome.STORED, Outcome.REPEATED}}
    assert asyncio.run(scenario()) in expected[fault]  # it may be the answer that was damaged
    query = "SELECT (SELECT COUNT(*) FROM trajectories WHERE task = id), num_failures FROM tasks WHERE id = ?"
    assert run.ledger.execute(query, (task.id,)).fetchone() == (1, 0)


@pytest.mark.full
def test_calls_of_every_kind_survive_a_line_with_all_faults_at_once(tmp_path):
    line = Line(damaged=0.15, lost=0.15, strange=0.15, twice=0.2)
    with LiveRun(tmp_path / "run", batch={"groups_per_step": 1, "group_size": 4}) as run:

        async def scenario():
            async with FaultProxy(run.server.port, line, seed=1) as proxy:
                ours, theirs = Connection(proxy.url), Connection(proxy.url)
                theirs.is_local = False  # compresses
                await join(ours, run.token(), "w")
                await join(theirs, run.token(Role.TRAINER), "t")
                store, key = FolderStore(tmp_path / "new"), SigningKey.generate()
                worker = RemoteWorker(ours, tmp_path / "cache")
                trainer = RemoteTrainer(theirs, store=store, signer=key.public)
                await trainer.reconcile(0, 0)
                sent = {}
                while len(sent) < 4:  # what was leased in an answer that was lost comes back with a heartbeat's silence
                    lease = await worker.lease(4, 0, 1.0)
                    for task in lease.tasks:
                        sent[task.id] = answer(task)
                        await worker.submit(sent[task.id], task.fence)
                    if not lease.tasks:
                        await run_beside(run, run.coordinator.leave("w"))
                batch = await trainer.claim(0, SOON_S)
                assert {m.task: m.trajectory for group in batch.groups for m in group.members} == sent
                publisher = Publisher(tmp_path / "new", store, key)
                made = publisher.write(await trainer.next_version(), 1, 0, load(WEIGHTS))
                line.damaged = 0.0  # of so many bytes none would arrive as it was
                await trainer.commit(0, made)
                assert (await worker.fetch(await worker.newer(0, SOON_S))).number == made.number
                for end in (ours, theirs):
                    await end.close()
                assert proxy.seen.faults.total() > 3

        asyncio.run(scenario())


async def run_beside(run, work) -> None:
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, run._loop))


@pytest.mark.parametrize("page", range(len(PAGES)), ids=PAGES)
def test_a_page_in_the_coordinators_place_ends_in_one_line_that_names_it(run, page):
    async def scenario():
        async with over(run, Line(strange=1.0), secret="any", patience_s=0.3) as (proxy, made):
            proxy.seen.faults["strange"] = page - 1 + len(PAGES)
            await RemoteWorker(made, run.folder).heartbeat([])

    with pytest.raises(
        DeadlineError, match=r"^http://127.0.0.1:\d+: POST /v1/heartbeat: not answered for 0 s: "
    ) as told:
        asyncio.run(scenario())
    assert "\n" not in str(told.value)


def test_a_page_in_place_of_a_file_is_not_taken_for_it(run):
    async def scenario():
        async with over(run, Line(strange=1.0, max_faults=len(PAGES)), secret=run.secret()) as (proxy, made):
            version = run.ledger.latest_version()
            fetched = await RemoteWorker(made, run.folder / "cache").fetch(version)
            assert proxy.seen.faults["strange"] == len(PAGES)
            return (fetched.path / FILE_NAME).read_bytes()

    assert asyncio.run(scenario()) == (run.weights.path(0) / FILE_NAME).read_bytes()


def test_what_the_coordinator_itself_refuses_is_raised_at_once(run):
    secret = run.secret()
    (task,) = run.lease(secret)

    async def scenario():
        async with over(run, Line(), secret=secret) as (proxy, made):
            worker = RemoteWorker(made, run.folder)
            with pytest.raises(Forbidden, match="never granted"):
                await worker.submit(answer(task), task.fence + 1)
            with pytest.raises(Refused, match="never published"):
                await worker.submit(answer(task, number=99), task.fence)
            assert proxy.seen.statuses == {403: 1, 422: 1}

    asyncio.run(scenario())


# --- answers that no coordinator gives ---


@asynccontextmanager
async def saying(*answers: bytes):
    """A server that says these, one a connection and then the last for ever; its URL."""
    said = list(answers)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said.pop(0) if len(said) > 1 else said[0])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def told(body: bytes, status: str = "200 OK", **changes: str) -> bytes:
    headers = {"Content-Length": str(len(body)), wire.CONTENT_DIGEST: wire.content_digest(body)}
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


BEAT, OTHER = wire.encode(Heartbeat((3,))), wire.encode(Heartbeat((9,)))
GARBAGE = {
    "nothing": b"",
    "no HTTP": b"\x00\x01\x02 SSH-2.0-OpenSSH\r\n\r\n",
    "a head cut short": told(OTHER)[:20],
    "a body cut short": told(OTHER)[:-3],
    "a chunk cut short": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    "another length": told(OTHER, Content_Length="1"),
    "a length that is none": told(OTHER, Content_Length="many"),
    "another digest": told(OTHER, Content_Digest=wire.content_digest(b"other")),
    "no digest": told(OTHER, Content_Digest="none"),
    "an error without end": b"HTTP/1.1 404 Not Found\r\nContent-Length: 1000000\r\n\r\n" + bytes(10**6),
    "a head without end": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10**6 + b"\r\n\r\n",
    "stay away for years": told(b"", "503 Service Unavailable", Retry_After="99999999999999999999"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_survived_until_there_is_an_answer(name, monkeypatch):
    monkeypatch.setattr(connection, "MAX_RETRY_AFTER_S", 0.01)

    async def scenario():
        async with saying(GARBAGE[name], GARBAGE[name], told(BEAT)) as url:
            made = Connection(url, "secret", patience_s=SOON_S)
            try:
                return await made.call("/v1/heartbeat", wire.HeartbeatCall(held=[]), Heartbeat)
            finally:
                await made.close()

    assert asyncio.run(scenario()) == Heartbeat((3,))


def test_a_caller_stays_away_for_as_long_as_it_is_asked_to(monkeypatch, caplog):
    monkeypatch.setattr(connection, "MAX_RETRY_AFTER_S", 1.5)
    busy = [told(b"", "503 Service Unavailable", Retry_After=seconds) for seconds in ("1", "99", "soon")]

    async def scenario():
        async with saying(*busy, told(BEAT)) as url:
            made = Connection(url, "secret", patience_s=SOON_S)
            try:
                await made.call("/v1/heartbeat", wire.HeartbeatCall(held=[]), Heartbeat)
            finally:
                await made.close()

    with caplog.at_level(logging.INFO, connection.log.name):
        asyncio.run(scenario())
    pauses_s = [float(found) for found in re.findall(r"trying again in ([\d.]+) s", caplog.text)]
    assert 1 <= pauses_s[0] < 1.5 <= pauses_s[1] < 2.5, "what was asked for, and never longer than the limit"
    assert pauses_s[2] < 1


def test_an_answer_beyond_all_measure_is_told_as_what_it_is(monkeypatch):
    monkeypatch.setattr(connection, "MAX_ANSWER_BYTES", 1000)

    async def scenario():
        async with saying(told(wire.compress(bytes(1001)), Content_Encoding="zstd")) as url:
            made = Connection(url, "secret", patience_s=SOON_S)
            try:
                await made.get("/v1/run", wire.RunInfo)
            finally:
                await made.close()

    with pytest.raises(OffbeatError, match=r"GET /v1/run: the answer has more than 1000 bytes; .*groups_per_step"):
        asyncio.run(scenario())


def test_an_answer_of_another_offbeat_is_told_as_what_it_is():
    async def scenario(**headers):
        async with saying(told(b"no msgpack, and no zstd", **headers)) as url:
            made = Connection(url, "secret", patience_s=SOON_S)
            try:
                await made.get("/v1/run", wire.RunInfo)
            finally:
                await made.close()

    for headers in ({}, {"Content_Encoding": "zstd"}):
        with pytest.raises(OffbeatError, match="use the coordinator's version of Offbeat"):
            asyncio.run(scenario(**headers))


# --- what the coordinator says ---


def test_every_answer_but_a_file_carries_its_digest(run, worker):
    for response in (
        run.send("GET", "/v1/run", secret=worker),
        run.post("/v1/heartbeat", wire.HeartbeatCall(held=[]), worker),
        run.post("/v1/give-back", wire.GiveBackCall(leases=[]), worker),
        run.post("/v1/heartbeat", wire.HeartbeatCall(held=[])),
        run.send("GET", "/v1/nothing", secret=worker),
        run.send("GET", "/v1/lease", secret=worker),
        run.send("GET", "/v1/manifests/0", secret=worker),
        run.send("GET", "/healthz"),
    ):
        assert response.headers[wire.CONTENT_DIGEST] == wire.content_digest(response.body)


@pytest.mark.parametrize("path", ["/v1/lease", "/v1/heartbeat", "/v1/leave", "/v1/give-back", "/v1/sources"])
def test_a_call_that_is_not_what_was_sent_is_400_and_says_so(run, worker, path, unchanged):
    for wrong in (None, wire.content_digest(b"other")):
        response = run.post_bytes(path, b"\x80", worker, **{wire.CONTENT_DIGEST: wrong})
        assert (response.status, b'"kind":"Damaged"' in response.body) == (400, True)
