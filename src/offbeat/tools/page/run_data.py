"""Data of a run that the page shows, as plain values for JSON, read from the run's folder.

Only reads: the ledger is opened read-only for each call, and files are read on from an offset, so a run may go on
meanwhile. Paths of this machine, process ids and logins in URLs are left out of everything but the answers themselves.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.config import load
from offbeat.launch.run_folder import CONFIG, EVENTS, LEDGER, METRICS, SUMMARY
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.reports import TaskDetail, TrajectoryRow
from offbeat.net import shown
from offbeat.observability.metric_files import events_after
from offbeat.tools.trajectories import Decode, as_text, open_ledger
from offbeat.trajectory import Trajectory

ANSWER_COLUMNS = (
    *("seq", "task", "group", "ordinal", "member", "purpose", "source", "state", "step", "reward", "error"),
    *("num_tokens", "first_version", "last_version", "worker", "ended_by", "accepted_at"),
)
"""Fields of `TrajectoryRow` that the page shows."""
PRIVATE = ("folder", "pid", "url", "target", "file")
"""Fields of events that tell about the machine, or that are addresses."""
SILENT_AFTER_S = 90.0
"""A run that goes on writes more often than this, but for a few steps of large models."""
PREVIEW_TOKENS = 100
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu")
"""Kinds of devices as torch names them, which are in the fingerprint of an engine that runs in the worker."""
PATH = re.compile(r"(?:file://|(?<![\w:/.~<-])~?)(?:/[^\s/'\"`,;:)(\]\[<>]+)+/?|\b[A-Za-z]:\\[^\s'\"]+")
"""An absolute path. The paths of URLs are not matched, because a host stands before them."""
WITH_FIGURES = ("event", "time", "attempt")
"""Fields of events that are kept, although they are text, where texts are left out."""


def without_paths(text: str) -> str:
    """Returns `text` with only the last part of each absolute path, and without logins in its URLs."""
    return PATH.sub(lambda found: "…/" + re.split(r"[/\\]", found[0].rstrip("/"))[-1], shown(text))


def plain(value: Any) -> Any:
    """Returns `value` without paths and logins in its texts, and None for numbers that JSON does not have."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class RunData:
    """Reads the run in folder `path`. `decode` turns tokens into text; None: prompts, answers and other texts that may
    quote them are left out."""

    path: Path
    decode: Decode | None

    def about(self) -> dict[str, Any]:
        """Returns the run's name, the few keys of its configuration that the page shows, and its state in words."""
        config = load(self.path / CONFIG)
        return {
            "name": self.path.absolute().name,
            "model": re.split(r"[/\\]", config.model.path.rstrip("/\\"))[-1],
            "engine": config.rollout.engine,
            "mode": config.schedule.mode,
            "steps": config.run.steps,
            "group_size": config.batch.group_size,
            "max_staleness": config.schedule.bound,
            "state": self._state(),
        }

    def _state(self) -> str:
        last = ""
        for event in self._all_events():
            match event["event"]:
                case "start" | "reopen" | "resume":
                    silent_s = self.silent_s()
                    waited = f"under way, or killed: nothing new for {silent_s / 60:.0f} min"
                    last = waited if silent_s > SILENT_AFTER_S else "under way"
                case "end":
                    last = "finished" if event.get("finished") else "stopped before its last step"
                case "error":
                    last = "ended by an error"
        return last or ("finished" if (self.path / SUMMARY).is_file() else "not begun")

    def silent_s(self) -> float:
        """Returns for how long nothing has been written in the run's folder."""
        files = (self.path / name for name in (METRICS, EVENTS, LEDGER, f"{LEDGER}-wal", CONFIG))
        return time.time() - max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)

    def _all_events(self) -> Iterator[dict[str, Any]]:
        offset = 0
        while True:
            found, offset = events_after(self.path / EVENTS, offset)
            if not found:
                return
            yield from found

    def all_events(self) -> list[dict[str, Any]]:
        return [self._event(event) for event in self._all_events()]

    def events(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Returns the events after byte `offset` of events.jsonl, and the offset to read on from."""
        found, offset = events_after(self.path / EVENTS, offset)
        return [self._event(event) for event in found], offset

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        kept = {key: plain(value) for key, value in event.items() if key not in PRIVATE}
        if self.decode is not None:
            return kept
        return {key: value for key, value in kept.items() if key in WITH_FIGURES or isinstance(value, int | float)}

    def ledger(self) -> dict[str, Any]:
        """Returns the ledger's report and the workers that joined; empty before the run has a ledger."""
        if not (self.path / LEDGER).is_file():
            return {}
        lease_s = load(self.path / CONFIG).rollout.lease_s
        with open_ledger(self.path) as ledger:
            report = asdict(ledger.report())
            columns = ("name", "role", "state", "reason", "joined_at", "last_seen_at", "is_away")
            workers = [{name: getattr(worker, name) for name in columns} for worker in ledger.list_workers(lease_s)]
        if self.decode is None:
            report["set_aside"] = dict.fromkeys(report["set_aside"], "")
            workers = [{**worker, "reason": None} for worker in workers]
        return {"report": plain(report), "workers": plain(workers), "read_at": time.time()}

    def makers(self, newest: Mapping[str, tuple[int, int | None]]) -> dict[str, dict[str, Any]]:
        """Returns the engine, the device and the version of workers, as their newest answer tells. `newest` are the
        task and the version of that answer, by worker."""
        workers = {task: worker for worker, (task, _) in newest.items()}
        none: dict[str, dict[str, Any]] = {}

        def read(ledger: Ledger) -> dict[str, dict[str, Any]]:
            rows = ledger.rows_of_tasks(workers)
            engines = {}
            for row, found in zip(rows, ledger.load_trajectories(rows), strict=True):
                worker = workers[row.task]
                parts = () if found is None else found.segments
                own = [part.engine for part in parts if part.worker == worker and part.engine]
                engines[worker] = without_paths(own[-1]) if own else ""
            return {
                worker: {"engine": engine, "device": device_in(engine), "version": newest[worker][1]}
                for worker, engine in engines.items()
            }

        return self._with_ledger(read, none)

    def previews(self, tasks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Returns the beginnings of prompt and response of each of `tasks`, by task."""
        found: dict[int, dict[str, Any]] = {}

        def read(ledger: Ledger) -> dict[int, dict[str, Any]]:
            for row in ledger.rows_of_tasks(tasks):
                (prompt, _), (trajectory,) = ledger.load_problems([row])[0], ledger.load_trajectories([row])
                found[row.task] = preview(prompt, trajectory, self.decode)
            return found

        return self._with_ledger(read, found)

    def texts(self, tasks: Sequence[int], *, with_history: bool) -> dict[int, dict[str, Any]]:
        """Returns the prompt, the segments and the reward of each of `tasks`, by task."""
        found: dict[int, dict[str, Any]] = {}

        def read(ledger: Ledger) -> dict[int, dict[str, Any]]:
            for task in tasks:
                found[task] = self._text(ledger.task_detail(task), with_history=with_history)
            return found

        return self._with_ledger(read, found)

    def _with_ledger(self, read: Callable[[Ledger], Any], default: Any) -> Any:
        if not (self.path / LEDGER).is_file():
            return default
        with open_ledger(self.path) as ledger:
            return read(ledger)

    def row(self, row: TrajectoryRow) -> list[Any]:
        values = {name: getattr(row, name) for name in ANSWER_COLUMNS}
        values["accepted_at"] = round(row.accepted_at, 3)
        if row.error is not None:
            values["error"] = "failed" if self.decode is None else without_paths(row.error)
        return list(values.values())

    def _text(self, detail: TaskDetail, *, with_history: bool) -> dict[str, Any]:
        segments = () if detail.trajectory is None else detail.trajectory.segments
        parts = []
        for place, stretch in enumerate(detail.segments):
            part: dict[str, Any] = asdict(stretch)
            if place < len(segments):
                segment = segments[place]
                part |= {"worker": without_paths(segment.worker), "engine": without_paths(segment.engine)}
                if self.decode is not None:
                    part["pieces"] = token_texts(segment.tokens, self.decode)
                if segment.logprobs is not None:
                    part["logprobs"] = [round(float(value), 3) for value in segment.logprobs]
            parts.append(part)
        found: dict[str, Any] = {
            "segments": parts,
            "is_pruned": detail.is_pruned,
            "error": None if detail.error is None or self.decode is None else without_paths(detail.error),
            "rewards": [{"name": r.name, "value": r.value, "weight": r.weight, "position": r.position}
                        for r in detail.rewards],
        }  # fmt: skip
        if self.decode is not None:
            found |= {"prompt": self.decode(detail.prompt), "right": as_text(detail.problem["answer"])}
            if with_history:
                found["history"] = [{"at": event.at, "what": without_paths(event.what)} for event in detail.history]
        return found


def preview(prompt: np.ndarray, trajectory: Trajectory | None, decode: Decode | None) -> dict[str, Any]:
    """Returns the beginnings of a prompt and of its response, or that there are none."""
    if decode is None:
        return {}
    begun = None if trajectory is None else decode(trajectory.tokens[:PREVIEW_TOKENS])
    return {"prompt": decode(prompt[-PREVIEW_TOKENS:]), "response": begun}


def device_in(engine: str) -> str:
    """Returns the kind of device that an engine's fingerprint names; "" if it names none."""
    return next((word for word in engine.split() if word in DEVICES), "")


def token_texts(tokens: np.ndarray, decode: Decode) -> list[str]:
    """Returns the text of each token; joined, these are the text of all. A character that takes several tokens belongs
    to the last of them; the others have no text."""
    texts: list[str] = []
    begin = read = 0  # the window that is decoded, so that the time is linear in the number of tokens
    for end in range(1, len(tokens) + 1):
        before, until = decode(tokens[begin:read]), decode(tokens[begin:end])
        is_whole = not until.endswith("\ufffd") or end == len(tokens) or end - read > MAX_TOKENS_PER_CHARACTER
        if is_whole:
            texts.append(until[len(before) :])
            begin, read = read, end
        else:
            texts.append("")
    return texts


MAX_TOKENS_PER_CHARACTER = 4
"""Bytes of the longest character in UTF-8. After as many tokens without a whole character, the bytes are invalid."""


def chosen_groups(rows: Iterable[TrajectoryRow], stride: int) -> list[TrajectoryRow]:
    """Returns the answers of every `stride`-th group, in the order of the groups' numbers, evaluations included."""
    listed = list(rows)
    kept = set(sorted({row.group for row in listed})[::stride])
    return [row for row in listed if row.group in kept]
