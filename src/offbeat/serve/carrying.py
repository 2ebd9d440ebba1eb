"""Counts beginnings of answers on their way back and out again, for the rows of a run's metrics."""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.trajectory import Task, Trajectory


class Carrying:
    """Sums since they were taken last."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._num_partials = self._num_partial_tokens = self._num_resumed_tokens = 0

    def handed_back(self, partial: Trajectory) -> None:
        self._num_partials += 1
        self._num_partial_tokens += partial.num_tokens

    def handed_out(self, tasks: Iterable[Task]) -> None:
        """An engine that does not have their keys and values computes those of prompt and beginning anew."""
        self._num_resumed_tokens += sum(
            len(task.prompt) + task.prefix.num_tokens for task in tasks if task.prefix is not None
        )

    def take(self) -> dict[str, int]:
        taken = {
            "partials": self._num_partials,
            "partial_tokens": self._num_partial_tokens,
            "resumed_tokens": self._num_resumed_tokens,
        }
        self._forget()
        return taken
