"""The figures of metrics.jsonl as columns, thinned to as many points as a screen has.

A long run is sent in buckets: of several steps, their mean, lowest and highest, so that a spike stays visible however
many steps share its pixel. A bucket holds 2**k steps. So when a row is added, only the last buckets change.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.observability.metric_files import Row, metrics_after, row_trouble

MAX_POINTS = 1024
"""Most buckets of one curve: two for each pixel of a chart on a small screen."""
NUM_RECENT = 20
"""Steps over which the page judges what limits the run."""
NUM_CHANGES = 1000
"""Changes that are remembered; a page that slept longer gets everything again."""
SAMPLE_BYTES = 8 << 20
"""A file longer than this is sampled first, because it takes long to read."""
SAMPLE_LINE_BYTES = 64 << 10
DIGITS = 6
HELD_OUT = "held-out"
"""Name of the column with the mean held-out reward, `eval_mean@K` for any K. No metric has a name with a dash."""
RUNNING = ("samples", "tokens", "hours")
"""Columns whose running sums are x axes; hours come from `seconds`."""


class MetricHistory:
    """Rows of metrics.jsonl that no resume has undone, one a step, as columns."""

    def __init__(self, file: Path):
        self._file, self._offset = file, 0
        self.revision = 0
        self._changes: deque[tuple[int, int]] = deque(maxlen=NUM_CHANGES)
        self._clear()

    def _clear(self) -> None:
        self.num_rows = 0
        self._steps, self._attempts = np.zeros(64, np.int64), np.zeros(64, np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self._place: dict[int, int] = {}
        self._begun: set[int] = set()
        self._newest: deque[Row] = deque(maxlen=NUM_RECENT)
        self._sums: tuple[int, dict[str, np.ndarray]] | None = None
        self.judged: dict[int, Row] = {}
        """Rows with a held-out reward, by step."""

    @property
    def names(self) -> list[str]:
        """Names of all metrics that are numbers."""
        return sorted(name for name in self._columns if name != HELD_OUT)

    def read(self) -> bool:
        """Reads on in the file, a few megabytes at most; returns whether there may be more."""
        if self._file.is_file() and self._file.stat().st_size < self._offset:  # another file has its name now
            self._offset = 0
            self._clear()
            self._note(0)
        rows, offset = metrics_after(self._file, self._offset)
        has_more = offset > self._offset
        self._offset = offset
        self.add(rows)
        return has_more

    def read_all(self) -> None:
        while self.read():
            pass

    @property
    def share_read(self) -> float:
        size = self._file.stat().st_size if self._file.is_file() else 0
        return min(1.0, self._offset / size) if size else 1.0

    def sample(self) -> MetricHistory | None:
        """Returns a history of about `MAX_POINTS` lines from all over the file, if the file takes long to read."""
        size = self._file.stat().st_size if self._file.is_file() else 0
        if size - self._offset < SAMPLE_BYTES:
            return None
        found = MetricHistory(self._file)
        with open(self._file, "rb") as file:
            for at in np.linspace(0, max(0, size - SAMPLE_LINE_BYTES), MAX_POINTS).astype(int).tolist():
                file.seek(at)
                line = file.readline(SAMPLE_LINE_BYTES) if at == 0 else (file.readline(), file.readline())[1]
                if (row := _row(line)) is not None:
                    found.add([row])
        return found

    def add(self, rows: Iterable[Row]) -> None:
        """Takes further rows of the file. Like `survivors`: an attempt undoes the earlier attempts' rows of the first
        step that it trains and of all later steps; a second row of a step is merged into the first."""
        lowest: int | None = None
        for row in rows:
            step, attempt = row["step"], row.get("attempt", 1)
            if "reward" in row and attempt not in self._begun:
                self._begun.add(attempt)
                lowest = min(self._undo(step, attempt), self.num_rows if lowest is None else lowest)
            place = self._place.get(step)
            if place is None:
                place = self._insert(step)
            self._put(place, attempt, row)
            lowest = place if lowest is None else min(lowest, place)
        if lowest is not None:
            self._note(lowest)

    def _undo(self, step: int, attempt: int) -> int:
        """Removes rows from `step` on whose attempt is below `attempt`; returns the first place that changed."""
        first = int(np.searchsorted(self._steps[: self.num_rows], step))
        kept = first + np.flatnonzero(self._attempts[first : self.num_rows] >= attempt)
        if len(kept) < self.num_rows - first:
            places = np.concatenate([np.arange(first), kept])
            for values in (self._steps, self._attempts, *self._columns.values()):
                values[: len(places)] = values[places]
            for values in self._columns.values():
                values[len(places) : self.num_rows] = np.nan
            self.num_rows = len(places)
            self._number()
            known = self._place
            self._newest = deque((row for row in self._newest if row["step"] in known), NUM_RECENT)
            self.judged = {at: row for at, row in self.judged.items() if at in known}
        return first

    def _number(self) -> None:
        self._place = {step: place for place, step in enumerate(self._steps[: self.num_rows].tolist())}

    def _insert(self, step: int) -> int:
        """Makes room for a row; nearly always at the end."""
        if self.num_rows == len(self._steps):
            self._steps, self._attempts = (np.concatenate([v, np.zeros_like(v)]) for v in (self._steps, self._attempts))
            self._columns = {n: np.concatenate([v, np.full(len(v), np.nan)]) for n, v in self._columns.items()}
        place = int(np.searchsorted(self._steps[: self.num_rows], step))
        if place < self.num_rows:
            for values in (self._steps, self._attempts, *self._columns.values()):
                values[place + 1 : self.num_rows + 1] = values[place : self.num_rows].copy()
            for values in self._columns.values():
                values[place] = np.nan
        self._steps[place] = step
        self._attempts[place] = 0
        self.num_rows += 1
        if place < self.num_rows - 1:
            self._number()
        self._place[step] = place
        return place

    def _put(self, place: int, attempt: int, row: Row) -> None:
        self._attempts[place] = max(attempt, self._attempts[place])
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = np.full(len(self._steps), np.nan)
                column[place] = value if math.isfinite(value) else np.nan
        held = next((name for name in row if name.startswith("eval_mean@")), None)
        if held is not None and row[held] is not None:
            self._columns.setdefault(HELD_OUT, np.full(len(self._steps), np.nan))[place] = row[held]
            self.judged[row["step"]] = row
        if "reward" in row:
            self._newest.append(row)

    def _note(self, place: int) -> None:
        self.revision += 1
        self._sums = None
        self._changes.append((self.revision, place))

    def first_changed(self, revision: int) -> int | None:
        """Returns the place of the first row that changed after `revision`; None if none did."""
        if revision >= self.revision:
            return None
        if not self._changes or self._changes[0][0] > revision + 1:
            return 0
        return min(place for number, place in self._changes if number > revision)

    def bucket(self, num_rows: int) -> int:
        """Returns how many rows of `num_rows` share a bucket."""
        return 1 << max(0, math.ceil(math.log2(max(1, num_rows) / MAX_POINTS)))

    def thinned(
        self, names: Sequence[str], *, after: int = 0, steps: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """Returns the curves of `names`, from the bucket with row `after` on; with `steps`, only the rows within, in
        smaller buckets. `at` is the number of the first bucket, and `size` the number of rows in a bucket."""
        low, high = 0, self.num_rows
        if steps is not None:
            low, high = np.searchsorted(self._steps[: self.num_rows], [steps[0], math.nextafter(steps[1], math.inf)])
            low, high = max(0, int(low) - 1), min(self.num_rows, int(high) + 1)
        size = self.bucket(high - low)
        at = after // size if steps is None else 0
        first = at * size if steps is None else low
        starts = np.arange(first, high, size)
        ends = np.minimum(starts + size, high) - 1
        found: dict[str, Any] = {"size": size, "at": at, "num_rows": self.num_rows}
        found["x"] = {"step": self._steps[ends].tolist()} | {n: _short(v[ends]) for n, v in self._running().items()}
        found["columns"] = {
            name: _thinned(self._columns[name][first:high], starts - first, size)
            for name in names
            if name in self._columns
        }
        return found

    def _running(self) -> Mapping[str, np.ndarray]:
        """Running sums of samples, tokens and hours, by row."""
        if self._sums is None or self._sums[0] != self.revision:
            sums = {}
            for name in RUNNING:
                values = self._columns.get("seconds" if name == "hours" else name)
                values = np.zeros(self.num_rows) if values is None else np.nan_to_num(values[: self.num_rows])
                sums[name] = np.cumsum(values) / (3600 if name == "hours" else 1)
            self._sums = self.revision, sums
        return self._sums[1]

    def latest(self) -> dict[str, Any]:
        """Returns the last row with a reward, the first and the last evaluation, and the times of the last steps."""
        judged = [self.judged[step] for step in sorted(self.judged)]
        times = [{n: v for n, v in row.items() if n in ("step", "attempt", "seconds") or n.startswith("time_")}
                 for row in self._newest]  # fmt: skip
        return {
            "row": self._newest[-1] if self._newest else None,
            "first_eval": judged[0] if judged else None,
            "last_eval": judged[-1] if judged else None,
            "recent": times,
        }


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and row_trouble(row) is None else None


def _thinned(values: np.ndarray, starts: np.ndarray, size: int) -> list[list[float | None]]:
    """Returns the mean of each bucket and, if buckets have several rows, its lowest and highest value."""
    if size == 1 or not len(starts):
        return [_short(values)]
    known = ~np.isnan(values)
    counts = np.add.reduceat(known, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    lows, highs = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return [_short(means), _short(lows), _short(highs)]


def _short(values: np.ndarray) -> list[float | None]:
    """Returns values with `DIGITS` digits, whole numbers as they are, and None for those that are missing."""
    known = np.isfinite(values)
    shown = np.where(known, values, 0.0)
    is_long = shown != np.rint(shown)
    scale = 10.0 ** np.clip(DIGITS - 1 - np.floor(np.log10(np.abs(shown[is_long]))), -300, 300)
    shown[is_long] = np.round(shown[is_long] * scale) / scale
    return [value if is_known else None for value, is_known in zip(shown.tolist(), known.tolist(), strict=True)]
