"""A run as a Slurm job: a heterogeneous job with a component for each class of nodes, submitted and followed.

The job's script starts one step on each node, so that a node that dies takes no other along: on the training node
`offbeat train`, on all nodes with workers `offbeat node`, which finds the run by the join file in the job's folder.
That folder must be shared by all nodes, as a user's home is; the run's own folder must not be, because of its ledger.
A job whose training node fails is submitted again, or requeued by Slurm if it has one class, and resumes its run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OffbeatError, UserError
from offbeat.files import make_folder, readable_by
from offbeat.launch.cluster import Machine, Placement

MAX_SUBMITTED = 20
"""Jobs that one command submits for a run whose nodes fail; each of them resumes the run."""
ANSWERS_WITHIN_S = 8.0
"""Seconds for Slurm to answer, so that what cannot be is refused within ten."""
LOOK_EVERY_S = 1.0
USABLE = ("idle", "mixed", "allocated", "completing")
PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "SUSPENDED")
ALIVE = (*PENDING, "RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING")
SCRIPT, LOG, JOIN_FILE = "job.sh", "job.log", "join.json"
GRES = re.compile(r"gpu(?::([A-Za-z_][\w.-]*))?(?::(\d+))?")


@dataclass(frozen=True)
class Found:
    """The nodes that Slurm knows and can use, and the names of idle ones."""

    machines: tuple[Machine, ...]
    idle: tuple[str, ...]


def _ask(*words: str) -> str:
    """Runs one of Slurm's commands and returns what it prints."""
    if shutil.which(words[0]) is None:
        raise UserError(f"--on slurm: there is no {words[0]} here; run this on a login node of the Slurm cluster")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise OffbeatError(f"Slurm's {words[0]} has not answered for {ANSWERS_WITHIN_S:.0f} s; try again") from None
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        raise UserError(f"--on slurm: {words[0]} refuses: {why}")
    return done.stdout


def find_machines(partition: str | None) -> Found:
    """Returns the nodes of a partition; None: of the default one."""
    listed = _ask("sinfo", "-h", "-N", "-o", "%N|%f|%G|%c|%T|%P", *(["-p", partition] if partition else []))
    machines, idle = dict[str, Machine](), list[str]()
    for line in listed.splitlines():
        name, features, gres, cores, state, of = (word.strip() for word in line.split("|"))
        if (partition is None and not of.endswith("*")) or name in machines:
            continue
        plain = state.rstrip("*~#!%$@^-").lower()
        if plain not in USABLE or state.endswith("*"):  # a star: it does not answer
            continue
        gpu = GRES.search(gres)
        kind = (gpu and gpu[1]) or (features.split(",")[0] if features != "(null)" else "") or "cpu"
        machines[name] = Machine(name, kind, int(gpu[2] or 1) if gpu else 0, int(cores.rstrip("+")))
        if plain == "idle":
            idle.append(name)
    return Found(tuple(machines.values()), tuple(idle))


@dataclass(frozen=True)
class Job:
    """A job to submit."""

    name: str
    folder: Path
    """Folder of the script, the log and the join file."""
    run: Path
    placement: Placement
    train: Sequence[str]
    """Words of `offbeat train` that describe the run: its configuration's file and keys."""
    node_words: Sequence[str]
    """Keys of the configuration for the nodes."""
    options: Sequence[str]
    """Further options of sbatch, the same for each component."""


def components(placement: Placement) -> list[tuple[Machine, int]]:
    """Returns the classes of a job, that of the training node first: its smallest machine, and the number of nodes."""
    counts = Counter(machine.kind for machine in placement.machines)
    found = []
    for kind, count in counts.items():
        of_kind = [machine for machine in placement.machines if machine.kind == kind]
        cores, num_gpus = min(m.num_cores for m in of_kind), min(m.num_gpus for m in of_kind)
        found.append((Machine(of_kind[0].name, kind, num_gpus, cores), count))
    return found


HEAD = """
set -u
cd {here} || exit
rm -f {join_file}
export OFFBEAT_SCRATCH=${{OFFBEAT_SCRATCH:-${{TMPDIR:-/tmp}}/offbeat-$(id -u)-{name}}}

if [ -f {config} ]; then
  train=({resumed})
else
  train=({fresh})
fi
"""
KEEP = """
# One step for one node, started again until the run is over: the node may die and come back.
keep() {{
  local host=$1
  shift
  set -- "$@" --name "$host" --dir "$OFFBEAT_SCRATCH-$host" --logs {nodes}/"$host"
  until srun --nodelist="$host" --nodes=1 --ntasks=1 "$@"; do
    echo "node $host: its step has ended; starting it again"
    sleep 5
  done
}}
"""
TRAIN = """
srun --nodelist="${{hosts0[0]}}" --nodes=1 --ntasks=1 {step} "${{train[@]}}" {shared} &
trainer=$!
trap 'kill -TERM "$trainer"' INT TERM
"""
NODES = """
for host in "${{{hosts}}}"; do
  keep "$host" {step} {node} &
done
"""
FOOT = """
wait "$trainer"
status=$?
while kill -0 "$trainer" 2>/dev/null; do  # a signal ends the wait, but not the run
  wait "$trainer"
  status=$?
done
exit "$status"
"""


def script(job: Job) -> str:
    """Returns the text of the job's script."""
    parts, join_file = components(job.placement), str(job.folder / JOIN_FILE)
    options = ["#!/bin/bash", f"# {job.name}: written by offbeat train --on slurm"]
    options += [f"#SBATCH --job-name=offbeat-{job.name} --output={job.folder / LOG} --open-mode=append"]
    for number, (machine, count) in enumerate(parts):
        options += ["#SBATCH hetjob"] if number else []
        options += [f"#SBATCH --nodes={count} --ntasks-per-node=1 --cpus-per-task={machine.num_cores}"]
        again = "--requeue" if len(parts) == 1 else "--no-requeue"  # Slurm would requeue the first component alone
        options += [f"#SBATCH --no-kill {again} {_class_options(machine)}".rstrip()]
        options += [f"#SBATCH {option}" for option in job.options]
    offbeat = [sys.executable, "-m", "offbeat"]
    here = job.placement.workers_on(job.placement.trains)
    head = HEAD.format(
        here=shlex.quote(os.getcwd()),
        join_file=shlex.quote(join_file),
        name=shlex.quote(job.name),
        config=shlex.quote(str(job.run / "config.json")),
        resumed=shlex.join([*offbeat, "train", "--resume", str(job.run)]),
        fresh=shlex.join([*offbeat, "train", *job.train]),
    )
    body = []
    if len(job.placement.machines) > 1:
        body.append(KEEP.format(nodes=shlex.quote(str(job.folder / "nodes"))).strip("\n") + "\n")
    for number, (machine, _) in enumerate(parts):
        nodes = "SLURM_JOB_NODELIST" + (f"_HET_GROUP_{number}" if len(parts) > 1 else "")
        step = [f"--het-group={number}"] if len(parts) > 1 else []
        step += [f"--cpus-per-task={machine.num_cores}", *_gpu_options(machine)]
        body.append(f'mapfile -t hosts{number} < <(scontrol show hostnames "${nodes}")')
        if not number:
            shared = ["--on", "local", "--workers-here", str(here), "--join-file", join_file]
            body.append(TRAIN.format(step=shlex.join(step), shared=shlex.join(shared)).strip("\n"))
        others = [m for m in job.placement.machines[1:] if m.kind == machine.kind]
        if others:
            node = [*offbeat, "node", "--join-file", join_file, "--trust-coordinator"]
            node += ["--workers", str(job.placement.workers_on(others[0])), *job.node_words]
            hosts = "hosts0[@]:1" if not number else f"hosts{number}[@]"
            body.append(NODES.format(hosts=hosts, step=shlex.join(step), node=shlex.join(node)).strip("\n"))
    return "\n".join([*options, head, "\n".join(body), FOOT.rstrip()]) + "\n"


def _gpu_options(machine: Machine) -> list[str]:
    return [f"--gpus-per-node={machine.kind}:{machine.num_gpus}"] if machine.num_gpus else []


def _class_options(machine: Machine) -> str:
    """Returns the options of sbatch that ask for nodes of a class: by the type of its GPUs, or by its feature."""
    if machine.num_gpus:
        return _gpu_options(machine)[0]
    return f"--constraint={machine.kind}" if machine.kind != "cpu" else ""


def submit(job: Job) -> str:
    """Writes the job's files, submits it, and returns its number."""
    try:
        with readable_by("private"):
            make_folder(job.folder.parent)
            make_folder(job.folder)
    except OSError as error:
        raise UserError(f"{job.folder} cannot be created: {error.strerror}; start from another folder") from error
    file = job.folder / SCRIPT
    file.write_text(script(job))
    file.chmod(0o700)
    return _ask("sbatch", "--parsable", str(file)).strip().partition(";")[0]


def state_of(number: str) -> tuple[str, str, int]:
    """Returns a job's state, Slurm's reason for it, and the exit status of its script."""
    line = _ask("scontrol", "show", "job", number, "-o").splitlines()[0]
    words = dict(word.partition("=")[::2] for word in line.split())
    status, _, by_signal = words.get("ExitCode", "0:0").partition(":")
    return (
        words.get("JobState", "UNKNOWN"),
        words.get("Reason", ""),
        int(status) or (128 + int(by_signal) if int(by_signal or 0) else 0),
    )


def follow(job: Job, number: str, say: Callable[[str], None]) -> int:
    """Prints what the job prints until it has ended; returns its exit status. A job that ended because a node failed is
    submitted again. Asked to stop (Ctrl-C, SIGTERM), stops
    the run, which ends with a checkpoint; asked twice, leaves the job alone."""
    log, at, told, asked = job.folder / LOG, 0, "", list[signal.Signals]()
    before = {
        n: signal.signal(n, lambda got, _: asked.append(signal.Signals(got))) for n in (signal.SIGINT, signal.SIGTERM)
    }
    num_passed, num_submitted = 0, 1
    try:
        while True:
            state, reason, status = state_of(number)
            at = _print_new(log, at)
            if state in PENDING and reason not in (told, "None", ""):
                told = reason
                say(f"job {number} waits: {reason}")
            if state == "NODE_FAIL" and not asked and num_submitted < MAX_SUBMITTED:
                before_it, number, num_submitted = number, submit(job), num_submitted + 1
                say(f"job {before_it} has ended, because a node failed; submitted again as {number}")
            elif state not in ALIVE:
                if state != "COMPLETED":
                    say(f"job {number} has ended: {state}, exit status {status}; its run: {job.run}")
                return status if state == "COMPLETED" else status or 1
            if len(asked) > 1:
                say(f"job {number} goes on; offbeat train --on slurm no longer follows it")
                return 128 + asked[-1]
            if len(asked) > num_passed:
                num_passed = len(asked)
                say(f"stopping job {number}; once more leaves it alone")
                if state in PENDING:
                    _ask("scancel", number)
                else:
                    _ask("scancel", "--batch", "--signal=INT", number)
            time.sleep(LOOK_EVERY_S)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _print_new(log: Path, at: int) -> int:
    if not log.is_file():
        return at
    with log.open("rb") as file:
        file.seek(at)
        new = file.read()
    sys.stdout.write(new.decode(errors="replace"))
    sys.stdout.flush()
    return at + len(new)
