"""How a coordinator in a process of its own comes to its end."""

import asyncio
import json

from offbeat.config import from_dict
from offbeat.launch import sources
from offbeat.launch.folder import RunFolder
from offbeat.launch.office import open_office, prepare
from offbeat.launch.serve import _until_over
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
        mixture = sources.make_mixture(config, None)
        pool = await sources.open_pool(config, mixture, folder.logs / "rewards.log")
        try:
            async with open_office(folder, mixture, pool, prepare(config, mixture)) as office:
                await office.coordinator.start(keep_leases=True)
                await office.coordinator.publish(Version(0, 0, None, "digest", tmp_path))
                await office.coordinator.checkpointed(config.run.steps)
                return await asyncio.wait_for(_until_over(folder, office, Stopping(lambda why: None)), SOON_S)
        finally:
            await pool.close()

    with RunFolder.create(config) as folder:
        assert asyncio.run(scenario(folder)), "the last step is trained and saved"
        events = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    left_out = [event for event in events if event["event"] == "evaluation_left_out"]
    assert [event["step"] for event in left_out] == [1]
    assert "the evaluation of step 1 is left out" in "".join(capsys.readouterr())
