"""Reinforcement learning for language models on the machines you really have.

    import offbeat

    run = offbeat.train("run.toml", reward=lambda response, answer: float(response.strip() == answer))
    run.plot()

Importing this package is cheap, because reward processes do it at every start; torch is imported when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable as _Callable
from collections.abc import Mapping as _Mapping
from collections.abc import Sequence as _Sequence
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from offbeat.errors import OffbeatError, UserError

if _TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.observability.sinks import STOP
    from offbeat.planner.cost.constants import Constants
    from offbeat.planner.inputs.hardware import Inventory
    from offbeat.planner.inputs.workload import Workload
    from offbeat.planner.plan import Plan
    from offbeat.run import Run

    __version__: str

__all__ = ["STOP", "Config", "OffbeatError", "Run", "UserError", "__version__", "make_plan", "train"]

_LAZY = {"Config": "offbeat.config", "Run": "offbeat.run", "STOP": "offbeat.observability.sinks"}
"""Public names and their modules. These modules are slow to import, so each is imported when its name is first used."""


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("offbeat")
        except PackageNotFoundError:
            return "0+unknown"  # a folder of sources, not installed
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def train(
    config: Config | _Mapping[str, _Any] | str | _Path | None = None,
    *,
    task: _Any = None,
    reward: _Any = None,
    callbacks: _Sequence[_Callable[[dict[str, _Any]], _Any]] | _Callable[[dict[str, _Any]], _Any] = (),
    loggers: _Any = (),
    resume: str | _Path | None = None,
    wait: bool = True,
    **overrides: _Any,
) -> Run:
    """Trains as `offbeat train` does and returns the `Run`.

    `config` is a `Config`, a dict or the path of a TOML file. If it is None, a resumed run keeps its configuration, and
    a new run gets that of the built-in demo or, with another `model`, the defaults.

    `task` gives the prompts, in one of these forms:

    - rows (a list of dicts, a `datasets.Dataset`, a data frame, a generator), which are recorded in the run's folder;
    - a function, as for `source = "function"`, or a file;
    - a section such as `{"source": "file", ...}`, or `{"rows": rows, "prompt": "question"}` to name columns, or a list
      of sections.

    `reward` replaces the configured rewards. It is a function (plain, async or written for TRL), a list of functions,
    or a dict from names to functions or to pairs (function, weight).

    `callbacks` are called with each row of metrics; a callback that returns `offbeat.STOP` ends the run. `loggers` are
    objects with a method `log(row)` and perhaps `close()`. A single callback or logger needs no list. They are called
    in this process, in the thread of the run. A callback or logger that raises an error gets no more rows.

    `resume` is the folder of a run to continue, or its name in `runs`. `overrides` set configuration keys: as sections,
    `batch={"group_size": 16}`; as dotted keys, `**{"batch.group_size": 16}`; or in the short forms `model="path"`,
    `steps=100`, `name="first"` and `lr=1e-6`.

    With `wait=False`, training goes on in a thread of its own; see `Run.stop` and `Run.wait`. Otherwise, Ctrl-C ends
    the run after the current step, with a checkpoint; the summary's `stopped_by` then says so. Signal handlers are
    restored at the end. Also works inside a running event loop, such as a notebook's. A process may do several runs,
    one after another or at once, each in its own folder.
    """
    from offbeat.run import Run

    return Run._train(
        config,
        task=task,
        reward=reward,
        callbacks=callbacks,
        loggers=loggers,
        resume=resume,
        wait=wait,
        **overrides,
    )


def make_plan(
    cluster: Inventory | str | _Path,
    workload: Workload | str | _Path,
    *,
    constants: Constants | str | _Path | None = None,
    budget: float | None = None,
    throughput: float | None = None,
    any_trainer: bool = False,
) -> Plan:
    """Plans as `offbeat plan` does: returns the fastest plan within `budget` ($/h; None: all machines) or, with
    `throughput` (tokens/s), the cheapest plan that reaches it.

    `cluster`, `workload` and `constants` are each an object of the planner or the path of a file. If `constants` is
    None, the cost model has its default constants. With `any_trainer`, trainers that Offbeat's own cannot run are
    planned too, as in a `Workload` that is given as an object."""
    import dataclasses

    from offbeat.planner.cost import constants as files
    from offbeat.planner.inputs.inventory import load_inventory
    from offbeat.planner.inputs.workload_file import load_workload
    from offbeat.planner.planning import plan

    if isinstance(cluster, (str, _Path)):
        cluster = load_inventory(cluster)
    if isinstance(workload, (str, _Path)):
        from offbeat.launch.run_folder import trained_lengths

        workload = dataclasses.replace(load_workload(workload, trained_lengths), any_trainer=any_trainer)
    if isinstance(constants, (str, _Path)):
        constants = files.load(_Path(constants))
    return plan(cluster, workload, constants=constants, budget=budget, throughput=throughput)
