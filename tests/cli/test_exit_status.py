"""Exit statuses of roles that are stopped, as shells and schedulers know them."""

import pytest
import torch

from offbeat.cli.main import STOPPED, main
from offbeat.cli.train import status_of
from offbeat.cli.trainer import exit_status
from offbeat.errors import RunStopped


@pytest.mark.parametrize(
    ("stopped_by", "status", "told"),
    [
        (None, 0, ""),
        ("run.max_hours = 1", 0, ""),
        ("SIGTERM", 143, "offbeat: worker stopped by SIGTERM\n"),
        ("SIGINT", 130, "offbeat: worker stopped by SIGINT\n"),
    ],
)
def test_a_signal_is_told_by_its_number_and_everything_else_is_a_success(stopped_by, status, told, capsys):
    assert exit_status("worker", stopped_by) == status
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("steps", "when"), [(0, "before its first step was trained"), (3, "after step 3, with a checkpoint")]
)
def test_a_stopped_run_says_how_far_it_came_and_how_to_go_on(steps, when, capsys):
    assert status_of({"stopped_by": "SIGINT", "steps": steps, "run": "runs/a"}, "serve") == 130
    assert capsys.readouterr().err == (
        f"offbeat: stopped by SIGINT {when}; continue with offbeat serve --resume runs/a\n"
    )


@pytest.mark.parametrize(
    ("role", "module"),
    [(["serve"], "coordinator_role.serve"), (["trainer", "--join", "http://127.0.0.1:1"], "trainer_role.train")],
)
def test_a_run_that_cannot_go_on_ends_its_roles_with_a_status_that_forbids_a_restart(
    role, module, monkeypatch, tmp_path, capsys
):
    async def ends(*_: object, **__: object) -> None:
        raise RunStopped("most rewards failed")

    monkeypatch.setattr(f"offbeat.launch.{module}", ends)
    monkeypatch.chdir(tmp_path)
    assert main(role) == STOPPED == 3
    assert capsys.readouterr().err == "offbeat: most rewards failed\n"
    if role == ["serve"]:
        (events,) = tmp_path.glob("runs/*/events.jsonl")
        assert '"error": "most rewards failed"' in events.read_text()


def test_a_gpu_whose_memory_is_full_is_one_line_with_remedies(monkeypatch, capsys):
    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 MiB"
        )

    monkeypatch.setattr("offbeat.cli.main._run", fill)
    assert main(["train"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("offbeat: CUDA out of memory. Tried to allocate 2.00 MiB; ")
    assert "nvidia-smi" in told
    assert len(told.splitlines()) == 1
