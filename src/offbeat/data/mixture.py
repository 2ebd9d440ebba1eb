"""Several sources, drawn in proportion to their weights.

The next source depends only on how often each source was drawn before. So the ledger's counts are the only cursor, and
a restarted run continues from them. The source that is farthest behind its share of the draws is next. So no source is
ever a whole draw ahead of its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config.schema import AnyTask, ArithmeticTask, EnvironmentTask, FunctionTask, GymTask
from offbeat.data.arithmetic import Arithmetic
from offbeat.data.environment import EnvironmentSource
from offbeat.data.files import DatasetRows, FileSource, JsonLines, Rows, open_file
from offbeat.data.function import FunctionSource
from offbeat.data.gym import Gym
from offbeat.data.prompts import Problem, PromptSource
from offbeat.errors import OffbeatError, UserError

RewardSpec = str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]]
"""A reward: a name, a function, or a mapping from names to such rewards, whose values are added up."""
Functions = Mapping[str, Callable[..., Any]]
"""Functions that a Python program gives as sources of prompts; each key is a task's `path`."""
ROWS = "tasks"
"""Name of the folder, inside the run's folder, for rows that were given from Python."""
SEED_STEP = 1_000_003
"""Distance between the seeds of a run's sources, so that two sources with equal settings give different problems."""


@dataclass(frozen=True)
class WeightedSource:
    """A source of problems with its settings in a mixture: name, weight, reward and system message."""

    source: PromptSource
    name: str
    weight: float = 1.0
    reward: str = ""
    """Name of the source's reward in `Mixture.rewards`."""
    system: str | None = None
    """System message for the source's prompts; None: no system message."""

    @property
    def chat(self) -> bool | None:
        return self.source.chat

    @property
    def is_opened(self) -> bool:
        """Whether an environment adds to the prompt."""
        return isinstance(self.source, EnvironmentSource)

    def problem(self, ordinal: int) -> Problem:
        return self.source.problem(ordinal)


class Mixture:
    """Sources of problems, drawn in proportion to their weights. `rewards` holds the sources' rewards by name
    (`WeightedSource.reward`)."""

    def __init__(self, members: Sequence[WeightedSource], rewards: Mapping[str, RewardSpec]):
        assert members, "a mixture needs a source"
        self.members = {member.name: member for member in members}
        assert len(self.members) == len(members), f"sources of the same name: {[member.name for member in members]}"
        self.rewards = dict(rewards)
        self._total_weight = sum(member.weight for member in members)
        self._held_out: dict[int, list[tuple[WeightedSource, Problem]]] = {}

    def next(self, drawn: Mapping[str, int]) -> tuple[WeightedSource, int]:
        """Returns the source to draw from next and the ordinal of its next problem. `drawn` holds the number of draws
        so far by source."""
        if strangers := drawn.keys() - self.members.keys():
            raise OffbeatError(
                f"task: the run has drawn prompts from {', '.join(sorted(strangers))}, which its configuration no "
                "longer has; restore that task, or start a new run"
            )
        num_drawn = 1 + sum(drawn.values())

        def deficit(member: WeightedSource) -> float:
            return member.weight / self._total_weight * num_drawn - drawn.get(member.name, 0)

        member = max(self.members.values(), key=deficit)
        return member, drawn.get(member.name, 0)

    def held_out(self, count: int) -> list[tuple[WeightedSource, Problem]]:
        """Returns up to `count` problems that training never draws, divided among the sources by weight; always the
        same ones."""
        if count not in self._held_out:
            shares = {name: 0 for name in self.members}
            for _ in range(count):
                shares[self.next(shares)[0].name] += 1
            members = self.members.values()
            self._held_out[count] = [(m, problem) for m in members for problem in m.source.held_out(shares[m.name])]
        return self._held_out[count]


def build_mixture(
    tasks: Sequence[AnyTask],
    *,
    seed: int,
    reward: RewardSpec | None = None,
    functions: Functions | None = None,
    home: Path | None = None,
    began_with: Mapping[str, str] | None = None,
) -> Mixture:
    """Builds the mixture of a configuration's `task` list. If `reward` is given, it replaces the rewards of all
    sources. `functions` are sources from Python, by `task.path`. `home` is the run's folder, which keeps the rows given
    from Python. `began_with` holds the names of the rewards with which the run began, by source (None: a new run)."""
    members: list[WeightedSource] = []
    rewards: dict[str, RewardSpec] = {}
    for position, task in enumerate(tasks):
        source = _build_source(task, seed + SEED_STEP * position, functions or {}, home)
        name = _unique(source.name, {member.name for member in members})
        chosen = _name_of(reward) if reward else task.reward or source.default_reward
        before = (began_with or {}).get(name, chosen)
        if reward is None and before != chosen:  # such a name in a configuration would be the same as before
            raise UserError(
                f"{home}: its reward, {before}, was given from Python, so only Python can give it again: "
                f'offbeat.Run("{home}").resume(reward=...), or .evaluate(reward=...)'
            )
        if chosen is None:
            raise UserError(
                f"task.reward: {name} has no reward of its own; set one of exact, number, math, module:function "
                "or file.py:function; in Python, give reward=FUNCTION"
            )
        rewards[chosen] = reward or chosen
        members.append(WeightedSource(source, name, task.weight, chosen, task.system))
    return Mixture(members, rewards)


def source_names(tasks: Sequence[AnyTask]) -> list[str]:
    """Returns the names of the tasks' sources, as in metrics and `offbeat show`, without opening the sources."""
    names: list[str] = []
    for task in tasks:
        names.append(_unique(_source_name(task), set(names)))
    return names


def _source_name(task: AnyTask) -> str:
    if isinstance(task, ArithmeticTask):
        return Arithmetic.name
    if isinstance(task, GymTask):
        return task.name
    if isinstance(task, FunctionTask | EnvironmentTask):
        return task.path.rpartition(":")[2]
    return Path(task.path).stem if task.source == "file" else Path(task.path).name


def _name_of(reward: RewardSpec) -> str:
    if isinstance(reward, Mapping):
        return "+".join(reward)
    return reward if isinstance(reward, str) else getattr(reward, "__name__", "reward")


def _build_source(task: AnyTask, seed: int, functions: Functions, home: Path | None) -> PromptSource:
    if isinstance(task, ArithmeticTask):
        return Arithmetic(seed, task.level, task.tail, task.tail_median, task.tail_sigma)
    if isinstance(task, GymTask):
        return Gym(task.name, task.options, seed, task.chat)
    if isinstance(task, EnvironmentTask):
        return EnvironmentSource(task.path, task.prompt, task.chat)
    if isinstance(task, FunctionTask):
        return FunctionSource(functions.get(task.path, task.path), seed, task.chat)
    return FileSource(
        DatasetRows(task.path, task.split) if task.source == "dataset" else _open_rows(task.path, home),
        name=_source_name(task),
        seed=seed,
        prompt=task.prompt,
        messages=task.messages,
        answer=task.answer,
        chat=task.chat,
        held_out=task.held_out,
        shuffle=task.shuffle,
    )


def _open_rows(path: str, home: Path | None) -> Rows:
    """Opens a task's file. If its rows were given from Python, errors name a row of the argument `task` instead of a
    line of the file, because the file is deleted with the folder of a run that is refused."""
    file = Path(rows_file(path, home))
    if home is None or file.parent.absolute() != (home / ROWS).absolute() or not file.is_file():
        return open_file(str(file))
    return JsonLines(file, "task=" if file.stem == "rows" else f"task=[...] ({file.stem})")


def rows_file(path: str, home: Path | None) -> str:
    """Returns the current path of a task's file. A file of rows that were given from Python is in the run's folder,
    which may have been moved to `home` since."""
    moved = None if home is None else home / ROWS / Path(path).name
    return str(moved) if moved and Path(path).parent.name == ROWS and moved.is_file() else path


def _unique(name: str, taken: set[str]) -> str:
    """Returns `name`, or the first of `name-2`, `name-3` and so on that is not in `taken`."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate
