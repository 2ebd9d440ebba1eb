"""An index of a run's answers, with which the page filters and sorts a million of them at once.

Columns of numbers in memory, read from the ledger in small parts and never in its writer; the ledger has no index for
this. They are kept in the user's cache folder, so that the next page of a long run need not read it all again. What can
be looked at again at any time, such as texts, is not in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.reports import TrajectoryRow

WHOLE = ("seq", "task", "group", "ordinal", "member", "num_tokens")
OPTIONAL = ("step", "first_version", "last_version")
WORDS = ("purpose", "source", "state", "worker", "ended_by")
DTYPES = {
    **dict.fromkeys(WHOLE, np.int64),
    **dict.fromkeys(OPTIONAL, np.int64),
    **dict.fromkeys(WORDS, np.int32),
    "reward": np.float64,
    "is_failed": np.bool_,
    "accepted_at": np.float64,
}
NONE = -1
"""Stands for None in the columns of `OPTIONAL`."""
FINAL = ("trained", "dropped", "evaluated")
"""States of a group that only a resume changes."""
ROWS_PER_READ = 500
MAX_OPEN_PER_READ = 1000
SAVE_EVERY = 100_000
"""The index is saved after so many new answers; reading as many takes a second or two."""
FORMAT = 1
ORDERS = ("newest", "oldest", "best", "worst", "longest")


@dataclass
class Asked:
    """Conditions on answers; one that is None sets none. `version` is one that sampled part of the answer."""

    purpose: str | None = None
    source: str | None = None
    worker: str | None = None
    state: str | None = None
    step: int | None = None
    version: int | None = None
    task: int | None = None
    group: int | None = None
    ordinal: int | None = None
    member: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None


@dataclass
class Found:
    rows: list[dict[str, Any]]
    num_found: int
    """Answers that meet the conditions."""


@dataclass
class AnswerIndex:
    """Answers of the run in folder `path`, in order of acceptance."""

    path: Path
    _columns: dict[str, np.ndarray] = field(default_factory=dict)
    _words: dict[str, dict[str, int]] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    """Numbers (`seq`) of answers whose group is not in a final state."""
    _refreshed: int = 0
    num_rows: int = 0
    num_abandoned: int = 0
    num_saved: int = 0
    num_in_ledger: int = 0

    def __post_init__(self) -> None:
        if not self._columns:
            self._clear()

    def _clear(self) -> None:
        self._columns = {name: np.zeros(1024, dtype) for name, dtype in DTYPES.items()}
        self._words = {name: {} for name in WORDS}
        self._open = set()
        self.num_rows = self.num_saved = 0

    def read(self, ledger: Ledger) -> bool:
        """Reads some of what is new in the ledger; returns whether there may be more."""
        self.num_in_ledger = ledger.last_trajectory()
        if (num_abandoned := ledger.num_abandoned_versions()) != self.num_abandoned:
            self._clear()  # a resume changed answers in final states
            self.num_abandoned = num_abandoned
        last = self._last_seq
        rows = ledger.list_trajectories(ROWS_PER_READ, "oldest", after=last)
        self._append(rows)
        return len(rows) == ROWS_PER_READ

    def refresh(self, ledger: Ledger) -> None:
        """Reads again answers that may have changed: of many, those that were read longest ago."""
        some = sorted(self._open, key=lambda seq: (seq <= self._refreshed, seq))[:MAX_OPEN_PER_READ]
        self._refreshed = some[-1] if some else 0
        for row in ledger.trajectory_rows(some) if some else ():
            place = int(np.searchsorted(self._columns["seq"][: self.num_rows], row.seq))
            self._put(place, row)

    @property
    def _last_seq(self) -> int:
        return int(self._columns["seq"][self.num_rows - 1]) if self.num_rows else 0

    def _append(self, rows: list[TrajectoryRow]) -> None:
        if self.num_rows + len(rows) > len(self._columns["seq"]):
            self._columns = {name: np.concatenate([v, np.zeros_like(v)]) for name, v in self._columns.items()}
        first = self.num_rows
        for place, row in enumerate(rows, start=first):
            self._put(place, row)
        self.num_rows = first + len(rows)

    def _put(self, place: int, row: TrajectoryRow) -> None:
        columns = self._columns
        for name in WHOLE:
            columns[name][place] = getattr(row, name)
        for name in OPTIONAL:
            value = getattr(row, name)
            columns[name][place] = NONE if value is None else value
        for name in WORDS:
            words, word = self._words[name], getattr(row, name)
            columns[name][place] = words.setdefault(word, len(words))
        columns["reward"][place] = np.nan if row.reward is None else row.reward
        columns["is_failed"][place] = row.error is not None
        columns["accepted_at"][place] = row.accepted_at
        is_final = row.state in FINAL or (row.state == "failed" and row.step is not None)
        (self._open.discard if is_final else self._open.add)(row.seq)

    def find(self, asked: Asked, order: str, start: int, count: int) -> Found:
        """Returns the answers from number `start` on, at most `count`, of those that meet the conditions."""
        columns = {name: values[: self.num_rows] for name, values in self._columns.items()}
        tests = []
        for name in WORDS:
            if (word := getattr(asked, name, None)) is not None:
                tests.append(columns[name] == self._words[name].get(word, NONE))
        for name in ("step", "task", "group", "ordinal", "member"):
            if (value := getattr(asked, name)) is not None:
                tests.append(columns[name] == value)
        if asked.version is not None:
            tests.append((columns["first_version"] <= asked.version) & (asked.version <= columns["last_version"]))
            tests.append(columns["first_version"] != NONE)
        for name, low, high in (
            ("reward", asked.min_reward, asked.max_reward),
            ("num_tokens", asked.min_length, asked.max_length),
        ):
            tests += [columns[name] >= low] if low is not None else []
            tests += [columns[name] <= high] if high is not None else []
        places = np.flatnonzero(np.logical_and.reduce(tests)) if tests else np.arange(self.num_rows)
        shown = _in_order(places, columns, order, start, count)
        return Found([self._row(place) for place in shown.tolist()], len(places))

    def _row(self, place: int) -> dict[str, Any]:
        columns = self._columns
        row: dict[str, Any] = {name: int(columns[name][place]) for name in WHOLE}
        for name in OPTIONAL:
            value = int(columns[name][place])
            row[name] = None if value == NONE else value
        for name in WORDS:
            row[name] = self._spelled(name)[int(columns[name][place])]
        reward = float(columns["reward"][place])
        row["reward"] = None if np.isnan(reward) else reward
        row["error"] = "failed" if columns["is_failed"][place] else None
        row["accepted_at"] = round(float(columns["accepted_at"][place]), 3)
        return row

    def _spelled(self, name: str) -> list[str]:
        return list(self._words[name])

    def choices(self) -> Mapping[str, list[str]]:
        """Returns the values of the columns with words that some answer has."""
        found = {}
        for name in ("purpose", "source", "worker", "state"):
            counts = np.bincount(self._columns[name][: self.num_rows], minlength=1)
            found[name] = sorted(
                word for word, code in self._words[name].items() if code < len(counts) and counts[code]
            )
        return found

    def newest_of_workers(self) -> dict[str, tuple[int, int | None]]:
        """Returns the task and the version of each worker's newest answer."""
        column = self._columns["worker"][: self.num_rows]
        found = {}
        for worker, code in self._words["worker"].items():
            places = np.flatnonzero(column == code)
            if len(places):
                row = self._row(int(places[-1]))
                found[worker] = row["task"], row["last_version"]
        return found

    def save(self) -> None:
        """Writes the index to the cache folder, for the next page. A folder that cannot be written is left alone."""
        file = cache_file(self.path)
        about = {
            "format": FORMAT,
            "words": {name: list(words) for name, words in self._words.items()},
            "open": sorted(self._open),
            "num_abandoned": self.num_abandoned,
        }
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished = file.with_name(f"{file.name}.{os.getpid()}")
            with open(unfinished, "wb") as made:
                encoded = np.frombuffer(json.dumps(about).encode(), np.uint8)
                columns: dict[str, Any] = {name: values[: self.num_rows] for name, values in self._columns.items()}
                np.savez(made, about=encoded, **columns)
            unfinished.replace(file)
            self.num_saved = self.num_rows

    def load(self, ledger: Ledger) -> None:
        """Takes the saved index, if it is of this very ledger."""
        try:
            with np.load(cache_file(self.path)) as saved:
                about = json.loads(saved["about"].tobytes())
                if about["format"] != FORMAT:
                    return
                columns = {name: saved[name].astype(dtype, copy=False) for name, dtype in DTYPES.items()}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return
        count = len(columns["seq"])
        ends = [place for place in (0, count - 1) if count]
        rows = ledger.trajectory_rows(int(columns["seq"][place]) for place in ends)
        known = {(int(columns["seq"][p]), int(columns["task"][p]), float(columns["accepted_at"][p])) for p in ends}
        if not known or {(row.seq, row.task, row.accepted_at) for row in rows} != known:
            return
        self._columns, self.num_rows, self.num_saved = columns, count, count
        self._words = {name: {w: code for code, w in enumerate(words)} for name, words in about["words"].items()}
        self._open, self.num_abandoned = set(about["open"]), about["num_abandoned"]


def _in_order(places: np.ndarray, columns: Mapping[str, np.ndarray], order: str, start: int, count: int) -> np.ndarray:
    """Returns `count` of `places` from number `start` on. Among equals, the newest comes first."""
    if order in ("newest", "oldest"):
        sorted_places = places if order == "oldest" else places[::-1]
        return sorted_places[start : start + count]
    keys = columns["num_tokens"][places].astype(float) if order == "longest" else columns["reward"][places]
    keys = np.where(np.isnan(keys), np.inf, keys if order == "worst" else -keys)[::-1]
    newest, wanted = places[::-1], min(start + count, len(places))
    if wanted < len(keys):  # nearly always: then most need not be sorted
        limit = np.partition(keys, wanted - 1)[wanted - 1] if wanted else np.inf
        candidates = np.flatnonzero(keys <= limit)
        below = candidates[keys[candidates] < limit]
        chosen = np.sort(np.concatenate([below, candidates[keys[candidates] == limit][: wanted - len(below)]]))
    else:
        chosen = np.arange(len(keys))
    chosen = chosen[np.argsort(keys[chosen], kind="stable")]
    return newest[chosen[start : start + count]]


def cache_file(run: Path) -> Path:
    """Returns the file of a run's index in the user's cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "offbeat" / "page" / f"{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]}.npz"
