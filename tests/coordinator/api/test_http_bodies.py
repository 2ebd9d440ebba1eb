"""Bodies that are too large, too slow, of the wrong kind or cut short; and connections held open for nothing."""

import json
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import zstandard
from http_run import SOON_S, LiveRun, answer

from offbeat.client import wire
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.ledger.errors import Refused
from offbeat.waiting import LARGE_BYTES

LIMIT, DECOMPRESSED_LIMIT = 100_000, 1_000_000
QUICK_S = 0.5
"""Long enough for an honest request on a busy machine, short enough to wait for."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = ServerSettings(
        max_body_bytes=LIMIT,
        max_decompressed_bytes=DECOMPRESSED_LIMIT,
        body_within_s=QUICK_S,
        head_within_s=QUICK_S,
        max_head_bytes=8192,
        joins_per_s=1000.0,
    )
    with LiveRun(tmp_path_factory.mktemp("run"), settings=settings) as live:
        yield live


def compressed_unsized(data: bytes) -> bytes:
    """zstd that does not say how large it will be."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


def test_a_compressed_trajectory_is_stored(run, worker, task):
    body = wire.compress(answer(task).encode())
    assert run.put(task.id, task.fence, body, worker, **{"Content-Encoding": "zstd"}).status == 201


def test_a_body_too_large_as_sent_is_413(run, worker, task, unchanged):
    assert run.put(task.id, task.fence, bytes(LIMIT + 1), worker).status == 413


def test_a_body_too_large_that_does_not_tell_its_length_is_413(run, worker, task, unchanged):
    chunk = b"%x\r\n" % 50_000 + bytes(50_000) + b"\r\n"
    head = head_of(
        "PUT", f"/v1/trajectories/{task.id}/{task.fence}", worker, b"Transfer-Encoding: chunked", digest(b"")
    )
    assert converse(run, head, chunk, chunk, chunk) == 413


def test_a_body_that_claims_to_be_huge_is_413_before_it_comes(run, worker, task, unchanged):
    head = head_of(
        "PUT", f"/v1/trajectories/{task.id}/{task.fence}", worker, b"Content-Length: 999999999999", digest(b"")
    )
    assert converse(run, head) == 413


@pytest.mark.parametrize(
    "body",
    [wire.compress(bytes(DECOMPRESSED_LIMIT + 1)), wire.compress(bytes(2**30))],
    ids=["a byte too many", "a gibibyte in 33 kB"],
)
def test_a_body_too_large_once_decompressed_is_413(run, worker, task, body, unchanged):
    assert len(body) < LIMIT
    response = run.put(task.id, task.fence, body, worker, **{"Content-Encoding": "zstd"})
    assert (response.status, "after decompression" in response.error) == (413, True)


@pytest.mark.parametrize("size", [10, 2**30])
def test_a_compressed_body_that_does_not_declare_its_size_is_400(run, worker, task, size, unchanged):
    response = run.put(task.id, task.fence, compressed_unsized(bytes(size)), worker, **{"Content-Encoding": "zstd"})
    assert (response.status, "does not declare its size" in response.error) == (400, True)


def test_a_body_that_lies_about_its_size_is_400(run, worker, task, unchanged):
    honest = bytearray(wire.compress(bytes(70_000)))
    place = honest.index((70_000).to_bytes(4, "little"))
    honest[place : place + 4] = (1000).to_bytes(4, "little")
    assert wire.decompressed_size(bytes(honest)) == 1000
    assert run.put(task.id, task.fence, bytes(honest), worker, **{"Content-Encoding": "zstd"}).status == 400


@pytest.mark.parametrize(
    "damage",
    [lambda z: z[:-3], lambda z: z + b"more", lambda z: z + z, lambda z: b"", lambda z: b"no zstd at all"],
    ids=["cut", "followed", "twice", "empty", "none"],
)
def test_damaged_compression_is_400(run, worker, task, damage, unchanged):
    body = damage(wire.compress(answer(task).encode()))
    assert run.put(task.id, task.fence, body, worker, **{"Content-Encoding": "zstd"}).status == 400


def test_an_encoding_that_we_do_not_speak_is_415(run, worker, task, unchanged):
    body = answer(task).encode()
    assert run.put(task.id, task.fence, body, worker, **{"Content-Encoding": "gzip"}).status == 415


@pytest.mark.parametrize("kind", [None, "application/json", "application/octet-stream", "text/msgpack", ""])
def test_another_content_type_is_415(run, worker, task, kind, unchanged):
    assert run.put(task.id, task.fence, answer(task).encode(), worker, **{"Content-Type": kind}).status == 415


def test_calls_that_are_malformed_are_400(run, worker, unchanged):
    for body in (
        b"",
        b"\xc1",
        wire.encode({"capacity": 1}),
        wire.encode({"capacity": 0, "have_version": 0, "wait_s": 0.0}),
        wire.encode({"capacity": 1, "have_version": -1, "wait_s": 0.0}),
        wire.encode({"capacity": 1, "have_version": 0, "wait_s": float("nan")}),
        wire.encode({"capacity": 1, "have_version": 0, "wait_s": float("inf")}),
        wire.encode({"capacity": 1, "have_version": 0, "wait_s": 0.0, "worker": "someone else"}),
    ):
        assert run.post_bytes("/v1/lease", body, worker).status == 400


def test_a_body_cut_short_by_a_broken_line_changes_nothing(run, worker, task, unchanged):
    body = answer(task).encode()
    head = head_of("PUT", f"/v1/trajectories/{task.id}/{task.fence}", worker, length(body), digest(body))
    with run.connect() as line:
        line.sendall(head + body[: len(body) // 2])
    with run.connect() as line:  # and half closed, where the other half could still be answered
        line.sendall(head + body[: len(body) // 2])
        line.shutdown(socket.SHUT_WR)
        assert status(line) in (400, 408, None)


def test_a_body_that_comes_too_slowly_is_408(run, worker, task, unchanged):
    body = answer(task).encode()
    head = head_of("PUT", f"/v1/trajectories/{task.id}/{task.fence}", worker, length(body), digest(body))
    with run.connect() as line:
        line.sendall(head + body[:10])
        assert status(line) == 408
        assert line.recv(1000) == b""  # and hung up


def test_a_body_that_drips_is_408_however_often_it_drips(run, worker, task, unchanged):
    body = answer(task).encode()
    head = head_of("PUT", f"/v1/trajectories/{task.id}/{task.fence}", worker, length(body), digest(body))
    assert converse(run, head, *[body[i : i + 1] for i in range(40)], pause_s=QUICK_S / 10) == 408


def test_a_line_that_says_nothing_is_hung_up(run):
    with run.connect() as line:
        assert status(line) == 408
        assert line.recv(1000) == b""


@pytest.mark.parametrize("drip", [b"X-Slow: 1\r\n", b"\r\n"], ids=["headers", "empty lines"])
def test_a_head_that_drips_is_408_and_hung_up(run, drip):
    first = b"" if drip == b"\r\n" else b"POST /v1/lease HTTP/1.1\r\nHost: x\r\n"
    assert converse(run, first, *[drip] * 40, pause_s=QUICK_S / 10) == 408


def test_a_second_head_that_drips_is_hung_up_too(run, worker):
    with run.connect() as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(line) == 200
        line.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert status(line) == 408


def test_empty_lines_after_a_request_do_not_keep_a_line_open(run):
    with run.connect() as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(line) == 200
        wait_until(lambda: is_broken(line, b"\r\n"), every_s=QUICK_S / 10)  # too few bytes to be a long head


def test_a_head_without_end_is_431(run):
    assert converse(run, b"GET / HTTP/1.1\r\n", *[b"X: " + b"y" * 5000 + b"\r\n"] * 4) == 431


def test_a_long_head_that_comes_in_one_piece_is_431_too(run):
    headers = b"".join(b"X-%d: y\r\n" % i for i in range(2000))
    assert converse(run, b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n") == 431


def test_what_is_no_http_is_400(run):
    assert converse(run, b"\x16\x03\x01 this is no HTTP\r\n\r\n") == 400


def test_whoever_is_refused_early_can_finish_sending_and_read_why(run, unchanged):
    body = bytes(LIMIT)
    response = run.put(1, 1, body, "nobody")
    assert response.status == 401


def test_whoever_is_refused_early_and_goes_on_for_ever_is_hung_up(run):
    head = head_of("PUT", "/v1/trajectories/1/1", "nobody", b"Content-Length: 99999")
    with run.connect() as line:
        line.sendall(head)
        assert status(line) == 401
        wait_until(lambda: is_broken(line))


def test_two_requests_on_one_line_are_both_answered(run, worker):
    call = wire.encode(wire.HeartbeatCall(held=[]))
    one = head_of("POST", "/v1/heartbeat", worker, length(call), digest(call)) + call
    with run.connect() as line:
        line.sendall(one + one)
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 2:
            data += line.recv(10_000)


def test_unknown_paths_and_methods_are_told_in_json(run, worker, unchanged):
    assert run.send("GET", "/v1/nothing", secret=worker).status == 404
    response = run.send("GET", "/v1/lease", secret=worker)
    assert response.status == 405
    assert "error" in json.loads(response.body)
    assert run.send("PUT", "/v1/trajectories/one/two", secret=worker).status == 404


def test_when_bodies_fill_the_memory_others_are_asked_to_come_back(tmp_path):
    settings = ServerSettings(max_held_bytes=20_000)
    with LiveRun(tmp_path, settings=settings) as run:
        worker = run.secret()
        (task,) = run.lease(worker)
        big = answer(task, worker="x" * 256)
        path, padding = f"/v1/trajectories/{task.id}/{task.fence}", bytes(15_000)
        before = run.content()
        with run.connect() as line:
            line.sendall(head_of("PUT", path, worker, b"Content-Length: 20000", digest(b"")) + padding)
            wait_until(lambda: run.server.state.bodies.held_bytes == 15_000)
            response = run.put(task.id, task.fence, bytes(10_000), worker)
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        wait_until(lambda: run.server.state.bodies.held_bytes == 0)
        small = wire.compress(bytes(30_000))  # what it becomes counts
        response = run.put(task.id, task.fence, small, worker, **{"Content-Encoding": "zstd"})
        assert (response.status, "too many request bodies" in response.error) == (503, True)
        assert run.server.state.bodies.held_bytes == 0
        assert run.content() == before
        assert run.submit(big, task.fence, worker).status == 201


@pytest.mark.parametrize("num_bytes", [1000, 500_000])
def test_what_is_large_once_decompressed_is_decoded_beside_the_loop(run, worker, task, num_bytes, monkeypatch):
    threads, trajectory = [], wire.trajectory

    def watched(data):
        threads.append(threading.get_ident())
        return trajectory(data)

    monkeypatch.setattr(wire, "trajectory", watched)
    body = wire.compress(bytes(num_bytes))
    assert run.put(task.id, task.fence, body, worker, **{"Content-Encoding": "zstd"}).status == 400
    is_beside = threads != [run._thread.ident]
    assert is_beside == (num_bytes > LARGE_BYTES)


def test_a_body_waits_on_its_budget_until_its_call_is_answered(tmp_path):
    with LiveRun(tmp_path) as run:
        worker, held = run.secret(), []

        async def watched(*_):
            held.append(run.server.state.bodies.held_bytes)
            raise Refused("looked at")

        run.coordinator.heartbeat = watched
        call = wire.HeartbeatCall(held=[(1, 1)] * 1000)
        body = wire.compress(wire.encode(call))
        assert run.post_bytes("/v1/heartbeat", body, worker, **{"Content-Encoding": "zstd"}).status == 422
        assert held == [len(body) + len(wire.encode(call))]
        assert run.server.state.bodies.held_bytes == 0


def test_a_stranger_that_takes_all_connections_keeps_nobody_out(tmp_path):
    """Those on which nobody has proved who it is give way; a worker's own is kept."""
    with LiveRun(tmp_path, settings=ServerSettings(max_connections=8)) as run, ExitStack() as stack:
        worker, call = run.secret(), wire.HeartbeatCall(held=[])
        body = wire.encode(call)
        request = head_of("POST", "/v1/heartbeat", worker, length(body), digest(body)) + body
        own = stack.enter_context(run.connect())
        own.sendall(request)
        assert status(own) == 200
        strangers = [stack.enter_context(run.connect()) for _ in range(20)]
        strangers[-1].sendall(b"GET /v1/run HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(strangers[-1]) == 401
        assert run.post("/v1/heartbeat", call, worker).status == 200
        own.sendall(request)
        assert status(own) == 200
        assert len(run.server._uvicorn.server_state.connections) < 8
        assert strangers[0].recv(1) == b""  # the first gave way


# --- raw lines ---


def head_of(method: str, path: str, secret: str, *lines: bytes) -> bytes:
    first = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {wire.MSGPACK}\r\nAuthorization: Bearer {secret}"
    return b"\r\n".join([first.encode(), *lines]) + b"\r\n\r\n"


def length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def digest(body: bytes) -> bytes:
    return f"{wire.CONTENT_DIGEST}: {wire.content_digest(body)}".encode()


def converse(run, *parts: bytes, pause_s: float = 0.0) -> int | None:
    """Sends parts, with pauses, until there is an answer; its status."""
    with run.connect() as line:
        for part in parts:
            try:
                line.sendall(part)
            except OSError:
                break
            if pause_s:
                line.settimeout(pause_s)
                try:
                    line.recv(1, socket.MSG_PEEK)
                    break
                except TimeoutError:
                    pass
        line.settimeout(SOON_S)
        return status(line)


def status(line: socket.socket) -> int | None:
    """Of the next answer; None where there is none."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            part = line.recv(1)
            if not part:
                return None
            data += part
        head = data.decode().lower()
        size = int(head.partition("content-length: ")[2].split("\r\n")[0] or 0)
        while size > 0:
            size -= len(line.recv(size))
    except ConnectionError:
        if not data:
            return None
    return int(data.split(b" ")[1])


def is_broken(line: socket.socket, drip: bytes = b"x") -> bool:
    try:
        line.sendall(drip)
    except OSError:
        return True
    return False


def wait_until(condition, every_s: float = 0.01) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(every_s)
