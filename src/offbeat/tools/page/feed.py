"""What a served page knows of one run, shared by all who look at it, and read on while they do.

Files and the ledger are read in small parts, in threads, as a share of a core: nobody who submits an answer waits for
somebody who looks at it. A page has a cursor for what it was sent, so that one that slept gets what it missed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.launch.run_folder import LEDGER, METRICS
from offbeat.tools.page.answer_index import SAVE_EVERY, AnswerIndex, Asked
from offbeat.tools.page.metric_history import HELD_OUT, MetricHistory
from offbeat.tools.page.run_data import ANSWER_COLUMNS, SILENT_AFTER_S, RunData, plain
from offbeat.tools.page.timeline import Spans
from offbeat.tools.trajectories import Decode, decoder, open_ledger

POLL_S = 1.0
"""How often files are looked at for new rows."""
REPORT_EVERY_S = 3.0
REPORT_SHARE = 20
"""The ledger's report is read again after `REPORT_SHARE` times the seconds that it took, and not within
`REPORT_EVERY_S`. So the pages of a large run take less than five per cent of a core for it."""
READ_AHEAD_S = 0.05
"""Longest time for which one turn reads a large ledger, before others get their turn."""
QUIET_S = 1.5
"""The ledger is read, and the tokenizer is loaded, this long after a page was opened, when its curves are drawn."""
SHOWN = re.compile(
    r"reward|reward_std|length|length_max|entropy|signal_share|cut_share|logprob_gap|kl|ess|kept_share|clip_share|"
    r"clamped_share|grad_norm|tokens_per_second|staleness|staleness_max|num_tokens/staleness_.+|(?:reward|part)/.+|"
    rf"eval/.*_mean@.+|{HELD_OUT}"
)
"""Metrics of the charts that are shown unasked. Others are sent when they are asked for."""
MAX_SHOWN = 64


@dataclass
class Cursor:
    """What a page was sent of a run."""

    is_whole: int = 0
    """Whether its metrics are of the whole file, not of a sample."""
    metrics: int = -1
    """Revision of the metrics; -1: it has none."""
    bucket: int = 0
    events: int = 0
    """Offset in events.jsonl."""
    report: int = 0
    index: int = -1
    minutes_silent: int = 0
    """Minutes of silence in the state that it was told."""

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))


class RunFeed:
    """Follows the run in folder `path`, called `name`, while somebody looks at it. `share` is that of a core which it
    may take for reading ahead."""

    def __init__(self, path: Path, name: str, share: float):
        self.path, self.name, self._share = path, name, share
        self._data = RunData(path, _no_text)
        self.history, self.index, self.spans = MetricHistory(path / METRICS), AnswerIndex(path), Spans(path)
        self._sampled: MetricHistory | None = None
        self._report: dict[str, Any] = {}
        self._report_number, self._report_due_s = 0, 0.0
        self._report_mark = self._index_mark = (-1, -1)
        self._has_loaded_index = False
        self._index_number = 0
        self.trouble = ""
        self._decode: Decode | None = None
        self._decoding, self._tracing = asyncio.Lock(), asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_looking = 0
        self._news = asyncio.Event()
        self._has_begun = asyncio.Event()

    async def enter(self) -> None:
        """Reads on for one more page that is open, until `leave`; returns when there are metrics to show."""
        self._num_looking += 1
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._follow_files()), asyncio.create_task(self._follow_ledger())]
        await self._has_begun.wait()

    def leave(self) -> None:
        self._num_looking -= 1
        if not self._num_looking:
            for task in self._tasks:
                task.cancel()
            self._tasks = []

    async def wait(self, within_s: float) -> None:
        """Waits until something may be new."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), within_s)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._has_begun.set()

    async def _follow_files(self) -> None:
        if not self.history.num_rows:
            self._sampled = await asyncio.to_thread(self.history.sample)
        if self._sampled is not None:
            self._tell()
            await asyncio.sleep(QUIET_S)
        while True:
            start_s = time.monotonic()
            while await asyncio.to_thread(self.history.read):
                if self._sampled is not None:
                    await asyncio.sleep((time.monotonic() - start_s) * (1 / self._share - 1))
                    start_s = time.monotonic()
            self._sampled = None
            self._tell()
            await asyncio.sleep(POLL_S)

    async def _follow_ledger(self) -> None:
        await self._has_begun.wait()
        await asyncio.sleep(QUIET_S)
        self._tasks.append(asyncio.create_task(self._prepare()))
        while True:
            start_s, has_more = time.monotonic(), False
            try:
                has_more = await asyncio.to_thread(self._read_ledger)
                self.trouble = ""
            except OffbeatError as error:
                self.trouble = str(error)
            self._tell()
            rest_s = (time.monotonic() - start_s) * (1 / self._share - 1)
            await asyncio.sleep(rest_s if has_more else max(rest_s, POLL_S))

    async def _prepare(self) -> None:
        """Loads the tokenizer, because an answer will be opened soon; an error is told to whoever opens one."""
        with suppress(OffbeatError):
            await self.decode()

    def _read_ledger(self) -> bool:
        """Reads on in the ledger for a moment; returns whether there may be more."""
        mark, due_s = self._mark(), time.monotonic() + READ_AHEAD_S
        if mark == (0, 0):
            return False
        has_more = False
        if mark != self._index_mark:
            with open_ledger(self.path) as ledger:
                if not self._has_loaded_index:
                    self.index.load(ledger)
                    self._has_loaded_index = True
                has_more = self.index.read(ledger)
                while has_more and time.monotonic() < due_s:
                    has_more = self.index.read(ledger)
                if not has_more:
                    self.index.refresh(ledger)
                    self._index_mark = mark
            self._index_number += 1
            num_new = self.index.num_rows - self.index.num_saved
            if num_new >= (max(SAVE_EVERY, self.index.num_saved) if has_more else SAVE_EVERY):
                self.index.save()
        if mark != self._report_mark and time.monotonic() >= self._report_due_s:
            start_s = time.monotonic()
            report = self._data.ledger()
            report["makers"] = self._data.makers(self.index.newest_of_workers())
            took_s = time.monotonic() - start_s
            self._report, self._report_mark, self._report_number = report, mark, self._report_number + 1
            self._report_due_s = time.monotonic() + max(REPORT_EVERY_S, REPORT_SHARE * took_s)
        return has_more

    def _mark(self) -> tuple[int, int]:
        """Times of the last changes of the ledger's files."""
        files = (self.path / LEDGER, self.path / f"{LEDGER}-wal")
        first, second = (file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
        return first, second

    def changes(self, cursor: Cursor) -> dict[str, Any]:
        """Returns what is new after `cursor`, and moves it on."""
        is_first = cursor.metrics < 0
        change: dict[str, Any] = {}
        if metrics := self._metrics_after(cursor):
            change["metrics"] = metrics
        events, cursor.events = self._data.events(cursor.events)
        if events:
            change["events"] = events
        minutes_silent = int(max(0.0, self._data.silent_s() - SILENT_AFTER_S + 60) / 60)
        if is_first or events or minutes_silent != cursor.minutes_silent:
            cursor.minutes_silent = minutes_silent
            change["about"] = {**self._data.about(), "name": self.name}
        if cursor.report != self._report_number:
            cursor.report = self._report_number
            change["ledger"] = self._report
        if cursor.index != self._index_number:
            cursor.index = self._index_number
            change["answers"] = {"num_known": self.index.num_rows, "num_all": self.index.num_in_ledger}
        return change

    def _metrics_after(self, cursor: Cursor) -> dict[str, Any]:
        history, is_whole = (self.history, 1) if self._sampled is None else (self._sampled, 0)
        place = history.first_changed(cursor.metrics)
        if cursor.is_whole != is_whole or cursor.bucket != history.bucket(history.num_rows) or cursor.metrics < 0:
            place = 0  # also at the end of a sample, and when buckets have become larger
        if place is None:
            return {}
        names = [name for name in (*history.names, HELD_OUT) if SHOWN.fullmatch(name)][:MAX_SHOWN]
        found = history.thinned(names, after=place) | plain(history.latest()) | {"names": history.names}
        cursor.is_whole, cursor.metrics, cursor.bucket = is_whole, history.revision, found["size"]
        return found | {"share_read": 1.0 if is_whole else self.history.share_read}

    def metrics(self, names: Sequence[str], steps: tuple[float, float] | None) -> dict[str, Any]:
        """Returns the curves of any metrics, or a closer look at some steps."""
        return (self._sampled or self.history).thinned(names, steps=steps)

    def answers(self, asked: Asked, order: str, start: int, count: int) -> dict[str, Any]:
        """Returns some answers, with how many meet the conditions, and what may be asked for."""
        found = self.index.find(asked, order, start, count)
        return {
            "columns": ANSWER_COLUMNS,
            "rows": [[row[name] for name in ANSWER_COLUMNS] for row in found.rows],
            "num_found": found.num_found,
            "num_known": self.index.num_rows,
            "num_all": max(self.index.num_in_ledger, self.index.num_rows),
            "choices": self.index.choices(),
        }

    async def timeline(self, begin: float | None, end: float | None) -> dict[str, Any]:
        """Returns a window of the time line; reads the trace on before."""
        async with self._tracing:
            while await asyncio.to_thread(self.spans.read):
                pass
            return await asyncio.to_thread(self.spans.window, begin, end)

    async def texts(self, tasks: Sequence[int], *, is_brief: bool) -> dict[int, dict[str, Any]]:
        data = RunData(self.path, await self.decode())
        if is_brief:
            return await asyncio.to_thread(data.previews, tasks)
        return await asyncio.to_thread(lambda: data.texts(tasks, with_history=True))

    async def decode(self) -> Decode:
        """Returns the run's tokenizer, which takes seconds to load the first time."""
        async with self._decoding:
            if self._decode is None:
                self._decode = await asyncio.to_thread(decoder, self.path)
            return self._decode


def _no_text(tokens: Any) -> str:
    """Stands for the tokenizer where no answer is read."""
    raise AssertionError("no answer is decoded here")
