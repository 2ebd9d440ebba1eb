"""Real processes: what starts, what is waited for, and that nobody is left behind."""

import asyncio
import functools
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web
from living import is_alive
from support_files import SUPPORT

from benchmarks.common.vllm_http import http_endpoint
from offbeat.engines.http_calls import Server, ServerRefused
from offbeat.engines.process import endpoints
from offbeat.engines.process import guard as engine_guard
from offbeat.engines.process.endpoints import port_endpoint
from offbeat.engines.process.server import EngineServer, ServerEnded, error_line
from offbeat.engines.sglang.api import INSIDE_FOLDER, LAUNCHER
from offbeat.errors import UserError

HERE = SUPPORT
WITHIN_S = 60.0


def in_a_loop(test):
    @functools.wraps(test)
    def run(*fixtures, **named):
        asyncio.run(test(*fixtures, **named))

    return run


def server_in(folder: Path, *words: str, start_within_s: float = WITHIN_S, new_endpoint=http_endpoint) -> EngineServer:
    def command(listen: Sequence[str]) -> list[str]:
        return [sys.executable, str(SUPPORT / "standin_server.py"), *listen, *words]

    log, lock = folder / "engine.log", folder / "engine.lock"
    return EngineServer(
        "stand-in", command, os.environ, new_endpoint=new_endpoint, log=log, lock=lock, start_within_s=start_within_s
    )


def processes(folder: Path) -> list[int]:
    """All that servers in this folder ever said they were, oldest first."""
    return [int(pid) for pid in re.findall(r"^(?:server|child) (\d+)", (folder / "engine.log").read_text(), re.M)]


def until(condition, what: str) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {WITHIN_S} s for {what}"
        time.sleep(0.05)


@in_a_loop
async def test_it_is_up_once_it_answers_and_stopping_ends_all_that_it_started(tmp_path):
    server = server_in(tmp_path, "--child")
    await server.start()
    answering = Server(server.url)
    await answering.text("/health")
    await answering.close()
    pids = processes(tmp_path)
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    await server.stop()
    assert not any(is_alive(pid) for pid in pids)
    await server.stop()  # there is nothing left to do


@in_a_loop
async def test_one_that_does_not_heed_is_killed(tmp_path, monkeypatch):
    guard = tmp_path / "guard.py"  # the same with less patience
    guard.write_text(Path(engine_guard.__file__).read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.2"))
    monkeypatch.setattr(engine_guard, "__file__", str(guard))
    server = server_in(tmp_path, "--child", "--stubborn")
    await server.start()
    await server.stop()
    assert server.status == -signal.SIGKILL
    assert not any(is_alive(pid) for pid in processes(tmp_path))


@in_a_loop
async def test_one_that_ends_while_it_starts_is_told_by_its_last_telling_line(tmp_path):
    words = "Traceback\nValueError: no egg\nbye"
    server = server_in(tmp_path, "--say", words, "--exit", "3")
    with pytest.raises(
        ServerEnded, match=r"^stand-in: its process ended with status 3: ValueError: no egg \(see .*"
    ) as e:
        await server.start()
    assert e.value.status == 3
    await server.stop()


@in_a_loop
async def test_only_what_the_last_start_printed_is_quoted(tmp_path):
    (tmp_path / "engine.log").write_text("ValueError: of long ago\n")
    server = server_in(tmp_path, "--say", "bye", "--exit", "1")
    with pytest.raises(ServerEnded, match="status 1: bye "):
        await server.start()
    await server.stop()


@in_a_loop
async def test_a_program_that_is_not_there_is_told_as_such(tmp_path):
    log, lock = tmp_path / "engine.log", tmp_path / "lock"
    server = EngineServer(
        "x", lambda listen: ["/no/such"], {}, new_endpoint=http_endpoint, log=log, lock=lock, start_within_s=WITHIN_S
    )
    with pytest.raises(ServerEnded, match=r"status 127: /no/such: No such file or directory"):
        await server.start()
    await server.stop()


@pytest.mark.full
@in_a_loop
async def test_one_that_never_answers_is_given_up_and_gone(tmp_path):
    server = server_in(tmp_path, "--deaf", "--child", start_within_s=3.0)
    with pytest.raises(ServerEnded, match=r"no answer within engine\.start_within_s = 3 s") as caught:
        await server.start()
    assert caught.value.status > 0
    assert not any(is_alive(pid) for pid in processes(tmp_path))


@in_a_loop
async def test_one_that_is_killed_later_is_noticed_and_what_it_started_is_killed_too(tmp_path):
    server = server_in(tmp_path, "--child")
    await server.start()
    listener, child = processes(tmp_path)
    assert server.status is None
    os.kill(listener, signal.SIGKILL)
    ended = await asyncio.wait_for(server.ended(), WITHIN_S)
    assert (ended.status, server.status) == (-9, -9)
    assert "was killed by signal 9" in str(ended)
    assert not is_alive(child)
    await server.stop()
    await server.start()  # and it can begin anew
    assert len(processes(tmp_path)) == 4
    await server.stop()


@pytest.mark.full
def test_killing_the_owner_ends_the_server_and_all_that_it_started(tmp_path):
    project = str(Path(__file__).parents[2])  # for the benchmarks' own server
    paths = os.pathsep.join([str(Path(__file__).parent), str(HERE), project, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "server_owner.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as owner:
        assert owner.stdout.readline().startswith(b"unix:/")
        pids = processes(tmp_path)
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        owner.kill()
    until(lambda: not any(is_alive(pid) for pid in pids), "the server and its child to end")


@in_a_loop
async def test_killing_the_guard_leaves_no_server_behind(tmp_path):
    server = server_in(tmp_path, "--child")
    await server.start()
    server._guard.kill()
    assert (await asyncio.wait_for(server.ended(), WITHIN_S)).status == -9
    until(lambda: not any(is_alive(pid) for pid in processes(tmp_path)), "the server and its child to end")
    await server.stop()


@pytest.mark.full
@in_a_loop
async def test_the_next_server_of_a_worker_waits_until_the_one_before_is_gone(tmp_path):
    first, second = server_in(tmp_path), server_in(tmp_path)
    await first.start()
    starting = asyncio.ensure_future(second.start())
    done, _ = await asyncio.wait({starting}, timeout=2.0)
    assert not done
    assert len(processes(tmp_path)) == 1, "two at a time would not fit into one GPU"
    await first.stop()
    await asyncio.wait_for(starting, WITHIN_S)
    await second.stop()


@in_a_loop
async def test_one_that_waits_for_its_turn_can_be_stopped(tmp_path):
    first, second = server_in(tmp_path), server_in(tmp_path)
    await first.start()
    starting = asyncio.ensure_future(second.start())
    await asyncio.wait({starting}, timeout=1.0)
    starting.cancel()
    await asyncio.wait({starting})
    await asyncio.wait_for(second.stop(), WITHIN_S)
    assert len(processes(tmp_path)) == 1
    await first.stop()


@in_a_loop
async def test_nobody_but_this_user_reaches_a_socket_and_nothing_of_it_is_left(tmp_path):
    server = server_in(tmp_path)
    await server.start()
    folder = Path(server.url.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((folder / "engine").stat().st_mode)
    await server.stop()
    assert not folder.exists()


@in_a_loop
async def test_a_server_at_a_port_has_a_key_that_no_command_line_shows(tmp_path):
    server = server_in(tmp_path, new_endpoint=port_endpoint)
    await server.start()
    try:
        (pid,) = processes(tmp_path)
        assert server.key
        assert server.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        stranger = Server(server.url)
        with pytest.raises(ServerRefused, match="401"):
            await stranger.get("/v1/models")
        await stranger.close()
        first = server.key
    finally:
        await server.stop()
    await server.start()
    await server.stop()
    assert server.key != first


@in_a_loop
async def test_a_stranger_who_took_the_port_is_not_mistaken_for_our_server(tmp_path, monkeypatch):
    """It says yes to everything, and echoes whatever it is sent."""

    async def agree(request: web.BaseRequest) -> web.Response:
        echoed = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return web.json_response({"data": [{"id": echoed}, {"id": "offbeat"}]})

    stranger = web.Server(agree)
    listener = await asyncio.get_running_loop().create_server(stranger, "127.0.0.1", 0)
    monkeypatch.setattr(endpoints, "_free_port", lambda: listener.sockets[0].getsockname()[1])
    try:
        server = server_in(tmp_path, "--deaf", new_endpoint=port_endpoint)
        with pytest.raises(ServerEnded, match=r"another process answers at http://127\.0\.0\.1:") as caught:
            await server.start()
        assert caught.value.status < 0, "it is worth another try, at another port"
        assert not any(is_alive(pid) for pid in processes(tmp_path))
    finally:
        listener.close()
        await stranger.shutdown(timeout=0.01)


def test_sglang_is_given_its_key_and_name_where_no_other_user_reads_them(tmp_path):
    """By a package that says what it was started with."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import os, sys\nprint(__name__, *sys.argv[1:], *(n for n in os.environ if n.startswith('OFFBEAT_SERVER')))\n"
    )
    path = os.pathsep.join([str(INSIDE_FOLDER), str(tmp_path)])
    secrets = {"OFFBEAT_SERVER_KEY": "k", "OFFBEAT_SERVER_NAME": "n", "PYTHONPATH": path}
    words = [sys.executable, "-m", LAUNCHER, "--port", "1"]
    said = subprocess.run(words, env={**os.environ, **secrets}, capture_output=True, text=True, check=True)
    assert said.stdout == "__main__ --port 1 --api-key k --served-model-name n\n"


@in_a_loop
async def test_a_path_too_long_for_a_socket_is_told_at_once(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(UserError, match=r"^TMPDIR = .*: too long for a socket in it; set it to a shorter path$"):
        await server_in(tmp_path).start()
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "no output"),
        ("a\nb\n\n", "b"),
        (
            "(EngineCore pid=7) ERROR 11-16 02:00:00 [core.py:9] ValueError: Free memory on cuda:0 is less\n"
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: Free memory on cuda:0 is less",
        ),
        ("usage: x\napi_server.py: error: unrecognized arguments: --foo\n", "api_server.py: error: unrecognized"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\nbye\n", "torch.OutOfMemoryError: CUDA out of memory."),
        ("RuntimeError: Engine core initialization failed. See root cause above.\nx", "RuntimeError: Engine core"),
    ],
)
def test_the_telling_line_is_the_last_that_says_what_went_wrong(text, told):
    assert error_line(text).startswith(told)
