"""Records, as spans of the run's trace, when workers had tasks and judges (which compute rewards) had samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol


class OnSpan(Protocol):
    """Receives a span: its track (who), its name (what), its start and end on the monotonic clock, and details."""

    def __call__(self, track: str, name: str, start_s: float, end_s: float, **details: Any) -> None: ...


@dataclass
class _Open:
    start_s: float
    last_s: float
    num_answers: int = 0


class BusyTimes:
    """Records the spans in which each member (worker or judge) had work; all spans get the name `name`. A span begins
    when the member gets work. It ends with the member's last answer, or at `settle` if the member still has work."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self._name, self._clock = name, clock
        self.on_span: OnSpan | None = None
        self._open: dict[str, _Open] = {}

    def got_work(self, member: str) -> None:
        now_s = self._clock()
        self._open.setdefault(member, _Open(now_s, now_s))

    def answered(self, member: str, count: int = 1) -> None:
        self.got_work(member)
        found = self._open[member]
        found.last_s, found.num_answers = self._clock(), found.num_answers + count

    def left(self, member: str) -> None:
        """Ends the span of a member that holds no work any more, and reports it if the member gave an answer."""
        if (found := self._open.pop(member, None)) is not None and found.num_answers:
            self._report(member, found, found.last_s)

    def settle(self, holding: Collection[str]) -> None:
        """Ends and reports the spans of all members, for example when a batch is claimed. Members in `holding` still
        have work: each of them begins a new span now. The spans of the others end as in `left`."""
        now_s = self._clock()
        for member, found in list(self._open.items()):
            if member in holding:
                self._report(member, found, now_s)
                self._open[member] = _Open(now_s, now_s)
            else:
                self.left(member)

    def _report(self, member: str, found: _Open, end_s: float) -> None:
        if self.on_span is not None:
            self.on_span(member, self._name, found.start_s, end_s, answers=found.num_answers)
