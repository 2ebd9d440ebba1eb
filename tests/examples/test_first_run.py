"""The notebook runs from its first cell to its last, in a real Jupyter kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import offbeat
from offbeat.observability.metric_files import read_events

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"
WITHIN_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def cells(folder: Path) -> list[Any]:
    """The notebook's code cells, executed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=WITHIN_S, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], text: str, kind: str) -> str:
    """What the cell that contains `text` shows as its result, as MIME type `kind`."""
    (cell,) = (cell for cell in cells if text in cell.source)
    (result,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return result.data[kind]


@pytest.mark.full
def test_a_notebook_trains_plots_stops_resumes_evaluates_and_exports(cells, folder):
    assert re.search(r"training, step \d+ of 100", shown(cells, "offbeat.train(", "text/html"))
    assert "part/right" in shown(cells, "run.frame()", "text/html")
    (run,) = (offbeat.Run(path) for path in (folder / "runs").iterdir())
    stopped = int(re.search(r"stopped by stop\(\), step (\d+) of 100", shown(cells, "run.stop()", "text/html"))[1])
    assert 10 <= stopped < 100
    assert len(shown(cells, "run.plot()", "image/png")) > 10_000
    assert shown(cells, "run.trajectories(", "text/html").count("<tr") == 1 + 6
    assert f"training, step {stopped} of {stopped + 10}" in shown(cells, "run.resume(", "text/html")
    assert f"finished, step {stopped + 10} of {stopped + 10}" in shown(cells, "run.wait()", "text/html")
    assert "'eval_prompts': 50" in shown(cells, "run.evaluate(", "text/plain")
    assert re.match(r"'17\+25=", shown(cells, "run.export(", "text/plain"))
    assert (folder / "my-model" / "model.safetensors").is_file()
    assert run.summary["steps"] == stopped + 10
    kinds = [event["event"] for event in read_events(run.path / "events.jsonl")]
    assert kinds.count("end") == 2
    assert "error" not in kinds


@pytest.mark.full
def test_a_notebook_shows_steps_while_a_cell_waits(cells):
    (waiting,) = (cell for cell in cells if "run.wait()" in cell.source)
    tables = [output.data["text/html"] for output in waiting.outputs if output.output_type == "display_data"]
    assert any("held-out" in table for table in tables)


def test_the_committed_notebook_has_no_outputs():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs, cell.execution_count) == ([], None)
