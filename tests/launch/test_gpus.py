"""GPUs are found without torch and divided among workers, each with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import UserError
from offbeat.launch.gpus import chosen_gpus, shares, visible_gpus

NOWHERE = Path("/nowhere")


@pytest.mark.parametrize("given, found", [("0,1", ["0", "1"]), ("GPU-a, 3", ["GPU-a", "3"]), ("", []), ("-1", [])])
def test_the_gpus_of_the_scheduler_count(given, found):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given}, NOWHERE, NOWHERE) == found


def test_without_a_scheduler_the_driver_is_asked(tmp_path: Path):
    for name in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path, NOWHERE) == ["0", "1"]
    assert visible_gpus({}, NOWHERE, NOWHERE) == []


def test_amd_counts_gpus_and_not_cpus(tmp_path: Path):
    for node, identifier in (("0", "0"), ("1", "4711"), ("2", "4712")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "gpu_id").write_text(identifier + "\n")
    assert visible_gpus({}, NOWHERE, tmp_path) == ["0", "1"]


def test_each_worker_gets_neighbouring_gpus_of_its_own():
    assert shares(["0", "1", "2", "3"], 2, 2) == [["0", "1"], ["2", "3"]]
    assert shares(["0", "1", "2"], 3, 1) == [["0"], ["1"], ["2"]]


def test_more_workers_than_gpus_share_them_in_turn():
    assert shares(["0", "1"], 3, 1) == [["0"], ["1"], ["0"]]
    assert shares([], 2, 1) == [[], []]


@pytest.mark.parametrize(
    "words, why", [("0,7", "7 is not a GPU"), ("0,0", "names no GPU, or one twice"), (",", "no GPU")]
)
def test_devices_that_are_not_there_are_refused(words, why, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert chosen_gpus("1") == ["1"]
    with pytest.raises(UserError, match=why):
        chosen_gpus(words)
