"""Where a coordinator in a process of its own listens, and how it comes to its end."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest

from offbeat.config import from_dict, load
from offbeat.coordinator.api.server import Address
from offbeat.launch import wiring
from offbeat.launch.coordinator_role import ADDRESS, NUM_THREADS, _announce, _until_over, address_of, serve
from offbeat.launch.coordinator_runtime import open_coordinator, prepare
from offbeat.launch.run_folder import RunFolder
from offbeat.launch.stopping import Stopping
from offbeat.weights.version import Version

SOON_S = 60.0


def test_a_run_ends_without_its_last_evaluation_when_nobody_is_left_to_make_it(tmp_path, capsys):
    config = from_dict(
        {
            "run": {"dir": str(tmp_path), "name": "a", "steps": 1},
            "eval": {"every": 1, "prompts": 2},
            "rollout": {"deadline_s": 0.1},
            "reward": {"processes": 0},
            "log": {"console": "quiet"},
        }
    )

    async def scenario(folder: RunFolder) -> bool:
        mixture = wiring.make_mixture(config, None)
        pool = await wiring.open_pool(config, mixture, folder.logs / "rewards.log")
        try:
            async with open_coordinator(
                folder, mixture, pool, prepare(config, mixture, wiring.load_tokens(config))
            ) as runtime:
                await runtime.coordinator.start(keep_leases=True)
                await runtime.coordinator.publish(Version(0, 0, None, "digest", tmp_path))
                await runtime.coordinator.checkpointed(config.run.steps)
                return await asyncio.wait_for(_until_over(folder, runtime, Stopping()), SOON_S)
        finally:
            await pool.close()

    with RunFolder.create(config) as folder:
        assert asyncio.run(scenario(folder)), "the last step is trained and saved"
        events = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    left_out = [event for event in events if event["event"] == "evaluation_left_out"]
    assert [event["step"] for event in left_out] == [1]
    assert "the evaluation of step 1 is left out" in "".join(capsys.readouterr())


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    told = {"url": "http://127.0.0.1:8700", "near_url": "http://127.0.0.1:8701", "run": str(folder)}
    (folder / ADDRESS).write_text(json.dumps(told))
    return folder


def port_of(folder, *overrides):
    return address_of(load(None, list(overrides)), folder).port


def test_a_run_that_goes_on_or_was_moved_listens_where_its_workers_look_for_it(run):
    assert port_of(run) == 8700
    assert port_of(run.rename(run.with_name("b"))) == 8700
    assert port_of(run.with_name("b"), "--serve.port=9000") == 9000


def test_a_copy_leaves_its_address_to_the_run_that_it_was_copied_from(run):
    assert port_of(shutil.copytree(run, run.with_name("b"))) == 0


@pytest.mark.parametrize("content", ["", "[]", "3", '{"url": 7}', '{"run": []}', '{"url": "http://x:y"}'])
def test_an_address_that_cannot_be_read_is_any(run, content):
    (run / ADDRESS).write_text(content)
    assert port_of(run) == 0


def test_a_coordinator_has_the_same_few_threads_on_any_machine(monkeypatch):
    """Each keeps the memory that a body once needed."""

    def look(*_: object) -> None:
        raise LookupError(asyncio.get_running_loop()._default_executor._max_workers)

    monkeypatch.setattr(wiring, "make_mixture", look)
    with pytest.raises(LookupError, match=f"^{NUM_THREADS}$"):
        asyncio.run(serve(SimpleNamespace(config=None, path=None)))


@pytest.mark.parametrize("processes", [0, 1])
def test_judges_are_asked_for_only_where_the_run_computes_no_rewards_itself(processes, tmp_path):
    notes: list[str] = []
    runtime = SimpleNamespace(console=SimpleNamespace(note=notes.append))
    config = from_dict({"run": {"dir": str(tmp_path)}, "reward": {"processes": processes}})
    with RunFolder.create(config) as folder:
        server = SimpleNamespace(url="http://10.0.0.5:8700", address=Address(host="10.0.0.5", is_plain=True))
        _announce(folder, server, "http://127.0.0.1:8701", runtime, needs_trainer=False)
        assert json.loads((folder.path / ADDRESS).read_text())["url"] == "http://10.0.0.5:8700"
    assert any("--role reward" in note for note in notes) == (processes == 0)
    assert not any("need no token" in note for note in notes)
    with RunFolder.open(folder.path) as resumed:
        _announce(resumed, server, "http://127.0.0.1:8701", runtime, needs_trainer=False)
    assert "workers that joined before need no token" in notes[-1]


def test_a_coordinator_says_how_its_trainer_joins_and_after_a_resume_that_the_same_one_has_to(tmp_path):
    notes: list[str] = []
    runtime = SimpleNamespace(console=SimpleNamespace(note=notes.append))
    server = SimpleNamespace(url="http://127.0.0.1:8700", address=Address())
    with RunFolder.create(from_dict({"run": {"dir": str(tmp_path)}})) as folder:
        _announce(folder, server, server.url, runtime, needs_trainer=True)
        assert any("offbeat trainer --join http://127.0.0.1:8700" in note for note in notes)
        folder.event("checkpoint", step=28, version=28)
    notes.clear()
    with RunFolder.open(folder.path) as resumed:
        _announce(resumed, server, server.url, runtime, needs_trainer=True)
    assert not any("offbeat trainer" in note for note in notes)
    assert "start it again with the same --dir" in notes[-1]
