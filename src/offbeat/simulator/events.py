"""The event queue: simulated time and what is due at which time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Events in the order of their time; those of the same time come in the order in which they were added. So a run is
    the same every time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_done = 0
        self._queue: list[tuple[float, int, Callable[..., None], Any]] = []
        self._num_added = 0
        self._is_over = False

    def clock(self) -> float:
        return self.now_s

    def at(self, time_s: float, call: Callable[..., None], what: Any) -> None:
        """Calls `call(what)` at `time_s`, or now if that is past."""
        self._num_added += 1
        heapq.heappush(self._queue, (time_s, self._num_added, call, what))

    def after(self, seconds: float, call: Callable[..., None], what: Any) -> None:
        self.at(self.now_s + seconds, call, what)

    def stop(self) -> None:
        """Ends `run` after the present event."""
        self._is_over = True

    def run(self, until_s: float) -> bool:
        """Carries out events until `stop` is called or the next one is later than `until_s`. Returns whether `stop` was
        called."""
        queue, pop = self._queue, heapq.heappop
        while queue and not self._is_over:
            if queue[0][0] > until_s:
                break
            time_s, _, call, what = pop(queue)
            if time_s > self.now_s:
                self.now_s = time_s
            self.num_done += 1
            call(what)
        return self._is_over
