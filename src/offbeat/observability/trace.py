"""Spans (named stretches of time): their seconds by name for each step, and a trace for Perfetto or chrome://tracing.

`trace.json` is in the array form of Chrome's trace format. `close` writes the closing bracket of the array; viewers
also accept a file without the bracket. The file stops growing at `max_bytes`, with a mark at its end. Concurrent spans
of this process are shown in separate lanes, which are rows of the viewer: at any time a lane holds one span and the
spans inside it. Spans of another process, such as a worker, are shown in a lane of its own, called its track.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from offbeat.files import Appender, cannot_write

MAX_TRACE_BYTES = 64 << 20
"""Default size limit of a trace: about half a million spans, which viewers can still open easily."""

_lane: ContextVar[tuple[int, object] | None] = ContextVar("lane", default=None)
"""Lane (row in the viewer) of the current span, and the span's owner (thread and asyncio task). A task that is started
inside a span inherits this value, but has another owner, and therefore gets its own lane."""


EMPTY, OPENED, CLOSED = b"[\n", b",\n", b"\n]\n"
"""Content of a file without spans; the end of a file to which spans may be added; and the end of a closed file."""
NUM_OWN_LANES = 10_000
"""Smallest lane number of a track, a lane for the spans that another process reports."""


class Trace:
    """Records spans (named stretches of time) from any thread or asyncio task. Viewers show `name` beside the lanes of
    this process."""

    def __init__(self, path: Path, *, name: str = "trainer", max_bytes: int = MAX_TRACE_BYTES):
        self._name = name
        _change_end(path, EMPTY + CLOSED[1:], EMPTY)
        _change_end(path, CLOSED, OPENED)
        self._file = Appender(path, buffered=True)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._tracks: dict[str, int] = {}
        self._free_lanes: list[int] = []
        self._num_lanes = 0
        self._wall_at_zero_us = time.time_ns() / 1e3 - time.monotonic() * 1e6
        self._is_full = self._file.num_bytes >= max_bytes
        if self._file.num_bytes == 0:
            self._file.line("[")

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """Measures the time of the block under `name`; `details` appear in the trace."""
        owner = _owner()
        around = _lane.get()
        inner = around is not None and around[1] == owner
        lane = around[0] if inner and around else self._take_lane()
        token = _lane.set((lane, owner))
        start_s = time.monotonic()
        try:
            yield
        finally:
            end_s = time.monotonic()
            _lane.reset(token)
            if not inner:
                self._give_lane(lane)
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + end_s - start_s
            self._add(name, lane, start_s, end_s, details)

    def record(self, track: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Adds a span with known times (`time.monotonic`) to `track`, such as a worker's name. Spans of a track must
        not overlap."""
        with self._lock:
            is_new = track not in self._tracks
            lane = self._tracks.setdefault(track, NUM_OWN_LANES + len(self._tracks))
        if is_new:
            self._name_lane(lane, track)
        self._add(name, lane, start_s, end_s, details)

    def spans_since_last(self) -> dict[str, float]:
        """Returns the total seconds, by name, of the `span` blocks that ended since the last call of this
        method. Spans added by `record` do not count."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Ends the file's array; a new `Trace` of the same file continues the array."""
        self._file.close()
        _change_end(self._file.path, OPENED, CLOSED)
        _change_end(self._file.path, EMPTY, EMPTY + CLOSED[1:])

    def _add(self, name: str, lane: int, start_s: float, end_s: float, details: dict[str, Any]) -> None:
        with self._lock:
            if self._is_full:
                return
            self._is_full = self._file.num_bytes >= self._max_bytes
        start_us, duration_us = self._wall_at_zero_us + start_s * 1e6, (end_s - start_s) * 1e6
        self._write({"name": name, "ph": "X", "ts": round(start_us, 1), "dur": round(duration_us, 1)}, lane, details)
        if self._is_full:
            self._write({"name": "the trace is full", "ph": "i", "s": "g", "ts": round(start_us, 1)}, lane, {})

    def _write(self, event: dict[str, Any], lane: int, details: dict[str, Any]) -> None:
        event |= {"pid": os.getpid(), "tid": lane} | ({"args": details} if details else {})
        self._file.line(json.dumps(event, default=str) + ",")

    def _name_lane(self, lane: int, name: str) -> None:
        self._write({"name": "thread_name", "ph": "M"}, lane, {"name": name})

    def _take_lane(self) -> int:
        with self._lock:
            if self._free_lanes:
                return heapq.heappop(self._free_lanes)
            self._num_lanes += 1
            lane = self._num_lanes
        self._name_lane(lane, self._name)
        return lane

    def _give_lane(self, lane: int) -> None:
        with self._lock:
            heapq.heappush(self._free_lanes, lane)


def _owner() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        task = None
    return threading.get_ident(), id(task) if task else None


def _change_end(path: Path, before: bytes, after: bytes) -> None:
    """If a file ends with `before`, replaces this end by `after`."""
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(before)))
            if size >= len(before) and file.read() == before:
                file.seek(size - len(before))
                file.write(after)
                file.truncate()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise cannot_write(path, error) from error
