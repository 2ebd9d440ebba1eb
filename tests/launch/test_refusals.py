"""What is refused only once torch is here, in this process to be quick; `cli/test_bad_input.py` is the real command."""

import shutil
from pathlib import Path

import pytest

from offbeat.config import from_dict
from offbeat.errors import OffbeatError, UserError
from offbeat.launch import wiring
from offbeat.model.loading import TINY_FOLDER
from offbeat.tools.evaluate import evaluate


def test_a_model_of_no_known_architecture_is_refused_by_name(tmp_path):
    folder = tmp_path / "shapeless"
    shutil.copytree(TINY_FOLDER, folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^model\.path = '.*shapeless': transformers cannot read its config\.json: .*"):
        wiring.load_tokens(from_dict({"model": {"path": str(folder)}}))


def test_an_evaluation_whose_rewards_fail_too_often_gives_no_figures_and_keeps_its_log():
    calls = []

    def judge(response):
        calls.append(response)
        if len(calls) in (3, 4):  # the first two are the trial
            raise ValueError("no egg")
        return 1.0

    config = from_dict({"eval": {"prompts": 6}, "run": {"threads": 1}, "rollout": {"max_new_tokens": 4}})
    told = r"^2 of the latest 6 rewards failed .*raised: ValueError: no egg .*; fix the reward \(see (.*)\)$"
    with pytest.raises(OffbeatError, match=told) as caught:
        evaluate(config, wiring.make_mixture(config, judge))
    log = Path(str(caught.value).rpartition("see ")[2].rstrip(")"))
    assert "Traceback" in log.read_text()
    log.unlink()
