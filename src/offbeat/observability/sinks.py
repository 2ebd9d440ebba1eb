"""Sends metrics to the sinks in `log.sinks` (TensorBoard, Weights & Biases or trackio), and to callbacks and loggers
that were given from Python.

A row is written to the run's own files before it is sent. If a sink raises an error, one line names the sink, it gets
no more rows, and the run goes on. A sink's package is imported only if the sink is used. If the package is missing, an
error with the command that installs it is raised before any work begins.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

from offbeat.errors import UserError
from offbeat.locate import is_async, one_line
from offbeat.spelling import a_kind

log = logging.getLogger(__name__)


class Sink(Protocol):
    def log(self, row: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Verdict(Enum):
    """Values that a callback may return to direct the run."""

    STOP = "stop"


STOP: Final = Verdict.STOP
"""Returned by a callback to end the run after this step, with a checkpoint."""


def send(row: Mapping[str, Any], sinks: list[Sink], alarm: Callable[[str], None]) -> None:
    """Sends a row to all sinks. A sink that raises an error is removed from the list, and `alarm` is called with a text
    about it."""
    for sink in list(sinks):
        try:
            sink.log(row)
        except Exception as error:  # a user's code may raise anything, and the run is worth more
            sinks.remove(sink)
            name = getattr(sink, "name", f"log.sinks: {type(sink).__name__}")
            log.warning("%s failed", name, exc_info=True)
            alarm(f"{name} failed and gets no more metrics: {one_line(error)}")


class GivenSink:
    """A callback (a function) or a logger (an object with `log` and perhaps `close`) that was given from Python. It
    gets a copy of every row of a step or an evaluation. If it returns `STOP`, `stop` is called with its name."""

    def __init__(self, given: Any, stop: Callable[[str], object], *, is_logger: bool):
        kind = "logger" if is_logger else "callback"
        shown = getattr(given, "__name__", type(given).__name__)
        self.name = f"{kind} {shown}"
        function = getattr(given, "log", None) if is_logger else given
        if not callable(function):
            wanted = "an object with a method log(row)" if is_logger else "a function that takes a row"
            raise UserError(f"{kind}s: {given!r:.60} is {a_kind(given)}; give {wanted}")
        if is_async(function):
            raise UserError(f"{self.name}: is async, and nothing awaits it; give a plain function")
        self._function, self._stop = function, stop
        self._close = getattr(given, "close", None) if is_logger else None

    def log(self, row: Mapping[str, Any]) -> None:
        if self._function(dict(row)) is STOP:
            self._stop(self.name)

    def close(self) -> None:
        try:
            if callable(self._close):
                self._close()
        except Exception as error:
            log.warning("%s failed", self.name, exc_info=True)
            print(f"warning: {self.name}: close failed: {one_line(error)}", file=sys.stderr, flush=True)


def check_sinks(names: Sequence[str]) -> None:
    """Raises `UserError` if a sink's package is not installed."""
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
