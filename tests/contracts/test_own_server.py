"""A real server as a worker starts it: tied weights follow a load; killed or standing still, it is told in time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from engine_servers import SERVERS, own_server
from served_engine import forward_logprobs, tiny_llama
from test_engine_contract import ask, prompt

from offbeat.engines.protocol import EngineDied, Generation, Version
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.direct import Channel, DirectDialect
from offbeat.launch.gpu_memory import taking_turns

pytestmark = pytest.mark.timeout(900)  # a busy machine takes minutes to start a server
PYTHON = os.environ.get(SERVERS["vllm"][1])
WITHIN_S = 45.0
"""Well above the time after which a silent server is taken for dead."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One that may be killed, by the last test: starting one takes a minute."""
    if not PYTHON:
        pytest.skip("make test-engines has a vLLM")
    tmp_path = tmp_path_factory.mktemp("server")
    tiny_llama(seed=1, tied=True).save_pretrained(tmp_path / "model")
    with own_server("direct", PYTHON, tmp_path / "model", tmp_path / "engine.log") as (url, server):
        yield url, server, Version(0, step=0, parent=None, digest="0", path=tmp_path / "model")


def listening_ports() -> list[int]:
    """Ports of this machine that anybody can connect to."""
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"]


def speaks_http(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b'"version"' in connection.recv(2000)
    except OSError:
        return False


def test_no_other_user_of_the_machine_can_call_a_workers_server(server):
    url, _, _ = server
    place = Path(url.removeprefix("unix:"))
    assert stat.S_ISSOCK(place.stat().st_mode)
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert not [port for port in listening_ports() if speaks_http(port)], "vLLM answers at a port"


def test_an_output_layer_that_shares_the_embeddings_weights_follows_them(server, tmp_path):
    url, _, first = server
    other = tiny_llama(seed=2, tied=True)
    other.save_pretrained(tmp_path / "other")
    second = Version(1, step=1, parent=0, digest="1", path=tmp_path / "other")
    request = ask(prompt(1, 20), temperature=1.0)

    async def scenario() -> Generation:
        engine = await ServerEngine.attach(DirectDialect(Channel(url)), worker="w", num_slots=16)
        await engine.load(first)
        await engine.load(second)
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    (segment,) = asyncio.run(scenario()).segments
    np.testing.assert_allclose(segment.logprobs, forward_logprobs(other, request, segment.tokens), atol=2e-2)


def test_prompts_that_fit_into_no_one_step_together_are_answered_as_each_alone(server):
    url, _, version = server
    asked = [ask(prompt(i, 900), seed=i, temperature=1.0, max_new_tokens=8) for i in range(16)]

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        engine = await ServerEngine.attach(DirectDialect(Channel(url)), worker="w", num_slots=16)
        await engine.load(version)
        try:
            together = await asyncio.gather(*map(engine.generate, asked))
            return together, [await engine.generate(request) for request in asked]
        finally:
            await engine.close()

    together, alone = asyncio.run(scenario())
    assert [answer.segments[0].tokens.tolist() for answer in together] == [
        answer.segments[0].tokens.tolist() for answer in alone
    ]


def test_a_server_that_stands_still_is_dead_after_a_while(server):
    url, process, version = server

    async def scenario() -> None:
        engine = await ServerEngine.attach(DirectDialect(Channel(url)), worker="w", num_slots=16)
        await engine.load(version)
        running = asyncio.create_task(engine.generate(ask(prompt(1), max_new_tokens=1500)))
        await asyncio.sleep(0.5)
        os.killpg(process._group, signal.SIGSTOP)
        try:
            with pytest.raises(EngineDied, match="no answer within"):
                await asyncio.wait_for(running, 2 * WITHIN_S)
        finally:
            os.killpg(process._group, signal.SIGCONT)
        await engine.close()

    asyncio.run(scenario())


def test_a_server_that_is_killed_mid_request_ends_every_call_in_time_and_by_name(server):
    url, process, version = server

    async def scenario() -> float:
        engine = await ServerEngine.attach(DirectDialect(Channel(url)), worker="w", num_slots=16)
        await engine.load(version)
        running = [asyncio.create_task(engine.generate(ask(prompt(i), max_new_tokens=1500))) for i in range(4)]
        await asyncio.sleep(0.5)
        os.killpg(process._group, signal.SIGKILL)
        killed_s = time.monotonic()
        for task in running:
            with pytest.raises(EngineDied, match=rf"engine w \(vllm .*{url}"):
                await task
        took_s = time.monotonic() - killed_s
        for call in (engine.generate(ask(prompt(1))), engine.load(version), engine.abort()):
            with pytest.raises(EngineDied, match=url):
                await call
        await engine.close()
        return took_s

    assert asyncio.run(scenario()) < WITHIN_S


def test_a_server_takes_no_memory_while_another_has_its_turn(tmp_path):
    if not PYTHON:
        pytest.skip("make test-engines has a vLLM")
    tiny_llama(seed=1).save_pretrained(tmp_path / "model")
    lock, is_up = tmp_path / "gpu.lock", threading.Event()

    def serve() -> None:
        with own_server("direct", PYTHON, tmp_path / "model", arguments=("--memory-lock", str(lock))):
            is_up.set()

    server = threading.Thread(target=serve)
    with taking_turns(lock):
        server.start()
        while num_open(lock) < 2:
            assert server.is_alive()
            time.sleep(0.2)
        assert not is_up.wait(3.0)
    assert is_up.wait(4 * WITHIN_S)
    server.join()


def num_open(file: Path) -> int:
    """How often processes of this machine have a file open."""
    number = 0
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            number += os.readlink(entry) == str(file)
    return number
