"""The page about planning shows the files and the answer as they are."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import torch
from doc_reader import ROOT, Reader, blocks, commands
from openai_server import PacedServer, serving

from offbeat.planner.inputs.inventory import load_inventory
from offbeat.planner.inputs.workload_file import load_workload
from offbeat.planner.report.frontier import homogeneous, mixed, split_by_class

PAGE = ROOT / "docs" / "planning.md"
FILES = ("cluster_hex_56.toml", "workload_hex_7b.toml")
EXAMPLES = ROOT / "examples" / "planning"
MEASUREMENTS = 3
"""On a machine that is busy for a moment, a measurement may be one that `offbeat calibrate` rightly refuses."""


@pytest.mark.parametrize("index", range(2), ids=FILES)
def test_a_file_on_the_page_is_the_example(index):
    example = (EXAMPLES / FILES[index]).read_text()
    assert example.rstrip().endswith(blocks(PAGE, "TOML")[index].rstrip())


def test_the_first_command_gives_the_shown_sentence(reader: Reader):
    (shown,) = blocks(PAGE, "")
    _, *words = shlex.split(commands(PAGE)[0])
    said = reader.succeed(*words)
    assert said.splitlines()[0] == shown.splitlines()[0]
    assert [line.split(":")[0] for line in said.splitlines()] == [line.split(":")[0] for line in shown.splitlines()]


@pytest.mark.full
def test_the_commands_that_measure_fit_and_plan_work_one_after_the_other(reader: Reader):
    measure, fit, plan = (
        words for line in commands(PAGE) if {"measurements.jsonl", "constants.json"} & set(words := shlex.split(line))
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # then only this thread's own time is measured, whatever else the machine does
    try:
        for _ in range(MEASUREMENTS):
            (reader.folder / "measurements.jsonl").unlink(missing_ok=True)
            assert "measurements.jsonl: " in reader.succeed(*measure[1:])
            if "memory's bandwidth" not in reader.offbeat(*fit[1:]).err:
                break
    finally:
        torch.set_num_threads(num_threads)
    fitted = reader.succeed(*fit[1:])
    assert all(f"  {word}  " in fitted for word in ("fitted", "held out", "default"))
    assert reader.succeed(*plan[1:]).splitlines()[0] == blocks(PAGE, "")[0].splitlines()[0]


def test_a_running_server_is_measured_by_the_command_on_the_page(reader: Reader):
    (swept,) = (words for line in commands(PAGE) if "--engine" in (words := shlex.split(line)))
    with serving(PacedServer(lambda rows, context: 0.001 * (1 + rows))) as url:
        words = [url if word.startswith("http") else word for word in swept[1:]]
        assert "fit them with" in reader.succeed(*words, "--rows", "1,2,4", "--contexts", "64")
    assert (reader.folder / "swept.jsonl").exists()


@pytest.mark.full
def test_the_numbers_beside_the_picture_are_those_of_the_plans():
    inventory = load_inventory(EXAMPLES / FILES[0])
    workload = replace(load_workload(EXAMPLES / FILES[1]), any_trainer=False)  # as `offbeat plan` does
    split, (best, *_) = split_by_class(inventory, workload), mixed(inventory, workload)
    page = " ".join(PAGE.read_text().split())
    assert f"makes {best.tokens_per_s:,.0f} tokens/s for {best.price_per_h:.2f} $/h" in page
    assert split is not None
    assert f"the split by class makes {split.tokens_per_s:,.0f} for {split.price_per_h:.2f} $/h" in page
    fastest = [points[0] for points in homogeneous(inventory, workload).values()]
    assert max(point.tokens_per_s for point in fastest) <= best.tokens_per_s
    assert min(point.price_per_h for point in fastest) >= 118
    assert (ROOT / "docs" / "planning-frontier.png").read_bytes().startswith(b"\x89PNG")
