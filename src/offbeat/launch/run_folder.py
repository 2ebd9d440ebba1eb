"""A run's folder: its lock, and the files that are written during the run.

    config.json    all configuration keys        secrets.json  passwords        ledger.sqlite  weights/  checkpoints/
    metrics.jsonl  one row per step              events.jsonl  events           trace.json     timed spans
    logs/          log records of all modules    summary.json  the result       lock           its holder

One process works in a folder at a time. Rows of metrics and events are never removed. Each row carries its `attempt`,
which is 1 for the first start and one more for each resume; `offbeat.observability.metric_files` finds the rows that
are still valid.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from offbeat.config import Change, Config, fixed_changes, free_changes, load, resolved, secrets
from offbeat.config.explain import show
from offbeat.config.schema import RunConfig
from offbeat.errors import OffbeatError, UserError
from offbeat.files import Appender, cannot_write, fsync_file, make_folder, readable_by, write_atomic
from offbeat.launch.engine_choice import AUTO, with_engine
from offbeat.net import shown
from offbeat.observability.metric_files import read_events
from offbeat.observability.trace import Trace

if TYPE_CHECKING:
    from offbeat.ledger.ledger import Ledger

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderInUse(UserError):
    """Another process works in a folder."""


class FolderLock:
    """Lets one process at a time work in a folder; held from construction until `release`.

    The lock is the kernel's (flock), so it ends with the process that holds it; forked children do not hold it. The
    lock file names this process.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(
                f"{path.parent}: cannot be written: {error.strerror}; choose another folder (run.dir or --dir)"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FolderInUse(
                    f"{path.parent} is in use by {_holder(path)}; stop that process or wait until it ends"
                ) from error
            raise UserError(
                f"{path.parent}: its file system cannot lock files ({error.strerror}); choose another folder (run.dir "
                "or --dir)"
            ) from error
        with contextlib.suppress(OSError):  # on a full disk, the lock holds but names no holder
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written its name yet
        return "another process"


def _release_in_child() -> None:
    """Closes a forked child's copies of its parent's locks; the parent keeps its locks."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


LEDGER, CONFIG, METRICS, EVENTS, TRACE, SUMMARY, ADDRESS, LOCK = (
    "ledger.sqlite",
    "config.json",
    "metrics.jsonl",
    "events.jsonl",
    "trace.json",
    "summary.json",
    "serve.json",
    "lock",
)
TRAINER_ID = "trainer.id"
"""File with the random id of the run's own trainer; `offbeat.trainer.checkpoint` writes it."""
CHECK_WITHIN_S = 60.0
"""Longest time for which a resume searches the ledger for damaged pages; enough to read about ten gigabytes."""
MAX_NAMED = 4
"""Largest number of other runs that an error names."""
LOGGERS = ("offbeat", "py.warnings")
"""Loggers whose records go to logs/; the root logger belongs to the calling program."""
_current_run: ContextVar[Path | None] = ContextVar("current_run", default=None)
"""Folder of the run to which the current code belongs, for its log file; None in threads of torch or engines."""
_open_logs: set[logging.Handler] = set()
_logs_lock = threading.Lock()


class RunFolder:
    """A run's locked folder, from `create` or `open`; close it, or use it in a `with` statement."""

    def __init__(self, path: Path, config: Config, lock: FolderLock):
        self.path, self.config, self._lock = path, config, lock
        self._is_new, self._has_trained = False, False
        self._config_before: Config | None = None
        """Configuration from before a resume, to be restored if the resume is refused; None for a new run."""
        with ExitStack() as stack:
            stack.enter_context(readable_by(config.run.access))  # for all files made during the run
            self._metrics = Appender(path / METRICS)
            self._events = Appender(path / EVENTS)
            self.trace = Trace(path / TRACE)
            events = read_events(path / EVENTS)
            self._last_events = {event["event"]: event for event in events}
            latest = max((event.get("attempt", 0) for event in events), default=0)
            self.attempt = max(1, latest + has_begun(path))
            """Number of this start of the run. Earlier starts that left nothing of value (`has_begun`) are not
            counted."""
            self._handler = _log_to(path / "logs" / "offbeat.log")
            self._access = stack.pop_all()
        self._before = _current_run.get()
        _current_run.set(path)
        self._start_s = time.monotonic()

    @classmethod
    def create(cls, config: Config, rows: Path | None = None, *, from_python: bool = False) -> Self:
        """Creates the folder of a new run, named by `run.name` or the current time; refuses a name in use. `rows` is a
        folder with data for tasks; its files are copied into the run's folder, and the tasks then read the copies.
        `from_python`: whether a Python program starts the run, for errors.
        """
        parent, name = Path(config.run.dir), config.run.name
        path = parent / name if name else _unused(parent / time.strftime("%Y%m%d-%H%M%S"))
        try:
            with readable_by(config.run.access):
                make_folder(path)
        except OSError as error:
            raise UserError(
                f"run.dir = {show(config.run.dir)}: {path} cannot be created: {error.strerror}; choose another run.dir"
            ) from error
        refuse_used(path, from_python=from_python)
        with _owned(path) as lock:
            refuse_used(path, from_python=from_python)  # again, under the lock
            for file in (
                *path.glob(f"{LEDGER}*"),
                path / SUMMARY,
            ):  # left by a run that never began, perhaps with other keys
                file.unlink(missing_ok=True)
            config = _renamed(config, path.resolve().name)
            if rows is not None:
                config = _with_rows_in(config, rows, path / rows.name)
            # First, because a folder without config.json is not a run and its name could not be used again.
            _write_config(path, config, "then start it again")
            if rows is not None:
                _copy_rows(rows, path / rows.name, config.run.access)
            folder = cls(path, config, lock)
            folder._is_new = True
            folder.event("start", pid=os.getpid(), folder=os.getcwd())
        return folder

    @classmethod
    def open(cls, path: Path, config: Config | None = None) -> Self:
        """Opens a run's folder to resume it. `config` may differ from config.json in free keys (those that a resume may
        change); None: use config.json."""
        from offbeat.ledger.migrations import upgrade

        stored_config(path)
        with _owned(path) as lock:
            stored = stored_config(path)
            before = load(path / CONFIG)
            config = check_resumable(path, config or before)
            upgrade(path / LEDGER)
            if (ledger := _existing_ledger(path)) is not None:
                with ledger:
                    ledger.check_pages(CHECK_WITHIN_S)
            folder = cls(path, config, lock)
            folder._config_before = before
            folder.event("reopen", pid=os.getpid(), folder=os.getcwd())
            folder._change_config(stored, config)
        return folder

    def _change_config(self, stored: Mapping[str, Any], config: Config) -> None:
        _write_config(self.path, config)
        changes = [(change.key, change.old, change.new) for change in free_changes(stored, config)]
        if (before := _name_in(stored)) != config.run.name:
            changes.append(("run.name", before, config.run.name))
        for key, old, new in changes:
            self.event("config_change", key=key, old=old, new=new)

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

    @property
    def events_file(self) -> Path:
        return self.path / EVENTS

    def metrics(self, row: dict[str, Any]) -> None:
        """Appends a step's row to metrics.jsonl; numbers that are not finite become null."""
        assert "step" in row, f"a metrics row without its step: {row}"
        self._has_trained = True
        self._metrics.line(json.dumps(plain({**row, "attempt": self.attempt})))
        self.trace.flush()

    def event(self, kind: str, **fields: Any) -> None:
        """Appends an event to events.jsonl, with wall-clock time and seconds since the start of this attempt."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        head = {"time": when, "seconds": round(time.monotonic() - self._start_s, 3), "attempt": self.attempt}
        row = plain({"event": kind, **head, **fields})
        self._events.line(shown(json.dumps(row)))
        self._last_events[kind] = row

    def last_event(self, kind: str) -> dict[str, Any] | None:
        """Returns the latest event of `kind` in any attempt; None if there is none."""
        return self._last_events.get(kind)

    def summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json, replacing an earlier one."""
        _replace(self.path / SUMMARY, plain(summary))

    def close(self) -> None:
        """Closes all files and releases the lock, even if closing one of them fails."""
        with ExitStack() as stack:
            stack.callback(self._access.close)
            stack.callback(self._lock.release)
            for file in (self._metrics, self._events, self.trace):
                stack.callback(file.close)
            stack.callback(_stop_logging, self._handler)
            _current_run.set(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the folder. If the run was refused or interrupted before its first row of metrics, undoes the start:
        removes the folder of a new run, so that its name can be used again, or restores the earlier configuration of a
        resumed run."""
        is_refused = isinstance(error, (UserError, KeyboardInterrupt)) and not self._has_trained
        try:
            if is_refused and self._is_new:  # before the lock is released, or another run might begin in between
                discard_unbegun(self.path)
            elif is_refused and self._config_before is not None:
                self._change_config(resolved(self.config), self._config_before)
            self.close()
        except OffbeatError:
            if error is None:  # otherwise the error that ended the run matters more
                raise


def _with_rows_in(config: Config, before: Path, now: Path) -> Config:
    """Returns the configuration with changed paths of tasks: a file in folder `before` becomes the file of the same
    name in folder `now`."""
    tasks = [
        task.model_copy(update={"path": str(now / file.name)})
        if (file := Path(getattr(task, "path", ""))).parent == before
        else task
        for task in config.task
    ]
    return config.model_copy(update={"task": tasks})


def _copy_rows(source: Path, target: Path, access: str) -> None:
    for file in source.iterdir():
        copy = target / file.name
        try:
            with readable_by(access):
                target.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
                fsync_file(copy)
        except OSError as error:
            raise cannot_write(copy, error, "then start it again") from error


def _write_config(path: Path, config: Config, then: str = "then resume the run") -> None:
    """Writes secrets to secrets.json, and then config.json without them; a failure in between loses no secret."""
    stated = resolved(config)
    with readable_by(config.run.access):
        try:
            secrets.save(path / secrets.SECRETS, stated)
        except OSError as error:
            raise cannot_write(path / secrets.SECRETS, error, then) from error
        _replace(path / CONFIG, secrets.shown_value(stated), then)


def _replace(path: Path, content: Any, then: str = "then resume the run") -> None:
    try:
        write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error, then) from error


def refuse_used(path: Path, *, from_python: bool = False) -> None:
    """Raises `UserError` if a folder holds a run that has begun, or other files. The folder of a run that was killed
    before it began may be reused. `from_python`: whether the error names arguments of `offbeat.train`, not options of
    the command line."""
    if (path / CONFIG).is_file():
        if has_begun(path):
            resume, name = (f'resume="{path}"', "name=") if from_python else (f"--resume {path}", "run.name")
            raise UserError(f"{path}: this run exists; continue it with {resume}, or choose another {name}")
    elif path.is_dir() and any(entry.name != LOCK for entry in path.iterdir()):
        raise UserError(f"{path}: this folder exists, but holds no run; choose another run.name or run.dir")


def has_begun(path: Path) -> bool:
    """Returns whether a run's folder holds anything of value: a published version or a group in the ledger, a row of
    metrics, or a checkpoint. A ledger that cannot be read counts as valuable."""
    if any(path.glob("checkpoints/*")) or ((path / METRICS).is_file() and (path / METRICS).stat().st_size):
        return True
    if not (path / LEDGER).is_file() or not (path / LEDGER).stat().st_size:
        return False
    from offbeat.ledger.errors import NoLedger
    from offbeat.ledger.ledger import Ledger

    try:
        with Ledger(path / LEDGER, read_only=True) as ledger:
            return ledger.latest_version() is not None or ledger.cursor().last is not None
    except NoLedger:
        return False
    except (OffbeatError, OSError):
        return True


def has_finished(path: Path) -> bool:
    """Returns whether a run's latest attempt has trained the last step and ended."""
    latest = [event for event in read_events(path / EVENTS) if event["event"] in ("start", "reopen", "end")][-1:]
    return any(event.get("finished") is True for event in latest)


def discard_unbegun(path: Path) -> None:
    """Removes the folder of a run that never began; leaves every other folder alone."""
    if all((path / name).is_file() for name in (CONFIG, EVENTS, LOCK)) and not has_begun(path):
        shutil.rmtree(path, ignore_errors=True)


def stored_config(path: Path) -> dict[str, Any]:
    """Returns the content of config.json in run folder `path`, with its secrets put back in."""
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run{_runs_beside(path)}")
    try:
        stored = json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: holds no run (it has no {CONFIG}); give a run's folder") from None
    except ValueError as error:
        raise UserError(f"{path / CONFIG}: is damaged ({error}); restore it or start a new run") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path / CONFIG}: is damaged (not a JSON object); restore it or start a new run")
    return secrets.restored(stored, secrets.load(path / secrets.SECRETS))


def check_resumable(path: Path, config: Config) -> Config:
    """Returns `config` with `run.name` set to the name of the run's folder, which may have been copied or moved. If
    `rollout.engine` is "auto", it is replaced by the engine that the run has. Raises `UserError` if a key that is fixed
    for the run differs from config.json or from the ledger, if `run.steps` is below the steps that are trained already,
    or if the ledger is lost."""
    stored = stored_config(path)
    if config.rollout.engine == AUTO:
        config = with_engine(config, *_engine_in(stored))
    is_own_name = config.run.name in (None, path.name, path.resolve().name)
    changes = fixed_changes(stored, _renamed(config, _name_in(stored)) if is_own_name else config)
    _refuse_changes(changes, f"the run {path} has", "leave it as it was")
    config = _renamed(config, path.resolve().name)
    rules, num_trained = _in_ledger(path)
    if config.run.steps < num_trained:
        raise UserError(
            f"run.steps = {config.run.steps}: {path} has trained {num_trained} steps already; set it above "
            f"{num_trained} to continue the run"
        )
    if rules is not None:  # the ledger decides, even if config.json was edited
        changes = fixed_changes(rules, _renamed(config, _name_in(rules)))
        _refuse_changes(changes, f"{path / LEDGER} was begun with", f"set it back in {path / CONFIG}")
    return config


def _refuse_changes(changes: list[Change], whose: str, remedy: str) -> None:
    if changes:
        key, old, new = changes[0]
        more = f"; other fixed keys that differ: {len(changes) - 1}" if len(changes) > 1 else ""
        raise UserError(
            f"{key} = {show(new)}: {whose} {show(old)}, and this key is fixed for the life of a run; {remedy}, or "
            f"start a new run{more}"
        )


def _in_ledger(path: Path) -> tuple[dict[str, Any] | None, int]:
    """Returns the run's fixed keys as recorded in its ledger, and the number of trained steps. Returns None and 0 if
    there is no ledger, or if the ledger must be upgraded first."""
    from offbeat.ledger.migrations import is_old

    if is_old(path / LEDGER) or (ledger := _existing_ledger(path)) is None:
        return None, 0
    with ledger:
        latest = ledger.latest_version()
        return ledger.recorded_fixed_keys(), latest.step if latest else 0


def _existing_ledger(path: Path) -> Ledger | None:
    """Opens the ledger of a run to resume, read-only. Raises `UserError` if the ledger is lost, instead of making an
    empty one. Returns None if the run failed before it began, for example on a full disk; a resume then begins it."""
    from offbeat.ledger.errors import NoLedger
    from offbeat.ledger.ledger import Ledger  # imported late: a refused start then does not wait for numpy

    file = path / LEDGER
    if file.is_file() and file.stat().st_size:
        with suppress(NoLedger):
            return Ledger(file, read_only=True)
    has_begun = any((path / name).is_file() and (path / name).stat().st_size for name in (METRICS, SUMMARY))
    if has_begun or any(path.glob("checkpoints/*")):
        raise UserError(f"{file}: is missing or empty; restore it from a backup, or start a new run")
    return None


def refuse_in_use(path: Path) -> None:
    """Raises `FolderInUse` if another process works in a run's folder. `RunFolder.open` repeats this early check."""
    FolderLock(path / LOCK).release()


def refuse_trainer_elsewhere(path: Path) -> None:
    """Raises `UserError` if the checkpoints of a run to resume are not in its folder, but in that of a trainer that
    joined the run. This is an early check, before anything is changed; later, the ledger checks every trainer that
    starts."""
    from offbeat.ledger.batches import latest_trainer
    from offbeat.ledger.migrations import is_old

    if any(path.glob("checkpoints/*")) or is_old(path / LEDGER) or (ledger := _existing_ledger(path)) is None:
        return
    with ledger:
        trainer = latest_trainer(ledger)
    home = (path / TRAINER_ID).read_text() if (path / TRAINER_ID).is_file() else None
    if trainer is not None and trainer.checkpoint_step is not None and trainer.home != home:
        raise UserError(
            f"{path}: its checkpoints are with the trainer that joined it ({trainer}); continue with offbeat serve "
            f"--resume {path}, and start that trainer again with the same --dir; or start the training over with "
            "--from-scratch, which undoes all steps"
        )


def named_run(given: str, parent: Path) -> Path:
    """Returns the folder of the run `given`: a path or, if this path does not exist, the name of a run in `parent`."""
    is_name = len(Path(given).parts) == 1 or (parent / given).is_dir()
    return parent / given if is_name and not Path(given).exists() else Path(given)


def newest_run(parent: Path) -> Path:
    """Returns the most recently active run in folder `parent`."""
    begun = [ledger.parent for ledger in parent.glob(f"*/{LEDGER}")]  # a refused start has no ledger
    runs = begun or [config.parent for config in parent.glob(f"*/{CONFIG}")]
    if not runs:
        raise UserError(f"{parent}: holds no run yet; offbeat train starts one")
    return max(runs, key=lambda run: max((file.stat().st_mtime_ns for file in run.glob("*.json*")), default=0))


def started_in(run: Path) -> Path:
    """Returns the folder in which a run was last started or resumed; relative paths in its configuration begin there.
    Leaves out folders from which `run.dir` does not lead to the run, as after a copy to another machine. If no folder
    is left, returns the current folder."""
    folders = [event["folder"] for event in read_events(run / EVENTS) if isinstance(event.get("folder"), str)]
    parent = Path(stored_config(run).get("run", {}).get("dir", RunConfig().dir))
    for folder in map(Path, reversed(folders)):
        with suppress(OSError):
            if (folder / parent).samefile(run.absolute().parent):
                return folder
    return Path.cwd()


def trained_lengths(folder: str, which: Literal["prompt", "answer"]) -> list[int]:
    """Returns the number of tokens of each training prompt, or of each training answer, of a run. Prompts of pruned
    trajectories are left out, because they are no longer stored."""
    file = Path(folder) / LEDGER
    if not file.is_file():
        raise UserError(f"run = {folder!r}: holds no ledger; give a run's folder")
    from offbeat.ledger.ledger import Ledger
    from offbeat.ledger.records import Purpose

    lengths = []
    with Ledger(file, read_only=True) as ledger, ledger.naming_damage():
        for row, trajectory in ledger.walk_trajectories():
            if row.purpose == Purpose.TRAIN and which == "answer":
                lengths.append(row.num_tokens)
            elif row.purpose == Purpose.TRAIN and trajectory is not None:
                lengths.append(len(trajectory.prompt))
    return lengths


def plain(value: Any) -> Any:
    """Converts a value for JSON: numbers that are not finite become null, numpy scalars become Python numbers."""
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
    """Locks a folder and yields the lock; releases it only if the block fails."""
    lock = FolderLock(path / LOCK)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _renamed(config: Config, name: str | None) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _name_in(stored: Mapping[str, Any]) -> str | None:
    run = stored.get("run")
    return run.get("name") if isinstance(run, Mapping) else None


def _engine_in(stored: Mapping[str, Any]) -> tuple[str, int | None]:
    """Returns the engine in a stored configuration, and its number of workers."""
    rollout = stored.get("rollout") or {}
    return rollout.get("engine", AUTO), rollout.get("workers")


def _unused(path: Path) -> Path:
    number = 2
    free = path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _runs_beside(path: Path) -> str:
    names = sorted(config.parent.name for config in path.parent.glob(f"*/{CONFIG}")) if path.parent.is_dir() else []
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"; {path.parent} has {', '.join(names[-MAX_NAMED:])}{more}" if names else ""


class _LogFile(logging.FileHandler):
    """A run's log file. Write errors, as on a full disk, are ignored, because they must not end the run."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self.run = path.parent.parent

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to keep a record; False for records of other runs in the same process."""
        return bool(super().filter(record)) and _current_run.get() in (None, self.run)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _LogLines(logging.Formatter):
    """Formatter that removes passwords from URLs, because libraries put such URLs into their messages."""

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
