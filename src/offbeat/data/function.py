"""Problems from a user's function with any of the parameters `ordinal`, `seed` and `held_out`.

The function is called by keyword. It returns a problem as a dict: `prompt` (text or chat messages) and, optionally,
`answer` and `info`. Like every source it must be a pure function of its arguments. For held-out problems (`held_out` is
True), ordinals also count from 0, and the function returns None once it has no more. A function without the parameter
`held_out` has no held-out problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offbeat.data.prompts import Problem, answer_text, plain, prompt_messages, prompt_text
from offbeat.errors import UserError
from offbeat.locate import accepted_arguments, locate, one_line
from offbeat.spelling import a_kind, suggest

KEYS = ("prompt", "answer", "info")


class FunctionSource:
    """Source of problems from `function`: a callable, `module:function` or `file.py:function`.

    `seed` is passed to the function. `chat` says whether text prompts go through the model's chat template; None: they
    do if the model has one.
    """

    default_reward: str | None = None

    def __init__(self, function: str | Callable[..., Any], seed: int = 0, chat: bool | None = None):
        self.seed, self.chat = seed, chat
        self._label = function if isinstance(function, str) else getattr(function, "__name__", "function")
        self._function = locate(function, "task.path") if isinstance(function, str) else function
        self._arguments = accepted_arguments(self._function, ("ordinal", "seed", "held_out"), f"task {self._label}")
        self.name = self._label.rpartition(":")[2].strip("<>")

    def problem(self, ordinal: int) -> Problem:
        problem = self._ask(ordinal, held_out=False)
        if problem is None:
            raise UserError(
                f"task {self._label}: the function returned None for problem {ordinal}; return a problem for each "
                "ordinal"
            )
        return problem

    def held_out(self, count: int) -> list[Problem]:
        problems: list[Problem] = []
        if "held_out" in self._arguments:
            while len(problems) < count and (problem := self._ask(len(problems), held_out=True)):
                problems.append(problem)
        return problems

    def _ask(self, ordinal: int, held_out: bool) -> Problem | None:
        offered = {"ordinal": ordinal, "seed": self.seed, "held_out": held_out}
        place = f"task {self._label}: {'held-out ' if held_out else ''}problem {ordinal}"
        try:
            found = self._function(**{name: offered[name] for name in self._arguments})
        except Exception as error:
            raise UserError(f"{place}: the function raised {one_line(error)}") from error
        return None if found is None else _problem(found, place)


def _problem(found: Any, place: str) -> Problem:
    if isinstance(found, Problem):
        return found
    if not isinstance(found, Mapping):
        raise UserError(f"{place}: the result is {found!r:.60}, {a_kind(found)}; return a dict with prompt")
    for key in found:
        if key not in KEYS:
            raise UserError(f"{place}: the function returned an unknown key {key!r}; {suggest(str(key), KEYS)}")
    prompt, info = found.get("prompt"), found.get("info", {})
    if not isinstance(info, Mapping):
        raise UserError(f"{place}: info is {info!r:.60}, {a_kind(info)}; return a dict")
    check = prompt_messages if isinstance(prompt, list) else prompt_text
    return Problem(check(prompt, f"{place}: prompt"), answer=answer_text(found.get("answer")), info=plain(info))
