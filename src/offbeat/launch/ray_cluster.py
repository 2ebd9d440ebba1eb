"""A run on a Ray cluster: an actor on each node starts `offbeat train` or `offbeat node` there and passes on its words.

Nothing of value lies in Ray: actors are not detached, no object is kept, and the run's ledger and checkpoints are where
they always are. A node that dies is missed by no one, and one that is added is used. If the training node dies or this
process ends, the run can be resumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError, UserError
from offbeat.launch import parent_watch
from offbeat.launch.cluster import Machine, Placement

LABEL, ACCELERATOR = "offbeat.io/class", "ray.io/accelerator-type"
"""Labels of a node that name its class: Offbeat's own (ray start --labels offbeat.io/class=h20), else Ray's."""
ANSWERS_WITHIN_S = 10.0
"""Seconds that an actor gets to answer before the others are looked at, and it is asked again."""
LOOK_EVERY_S = 1.0
STOP_WITHIN_S = 100.0
JOIN_FILE = "join.json"


class Steward:
    """Runs one `offbeat` command on a node, as an actor. The command ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def start(self, folder: str, words: Sequence[str], join_file: bytes | None, home: str) -> None:
        """Starts the command, whose files are in `folder` of this node's disk, with a join file there if one is given.
        Relative paths in the command start at `home`, if this node has it."""
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if join_file is not None:
            file = self._folder / JOIN_FILE
            file.touch(mode=0o600)
            file.write_bytes(join_file)
        words = [word.replace("{folder}", folder) for word in words]
        read, self._write = os.pipe()  # closed with this process, however it ends
        with (self._folder / "output.log").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(read,),
                cwd=home if Path(home).is_dir() else folder,
                env={**os.environ, parent_watch.VARIABLE: str(read)},
                start_new_session=True,
            )
        os.close(read)

    def look(self, at: int) -> tuple[bytes, int | None]:
        """Returns the command's output after the first `at` bytes, and its exit status; None: it runs."""
        assert self._process is not None
        status = self._process.poll()
        with (self._folder / "output.log").open("rb") as output:
            output.seek(at)
            return output.read(), status

    def join_file(self) -> bytes | None:
        """Returns the join file that the command has written; None: not yet."""
        file = self._folder / JOIN_FILE
        return file.read_bytes() if file.is_file() else None

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def connect() -> Any:
    """Returns the module `ray`, connected to the cluster of `RAY_ADDRESS` or of this machine."""
    try:
        import ray
    except ImportError:
        raise UserError("--on ray: the package ray is not installed here; pip install ray on every node") from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(
                f"--on ray: no cluster answers ({why}); run this on one of its nodes, or set RAY_ADDRESS"
            ) from None
    return ray


def find_machines(ray: Any) -> dict[str, Machine]:
    """Returns the living nodes of the cluster by their ids. A node without resources, such as a head, is left out."""
    found = {}
    for node in ray.nodes():
        cores, num_gpus = int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
        if not node["Alive"] or not cores + num_gpus:
            continue
        labels = node.get("Labels") or {}
        kind = labels.get(LABEL) or labels.get(ACCELERATOR) or ("gpu" if num_gpus else "cpu")
        found[node["NodeID"]] = Machine(f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}", kind, num_gpus, cores)
    return dict(sorted(found.items(), key=lambda pair: (pair[1].kind, pair[1].name)))


@dataclass
class Placed:
    """A steward and what is known of its command."""

    machine: Machine
    steward: Any
    num_read: int = 0
    status: int | None = None
    is_lost: bool = False


class RayRun:
    """A run's commands on the nodes of a Ray cluster."""

    def __init__(self, ray: Any, name: str, placement: Placement, train: Sequence[str], say: Callable[[str], None]):
        """`train` holds the words of `offbeat train` for the training node."""
        self._ray, self._name, self._placement, self._train, self._say = ray, name, placement, train, say
        self._ids = {machine: identifier for identifier, machine in find_machines(ray).items()}
        self._nodes: dict[str, Placed] = {}
        self._asked: list[signal.Signals] = []

    def to_end(self) -> int:
        """Runs until the training command has ended; returns its exit status."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, lambda got, _: self._asked.append(signal.Signals(got))) for one in signals}
        here = str(self._placement.workers_on(self._placement.trains))
        words = [*self._train, "--on", "local", "--workers-here", here, "--join-file", f"{{folder}}/{JOIN_FILE}"]
        try:
            trainer = self._start(self._placement.trains, ["train", *words], None)
            join_file: bytes | None = None
            is_stopping = False
            while trainer.status is None:
                if join_file is None:
                    join_file = self._get(trainer, trainer.steward.join_file.remote())
                if join_file is not None:
                    self._start_nodes(join_file)
                for placed in (trainer, *self._nodes.values()):
                    self._look(placed)
                if trainer.is_lost:
                    raise OffbeatError(
                        f"{trainer.machine.name}: the training node is lost; when it is back, go on with offbeat train "
                        "--on ray --resume"
                    )
                if self._asked and not is_stopping:
                    is_stopping = True
                    self._get(trainer, trainer.steward.stop.remote())
                if len(self._asked) > 1:
                    return 128 + self._asked[-1]
                time.sleep(LOOK_EVERY_S)
            self._let_nodes_end()
            return trainer.status
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_nodes(self, join_file: bytes) -> None:
        """Starts a node on each machine that has none: those that were planned, and those that joined since."""
        now = find_machines(self._ray)
        known = {self._ids[machine] for machine in self._placement.machines}
        for identifier, machine in now.items():
            if identifier in self._nodes or machine == self._placement.trains:
                continue
            is_new = identifier not in known
            workers = self._placement.workers_of_another(machine)
            if not workers:
                continue
            self._ids[machine] = identifier
            words = ["node", "--join-file", f"{{folder}}/{JOIN_FILE}", "--trust-coordinator", "--name", machine.name]
            words += ["--workers", str(workers), "--dir", "{folder}/node"]
            if is_new:
                self._say(f"{machine.name} ({machine.kind}) has joined the cluster: {workers} more")
            self._nodes[identifier] = self._start(machine, words, join_file)

    def _start(self, machine: Machine, words: Sequence[str], join_file: bytes | None) -> Placed:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(self._ids[machine], soft=False)
        actor = self._ray.remote(Steward).options(
            num_gpus=machine.num_gpus, num_cpus=1, scheduling_strategy=place, max_restarts=0
        )
        placed = Placed(machine, actor.remote())
        scratch = os.environ.get("OFFBEAT_SCRATCH", f"/tmp/offbeat-{os.getuid()}")
        folder = f"{scratch}-{self._name}-{machine.name}"
        self._get(placed, placed.steward.start.remote(folder, list(words), join_file, os.getcwd()))
        return placed

    def _look(self, placed: Placed) -> None:
        if placed.status is not None or placed.is_lost:
            return
        found = self._get(placed, placed.steward.look.remote(placed.num_read))
        if found is None:
            return
        output, placed.status = found
        placed.num_read += len(output)
        sys.stdout.write(output.decode(errors="replace"))
        sys.stdout.flush()

    def _get(self, placed: Placed, reference: Any) -> Any:
        """Returns an actor's answer; None if there is none in time, or if its node is lost, which is noted."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=ANSWERS_WITHIN_S)
        except errors.GetTimeoutError:  # a busy node; Ray itself says when a node is dead
            return None
        except errors.RayTaskError as error:
            raise OffbeatError(f"{placed.machine.name}: {error.cause}") from error
        except errors.RayActorError:
            if not placed.is_lost:
                self._say(f"{placed.machine.name} ({placed.machine.kind}) is lost; the others carry on with its work")
            placed.is_lost = True
            return None

    def _let_nodes_end(self) -> None:
        deadline_s = time.monotonic() + STOP_WITHIN_S
        while time.monotonic() < deadline_s:
            for placed in self._nodes.values():
                self._look(placed)
            if all(placed.status is not None or placed.is_lost for placed in self._nodes.values()):
                return
            time.sleep(LOOK_EVERY_S)
