"""How a role comes to a run: into a folder of its own, believing no more than it must."""

import asyncio
import errno
import stat
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker
from offbeat.config import from_dict, resolved
from offbeat.errors import OffbeatError, UserError
from offbeat.launch.joining import Invitation, joined, own_folder
from offbeat.launch.worker_role import Site, work
from offbeat.ledger.workers import Role
from offbeat.weights.version import Version


def told(**keys) -> dict:
    return resolved(from_dict({}, {"rollout.engine": "paced", **{k.replace("__", "."): v for k, v in keys.items()}}))


class Coordinator:
    """One that answers every call with the same record, whatever that is."""

    def __init__(self, answer: object):
        self.answer = answer

    async def __aenter__(self) -> str:
        async def handle(request: web.BaseRequest) -> web.Response:
            body = wire.encode(self.answer)
            headers = {wire.CONTENT_DIGEST: wire.content_digest(body)}
            return web.Response(body=body, content_type=wire.MSGPACK, headers=headers)

        self._server = web.Server(handle)
        self._listener = await asyncio.get_running_loop().create_server(self._server, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        await self._server.shutdown(timeout=0.01)


def welcome(config: dict, **changes) -> dict:
    given = {"worker": "w", "secret": "s" * 43, "role": "rollout", "run": "a"}
    return {**given, "config": config, **changes}


def invited(folder: Path, url: str, **more) -> Invitation:
    (folder / "token").write_text("t")
    return Invitation(url, Role.ROLLOUT, folder, "w", folder / "token", patience_s=5.0, **more)


def test_a_worker_starts_no_program_that_a_coordinator_names(tmp_path):
    """Its configuration names a script as the engine's Python, which would say that it was run."""
    script, was_run = tmp_path / "x.sh", tmp_path / "was_run"
    script.write_text(f"#!/bin/sh\ntouch {was_run}\n")
    script.chmod(0o755)
    config = told(rollout__engine="vllm", engine__python=str(script))

    async def run() -> None:
        async with Coordinator(welcome(config)) as url:
            await asyncio.wait_for(work(invited(tmp_path, url), [], Site()), 60)

    with pytest.raises(UserError, match=r"^engine\.python = .*comes from the coordinator.*--trust-coordinator$"):
        asyncio.run(run())
    assert not was_run.exists()


@pytest.mark.parametrize("field", ["run", "worker"])
@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", ".hidden", "", "a/b", "a\\b", "a\nb", "a\0", "x" * 300])
def test_a_name_that_leads_out_of_the_workers_folder_is_not_believed(tmp_path, field, name):
    async def run() -> None:
        async with Coordinator(welcome(told(), **{field: name})) as url, joined(invited(tmp_path, url), []):
            raise AssertionError("it joined")

    with pytest.raises(OffbeatError, match=rf"the coordinator's answer cannot be read .*\$\.{field}"):
        asyncio.run(run())
    kept = {file.name for file in tmp_path.iterdir()}
    assert kept <= {"token", "rollout-joining.key"}, "nothing was kept of it"


@pytest.mark.parametrize("name", ["a", "20260101-120000", "My run 7", "run@2"])
def test_names_that_folders_have_are_names_of_runs(name):
    answer = msgspec.msgpack.encode({"run": name, "config": {}})
    assert wire.decode(answer, wire.RunInfo).run == name


@pytest.mark.parametrize("name", ["../x", "/x", ".x", "", "a/b", "a\0"])
def test_a_file_of_weights_has_a_name_within_its_folder(tmp_path, name):
    files = {"files": [{"name": name, "num_bytes": 1, "blake3": "0" * 64}]}

    async def run() -> None:
        async with Coordinator(files) as url:
            connection = Connection(url, "s", patience_s=5.0)
            try:
                version = Version(1, 1, 0, "d", Path("/theirs"))
                await RemoteWorker(connection, tmp_path).fetch(version)
            finally:
                await connection.close()

    with pytest.raises(OffbeatError, match="the coordinator's answer cannot be read"):
        asyncio.run(run())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_workers_folder_is_private_and_one_that_was_there_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with own_folder(None, "w", "http://host:1") as (path, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with own_folder(str(tmp_path / "new"), None, "http://host:1") as (path, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (tmp_path / "mine").mkdir(mode=0o755)
    with own_folder(str(tmp_path / "mine"), None, "http://host:1") as (path, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_folder_that_cannot_be_locked_is_told_and_not_taken_for_one_in_use(tmp_path, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuse)
    told = r"its file system cannot lock files \(No locks available\)"
    with pytest.raises(UserError, match=told), own_folder(None, "w", "http://host:1"):
        pass


def test_a_worker_is_named_as_it_is_told_or_else_by_its_folder(tmp_path):
    for name, expected in (("w", "w"), (None, "mine")):
        with own_folder(str(tmp_path / "mine"), name, "http://host:1") as (_, found):
            assert found == expected


def test_what_a_worker_writes_is_private_too(tmp_path):
    async def run() -> None:
        async with Coordinator(welcome(told())) as url, joined(invited(tmp_path, url), []):
            (tmp_path / "spooled").touch()

    asyncio.run(run())
    private = {"spooled", "rollout-config.json", "rollout-credentials.json"}
    assert {file.name for file in tmp_path.iterdir() if not file.stat().st_mode & 0o077} >= private
