"""Spans of a run's trace.json for the page's time line: who did what when, from hours to milliseconds.

A window of the time line holds the spans that are wider than a pixel. Narrower ones are summed up in cells of a few
pixels: of a track and a kind of work, one span as long as all of them together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from offbeat.launch.run_folder import TRACE

MAX_READ_BYTES = 4 << 20
"""Most bytes that one call of `read` reads."""
MAX_FILE_SPANS = 20_000
"""Most spans in a file to share; of more, the shortest are summed up."""
MAX_WINDOW_SPANS = 4000
CELLS = 400
"""Cells along a window, in which narrow spans are summed up."""
STEPS_SHOWN_FIRST = 6
TRAINER = "trainer"
NO_ANSWERS = -1
NUM_FIELDS = 5


class Spans:
    """The spans of a trace file, which may still grow."""

    def __init__(self, run: Path):
        self._file, self._offset = run / TRACE, 0
        self._lanes: dict[tuple[int, int], int] = {}
        self.tracks: list[str] = []
        self.names: list[str] = []
        self._rows = np.zeros((256, NUM_FIELDS))
        self.num_spans = 0

    def read(self) -> bool:
        """Reads on; returns whether there may be more."""
        if not self._file.is_file():
            return False
        with open(self._file, "rb") as file:
            file.seek(self._offset)
            data = file.read(MAX_READ_BYTES)
        end = self._offset
        for line in data.split(b"\n")[:-1]:
            # Only up to the comma: closing the file replaces it by a bracket, and a resume the bracket by a comma.
            event = line.rstrip(b",")
            if event.strip() not in (b"", b"]"):
                self._offset = end + len(event)
                self._take(event)
            end += len(line) + 1
        return len(data) == MAX_READ_BYTES

    def read_all(self) -> None:
        while self.read():
            pass

    def _take(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line)
            lane = (event["pid"], event["tid"])
            if event["ph"] == "M":
                self._lanes[lane] = _index(self.tracks, str(event["args"]["name"]))
            elif event["ph"] == "X":
                track = self._lanes.get(lane)
                if track is None:
                    track = _index(self.tracks, "other")
                name = _index(self.names, str(event["name"]))
                answers = event.get("args", {}).get("answers")
                is_count = isinstance(answers, int)
                self._add(track, name, event["ts"] / 1e6, event["dur"] / 1e6, answers if is_count else NO_ANSWERS)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
            return  # a line that a kill cut short, or the bracket at the beginning

    def _add(self, *span: float) -> None:
        if self.num_spans == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self.num_spans] = span
        self.num_spans += 1

    def window(
        self, begin: float | None = None, end: float | None = None, limit: int = MAX_WINDOW_SPANS
    ) -> dict[str, Any]:
        """Returns the spans between two wall times (None: the first and the last), and sums over all of the trace.

        A span is a list: number of its track, of its name, start, seconds, answers or None, steps that were trained
        before its middle, and how many spans it sums up."""
        rows = self._rows[: self.num_spans]
        track, name, start, seconds = (rows[:, field] for field in range(4))
        ends = start + seconds
        whole = (float(start.min()), float(ends.max())) if len(rows) else (0.0, 0.0)
        low, high = whole[0] if begin is None else begin, whole[1] if end is None else end
        trained = self._trained(rows)
        inside = np.flatnonzero((ends >= low) & (start <= high))
        wide = inside
        if len(inside) > limit:
            shortest = np.partition(seconds[inside], len(inside) - limit)[len(inside) - limit]
            wide = inside[seconds[inside] > shortest]
        narrow = np.setdiff1d(inside, wide, assume_unique=True)
        shown = [
            [int(track[i]), int(name[i]), round(float(start[i]), 6), round(float(seconds[i]), 6), _count(rows[i, 4]), 1]
            for i in wide.tolist()
        ] + _summed(rows[narrow], low, high)
        middles = np.array([span[2] + span[3] / 2 for span in shown])
        steps = np.searchsorted(trained, middles, side="right").tolist()
        newest = float(trained[-STEPS_SHOWN_FIRST]) if len(trained) >= STEPS_SHOWN_FIRST else whole[0]
        return {
            "tracks": self.tracks,
            "names": self.names,
            "begin": whole[0],
            "end": whole[1],
            "newest": newest,
            "low": low,
            "high": high,
            "num_spans": len(rows),
            "spans": [[*span[:5], step, span[5]] for span, step in zip(shown, steps, strict=True)],
            "sums": self._sums(rows),
        }

    def _trained(self, rows: np.ndarray) -> np.ndarray:
        """Returns when the trainer had trained each step; spans of its ranks are about the same steps."""
        if "train" not in self.names or TRAINER not in self.tracks:
            return np.zeros(0)
        is_step = (rows[:, 0] == self.tracks.index(TRAINER)) & (rows[:, 1] == self.names.index("train"))
        return np.sort(rows[is_step, 2] + rows[is_step, 3])

    def _sums(self, rows: np.ndarray) -> list[list[float]]:
        """Returns track, name, number of spans and seconds, of each track and name."""
        if not len(rows):
            return []
        keys = (rows[:, 0] * len(self.names) + rows[:, 1]).astype(np.int64)
        counts, seconds = np.bincount(keys), np.bincount(keys, weights=rows[:, 3])
        return [
            [*divmod(key, len(self.names)), int(counts[key]), round(float(seconds[key]), 6)]
            for key in np.flatnonzero(counts).tolist()
        ]


def _summed(rows: np.ndarray, low: float, high: float) -> list[list[Any]]:
    if not len(rows):
        return []
    width = max(high - low, 1e-9) / CELLS
    cells = np.clip(((rows[:, 2] - low) / width).astype(np.int64), 0, CELLS - 1)
    kinds, which = np.unique(np.stack([rows[:, 0], rows[:, 1], cells], axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    counts, seconds = np.bincount(which), np.bincount(which, weights=rows[:, 3])
    answers = np.bincount(which, weights=np.maximum(rows[:, 4], 0))
    has_answers = np.bincount(which, weights=rows[:, 4] >= 0)
    first = np.full(len(kinds), np.inf)
    np.minimum.at(first, which, rows[:, 2])
    return [
        [int(k[0]), int(k[1]), round(float(first[i]), 6), round(float(min(seconds[i], width)), 6),
         int(answers[i]) if has_answers[i] else None, int(counts[i])]
        for i, k in enumerate(kinds)
    ]  # fmt: skip


def _count(value: float) -> int | None:
    return None if value == NO_ANSWERS else int(value)


def _index(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)
