"""Problems of the data sets of reasoning-gym.

A problem depends only on seed and ordinal. Problems are made in chunks of `CHUNK` problems with consecutive seeds,
because some data sets build all problems at once. Held-out problems come from seeds of their own, the same for every
run. A hash of its text decides whether a question may be held out; training skips such questions, whichever seed
made them.

A few data sets iterate over Python sets, so a second run gets the same questions only with the same PYTHONHASHSEED.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from offbeat.data.prompts import Problem
from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.spelling import a_kind, suggest

CHUNK = 500
"""Problems per chunk: reasoning-gym's default size, with which every data set is tested."""
HELD_OUT_IN = 4
"""One question in this many may be held out. The share is large, so that such a question is found after a few tries.
Training loses nothing, because questions are generated on demand."""
NUM_HELD_OUT_SEEDS = 2**24
NUM_TRAIN_SEEDS = 2**32 - NUM_HELD_OUT_SEEDS
STRIDE = 2**26
"""Number added to the seed for the next attempt if a question must be skipped. No run draws as many problems, so an
attempt never meets the seed of another problem."""
MAX_TRIES = 60
"""Attempts to find a question to train on; only a data set with very few different questions needs more."""


class Gym:
    """Source of the problems of the reasoning-gym data set `dataset`; `options` are passed to its configuration."""

    default_reward = "gym"

    def __init__(self, dataset: str, options: Mapping[str, Any] | None = None, seed: int = 0, chat: bool | None = None):
        self.dataset = self.name = dataset
        self.options, self.chat = dict(options or {}), chat
        self._first_seed = zlib.crc32(f"{seed}".encode()) % NUM_TRAIN_SEEDS
        _check_options(dataset, self.options)
        self._chunk = lru_cache(maxsize=8)(partial(_make, dataset, self.options))
        self._chunk(0)

    def problem(self, ordinal: int) -> Problem:
        for attempt in range(MAX_TRIES):
            position = (self._first_seed + ordinal + attempt * STRIDE) % NUM_TRAIN_SEEDS
            problem = self._pose(NUM_HELD_OUT_SEEDS + position)
            if not is_held_out(str(problem.prompt)):
                return problem
        raise UserError(
            f"task.name = {self.dataset!r}: these task.options allow too few different questions; widen their ranges"
        )

    def held_out(self, count: int) -> list[Problem]:
        drawn: dict[str, Problem] = {}
        for position in range(min(MAX_TRIES * count, NUM_HELD_OUT_SEEDS)):
            problem = self._pose(position)
            if is_held_out(str(problem.prompt)):
                drawn.setdefault(str(problem.prompt), problem)
            if len(drawn) == count:
                break
        return list(drawn.values())

    def _pose(self, seed: int) -> Problem:
        first = seed - seed % CHUNK
        entry = dict(self._chunk(first)[seed - first])
        question = entry.pop("question")
        answer = entry.get("answer")
        info = {"dataset": self.dataset, "options": self.options, "entry": _to_plain(entry)}
        return Problem(question, answer=None if answer is None else str(answer), info=info)


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0


def judge(question: str, answer: str, info: Mapping[str, Any]) -> float:
    """Returns the data set's own score of `answer`; `question` and `info` are prompt and info of one of `Gym`'s
    problems."""
    if "entry" not in info:
        raise ValueError(
            "the reward 'gym' judges only problems of reasoning-gym, and this one has another source; set another "
            "task.reward for that source"
        )
    dataset = _judging(info["dataset"], json.dumps(info["options"], sort_keys=True))
    return dataset.score_answer(answer, {"question": question, **_from_plain(info["entry"])})


@lru_cache(maxsize=32)
def _judging(dataset: str, options: str) -> Any:
    return _make(dataset, json.loads(options), seed=0)


def _make(dataset: str, options: Mapping[str, Any], seed: int) -> Any:
    gym = import_extra("reasoning_gym", "gym", "the task source 'reasoning-gym'")
    try:
        return gym.create_dataset(dataset, size=CHUNK, seed=seed, **options)
    except Exception as error:  # data sets refuse options with errors of many kinds
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"task.options of {dataset!r}: refused by reasoning-gym: {why}") from error


def _check_options(dataset: str, options: Mapping[str, Any]) -> None:
    import_extra("reasoning_gym", "gym", "the task source 'reasoning-gym'")
    known = import_extra("reasoning_gym.factory", "gym", "the task source 'reasoning-gym'").DATASETS
    if dataset not in known:
        raise UserError(f"task.name = {dataset!r}: reasoning-gym has no such data set; {suggest(dataset, known)}")
    fields = [field.name for field in dataclasses.fields(known[dataset][1]) if field.name not in ("seed", "size")]
    for option in options:
        if option in ("seed", "size"):
            raise UserError(f"task.options.{option} of {dataset!r}: Offbeat sets this option itself; leave it out")
        if option not in fields:
            raise UserError(f"task.options.{option}: {dataset!r} has no such option; {suggest(option, fields)}")


def _to_plain(value: Any) -> Any:
    """Converts a value to JSON types. Tuples and mappings are marked so that `_from_plain` restores them exactly: the
    scoring of a data set compares them with values of its own, and (1, 2) is not [1, 2]."""
    if isinstance(value, tuple):
        return {"tuple": [_to_plain(item) for item in value]}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {"map": [[_to_plain(key), _to_plain(item)] for key, item in value.items()]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(
        f"a problem of reasoning-gym holds {a_kind(value)}, which cannot be sent to its reward; choose another data set"
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if isinstance(value, Mapping) and "tuple" in value:
        return tuple(_from_plain(item) for item in value["tuple"])
    if isinstance(value, Mapping):
        return {_from_plain(key): _from_plain(item) for key, item in value["map"]}
    return value
