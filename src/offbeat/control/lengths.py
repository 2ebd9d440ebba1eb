"""How long answers are, from those that ended and those that did not yet."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from offbeat.control.law import Law


class Lengths:
    """See the module. One record a trajectory, by key; `advance` with each version."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens

    def running(self, key: Hashable, bucket: Hashable, num_tokens: int, group: Hashable = None) -> None:
        """It has so many tokens and goes on, now or later."""
        raise NotImplementedError

    def finished(self, key: Hashable, bucket: Hashable, num_tokens: int, group: Hashable = None) -> None:
        """It ended by itself; with `max_tokens` or more it was cut."""
        raise NotImplementedError

    def capped(self, key: Hashable, bucket: Hashable, group: Hashable = None) -> None:
        """It was cut at `max_tokens`."""
        raise NotImplementedError

    def dropped(self, key: Hashable) -> None:
        """It will not be carried on, and how long it would have been is not known."""
        raise NotImplementedError

    def advance(self) -> None:
        """There is a new version: what ended under earlier ones counts for less."""
        raise NotImplementedError

    @property
    def num_finished(self) -> float:
        """Records that ended, by what they count for."""
        raise NotImplementedError

    def survival(self, bucket: Hashable = None) -> np.ndarray:
        """At t = 0..max_tokens the share that has more than t tokens; None: of all buckets together."""
        raise NotImplementedError

    def expected_remaining(self, bucket: Hashable, num_tokens: int, group: Hashable = None) -> float:
        """Tokens that a trajectory with so many is expected to add; finished siblings of its group sharpen it."""
        raise NotImplementedError

    def law(self, bucket: Hashable = None) -> Law:
        """What a prediction draws from."""
        raise NotImplementedError
