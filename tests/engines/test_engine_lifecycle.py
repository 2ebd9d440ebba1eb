"""What a worker does about its engine's process: a real one that only answers that it is up, and so is no vLLM."""

import asyncio
import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest
from test_engine_server import SUPPORT, is_alive, processes, until

from offbeat.config import from_dict
from offbeat.engines.process import lifecycle
from offbeat.engines.process.lifecycle import ServerEngines
from offbeat.engines.protocol import EngineDied
from offbeat.errors import UserError

NO_VLLM = "failed at 'facts': it is no vLLM"
NO_VLLM_BEHIND_HTTP = "/version: the server answered with status 404"


def stand_in_for_python(folder: Path) -> str:
    """An interpreter that has a vllm: it starts our stand-in, whatever it is asked to run."""
    file = folder / "python"
    stand_in = shlex.join([sys.executable, str(SUPPORT / "standin_server.py")])
    found = """{"has": true, "gpus": 0}"""
    file.write_text(f"""#!/bin/sh\nif [ "$1" = -c ]; then echo '{found}'; exit; fi\nshift 2\nexec {stand_in} "$@"\n""")
    file.chmod(0o755)
    return str(file)


def engines_in(folder: Path, *arguments: str, **keys) -> ServerEngines:
    settings = {"python": stand_in_for_python(folder), "arguments": list(arguments), "start_within_s": 60.0, **keys}
    return ServerEngines(from_dict({"rollout": {"engine": "vllm"}, "engine": settings}), "w", folder)


def opened(engines: ServerEngines) -> str:
    """Why no engine came of a server that only answers /health."""

    async def run() -> str:
        try:
            with pytest.raises(UserError) as caught:
                await asyncio.wait_for(engines.open(), 100)
        finally:
            await engines.close()
        return str(caught.value)

    return asyncio.run(run())


def test_a_server_is_started_asked_what_it_is_and_ended(tmp_path, capsys):
    assert NO_VLLM in opened(engines_in(tmp_path))
    (pid,) = processes(tmp_path)
    assert not is_alive(pid)
    starting, up = capsys.readouterr().out.splitlines()
    assert starting == f"worker w: engine vllm: starting; its output is in {tmp_path / 'engine.log'}"
    assert up.startswith("worker w: engine unix:/")


def test_what_it_prints_goes_where_it_is_told_to(tmp_path):
    log = tmp_path / "logs" / "w-engine.log"
    engines = engines_in(tmp_path)
    opened(ServerEngines(engines.config, "w", tmp_path, log))
    assert log.read_text().startswith("server ")


def test_a_first_start_that_fails_is_for_the_user_to_mend(tmp_path):
    told = opened(engines_in(tmp_path, "--say", "ValueError: no egg", "--exit", "1"))
    how = f"vllm: its process ended with status 1: ValueError: no egg (see {tmp_path / 'engine.log'})"
    assert told == f'{how}; to do without vllm, set rollout.engine = "embedded"'
    assert len(processes(tmp_path)) == 1


def test_one_that_is_killed_while_it_starts_is_started_again(tmp_path, capsys):
    assert NO_VLLM in opened(engines_in(tmp_path, "--killed-at-first", str(tmp_path / "was_here")))
    assert len(processes(tmp_path)) == 2
    assert "worker w: engine vllm: dead: vllm: its process was killed by signal 9: server" in capsys.readouterr().out


def test_one_that_dies_again_and_again_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat.rules.restarts.FIRST_PAUSE_S", 0.01)

    async def run() -> None:
        engines = engines_in(tmp_path)
        try:
            for _ in range(4):
                with pytest.raises(UserError, match=NO_VLLM):
                    await engines.open()
                await engines.dispose(EngineDied("it hangs"))
                assert not any(is_alive(pid) for pid in processes(tmp_path))
            with pytest.raises(UserError, match=NO_VLLM):
                await engines.open()
            with pytest.raises(UserError, match=r"^the engine died too often and is not restarted: it hangs; mend"):
                await engines.dispose(EngineDied("it hangs"))
        finally:
            await engines.close()

    asyncio.run(run())


def test_the_end_of_its_process_is_known_at_once(tmp_path):
    async def run() -> None:
        engines = engines_in(tmp_path)
        try:
            with pytest.raises(UserError, match=NO_VLLM):
                await engines.open()
            gone = asyncio.ensure_future(engines.wait_exited())
            assert not (await asyncio.wait({gone}, timeout=0.5))[0]
            (pid,) = processes(tmp_path)
            os.kill(pid, signal.SIGKILL)
            died = await asyncio.wait_for(gone, 60)
            assert "was killed by signal 9" in str(died)
            await engines.dispose(died)
            with pytest.raises(UserError, match=NO_VLLM):
                await engines.open()
            assert len(processes(tmp_path)) == 2
        finally:
            await engines.close()

    asyncio.run(run())


@pytest.mark.full
def test_a_server_of_someone_else_is_waited_for_told_of_once_and_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lifecycle, "CHECK_EVERY_S", 0.05)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "engine.log"

    async def run() -> None:
        engines = engines_in(tmp_path, url=url)
        opening = asyncio.ensure_future(engines.open())
        assert not (await asyncio.wait({opening}, timeout=1.0))[0]
        with log.open("wb") as output:
            words = (sys.executable, str(SUPPORT / "standin_server.py"), "--port", str(port))
            server = await asyncio.create_subprocess_exec(*words, stdout=output)
        try:
            with pytest.raises(UserError, match=NO_VLLM_BEHIND_HTTP):
                await asyncio.wait_for(opening, 60)
            await engines.dispose(EngineDied("it hangs"))
            await engines.close()
            assert server.returncode is None
        finally:
            server.kill()
            await server.wait()

    asyncio.run(run())
    waiting, dead = capsys.readouterr().out.splitlines()
    assert waiting.startswith(f"worker w: engine {url}: waiting for the server to answer: {url}/health: ")
    assert dead == f"worker w: engine {url}: dead: it hangs"
    until(lambda: not any(is_alive(pid) for pid in processes(tmp_path)), "the stand-in to end")
