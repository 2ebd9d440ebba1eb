"""Where the roles of a run stand on a cluster, without a plan: one node trains, every other GPU rolls out.

On nodes without GPUs, a worker is a share of the CPU: each node but the training one has `rollout.workers`, or one.
What is asked for and not there is refused with counts, before anything is started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.schema import SERVED, Config
from offbeat.errors import UserError
from offbeat.ledger.database import network_file_system
from offbeat.spelling import nearest


@dataclass(frozen=True)
class Machine:
    """A node of a cluster, as its scheduler describes it."""

    name: str
    kind: str
    """Class of the node, such as "h20"."""
    num_gpus: int
    num_cores: int


@dataclass(frozen=True)
class Placement:
    """What each machine runs. The first machine trains."""

    machines: tuple[Machine, ...]
    num_ranks: int
    gpus_per_worker: int = 1
    workers_per_cpu_node: int = 1

    @property
    def trains(self) -> Machine:
        return self.machines[0]

    @property
    def num_workers(self) -> int:
        return sum(map(self.workers_on, self.machines))

    def workers_on(self, machine: Machine) -> int:
        """Returns how many workers a machine runs."""
        is_alone = len(self.machines) == 1
        if machine is not self.trains:
            return self.workers_of_another(machine)
        if machine.num_gpus:
            return (machine.num_gpus - self.num_ranks) // self.gpus_per_worker or int(is_alone)
        return self.workers_per_cpu_node if is_alone else 0

    def workers_of_another(self, machine: Machine) -> int:
        """Returns how many workers a machine runs that does not train."""
        return machine.num_gpus // self.gpus_per_worker if machine.num_gpus else self.workers_per_cpu_node

    def lines(self, *, with_names: bool) -> list[str]:
        """Returns two lines: what trains, and what rolls out. `with_names`: whether the nodes are already chosen, or
        only their classes."""
        one = self.trains
        who = f"{one.name} ({one.kind})" if with_names else f"1 node of {one.kind}"
        ranks = f"{self.num_ranks} trainer rank{'s' * (self.num_ranks > 1)}"
        on = f"{self.num_ranks} of {one.num_gpus} GPU{'s' * (one.num_gpus > 1)}" if one.num_gpus else "the CPU"
        rolling = [machine for machine in self.machines if self.workers_on(machine)]
        if with_names:
            places = [f"{machine.name} ({machine.kind}) {self.workers_on(machine)}" for machine in rolling]
        else:
            workers = Counter[str]()
            for machine in rolling:
                workers[machine.kind] += self.workers_on(machine)
            nodes = Counter(machine.kind for machine in rolling)
            places = [f"{workers[kind]} on {count} node{'s' * (count > 1)} of {kind}" for kind, count in nodes.items()]
        total = f"{self.num_workers} worker{'s' * (self.num_workers != 1)}"
        return [
            f"trains       {who}: coordinator and {ranks}, on {on}",
            f"rolls out    {total}: {', '.join(places)}" if rolling else f"rolls out    {total}",
        ]


def place(machines: Sequence[Machine], config: Config, train_on: str | None = None) -> Placement:
    """Returns where a run's roles stand on `machines`. The training node is of the class `train_on`, or else the one
    with the most GPUs, and of those the first by name."""
    if not machines:
        raise UserError("the cluster has no node that can be used")
    kinds = sorted({machine.kind for machine in machines})
    if train_on is not None and train_on not in kinds:
        raise UserError(
            f"--train-on {train_on}: there is no node of this class; {_have(machines)}{_near(train_on, kinds)}"
        )
    ranks = config.trainer.ranks
    able = [m for m in machines if train_on in (None, m.kind) and (not m.num_gpus or m.num_gpus >= ranks)]
    if not able:
        most = max(m.num_gpus for m in machines if train_on in (None, m.kind))
        raise UserError(
            f"trainer.ranks = {ranks}: needs as many GPUs on one node, and the largest has {most}; lower it, or start "
            "ranks on several nodes with offbeat node --ranks"
        )
    order = {machine: number for number, machine in enumerate(machines)}
    first = min(able, key=lambda m: (-m.num_gpus, order[m]))
    found = Placement(
        (first, *(machine for machine in machines if machine is not first)),
        ranks,
        config.engine.tensor_parallel if config.rollout.engine in (*SERVED, "auto") else 1,
        config.rollout.workers or 1,
    )
    if not found.num_workers:
        raise UserError(
            f"no GPU is left to generate: {ranks} of {first.num_gpus} train, and a worker takes "
            f"{found.gpus_per_worker}; lower trainer.ranks or engine.tensor_parallel, or add nodes"
        )
    return found


def wanted_machines(machines: Sequence[Machine], wanted: Sequence[str], idle: Sequence[str]) -> list[Machine]:
    """Returns the nodes to use: as many of each class as `wanted` says, such as "h20:2", the `idle` ones first; or,
    without `wanted`, all idle ones. Raises `UserError` with counts if there are fewer."""
    free = [machine for machine in machines if machine.name in idle]
    if not wanted:
        if not free:
            raise UserError(
                f"no node is idle; {_have(machines)}; to wait for nodes, say how many: --nodes {_example(machines)}"
            )
        return free
    counts: Counter[str] = Counter()
    for word in wanted:
        kind, _, digits = word.rpartition(":")
        if not kind or not digits.isdecimal() or not int(digits):
            raise UserError(f"--nodes {word}: write CLASS:NODES, such as {_example(machines)}")
        counts[kind] += int(digits)
    kinds = sorted({machine.kind for machine in machines})
    chosen = []
    for kind, number in counts.items():
        of_kind = [machine for machine in (*free, *(m for m in machines if m not in free)) if machine.kind == kind]
        if len(of_kind) < number:
            raise UserError(
                f"--nodes {kind}:{number}: the cluster has {len(of_kind)} node{'s' * (len(of_kind) != 1)} of {kind}; "
                f"{_have(machines)}{_near(kind, kinds)}"
            )
        chosen += of_kind[:number]
    return chosen


def _have(machines: Sequence[Machine]) -> str:
    counts = Counter((machine.kind, machine.num_gpus) for machine in machines)
    has = [f"{count} of {kind} with {gpus or 'no'} GPU{'s' * (gpus != 1)}" for (kind, gpus), count in counts.items()]
    return f"it has {', '.join(has) or 'no nodes'}"


def _example(machines: Sequence[Machine]) -> str:
    return f"{machines[0].kind}:1" if machines else "h20:2"


def _near(kind: str, kinds: Sequence[str]) -> str:
    near = nearest(kind, list(kinds)) if kind not in kinds else None
    return f"; did you mean {near}?" if near else ""


def refuse_network_folder(config: Config) -> None:
    """Raises `UserError` if the ledger would lie on a network file system, before any machine is asked for."""
    folder = Path(config.run.dir).expanduser().absolute()
    kind = network_file_system(folder)
    if kind is not None:
        raise UserError(
            f'run.dir = "{config.run.dir}": {folder} is on a network file system ({kind}), on which SQLite can lose '
            "data; set run.dir to a folder on a local disk of the training node, and ledger.backup to a shared one"
        )
