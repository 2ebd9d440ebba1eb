"""A judge without a run, and runs without a judge: each is refused in one line, before anything is written."""

import pytest

from offbeat.cli.main import main


@pytest.mark.parametrize(
    "words, why",
    [
        (["train"], "judges cannot join a run of one process; set rollout.workers, or use offbeat serve"),
        (["eval", "offbeat-tiny"], "judges cannot join an evaluation; add --reward.processes 1"),
    ],
)
def test_where_nobody_can_join_rewards_need_processes(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--reward.processes=0"]) == 2
    assert capsys.readouterr().err == f"offbeat: reward.processes = 0: must be 1 or more here, because {why}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_judge_without_a_token_is_told_where_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OFFBEAT_TOKEN", raising=False)
    words = ["--role", "reward", "--join", "http://127.0.0.1:9", "--dir", str(tmp_path)]
    assert main(["worker", *words]) == 2
    assert "OFFBEAT_TOKEN is not set; set it to a join token" in capsys.readouterr().err


def test_a_role_that_a_worker_cannot_have_is_refused(capsys):
    assert main(["worker", "--role", "trainer", "--join", "http://127.0.0.1:9"]) == 2
    assert "--role" in capsys.readouterr().err
