"""A run's folder: who owns it, what is in it, and what is written there while the run goes on.

    config.json    every key, as this attempt runs with it        ledger.sqlite  weights/  checkpoints/
    secrets.json   what of it is nobody's business, where there is any
    metrics.jsonl  a row a step      events.jsonl  what happened and when      trace.json  spans of time
    logs/          what modules log  summary.json  how it ended                lock        who is at work here

One process works in a folder at a time. Nothing is ever cut from metrics and events: every row carries its `attempt`,
1 for the first start and one more for each resume, and `offbeat.watch.history` finds the rows that survived.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from offbeat.config import Change, Config, fixed_changes, free_changes, load, resolved, secrets
from offbeat.config.explain import show
from offbeat.errors import OffbeatError, UserError
from offbeat.files import cannot_write, make_folder, readable_by, write_atomic
from offbeat.launch.lock import FolderLock
from offbeat.redact import shown
from offbeat.watch.appending import Appender
from offbeat.watch.history import read_events
from offbeat.watch.trace import Trace

if TYPE_CHECKING:
    from offbeat.ledger.ledger import Ledger

LEDGER, CONFIG, METRICS, EVENTS, TRACE, SUMMARY, LOCK = (
    "ledger.sqlite",
    "config.json",
    "metrics.jsonl",
    "events.jsonl",
    "trace.json",
    "summary.json",
    "lock",
)
CHECK_WITHIN_S = 60.0
"""How long a resume looks for damaged pages in the ledger; in that time a disk reads some ten gigabytes."""
LOGGERS = ("offbeat", "py.warnings")
"""Whose records go to logs/; the root logger belongs to the program that called us."""
_at_work: ContextVar[Path | None] = ContextVar("at_work", default=None)
"""The folder of the run whose code this is, for its log; threads that torch or an engine started do not know."""
_open_logs: set[logging.Handler] = set()
_logs_lock = threading.Lock()


class RunFolder:
    """An owned folder; close it, or use it in a `with` statement. `create` and `open` make one."""

    def __init__(self, path: Path, config: Config, lock: FolderLock):
        self.path, self.config, self._lock = path, config, lock
        with ExitStack() as stack:
            stack.enter_context(readable_by(config.run.access))  # for all that is made here, by whichever module
            self._metrics = Appender(path / METRICS)
            self._events = Appender(path / EVENTS)
            self._trace = Trace(path / TRACE)
            events = read_events(path / EVENTS)
            self._last_events = {event["event"]: event for event in events}
            self.attempt = max((event.get("attempt", 0) for event in events), default=0) + 1
            self._handler = _log_to(path / "logs" / "offbeat.log")
            self._access = stack.pop_all()
        self._before = _at_work.get()
        _at_work.set(path)
        self._start_s = time.monotonic()

    @classmethod
    def create(cls, config: Config) -> Self:
        """A new run's folder, named by `run.name` or the time; a name in use is refused."""
        parent, name = Path(config.run.dir), config.run.name
        path = parent / name if name else _unused(parent / time.strftime("%Y%m%d-%H%M%S"))
        try:
            with readable_by(config.run.access):
                make_folder(path)
        except OSError as error:
            raise UserError(f"run.dir = {show(config.run.dir)}: {path} cannot be made: {error.strerror}") from error
        refuse_used(path)
        with _owned(path) as lock:
            refuse_used(path)  # again, now that nobody else can begin here
            config = _named(config, path)
            # First: what is there without it is no run, and its name would be lost.
            _write_config(path, config, "then start it again")
            folder = cls(path, config, lock)
            folder.event("start", pid=os.getpid())
        return folder

    @classmethod
    def open(cls, path: Path, config: Config | None = None) -> Self:
        """An existing run's folder, to go on in; `config` may differ from the stored one in free keys."""
        stored_config(path)
        with _owned(path) as lock:
            stored = stored_config(path)
            config = check_resumable(path, config or load(path / CONFIG))
            if (ledger := _existing_ledger(path)) is not None:
                with ledger:
                    ledger.check_pages(CHECK_WITHIN_S)
            folder = cls(path, config, lock)
            _write_config(path, config)
            folder.event("reopen", pid=os.getpid())
            changes = [(change.key, change.old, change.new) for change in free_changes(stored, config)]
            if (before := _name_in(stored)) != config.run.name:
                changes.append(("run.name", before, config.run.name))
            for key, old, new in changes:
                folder.event("config_change", key=key, old=old, new=new)
        return folder

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    def metrics(self, row: dict[str, Any]) -> None:
        """Appends a step's row; numbers that JSON cannot say become null."""
        assert "step" in row, f"a metrics row without its step: {row}"
        self._metrics.line(json.dumps(plain({**row, "attempt": self.attempt})))
        self._trace.flush()

    def event(self, kind: str, **fields: Any) -> None:
        """Appends something that happened, with the time for people and seconds since this attempt's start."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        head = {"time": when, "seconds": round(time.monotonic() - self._start_s, 3), "attempt": self.attempt}
        row = plain({"event": kind, **head, **fields})
        self._events.line(shown(json.dumps(row)))
        self._last_events[kind] = row

    def last_event(self, kind: str) -> dict[str, Any] | None:
        """The latest event of a kind, of any attempt."""
        return self._last_events.get(kind)

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Times what happens inside, for trace.json and `spans_since_last`."""
        return self._trace.span(name, **details)

    def spans_since_last(self) -> dict[str, float]:
        """Seconds by name of the spans that ended since the last call."""
        return self._trace.spans_since_last()

    def summary(self, summary: dict[str, Any]) -> None:
        """Replaces summary.json."""
        _replace(self.path / SUMMARY, plain(summary))

    def close(self) -> None:
        """Gives the folder up; whatever cannot be closed, the rest is."""
        with ExitStack() as stack:
            stack.callback(self._access.close)
            stack.callback(self._lock.release)
            for file in (self._metrics, self._events, self._trace):
                stack.callback(file.close)
            stack.callback(_stop_logging, self._handler)
            _at_work.set(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OffbeatError:
            if error is None:  # otherwise what ended the run matters more than lines that could not be flushed
                raise


def _write_config(path: Path, config: Config, then: str = "then --resume the run") -> None:
    """All of it, but for secrets, which have a file of their own: written first, so that none is ever lost."""
    stated = resolved(config)
    with readable_by(config.run.access):
        try:
            secrets.save(path / secrets.SECRETS, stated)
        except OSError as error:
            raise cannot_write(path / secrets.SECRETS, error, then) from error
        _replace(path / CONFIG, secrets.shown_value(stated), then)


def _replace(path: Path, content: Any, then: str = "then --resume the run") -> None:
    try:
        write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error, then) from error


def refuse_used(path: Path) -> None:
    """Raises if a folder holds a run's work, or something else of the user's.

    A folder whose run ended before it began, as when a reward function could not be found, is used again.
    """
    if (path / CONFIG).is_file():
        begun = (path / LEDGER, path / METRICS, path / SUMMARY)
        if any(file.is_file() and file.stat().st_size for file in begun):
            raise UserError(f"{path}: this run exists; go on with it by --resume {path}, or choose another run.name")
    elif path.is_dir() and any(entry.name != LOCK for entry in path.iterdir()):
        raise UserError(f"{path}: is there already and holds no run; choose another run.name or run.dir")


def stored_config(path: Path) -> dict[str, Any]:
    """A run's config.json, with its secrets."""
    if not path.is_dir():
        raise UserError(f"{path}: no such run{_runs_beside(path)}")
    try:
        stored = json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: holds no run (it has no {CONFIG})") from None
    except ValueError as error:
        raise UserError(f"{path / CONFIG}: is damaged ({error}); bring it back or start a new run") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path / CONFIG}: is damaged (not a JSON object); bring it back or start a new run")
    return secrets.restored(stored, secrets.load(path / secrets.SECRETS))


def check_resumable(path: Path, config: Config) -> Config:
    """The configuration to go on with, under the name of its folder, which may have been copied or moved since the run
    was at work; raises if it changes what is fixed, for this run's config.json or for its ledger, or if there is no
    ledger to go on with."""
    stored = stored_config(path)
    is_own_name = config.run.name in (None, path.name, path.resolve().name)
    changes = fixed_changes(stored, _renamed(config, _name_in(stored)) if is_own_name else config)
    _refuse_changes(changes, f"the run {path} has", "leave it as it was")
    config = _named(config, path)
    rules = None
    if (ledger := _existing_ledger(path)) is not None:
        with ledger:
            rules = ledger.begun_with()
    if rules is not None:  # what is in the ledger holds, whatever was written into config.json since
        changes = fixed_changes(rules, _renamed(config, _name_in(rules)))
        _refuse_changes(changes, f"{path / LEDGER} was begun with", f"set it back in {path / CONFIG}")
    return config


def _refuse_changes(changes: list[Change], whose: str, remedy: str) -> None:
    if changes:
        key, old, new = changes[0]
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise UserError(
            f"{key} = {show(new)}: {whose} {show(old)}, and this key is fixed for the life of a run; {remedy}, or "
            f"start a new run{more}"
        )


def _existing_ledger(path: Path) -> Ledger | None:
    """The ledger of a run that is to be resumed, to be read: a lost one is told, and never replaced by an empty one.
    None: the run ended before it began, as on a full disk; resuming it begins it."""
    from offbeat.ledger.errors import NoLedger
    from offbeat.ledger.ledger import Ledger  # here, because a start that is refused need not wait for numpy

    file = path / LEDGER
    if file.is_file() and file.stat().st_size:
        with suppress(NoLedger):
            return Ledger(file, read_only=True)
    has_begun = any((path / name).is_file() and (path / name).stat().st_size for name in (METRICS, SUMMARY))
    if has_begun or any(path.glob("checkpoints/*")):
        raise UserError(f"{file}: is missing or empty; bring back a copy of it, or start a new run")
    return None


def refuse_in_use(path: Path) -> None:
    """Raises if another process is at work in a folder; `open` checks again, this only tells a user sooner."""
    FolderLock(path / LOCK).release()


def newest(parent: Path) -> Path:
    """The run in a folder of runs that was at work last."""
    begun = [ledger.parent for ledger in parent.glob(f"*/{LEDGER}")]  # a start that was refused has none
    runs = begun or [config.parent for config in parent.glob(f"*/{CONFIG}")]
    if not runs:
        raise UserError(f"{parent}: has no run to resume; start one without --resume")
    return max(runs, key=lambda run: max(file.stat().st_mtime_ns for file in run.glob("*.json*")))


def plain(value: Any) -> Any:
    """A value as JSON can say it: numbers that are not finite become null, numpy's become Python's."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


@contextmanager
def _owned(path: Path) -> Iterator[FolderLock]:
    """A lock on a folder that goes again if what comes next fails."""
    lock = FolderLock(path / LOCK)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _named(config: Config, path: Path) -> Config:
    return _renamed(config, path.resolve().name)


def _renamed(config: Config, name: str | None) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _name_in(stored: Mapping[str, Any]) -> str | None:
    run = stored.get("run")
    return run.get("name") if isinstance(run, Mapping) else None


def _unused(path: Path) -> Path:
    number = 2
    free = path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _runs_beside(path: Path) -> str:
    names = sorted(config.parent.name for config in path.parent.glob(f"*/{CONFIG}")) if path.parent.is_dir() else []
    return f"; {path.parent} has {', '.join(names[-4:])}" if names else ""


class _LogFile(logging.FileHandler):
    """A run's log, which a full disk cuts short: ledger, metrics and checkpoints are what must not be lost."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self.run = path.parent.parent

    def filter(self, record: logging.LogRecord) -> bool:
        """Several runs of one process keep their records apart."""
        return bool(super().filter(record)) and _at_work.get() in (None, self.run)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _LogLines(logging.Formatter):
    """Lines without the passwords of URLs that libraries put into their messages."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def _log_to(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(exist_ok=True)
        handler = _LogFile(path)
    except OSError as error:
        raise cannot_write(path, error, "then try again") from error
    handler.setFormatter(_LogLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with _logs_lock:
        _open_logs.add(handler)
        logging.captureWarnings(True)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    if logging.getLogger("offbeat").level == logging.NOTSET:
        logging.getLogger("offbeat").setLevel(logging.INFO)
    return handler


def _stop_logging(handler: logging.Handler) -> None:
    with _logs_lock:
        _open_logs.discard(handler)
        logging.captureWarnings(bool(_open_logs))
    for name in LOGGERS:
        logging.getLogger(name).removeHandler(handler)
    handler.close()
