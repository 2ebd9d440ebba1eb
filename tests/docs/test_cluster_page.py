"""The page about clusters is true: its lines are typed in terminals of one machine, and the run ends well."""

from __future__ import annotations

import os
import shutil

import pytest
from doc_reader import ROOT, blocks
from terminals import SMALL, Terminals

pytestmark = pytest.mark.full
PAGE = ROOT / "docs" / "cluster.md"
LINES = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
HERE, TRAIN, NODE, TOKEN, SLURM = LINES
FEW = f"{SMALL} --run.steps=4 --eval.every=0"


def test_a_run_is_placed_on_this_machine_and_said_in_two_lines(terminals: Terminals):
    window = terminals.start(HERE, FEW)
    assert terminals.wait(window) == 0, terminals.screen()
    lines = terminals.screen().splitlines()
    assert [line.split()[0] for line in lines if "(this machine)" in line] == ["trains", "rolls"]


def test_a_node_joins_by_the_file_that_the_run_writes(terminals: Terminals):
    run = terminals.start(TRAIN, FEW)
    terminals.until("the run can be joined", (terminals.folder / "join.json").is_file)
    assert len(terminals.say(TOKEN).strip()) > 30
    node = terminals.start(NODE)
    assert [terminals.wait(window) for window in (run, node)] == [0, 0], terminals.screen()
    assert "gpu-2" in terminals.say("offbeat worker list runs/cluster")
    assert "everything holds" in terminals.say("offbeat ledger verify runs/cluster")


def test_the_dry_run_for_slurm_prints_places_and_job(terminals: Terminals):
    if shutil.which("sinfo") is None or "SLURM_CONF" not in os.environ:
        pytest.skip("no Slurm is running: SLURM_CONF names its configuration")
    said = terminals.say(SLURM)
    assert said.startswith("# trains       1 node of ")
    assert "#SBATCH --no-kill --" in said
