"""Problems from rows: a JSONL or Parquet file, or a Hugging Face dataset, with a mapping of columns.

- Every row is checked when the source is opened; what is wrong is one line that names the place.
- Held out are the rows whose prompt hashes below the share asked for, so equal prompts fall on one side, and rows that
  are added later leave the others where they are.
- Epochs follow one another, each in an order of its own that depends on seed and epoch alone.
- The reward gets the row's other columns as `info`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3

from offbeat.errors import UserError
from offbeat.spelling import suggest
from offbeat.tasks.rows import Row, Rows
from offbeat.tasks.source import Problem
from offbeat.tasks.values import answer_text, plain, prompt_messages, prompt_text

DEFAULT_ANSWER = "answer"
"""The one column that may be missing when nobody asked for it by another name."""


class FileSource:
    """See the module."""

    default_reward: str | None = None

    def __init__(
        self,
        rows: Rows,
        *,
        name: str,
        seed: int = 0,
        prompt: str = "prompt",
        messages: str | None = None,
        answer: str | None = DEFAULT_ANSWER,
        chat: bool | None = None,
        held_out: float = 0.05,
        shuffle: bool = True,
    ):
        self.rows, self.name, self.seed, self.chat, self.shuffle = rows, name, seed, chat, shuffle
        self._column, self._is_messages, self._answer = messages or prompt, messages is not None, answer
        self._needed = [self._column] + ([answer] if answer not in (None, DEFAULT_ANSWER) else [])
        hashes = np.array([_hash(self._prompt_of(row, i)) for i, row in enumerate(rows.scan(self._needed))], np.uint64)
        if not len(hashes):
            raise UserError(f"task.path = {str(rows.path)!r}: its file has no row; every row is a prompt to train on")
        is_held_out = _choose_held_out(hashes, held_out)
        self._train = np.flatnonzero(~is_held_out)
        # In the order of their hashes, so that the first ones are a fair sample; of equal prompts only one.
        _, first = np.unique(hashes, return_index=True)
        self._held_out = first[is_held_out[first]]
        if not len(self._train):
            raise UserError(f"task.held_out = {held_out:g}: leaves no row of {name} to train on, of {len(hashes)}")
        self._order = lru_cache(maxsize=2)(self._make_order)  # two: a step may reach into the next epoch

    def problem(self, ordinal: int) -> Problem:
        epoch, position = divmod(ordinal, len(self._train))
        return self._problem(int(self._train[self._order(epoch)[position]]))

    def held_out(self, count: int) -> list[Problem]:
        return [self._problem(int(index)) for index in self._held_out[:count]]

    def _make_order(self, epoch: int) -> np.ndarray:
        size = len(self._train)
        return permutation(size, f"{self.seed}:{epoch}") if self.shuffle else np.arange(size)

    def _problem(self, index: int) -> Problem:
        row = self.rows.row(index)
        prompt = self._prompt_of(row, index)
        info = {key: plain(value) for key, value in row.items() if key not in (self._column, self._answer)}
        return Problem(prompt, answer=answer_text(row.get(self._answer)) if self._answer else None, info=info)

    def _prompt_of(self, row: Row, index: int) -> str | list[Mapping[str, Any]]:
        """The row's prompt, after a check of all that we need of it."""
        where = self.rows.where(index)
        for column in self._needed:
            if column not in row:
                raise UserError(f"{where}: there is no column {column!r}; {suggest(column, row)}")
        value, place = row[self._column], f"{where}: {self._column}"
        if isinstance(value, list) and not self._is_messages:
            raise UserError(f"{place} is a list; for chat messages set task.messages = {self._column!r}")
        return prompt_messages(value, place) if self._is_messages else prompt_text(value, place)


def permutation(size: int, key: str) -> np.ndarray:
    """The numbers below `size` in an order that depends on `key` alone, whatever numpy's version.

    Sorts by a mixed counter (splitmix64), because the streams of numpy's generators may change between releases.
    """
    start = int.from_bytes(blake3(key.encode()).digest(length=8), "little")
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def _choose_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which rows are held out; at least one prompt, where some were asked for and two differ."""
    chosen = hashes < np.uint64(int(share * 2**64))
    if share > 0 and not chosen.any() and hashes.min() != hashes.max():
        chosen = hashes == hashes.min()
    return chosen


def _hash(prompt: str | list[Mapping[str, Any]]) -> int:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return int.from_bytes(blake3(text.encode(errors="surrogatepass")).digest(length=8), "little")
