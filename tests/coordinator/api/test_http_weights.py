"""Weights as whole files: ranges, versions without a manifest, and downloads that resume."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from http_run import WEIGHTS, LiveRun, answer
from safetensors.torch import load

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker
from offbeat.errors import DeadlineError
from offbeat.ledger.workers import Role
from offbeat.weights.version import FILE_NAME, Version, WeightsError, weights_digest

FILE = f"/v1/weights/0/{FILE_NAME}"
DIGEST = weights_digest({"w": load(WEIGHTS)["w"]})
"""Of what every version of step 0 has."""


@pytest.fixture
def run(tmp_path):
    with LiveRun(tmp_path / "run") as live:
        yield live


@pytest.fixture
def trainer(run):
    return run.secret("trainer", Role.TRAINER)


def version(number=1, step=0, parent=0):
    return Version(number, step, parent, DIGEST, Path("wherever the trainer has it"))


# --- reading ---


def test_a_file_comes_whole(run, worker):
    response = run.send("GET", FILE, secret=worker)
    assert (response.status, response.body) == (200, WEIGHTS)


@pytest.mark.parametrize(
    "asked, start, stop",
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, len(WEIGHTS)),
        ("bytes=10-19", 10, 20),
        ("bytes=-7", len(WEIGHTS) - 7, len(WEIGHTS)),
        (f"bytes=1-{10**12}", 1, len(WEIGHTS)),
        (f"bytes=-{10**12}", 0, len(WEIGHTS)),
    ],
)
def test_a_range_of_it_comes_too(run, worker, asked, start, stop):
    response = run.send("GET", FILE, headers={"Range": asked}, secret=worker)
    assert (response.status, response.body) == (206, WEIGHTS[start:stop])
    assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(WEIGHTS)}"


@pytest.mark.parametrize("asked", [f"bytes={len(WEIGHTS)}-", "bytes=9-3", "bytes=-0"])
def test_a_range_that_holds_nothing_is_416(run, worker, asked):
    assert run.send("GET", FILE, headers={"Range": asked}, secret=worker).status == 416


@pytest.mark.parametrize("asked", ["bytes={}-", "bytes=0-{}", "bytes=-{}"])
def test_a_range_of_thousands_of_digits_is_400(run, worker, asked):
    response = run.send("GET", FILE, headers={"Range": asked.format("9" * 5000)}, secret=worker)
    assert (response.status, "digits" in response.error) == (400, True)


@pytest.mark.parametrize("asked", ["bytes=a-b", "lines=1-2", "bytes=-", "bytes=0-1,5-6"])
def test_a_range_that_nobody_understands_is_ignored(run, worker, asked):
    assert run.send("GET", FILE, headers={"Range": asked}, secret=worker).status == 200


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/weights/7/{FILE_NAME}",
        "/v1/weights/0/other",
        "/v1/weights/0/..%2f..%2fledger.sqlite",
        "/v1/weights/0/%2e%2e",
        "/v1/weights/0/.hidden",
        "/v1/weights/0/../../ledger.sqlite",
        f"/v1/weights/{2**70}/{FILE_NAME}",
        "/v1/weights/7",
        f"/v1/weights/{2**70}",
    ],
)
def test_what_is_no_file_of_a_published_version_is_404(run, worker, path):
    assert run.send("GET", path, secret=worker).status == 404


def test_a_version_tells_its_files(run, worker):
    (file,) = run.send("GET", "/v1/weights/0", secret=worker).record(wire.WeightFiles).files
    assert (file.name, file.num_bytes) == (FILE_NAME, len(WEIGHTS))


def test_a_version_that_is_no_longer_kept_is_404(run, worker):
    run.weights.keep([])
    assert run.send("GET", FILE, secret=worker).status == 404
    assert run.send("GET", "/v1/weights/0", secret=worker).status == 404


def test_a_version_whose_weights_are_not_here_is_422(run, trainer, unchanged):
    assert run.post("/v1/publish", wire.PublishCall(version=version()), trainer).status == 422


def test_a_version_that_lies_in_its_place_is_published_once(run, trainer):
    run.weights.path(1).mkdir()
    (run.weights.path(1) / FILE_NAME).write_bytes(WEIGHTS)
    for _ in range(2):
        assert run.post("/v1/publish", wire.PublishCall(version=version()), trainer).status == 204
    other = replace(version(), digest="another")
    assert run.post("/v1/publish", wire.PublishCall(version=other), trainer).status == 409
    assert run.ledger.version(1) == replace(version(), path=run.weights.path(1))
    assert run.ledger.counts().num_versions == 2


# --- the client's side ---


def connected(run, secret, **options):
    return Connection(run.server.url, secret, **options)


def with_worker(run, secret, cache, work, **options):
    async def scenario():
        connection = connected(run, secret, **options)
        try:
            return await work(RemoteWorker(connection, cache))
        finally:
            await connection.close()

    return asyncio.run(scenario())


def test_a_fetched_version_is_whole_and_here(run, worker, tmp_path):
    async def work(remote):
        found = await remote.newer(None, 1.0)
        here = await remote.fetch(found)
        again = await remote.fetch(found)
        assert here == again
        return found, here

    found, here = with_worker(run, worker, tmp_path / "cache", work)
    assert (here.path / FILE_NAME).read_bytes() == WEIGHTS
    assert here.path.parent == tmp_path / "cache"
    assert replace(here, path=found.path) == found


def test_a_worker_on_the_same_disk_reads_them_where_they_lie(run, worker, tmp_path):
    async def scenario():
        connection = connected(run, worker)
        remote = RemoteWorker(connection, tmp_path / "cache", shares_disk=True)
        here = await remote.fetch(await remote.newer(None, 1.0))
        await connection.close()
        return here

    assert asyncio.run(scenario()).path == run.weights.path(0)
    assert not (tmp_path / "cache").exists()


def test_a_fetch_goes_on_where_an_earlier_one_ended(run, worker, tmp_path):
    cache = tmp_path / "cache"

    async def work(remote):
        found = await remote.newer(None, 1.0)
        final = remote._receiver.cache.path_of(found.number, found.digest)
        draft = final.with_name(f".{final.name}.copy.draft")
        draft.mkdir(parents=True)
        (draft / FILE_NAME).write_bytes(WEIGHTS[:2_000_000])
        return await remote.fetch(found)

    here = with_worker(run, worker, cache, work)
    assert (here.path / FILE_NAME).read_bytes() == WEIGHTS
    assert 'route="/v1/weights/{number}/{file}",status="206"' in run.send("GET", "/metrics").body.decode()
    assert [path.name for path in cache.iterdir()] == [here.path.name]


@pytest.mark.parametrize(
    "left",
    [WEIGHTS[:1000] + b"damage", WEIGHTS + b"more", os.urandom(len(WEIGHTS))],
    ids=["damaged", "too long", "another"],
)
def test_what_an_earlier_fetch_left_damaged_is_fetched_again(run, worker, tmp_path, left):
    async def work(remote):
        found = await remote.newer(None, 1.0)
        final = remote._receiver.cache.path_of(found.number, found.digest)
        draft = final.with_name(f".{final.name}.copy.draft")
        draft.mkdir(parents=True)
        (draft / FILE_NAME).write_bytes(left)
        return await remote.fetch(found)

    assert (with_worker(run, worker, tmp_path / "cache", work).path / FILE_NAME).read_bytes() == WEIGHTS


def test_a_line_that_breaks_again_and_again_still_brings_the_file(run, worker, tmp_path):
    with BreakingProxy(run, after_bytes=700_000) as proxy:

        async def scenario():
            connection = Connection(proxy.url, worker)
            remote = RemoteWorker(connection, tmp_path / "cache")
            here = await remote.fetch(await remote.newer(None, 1.0))
            await connection.close()
            return here

        here = asyncio.run(scenario())
    assert (here.path / FILE_NAME).read_bytes() == WEIGHTS
    assert proxy.num_broken >= 3


def test_a_version_that_is_gone_cannot_be_had(run, worker, tmp_path):
    async def work(remote):
        found = await remote.newer(None, 1.0)
        run.weights.keep([])
        await remote.fetch(found)

    with pytest.raises(WeightsError, match="version 0 cannot be fetched: the weights of version 0 are no longer"):
        with_worker(run, worker, tmp_path / "cache", work)


def test_patience_ends_also_in_the_middle_of_a_file(run, worker, tmp_path):
    with BreakingProxy(run, after_bytes=3_000) as proxy:

        async def scenario():
            connection = Connection(proxy.url, worker, patience_s=0.5)
            remote = RemoteWorker(connection, tmp_path / "cache")
            found = await remote.newer(None, 1.0)
            proxy.after_bytes = 0
            try:
                await remote.fetch(found)
            finally:
                await connection.close()

        with pytest.raises(DeadlineError, match="not answered"):
            asyncio.run(scenario())


class BreakingProxy:
    """Passes bytes between callers and a run, and breaks each line after so many bytes of answers."""

    def __init__(self, run, after_bytes: int):
        self.run, self.after_bytes, self.num_broken = run, after_bytes, 0

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        async def stop():
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.run.server.port)
        passing = asyncio.create_task(self._pass(reader, there_writer))
        left = self.after_bytes
        try:
            while data := await there_reader.read(65536):
                writer.write(data[:left])
                left -= len(data)
                if left <= 0:
                    self.num_broken += 1
                    break
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            passing.cancel()
            writer.close()
            there_writer.close()

    async def _pass(self, reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


def test_weights_are_read_while_answers_are_stored(run, worker, task):
    """A long download does not keep a submission waiting: both are answered on one line each."""
    with run.connect() as line:
        line.sendall(f"GET {FILE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {worker}\r\n\r\n".encode())
        assert run.submit(answer(task), task.fence, worker).status == 201
