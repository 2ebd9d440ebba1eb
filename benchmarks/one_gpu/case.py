"""One case: a run of an example's configuration on one card, whose trainer is killed once in the middle of a step."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.shapes import SHAPES, Shape
from benchmarks.common.supervised import Supervised, rows, until
from benchmarks.engines.models import random_tensors, write
from benchmarks.one_gpu import coin, small_card
from benchmarks.one_gpu.memory_in_use import MemoryInUse
from benchmarks.report import REPOSITORY
from offbeat.errors import OffbeatError
from offbeat.ledger.ledger import Ledger
from offbeat.rewards.guard import descendants

STEPS = 10
KILL_AFTER = 5
"""Steps before the kill. The checkpoint is of step 4, so the restarted trainer trains step 5 again."""
INTO_STEP_S = 0.3
"""Seconds from the claim of a batch to the kill: the trainer has read the batch, and no step is as short on a GPU."""
START_WITHIN_S, NEXT_WITHIN_S = 300.0, 150.0
LOG_LINES, LINE_CHARACTERS = 15, 300
KEPT = ("logs", "metrics.jsonl", "events.jsonl", "trace.json", "trainer-trace.json", "microbatch.json", "config.json")
"""Files and folders of a run that `--keep` copies, all of them small."""
SHORT = (
    *("--run.name=a", f"--run.steps={STEPS}", "--batch.groups-per-step=8", "--batch.group-size=8"),
    *("--eval.every=0", "--checkpoint.every=4", "--log.console=quiet"),
    "--checkpoint.keep=1",  # in full a checkpoint has 18.5 GB, and the scratch folder may be memory
)
"""Options, besides model and task, by which a run differs from the example, to be short."""
QUICK = (
    *("--rollout.engine=embedded", "--model.device=cpu", "--rollout.slots=16", "--rollout.max-new-tokens=24"),
    *("--run.threads=1", "--batch.groups-per-step=4", "--batch.group-size=4", "--loss.max-logprob-gap=1000"),
)
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
"""Chat template, since the examples have a system message."""
SHARE = re.compile(r"'gpu_memory_utilization': ([\d.]+)")
OUT_OF_MEMORY = re.compile(r"out of (?:\w+ )?memory|OutOfMemory", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """An example, and the card that it is made for."""

    name: str
    example: str
    card_gb: int
    scratch_gb: int
    """Disk space of a run: the model, two checkpoints and a few versions."""

    @property
    def config(self) -> Path:
        return REPOSITORY / "examples" / self.example


CASES = (Case("lora", "gsm8k_lora.toml", 24, 15), Case("full", "gsm8k.toml", 80, 55))


@dataclass(frozen=True)
class Outcome:
    peak_gb: float | None
    """None: there is no GPU."""
    next_step_s: float
    """Seconds from the kill until the row of the next step that was trained."""
    caught_up_s: float
    """Seconds from the kill until the row of the step that was interrupted."""
    first_train_s: float
    """Seconds of training, without generation, in the first step after the restart."""
    is_mid_step: bool
    """Whether the batch was claimed, and its step not yet committed, when the trainer had ended."""
    num_steps: int
    findings: list[str]
    """Rules that the ledger breaks."""
    microbatch_tokens: int | str
    """As measured by the trainer, or else as configured."""
    num_halvings: int
    memory_warnings: list[str]
    """Lines of logs that say that memory ran out."""
    engine_share: float | None
    """As vLLM says in its log."""
    undone_steps: list[int]
    step_s: list[float] = field(default_factory=list)
    """Seconds of each trained step, in the order of their rows."""


@dataclass(frozen=True)
class Engine:
    """The interpreter that has vLLM, and further arguments of its server."""

    python: str
    arguments: Sequence[str]


def write_model(shape: Shape, folder: Path) -> Path:
    """Writes random weights, with a tokenizer that has a chat template."""
    write(shape, random_tensors(shape), folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def play(case: Case, engine: Engine, folder: Path, keep: Path | None, *, quick: bool) -> Outcome:
    """Runs a case below `folder`; its logs are copied to `keep`, if that is given. Whatever it starts has ended when it
    returns or raises."""
    hook = folder / "hook"
    write_hook(hook, engine.python)
    model = write_model(SHAPES["tiny" if quick else "1.5b"], folder / "model")
    problems = folder / "problems.jsonl"
    script = REPOSITORY / "examples" / "word_problems.py"
    subprocess.run([sys.executable, str(script), str(problems)], check=True)
    words = [str(case.config), f"--model.path={model}", "--task.source=file", f"--task.path={problems}", *SHORT]
    words += [f"--task.reward={coin.__file__}:reward", *(QUICK if quick else engine_words(engine, hook))]
    with nullcontext() if quick else MemoryInUse() as memory:
        run = Supervised(folder, *words, environment=environment(case, hook))
        try:
            killed = kill_in_mid_step(run)
            run.finish()
        except (AssertionError, TimeoutError) as error:
            raise OffbeatError(f"{case.name}: {error}\n{log_tails(run)}") from error
        finally:
            end(run)
            if keep is not None:
                copy_records(run.run, keep / case.name)
    return outcome(run.run, killed, None if memory is None else memory.peak_bytes / 1e9)


def write_hook(folder: Path, python: str) -> None:
    """Writes what makes a Python a user of the smaller card, and `folder/python`, which runs `python` with it. Offbeat
    leaves PYTHONPATH out of an engine's environment, so that interpreter has to add to it."""
    folder.mkdir(parents=True)
    shutil.copy(small_card.__file__, folder / "sitecustomize.py")
    path = f'{shlex.quote(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(python)} "$@"\n')
    wrapper.chmod(0o755)


def engine_words(engine: Engine, hook: Path) -> list[str]:
    arguments = [f"--engine.arguments={','.join(engine.arguments)}"] if engine.arguments else []
    return [f"--engine.python={hook / 'python'}", *arguments]


def environment(case: Case, hook: Path) -> dict[str, str]:
    """Returns the variables of the run: the smaller card, and the threads that Offbeat gives trainer and worker each,
    which `Supervised` would set to 1."""
    path = [str(hook), *(os.path.abspath(entry) for entry in sys.path if entry)]
    threads = max(1, (os.cpu_count() or 1) // 2)
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(threads),
        small_card.BYTES: str(case.card_gb * 10**9),
    }


@dataclass(frozen=True)
class Killed:
    next_step_s: float
    caught_up_s: float
    is_mid_step: bool
    row: Mapping[str, Any]
    """Row of metrics.jsonl of the first step after the restart."""


def kill_in_mid_step(run: Supervised) -> Killed:
    """Kills the trainer while it trains the step after `KILL_AFTER`, and waits for the step's row."""
    metrics = run.run / "metrics.jsonl"

    def steps() -> list[dict[str, Any]]:
        assert run.process.poll() is None or run.process.returncode == 0, f"the run ended early: {run.errors}"
        return trained(rows(metrics))

    until(lambda: reaches(steps(), KILL_AFTER), f"step {KILL_AFTER}", START_WITHIN_S)
    # Steps count from 0 in the ledger, so this is the batch of the step after it.
    until(lambda: steps() and batch_state(run.run, KILL_AFTER), f"the batch of step {KILL_AFTER + 1}", NEXT_WITHIN_S)
    time.sleep(INTO_STEP_S)
    num_before, killed_s = len(steps()), time.monotonic()
    run.kill("trainer")
    is_mid_step = batch_state(run.run, KILL_AFTER) == "claimed"
    until(lambda: len(steps()) > num_before, "a step after the kill", NEXT_WITHIN_S)
    next_step_s = time.monotonic() - killed_s
    until(lambda: reaches(steps()[num_before:], KILL_AFTER + 1), f"step {KILL_AFTER + 1}", NEXT_WITHIN_S)
    return Killed(next_step_s, time.monotonic() - killed_s, is_mid_step, steps()[num_before])


def trained(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of trained steps; others are of evaluations."""
    return [row for row in lines if "reward" in row]


def reaches(steps: Sequence[Mapping[str, Any]], step: int) -> bool:
    return any(row["step"] >= step for row in steps)


def batch_state(run: Path, step: int) -> str | None:
    """Returns the state of the batch that was claimed for a step; None before. The ledger is read beside the run."""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        found = ledger.execute("SELECT state FROM batches WHERE step = ? AND state <> 'undone'", (step,)).fetchone()
    return found[0] if found else None


def outcome(run: Path, killed: Killed, peak_gb: float | None) -> Outcome:
    steps, events = trained(rows(run / "metrics.jsonl")), rows(run / "events.jsonl")
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        findings = [str(violation) for violation in ledger.verify().violations]
    configured = json.loads((run / "config.json").read_text())["batch"]["tokens_per_microbatch"]
    measured = run / "microbatch.json"
    engine_log = run / "logs" / "worker-1-engine.log"
    shares = SHARE.findall(engine_log.read_text(errors="replace")) if engine_log.is_file() else []
    return Outcome(
        peak_gb=peak_gb,
        next_step_s=killed.next_step_s,
        caught_up_s=killed.caught_up_s,
        first_train_s=killed.row["time_train_s"],
        is_mid_step=killed.is_mid_step,
        num_steps=max(row["step"] for row in steps),
        findings=findings,
        microbatch_tokens=json.loads(measured.read_text())["tokens"] if measured.is_file() else configured,
        num_halvings=halvings(events, configured),
        memory_warnings=[line for log in sorted((run / "logs").glob("*.log")) for line in memory_lines(log)],
        engine_share=float(shares[-1]) if shares else None,
        undone_steps=[step for event in events if event["event"] == "resume" for step in event["undone_steps"]],
        step_s=[row["seconds"] for row in steps],
    )


def halvings(events: Sequence[Mapping[str, Any]], configured: int | str) -> int:
    """Counts the events that say that micro-batches became smaller. If their size is `configured` as "auto", the first
    event says what was measured."""
    tokens = [event["tokens"] for event in events if event["event"] == "microbatch"]
    tokens = tokens if configured == "auto" else [configured, *tokens]
    return sum(after < before for before, after in pairwise(tokens))


def memory_lines(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if OUT_OF_MEMORY.search(line)]


def log_tails(run: Supervised) -> str:
    """Returns the last lines of the run's logs and events, and last those of its errors."""
    logs = run.run / "logs"
    files = [logs / "supervisor.jsonl", run.run / "events.jsonl", *sorted(logs.glob("*.log")), run.folder / "errors"]
    tails = [[f"--- {file.name}", *_tail(file)] for file in files if file.is_file()]
    return "\n".join(line for tail in tails for line in tail)


def _tail(file: Path) -> list[str]:
    return [line[:LINE_CHARACTERS] for line in file.read_text(errors="replace").splitlines()[-LOG_LINES:]]


def copy_records(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (run / name).is_dir():
            shutil.copytree(run / name, folder / name, dirs_exist_ok=True)
        elif (run / name).is_file():
            shutil.copy(run / name, folder / name)


def end(run: Supervised) -> None:
    """Ends the run's processes. An engine's are found as descendants, since nothing of Offbeat's is in their
    environment; when the supervisor has ended, they are no longer its descendants."""
    pids = descendants(run.process.pid)
    run.end()
    for pid in {*pids, *run.living()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
