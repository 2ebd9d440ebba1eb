"""Reinforcement learning for language models on the machines you really have.

    import offbeat

    offbeat.train("run.toml", reward=lambda response, answer: float(response.strip() == answer))

Importing this package is cheap, because reward processes do it at every start; torch is imported when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import OffbeatError, UserError

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.planner.cost.constants import Constants
    from offbeat.planner.inputs.hardware import Inventory
    from offbeat.planner.inputs.workload import Workload
    from offbeat.planner.plan import Plan

__all__ = ["Config", "OffbeatError", "UserError", "make_plan", "train"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from offbeat.config import Config

        return Config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    resume: str | Path | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Trains as `offbeat train` does and returns the run's summary.

    `config` is a `Config`, a dict or the path of a TOML file. None means the configuration of the run to `resume`, or
    else the built-in demo. `reward` scores all answers in place of the configured rewards. `resume` is the folder of a
    run to continue. Overrides are sections with some of their keys, `batch={"group_size": 16}`, or dotted keys,
    `**{"batch.group_size": 16}`.

    Also works inside a running event loop, such as a notebook's. Ctrl-C ends the run after the current step, with a
    checkpoint; the summary's `stopped_by` then says so. Signal handlers are restored at the end. A process may do
    several runs, one after another or at once in separate threads, each in its own folder; in threads, signals are left
    to the caller.
    """
    from offbeat.config import DEMO, Config, from_dict, load, resolved

    if config is None:
        config = Path(resume) / "config.json" if resume else DEMO
    if isinstance(config, (str, Path)):
        config = load(Path(config))
    given = resolved(config) if isinstance(config, Config) else config
    from offbeat.launch import local

    return local.train(from_dict(given, overrides), reward=reward, resume=Path(resume) if resume else None)


def make_plan(
    cluster: Inventory | str | Path,
    workload: Workload | str | Path,
    *,
    constants: Constants | str | Path | None = None,
    budget: float | None = None,
    throughput: float | None = None,
) -> Plan:
    """Plans as `offbeat plan` does: the fastest plan for a budget ($/h), or the cheapest at a throughput (tokens/s).

    `cluster`, `workload` and `constants` are each a record or the path of a file. The planner is in `offbeat.planner`.
    """
    from offbeat.planner.cost import constants as files
    from offbeat.planner.inputs.inventory import load_inventory
    from offbeat.planner.inputs.workload_file import load_workload
    from offbeat.planner.planning import plan

    if isinstance(cluster, (str, Path)):
        cluster = load_inventory(cluster)
    if isinstance(workload, (str, Path)):
        from offbeat.launch.run_folder import trained_lengths

        workload = load_workload(workload, trained_lengths)
    if isinstance(constants, (str, Path)):
        constants = files.load(Path(constants))
    return plan(cluster, workload, constants=constants, budget=budget, throughput=throughput)
