"""One run, calm or attacked: the processes that a user would start, honest workers, and perhaps the adversaries.

Coordinator and trainer are those of `offbeat train`, each a process of its own. The run always ends, whatever the
attack does: every wait has a deadline, a run that takes too much memory is given up, and all processes that were
started are ended. Afterwards the figures are read from the ledger.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks import report
from benchmarks.common.load import TICKS_PER_S
from benchmarks.common.supervised import Supervised, until
from benchmarks.malice.account import Account, account
from benchmarks.malice.adversaries import chosen, num_tokens
from benchmarks.malice.plans import AttackPlan, HonestPlan
from offbeat.errors import DeadlineError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role

HONEST = ("honest-1", "honest-2", "honest-3", "honest-4")
NUM_SLOTS, STEP_S = 6, 0.06
"""Of each honest worker: 17 answers a second in all, for a third of a core."""
MAX_NEW_TOKENS = 24
GROUPS_PER_STEP, GROUP_SIZE = 8, 4
SETTINGS = (
    *("--run.name=a", "--run.steps=1000000", "--run.threads=1", "--rollout.workers=0", "--log.console=quiet"),
    *(f"--batch.groups-per-step={GROUPS_PER_STEP}", f"--batch.group-size={GROUP_SIZE}", "--checkpoint.every=0"),
    *(f"--rollout.max-new-tokens={MAX_NEW_TOKENS}", "--rollout.max-prompt-tokens=32", "--rollout.lease-s=6"),
    *("--schedule.mode=overlap", "--optimizer.lr=1e-4", "--eval.every=0"),
)
TASK = """[[task]]
source = "arithmetic"
reward = "benchmarks.malice.reward:share_of_digits"
"""
TOKEN_MINUTES = 30.0
WARM_STEPS = 2
START_WITHIN_S, READY_WITHIN_S, END_WITHIN_S = 120.0, 90.0, 30.0
LOOK_EVERY_S = 0.25
MAX_BYTES = 4_000_000_000
"""Memory of the coordinator above which the run is given up, before the machine runs out of memory."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    is_attacked: bool
    seconds: float
    """Of the window."""
    peak_bytes: int
    """The coordinator's peak memory."""
    honest_share: float
    """Share of one core that all honest workers together used within the window."""
    coordinator_share: float
    account: Account
    adversaries: list[dict[str, Any]] = field(default_factory=list)
    honest_errors: dict[str, str] = field(default_factory=dict)
    """Reasons why honest workers ended before the run, by worker."""
    ended: str = ""
    """Reason why the run itself ended early; empty if it did not."""

    @property
    def honest_tokens_per_s(self) -> float:
        return self.account.honest_tokens / self.seconds

    def told(self) -> dict[str, Any]:
        return {**asdict(self), "honest_tokens_per_s": round(self.honest_tokens_per_s, 1)}


class Watched:
    """The coordinator's process, observed from outside, also after restarts."""

    def __init__(self, run: Supervised):
        self._run = run
        self.peak_bytes = 0
        self._cpu_s: dict[int, float] = {}

    def look(self) -> None:
        pid = self._run.pid("coordinator")
        if pid is None:
            return
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            self.peak_bytes = max(self.peak_bytes, 1024 * kilobytes)
            self._cpu_s[pid] = cpu_s(pid)

    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())


def cpu_s(pid: int) -> float:
    """CPU seconds that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Child:
    """A child process with which we exchange lines of JSON."""

    def __init__(self, name: str, folder: Path):
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.malice.{name}"],
                cwd=report.REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # then its next line is missing, which is told
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def hear(self, within_s: float) -> Any:
        """Returns its next line; None if it ends or stays silent."""
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def cpu_s(self) -> float:
        with suppress(OSError):
            return cpu_s(self.process.pid)
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def play(
    folder: Path, model: Path, *, is_attacked: bool, seconds: float, seed: int, titles: Collection[str] = ()
) -> Outcome:
    """Starts a run, lets it work for a window of so many seconds, and ends it; `titles` are those of the adversaries,
    all of them where none is named."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(TASK)
    with ExitStack() as stack:
        workers = stack.enter_context(Child("honest", folder))
        enemies = stack.enter_context(Child("attack", folder)) if is_attacked else None
        run = Supervised(folder, "run.toml", *SETTINGS, f"--model.path={model}", f"--run.seed={seed}")
        stack.callback(end, run)
        url = f"http://127.0.0.1:{run.port()}"
        tokens = _tokens(run.run / "ledger.sqlite", len(HONEST) + (num_tokens(chosen(titles)) if is_attacked else 0))
        own = dict(zip(HONEST, tokens, strict=False))
        workers.tell(asdict(HonestPlan(url, str(folder / "honest"), own, NUM_SLOTS, STEP_S)))
        if enemies is not None:
            aim = AttackPlan(
                url=url,
                folder=str(folder / "enemies"),
                honest=list(HONEST),
                used_token=own[HONEST[0]],
                titles=list(titles),
                tokens=tokens[len(HONEST) :],
                seconds=seconds,
                seed=seed,
            )
            enemies.tell(asdict(aim))
        return _window(run, workers, enemies, seconds)


def _window(run: Supervised, workers: Child, enemies: Child | None, seconds: float) -> Outcome:
    ledger, watched = run.run / "ledger.sqlite", Watched(run)
    until(lambda: _num_trained(ledger) >= WARM_STEPS, f"step {WARM_STEPS} of {run.folder}", START_WITHIN_S)
    adversaries = enemies.hear(READY_WITHIN_S) if enemies is not None else []
    if adversaries is None:
        raise DeadlineError(
            f"the adversaries could not join within {READY_WITHIN_S:.0f} s; see {run.folder}/attack.log"
        )
    watched.look()
    coordinator_s, honest_s = watched.cpu_s(), workers.cpu_s()
    since, start_s, ended = time.time(), time.monotonic(), ""
    if enemies is not None:
        enemies.tell("begin")
    while (elapsed_s := time.monotonic() - start_s) < seconds:
        time.sleep(min(LOOK_EVERY_S, seconds - elapsed_s))
        watched.look()
        ended = ended or _why_ended(run, watched)
    coordinator_s, honest_s = watched.cpu_s() - coordinator_s, workers.cpu_s() - honest_s
    now = time.time()
    if enemies is not None:
        adversaries = enemies.hear(END_WITHIN_S) or [{**told, "broken": "did not end"} for told in adversaries]
    workers.hang_up()
    errors = workers.hear(END_WITHIN_S)
    end(run)
    return Outcome(
        is_attacked=enemies is not None,
        seconds=elapsed_s,
        peak_bytes=watched.peak_bytes,
        honest_share=honest_s / elapsed_s,
        coordinator_share=coordinator_s / elapsed_s,
        account=account(ledger, HONEST, [told["worker"] for told in adversaries if told["forges"]], since, now),
        adversaries=adversaries,
        honest_errors={"all": "did not end"} if errors is None else errors,
        ended=ended,
    )


def _tokens(ledger: Path, count: int) -> list[str]:
    with Ledger(ledger) as opened:
        return [opened.issue_token(Role.ROLLOUT, TOKEN_MINUTES) for _ in range(count)]


def _num_trained(ledger: Path) -> int:
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        return db.execute("SELECT COUNT(*) FROM batches WHERE state = 'trained'").fetchone()[0]


def _why_ended(run: Supervised, watched: Watched) -> str:
    """Returns why the run is over; empty while it continues. Ends a run that takes too much memory."""
    if watched.peak_bytes > MAX_BYTES:
        run.end()
        return f"given up: the coordinator had {watched.peak_bytes / 1e9:.1f} GB"
    if run.process.poll() is None:
        return ""
    return (run.errors.splitlines() or [f"ended with status {run.process.returncode}"])[-1]


def end(run: Supervised) -> None:
    """Ends a run at once, with all of its processes: what its ledger holds must be whole all the same."""
    run.end()
    for pid in run.living():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not run.living(), f"the end of {run.folder}", END_WITHIN_S)
