"""Problems of reasoning-gym with more than one try: `path = "reasoning-gym:DATASET"`.

The model answers, is told how its answer scores, and may answer again. The episode earns the score of its last answer.
`task.options` are `tries` and the options of the data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.environments.protocol import Done, Turn
from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.locate import one_line
from offbeat.spelling import suggest

SOLVED = 1.0


def environment(dataset: str) -> type:
    """Returns the class of the environment for a data set of this name."""
    needed_by = f'path = "reasoning-gym:{dataset}"'
    known = import_extra("reasoning_gym.factory", "gym", needed_by).DATASETS
    if dataset not in known:
        raise UserError(f"{needed_by}: reasoning-gym has no such data set; {suggest(dataset, known)}")

    class Named(ReasoningRetry):
        def __init__(self, tries: int = 3, **options: Any):
            super().__init__(dataset, tries, options)

    return Named


class ReasoningRetry:
    """A problem, and tries at it."""

    deterministic = True

    def __init__(self, dataset: str, tries: int, options: Mapping[str, Any]):
        if tries < 1:
            raise UserError(f"task.options.tries = {tries}: allowed 1 or more")
        self.dataset, self.tries, self.options = dataset, tries, dict(options)
        self.num_tried = 0

    def begin(self, problem: Mapping[str, Any], seed: int) -> str:
        gym = import_extra("reasoning_gym", "gym", f'path = "reasoning-gym:{self.dataset}"')
        try:
            self.problems = gym.create_dataset(self.dataset, seed=seed % 2**31, size=1, **self.options)
        except Exception as error:  # data sets refuse options with errors of many kinds
            raise UserError(f"task.options of reasoning-gym:{self.dataset}: refused: {one_line(error)}") from error
        self.entry = self.problems[0]
        return self.entry["question"]

    def step(self, turn: Turn) -> str | Done:
        score = float(self.problems.score_answer(turn.text.strip(), self.entry))
        self.num_tried += 1
        if score >= SOLVED or self.num_tried >= self.tries:
            return Done(score, {"tries": self.num_tried, "solved": score >= SOLVED})
        left = self.tries - self.num_tried
        return f"This answer scores {score:.2f} of 1. Try again; {left} {'try' if left == 1 else 'tries'} left."
