"""Whom each worker fetches weights from, so that a version crosses a slow link once.

Workers that can serve pieces say where, and at which site they are; whoever asks is told the addresses of its line of
relays (`offbeat.control.relay`), nearest first. The coordinator itself, or the run's store, is always the last resort
and is not named. A worker that is not heard of for a while relays to nobody any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.control.relay import ROOT, Receiver, RelayTree

SILENT_S = 60.0
"""A relay asks for a version every few steps; one that was silent for longer may be gone."""


@dataclass(frozen=True)
class Place:
    """Where a worker is, in the relay's eyes."""

    site: str
    """Machines that reach each other fast have the same; "" is nobody's."""
    url: str = ""
    """Where it serves pieces; "": nowhere."""
    up_bytes_per_s: float | None = None
    root_bytes_per_s: float | None = None


class Relaying:
    def __init__(self, clock: Callable[[], float] = time.monotonic, silent_s: float = SILENT_S):
        self._clock, self._silent_s = clock, silent_s
        self._tree = RelayTree()
        self._heard: dict[str, tuple[float, Place]] = {}

    def sources(self, worker: str, place: Place) -> list[str]:
        """The addresses that a worker is to ask, in this order, before it asks us."""
        self._forget_silent()
        if not place.site:  # nobody is near it
            self.leave(worker)
            return []
        self._heard[worker] = self._clock(), place
        self._tree.put(
            Receiver(worker, place.site, bool(place.url), place.up_bytes_per_s, place.root_bytes_per_s),
        )
        line = [name for name in self._tree.sources(worker) if name != ROOT]
        return [self._heard[name][1].url for name in line]

    def hear(self, worker: str) -> None:
        """It is alive."""
        if worker in self._heard:
            self._heard[worker] = self._clock(), self._heard[worker][1]

    def leave(self, worker: str) -> None:
        if self._heard.pop(worker, None) is not None:
            self._tree.remove(worker)

    def _forget_silent(self) -> None:
        since_s = self._clock() - self._silent_s
        for worker in [worker for worker, (heard_s, _) in self._heard.items() if heard_s < since_s]:
            self.leave(worker)
