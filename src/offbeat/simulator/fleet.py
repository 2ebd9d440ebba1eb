"""Workers of a simulated run: what they are, what they do at the moment, and how versions reach them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from offbeat.simulator.replica import EngineSpeed, Replica
from offbeat.simulator.tasks import SimulatedTask
from offbeat.weights.relay_tree import FAN_OUT, RelayNode, RelayTree

PIECE_BYTES = 16 * 2**20
"""Bytes of a piece of a version; a worker passes a piece on once it is complete."""


@dataclass(frozen=True)
class WorkerClass:
    """Workers that are alike. Each has one engine on `accelerators` accelerators."""

    name: str
    count: int
    slots: int
    speed: EngineSpeed
    kv_tokens: float = math.inf
    accelerators: int = 1
    price_per_h: float = 0.0
    """$/h of one accelerator."""
    round_trip_s: float = 0.0
    """Time of a call to the coordinator and back."""
    site: str = ""
    """Workers of one site pass versions on to one another; "": each fetches from the coordinator."""
    root_bytes_per_s: float = math.inf
    """Rate from the coordinator to the site, or to each worker without a site."""
    site_bytes_per_s: float = math.inf
    """Rate from one worker of the site to the others."""
    fetch_s: float | None = None
    """Time from a version's publication until the worker has it; None: it follows from the links."""
    spread: float = 0.0
    """Log-normal spread of the workers' speeds: some are stragglers."""


class Doing(StrEnum):
    """What a worker's control loop does; its engine may generate meanwhile."""

    FREE = "free"
    CALLING = "calling"
    """Its lease call is under way."""
    PARKED = "parked"
    """Its lease call waits at the coordinator for tasks."""
    TAKING = "taking"
    """Its lease call was answered with a version, which it fetches and loads."""
    LOADING = "loading"
    LEAVING = "leaving"
    """It hands back its tasks and asks for no more."""
    GONE = "gone"


class Idle(StrEnum):
    """Why an engine has no running answer."""

    NO_WORK = "no work"
    """No task is open that the worker may take: a batch is being trained, or enough is in flight."""
    VERSION = "version"
    """It waits for new weights, or loads them."""
    CALLS = "calls"
    """It waits for the coordinator's answer."""
    GONE = "gone"
    """It has crashed or left."""


class SimulatedWorker:
    def __init__(self, name: str, kind: WorkerClass, replica: Replica):
        self.name, self.kind, self.replica = name, kind, replica
        self.doing = Doing.FREE
        self.fetching: int | None = None
        """Version that it fetches."""
        self.fetched: int | None = None
        """Version that it has fetched and not loaded."""
        self.taking: int | None = None
        """Version that its latest lease call was answered with."""
        self.fetch_s = 0.0
        self.num_running = self.num_unsent = self.num_leased = 0
        self.round: int | None = None
        self.last_round_over = -1
        self.tasks: dict[int, SimulatedTask] = {}
        """Tasks that it runs, or whose answers it sends."""
        self.life = 0
        """Number of restarts; events of an earlier life are ignored."""
        self.due_s = math.inf
        """Time of the engine's next change that is in the event queue."""
        self.is_present = True
        self.state: str = Idle.CALLS
        self.since_s = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Time by state: "busy", or a reason of `Idle`."""
        self.spans: list[tuple[str, str, float, float]] | None = None
        """Where it notes what it did, for a trace; None: nowhere."""

    @property
    def version(self) -> int | None:
        return self.replica.version

    @property
    def num_free(self) -> int:
        """Number of tasks that it may lease: its free slots, but none if more answers than slots are unsent."""
        slots = self.kind.slots
        return max(0, slots - self.num_running) if self.num_unsent <= slots else 0

    def mark(self, now_s: float) -> None:
        """Notes what it does from now on, after any change."""
        if self.doing is Doing.GONE:
            state: str = Idle.GONE
        elif self.num_running:
            state = "busy"
        elif self.doing is Doing.PARKED:
            state = Idle.NO_WORK
        elif self.doing in (Doing.TAKING, Doing.LOADING):
            state = Idle.VERSION
        else:
            state = Idle.CALLS
        if state != self.state:
            self.seconds[self.state] += now_s - self.since_s
            if self.spans is not None and now_s > self.since_s:
                self.spans.append((self.name, str(self.state), self.since_s, now_s))
            self.state, self.since_s = state, now_s

    def settle(self, now_s: float) -> None:
        self.seconds[self.state] += now_s - self.since_s
        self.since_s = now_s


def fetch_times(workers: Sequence[SimulatedWorker], num_bytes: float) -> dict[str, float]:
    """Returns, by worker, the seconds from a version's publication until the worker has its bytes. The workers of a
    site form the relay tree of a real run, of which only the head fetches from the coordinator."""
    tree, kinds = RelayTree(), {worker.name: worker.kind for worker in workers}
    for worker in workers:
        if worker.kind.site:
            tree.put(RelayNode(worker.name, worker.kind.site))
    times = {}
    for name, kind in kinds.items():
        if kind.fetch_s is not None:
            times[name] = kind.fetch_s
            continue
        if not kind.site:
            times[name] = num_bytes / kind.root_bytes_per_s
            continue
        line = [kinds[relay] for relay in tree.sources(name) if relay in kinds]
        head = line[-1] if line else kind
        each = [relay.site_bytes_per_s / FAN_OUT for relay in line]
        rate = min([head.root_bytes_per_s, *each])
        hops = sum(PIECE_BYTES / one + kind.round_trip_s / 2 for one in each)
        times[name] = num_bytes / rate + hops
    return times
