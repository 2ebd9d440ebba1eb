"""Turns the arguments of `offbeat.train` into a configuration. Functions and rewards that a configuration cannot hold
are returned beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config import DEMO, Config, from_dict, load, resolved
from offbeat.config.keys import TASK_MODELS
from offbeat.data.files import READERS_OF_PANDAS
from offbeat.data.mixture import RewardSpec
from offbeat.errors import UserError
from offbeat.spelling import a_kind

SHORT = {"model": "model.path", "steps": "run.steps", "name": "run.name", "lr": "optimizer.lr"}
"""Short names of arguments, and the configuration keys for which they stand."""
DEMO_MODEL = "offbeat-tiny"


@dataclass(frozen=True)
class Prepared:
    config: Config
    reward: RewardSpec | None
    functions: dict[str, Callable[..., Any]]
    """Functions given as sources of prompts, by the `task.path` that names each in `config`."""


def prepare(
    config: Config | Mapping[str, Any] | str | Path | None,
    overrides: Mapping[str, Any],
    *,
    task: Any,
    reward: Any,
    resume: Path | None,
    rows: Path,
) -> Prepared:
    """Checks the arguments of `offbeat.train` and returns the run's configuration, reward and functions. `resume` is
    the folder of the run to resume; None: a new run. Data rows in `task` are written to files in the folder `rows`,
    which must exist."""
    keys = {SHORT[k] if k in SHORT and not isinstance(v, Mapping) else k: v for k, v in overrides.items()}
    base = _base(config, resume, keys)
    tasks = Tasks(rows)
    if task is not None and resume is not None:
        tasks.name_functions(task)
    elif task is not None:
        base = {**base, "task": tasks.sections(task)}
    spec, weights = read_reward(reward)
    for name, weight in weights.items():
        base = {**base, "reward": {**base.get("reward", {}), "weights": {**_weights(base), name: weight}}}
    made = from_dict(base, keys)
    if isinstance(spec, str):  # the configuration can hold it
        named = [one.model_copy(update={"reward": spec}) for one in made.task]
        return Prepared(made.model_copy(update={"task": named}), None, tasks.functions)
    return Prepared(made, spec, tasks.functions)


def _weights(base: Mapping[str, Any]) -> Mapping[str, Any]:
    section: Mapping[str, Any] = base.get("reward", {})
    return section.get("weights", {})


def _base(
    config: Config | Mapping[str, Any] | str | Path | None, resume: Path | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the configuration as it is before the overrides `keys` are applied. If `config` is None, returns that of
    the run to resume; for a new run, returns the demo's configuration if the run has the demo's model. For another
    model, whose training the demo's learning rate would ruin, returns an empty dict, which stands for defaults."""
    if config is None and resume is None:
        model = keys.get("model.path") or dict(keys.get("model", {})).get("path", DEMO_MODEL)
        return copy.deepcopy(DEMO) if model == DEMO_MODEL else {}
    if config is None:
        assert resume is not None
        config = resume / "config.json"
    if isinstance(config, str | Path):
        config = load(Path(config))
    return resolved(config) if isinstance(config, Config) else dict(config)


def read_reward(reward: Any) -> tuple[RewardSpec | None, dict[str, float]]:
    """Returns the argument `reward` of `offbeat.train` as one reward or as a dict of rewards by name. Also returns the
    weights that were given with rewards, by the rewards' names."""
    if reward is None or callable(reward) or isinstance(reward, str):
        return reward, {}
    if isinstance(reward, Sequence) and reward:
        named: dict[str, Any] = {}
        for one in reward:
            named[_unused(_name(one), named)] = one
    elif isinstance(reward, Mapping) and reward:
        named = dict(reward)
    else:
        raise UserError(
            f"reward: {reward!r:.60} is {a_kind(reward)}; give a function, a list of functions, or a dict of "
            "functions by name"
        )
    functions, weights = dict[str, Any](), dict[str, float]()
    for name, value in named.items():
        function, *weight = value if isinstance(value, tuple | list) and len(value) == 2 else (value,)
        if not (callable(function) or isinstance(function, str)) or not isinstance(name, str):
            raise UserError(
                f"reward: {name!r}: {value!r:.60} is not a reward; give a function, or (function, weight); keys of the "
                f'section [reward] are given as **{{"reward.{name}": ...}}'
            )
        functions[name] = function
        if weight:
            weights[name] = _weight(name, weight[0])
    return functions, weights


def _weight(name: str, weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise UserError(
            f"reward: {name!r}: the weight {weight!r:.60} is {a_kind(weight)}; give (function, weight) with a number, "
            "as in (function, 0.5)"
        ) from None


class Tasks:
    """Turns the argument `task` of `offbeat.train` into `[[task]]` sections of a configuration."""

    def __init__(self, rows: Path):
        self.folder = rows
        self.functions: dict[str, Callable[..., Any]] = {}

    def sections(self, task: Any) -> list[dict[str, Any]]:
        several = isinstance(task, list | tuple) and task and all(_is_section(one) for one in task)
        return [self._section(one) for one in (task if several else [task])]

    def name_functions(self, task: Any) -> None:
        """Stores the functions in `task` for a resumed run, whose configuration already names them. Raises `UserError`
        if `task` holds anything but functions, because a resumed run keeps its tasks and rows."""
        for one in task if isinstance(task, list | tuple) else [task]:
            function = one.get("rows") if isinstance(one, Mapping) else one
            if not callable(function):
                raise UserError("task: a resumed run keeps the tasks and rows that it began with; leave out task")
            self._named(function)

    def _section(self, task: Any) -> dict[str, Any]:
        settings = {}
        if _is_section(task):
            if "rows" not in task:
                return dict(task)
            settings = {key: value for key, value in task.items() if key != "rows"}
            task = task["rows"]
        if callable(task):
            return {**settings, "source": "function", "path": self._named(task)}
        if isinstance(task, str | Path):
            return {**settings, "source": _source_of(str(task)), "path": str(task)}
        from offbeat.data.rows import record

        file = self.folder / f"{_unused('rows', [file.stem for file in self.folder.iterdir()])}.jsonl"
        return record(task, file, settings, "task")

    def _named(self, function: Callable[..., Any]) -> str:
        name = f"{getattr(function, '__module__', '__main__')}:{_name(function)}"
        self.functions[name] = function
        return name


def _is_section(task: Any) -> bool:
    """Whether the value is a `[[task]]` section as in a configuration, or a dict with data under the key `rows`. A
    single row of data is neither, even if it has a column `source`."""
    return isinstance(task, Mapping) and ("rows" in task or task.get("source") in TASK_MODELS)


def _source_of(text: str) -> str:
    if text.endswith((".jsonl", ".ndjson", ".parquet", *READERS_OF_PANDAS)):
        return "file"  # of the last, opening it tells how to convert it
    return "function" if ":" in text else "dataset"


def _name(one: Any) -> str:
    if isinstance(one, str):
        return one.rpartition(":")[2]
    return getattr(one, "__name__", type(one).__name__).strip("<>")


def _unused(name: str, taken: Any) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
