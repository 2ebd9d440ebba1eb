"""Parts of a run that a Python program gives besides the configuration: functions, rows, callbacks, a way to stop it.

A coordinator in another process gets the functions through a pickle file. Only this user can read the file, and it is
deleted when the run ends. So nothing that a run keeps is ever unpickled.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle

from offbeat.data.mixture import Functions, RewardSpec
from offbeat.errors import UserError
from offbeat.launch.stopping import StopButton
from offbeat.locate import one_line
from offbeat.observability.sinks import Sink

if TYPE_CHECKING:
    from offbeat.observability.console import Console

VARIABLE = "OFFBEAT_GIVEN"
"""Environment variable with the path of the file from which a coordinator reads the functions."""


@dataclass(frozen=True)
class Given:
    reward: RewardSpec | None = None
    """Reward of all tasks, in place of their own."""
    functions: Functions = field(default_factory=dict)
    """Functions that make prompts, by the `task.path` that names each in the configuration."""
    rows: Path | None = None
    """Folder with the rows of tasks, one file for each; the files are copied into the run's folder. None: no rows."""
    sinks: Sequence[Sink] = ()
    stop: StopButton = field(default_factory=StopButton)
    on_folder: Callable[[Path], object] = lambda _: None
    """Called with the run's folder as soon as there is one."""
    on_console: Callable[[Console], object] = lambda _: None
    """Called with the run's console, if it is opened in this process."""
    from_python: bool = False
    """Whether a Python program started the run, not the command line."""


@contextmanager
def handed_over(given: Given) -> Iterator[dict[str, str]]:
    """Writes the reward and the functions of `given` to a file that exists within the block. Yields the environment
    variables by which a coordinator finds this file; yields an empty dict for a run from the command line."""
    if not given.from_python:
        yield {}
        return
    descriptor, name = tempfile.mkstemp(prefix="offbeat-given-")
    try:
        with open(descriptor, "wb") as file:
            try:
                cloudpickle.dump((given.reward, dict(given.functions)), file)
            except Exception as error:
                raise UserError(
                    f"a function given from Python cannot be sent to the coordinator's process ({one_line(error)}); "
                    'put it into a file and give it as "file.py:function"'
                ) from error
        path = os.pathsep.join(entry for entry in sys.path if entry)
        yield {VARIABLE: name, "PYTHONPATH": path}
    finally:
        os.unlink(name)


def received() -> Given:
    """Returns the reward and the functions that the parent process passed with `handed_over`; an empty `Given` if the
    run was started from the command line."""
    name = os.environ.pop(VARIABLE, None)
    if name is None:
        return Given()
    try:
        reward, functions = pickle.loads(Path(name).read_bytes())
    except Exception as error:
        raise UserError(
            f"a function given from Python cannot be loaded in the coordinator's process ({one_line(error)}); put it "
            'into a file and give it as "file.py:function"'
        ) from error
    return Given(reward, functions, from_python=True)
