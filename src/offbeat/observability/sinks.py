"""Sends metrics to the sinks in `log.sinks`: TensorBoard, Weights & Biases or trackio.

A row is written to the run's own files before it is sent. A sink's package is imported only if the sink is used; if it
is missing, an error with the command that installs it is raised before any work begins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import UserError


class Sink(Protocol):
    def log(self, row: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def check_sinks(names: Sequence[str]) -> None:
    """Raises if a sink's package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f'log.sinks = "{name}": its package is not installed; run pip install "offbeat[{name}]"')


def open_sinks(names: Sequence[str], folder: Path, project: str, config: Mapping[str, Any]) -> list[Sink]:
    """Opens the named sinks; in each, the run is named after `folder`."""
    check_sinks(names)
    return [MAKERS[name](folder, project, config) for name in dict.fromkeys(names)]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row that can be plotted, without `step` and `attempt`."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ("step", "attempt")
    }


class TensorBoard:
    """Writes event files to the run's folder; view them with `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        self.writer = importlib.import_module("tensorboard.summary").Writer(str(folder / "tensorboard"))

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Sends metrics to Weights & Biases. The run's id is its name, so that a resumed run continues the same record."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        name = folder.name
        self.run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder), config=dict(config))
        self.run.define_metric("*", step_metric="step")  # unlike wandb's step, ours may decrease on a resume

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log({**numbers(row), "step": row["step"]})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """Stores metrics locally with trackio; view them with `trackio show --project PROJECT`."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        trackio = importlib.import_module("trackio")
        with redirect_stdout(sys.stderr):  # trackio prints a long greeting
            self.run = trackio.init(project=project, name=folder.name, resume="allow", config=dict(config), embed=False)

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        self.run.finish()


MAKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
