"""One simulated run: workers, coordinator and trainer as events around the rules.

The coordinator's part calls `MemoryLedger` and the classes that a real coordinator calls: over-provision, rounds, the
times of a step. A worker leases tasks for its free slots, generates, submits, and loads versions as
`offbeat.worker.worker` does; a trainer claims, trains, publishes and commits as `offbeat.trainer.trainer` does.
Evaluations and checkpoints are not simulated.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from offbeat.rules.leases import Lease, lost_and_kept
from offbeat.rules.over_provision import Decision, provisioning_of
from offbeat.rules.rounds import RoundMembers
from offbeat.rules.step_times import StepTimes
from offbeat.simulator.baselines import OFFBEAT, Baseline
from offbeat.simulator.events import Events
from offbeat.simulator.fleet import Doing, SimulatedWorker, WorkerClass, fetch_times
from offbeat.simulator.lengths import Lengths
from offbeat.simulator.memory_ledger import LedgerSettings, MemoryLedger, SimulatedBatch
from offbeat.simulator.replica import Replica, Row
from offbeat.simulator.tasks import SimulatedTask, TaskPhase

BEATS_PER_TTL = 3
"""Heartbeats of a worker per lease time."""


@dataclass(frozen=True)
class TrainerModel:
    """Seconds of a training step: fixed, and per token of prompts and answers, and per squared trajectory length."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    publish_s: float = 0.0
    """Time to write a new version and commit the step."""
    claim_s: float = 0.0
    """Time from the claim of a batch until the trainer has it."""
    accelerators: int = 1
    price_per_h: float = 0.0

    def seconds(self, batch: SimulatedBatch) -> float:
        tokens = batch.num_trained + batch.num_masked + batch.num_prompt_tokens
        return self.fixed_s + self.token_s * tokens + self.square_s * batch.num_square_tokens


@dataclass(frozen=True)
class CoordinatorModel:
    """Costs at the coordinator, which carries out one call at a time, and the reward processes beside it."""

    lease_s: float = 0.0
    submit_s: float = 0.0
    """Time of one answer's submission; those of several answers add up."""
    reward_s: float = 0.0
    reward_slots: int = 1
    reward_delay_s: float = 0.0
    """Time that passes beside the reward itself, such as for the queue and the commit."""
    uplink_bytes_per_s: float = math.inf
    """Rate at which the coordinator sends versions, shared by all sites and workers that fetch from it."""


@dataclass(frozen=True)
class FleetEvent:
    """Something that happens to workers at a time. `kind`: "crash" (again there after `seconds`, if given), "reclaim"
    (told `seconds` before they are gone), "leave", "join" (`count` more), or "slow" (`factor` times as slow)."""

    at_s: float
    kind: Literal["crash", "reclaim", "leave", "join", "slow"]
    workers: str
    count: int = 1
    seconds: float | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """Everything that a simulated run depends on."""

    fleet: tuple[WorkerClass, ...]
    ledger: LedgerSettings
    trainer: TrainerModel = TrainerModel()
    coordinator: CoordinatorModel = CoordinatorModel()
    overlap: bool = False
    over_provision: float | Literal["auto"] = 1.0
    finishes: bool = False
    keeps_kv: bool = False
    kv_lag: int = 0
    weight_bytes: float = 0.0
    lease_ttl_s: float = 60.0
    events: tuple[FleetEvent, ...] = ()
    baseline: Baseline = OFFBEAT
    round_robin: bool = False
    """Whether each worker gets an equal share of the tasks, instead of as many as it asks for."""
    seed: int = 0
    num_warmup: int = 0
    """Steps that figures leave out."""
    num_measured: int | None = None
    """Step after which the simulation stops, although the run goes on; None: it ends with the run."""
    until_s: float = math.inf


@dataclass(frozen=True)
class StepRow:
    """A trained step."""

    step: int
    at_s: float
    """Time of its commit."""
    wait_s: float
    train_s: float
    publish_s: float
    num_answers: int
    num_trained: int
    num_masked: int
    staleness: float
    """Mean staleness of its trained tokens."""


@dataclass
class Totals:
    """Running totals of a run, at one time."""

    at_s: float = 0.0
    num_generated: int = 0
    num_prefilled: int = 0
    num_preempted: int = 0
    num_delivered: int = 0
    """Tokens of stored answers."""
    num_trained: int = 0
    num_masked: int = 0
    num_answers: int = 0
    """Answers that were trained."""
    num_over: int = 0
    num_steps: int = 0
    by_staleness: Counter[int] = field(default_factory=Counter)
    wasted: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, defaultdict[str, float]] = field(default_factory=dict)
    """Time by state, by class of workers."""
    trainer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    dollars: float = 0.0
    num_leases: int = 0
    coordinator_busy_s: float = 0.0


class Simulation:
    """Runs one scenario; call `run` once."""

    def __init__(self, scenario: Scenario, lengths: Lengths, *, records_spans: bool = False):
        self.scenario, self.events = scenario, Events()
        self.ledger = MemoryLedger(scenario.ledger, lengths, scenario.baseline, self.events.clock)
        self.rows: list[StepRow] = []
        self.spans: list[tuple[str, str, float, float]] = []
        """Spans of the trace: track, name, start and end."""
        self.workers: dict[str, SimulatedWorker] = {}
        self.start = self.end = Totals()
        self._records_spans = records_spans
        self._random = np.random.Generator(np.random.Philox(scenario.seed + 1))
        self._by_class: Counter[str] = Counter()
        self._gone: list[SimulatedWorker] = []
        settings = scenario.ledger
        self._provisioning = provisioning_of(
            scenario.over_provision,
            settings.max_staleness,
            self._note_choice,
            overlaps=scenario.overlap,
            clock=self.events.clock,
        )
        self.choices: list[tuple[float, Decision]] = []
        self._members = RoundMembers(in_rounds=settings.in_rounds)
        self._times = StepTimes(self.events.clock)
        self._may_draw, self._is_waking = True, False
        self._parked: dict[str, None] = {}
        self._total_slots = 0
        self._coordinator_free_s = 0.0
        self._rewarding = [0.0] * scenario.coordinator.reward_slots
        self._totals = Totals()
        self._lost_generated = 0
        # the trainer
        self._step = 0
        self._wants: int | None = None
        """Step whose batch is to be claimed."""
        self._batch: SimulatedBatch | None = None
        """Batch that was claimed ahead."""
        self._is_training = False
        self._is_publishing = False
        self._after_publishing: list[Any] = []
        self._trainer_state, self._trainer_since_s = "wait", 0.0
        self._step_began_s = self._train_began_s = self._train_ended_s = 0.0

    def _note_choice(self, decision: Decision) -> None:
        self.choices.append((self.events.now_s, decision))

    def run(self) -> Totals:
        """Simulates the run; returns the totals between the end of the warm-up and the end."""
        for kind in self.scenario.fleet:
            for _ in range(kind.count):
                self._join(kind)
        self._set_fetch_times()
        for event in self.scenario.events:
            self.events.at(event.at_s, self._happens, event)
        self.ledger.newest = 0
        self._wants = 0
        self.events.at(0.0, self._announce, 0)
        self.events.run(self.scenario.until_s)
        self.end = self._snapshot()
        return self.end

    # The fleet

    def _join(self, kind: WorkerClass) -> SimulatedWorker:
        number = self._by_class[kind.name]
        self._by_class[kind.name] += 1
        replica = Replica(
            kind.speed,
            capacity_tokens=kind.kv_tokens,
            keeps_kv=self.scenario.keeps_kv,
            kv_lag=self.scenario.kv_lag,
        )
        if kind.spread:
            replica.slowness = float(np.exp(kind.spread * self._random.standard_normal()))
        worker = SimulatedWorker(f"{kind.name}-{number}", kind, replica)
        worker.since_s = self.events.now_s
        worker.spans = self.spans if self._records_spans else None
        self.workers[worker.name] = worker
        self._total_slots += kind.slots
        self.events.after(0.0, self._pull, worker)
        return worker

    def _set_fetch_times(self) -> None:
        present = [worker for worker in self.workers.values() if worker.doing is not Doing.GONE]
        num_heads = len({worker.kind.site or worker.name for worker in present}) or 1
        share = self.scenario.coordinator.uplink_bytes_per_s / num_heads
        times = fetch_times(present, self.scenario.weight_bytes)
        for worker in present:
            worker.fetch_s = times[worker.name]
            if worker.kind.fetch_s is None:
                worker.fetch_s = max(worker.fetch_s, self.scenario.weight_bytes / share)

    def _happens(self, event: FleetEvent) -> None:
        kind = next(kind for kind in self.scenario.fleet if kind.name == event.workers)
        if event.kind == "join":
            for _ in range(event.count):
                self._join(kind)
            self._set_fetch_times()
            return
        alive = [worker for worker in self.workers.values() if worker.kind.name == kind.name]
        alive = [worker for worker in alive if worker.doing is not Doing.GONE]
        for worker in alive[-event.count :]:
            if event.kind == "slow":
                self._submit_ended(worker, worker.replica.interrupt(self.events.now_s))
                worker.replica.slowness *= event.factor
                self._schedule(worker)
            elif event.kind == "crash":
                self._crash(worker, event.seconds)
            else:
                self._drain(worker)

    def _crash(self, worker: SimulatedWorker, back_after_s: float | None) -> None:
        now_s, ttl_s = self.events.now_s, self.scenario.lease_ttl_s
        worker.replica.kill(now_s)
        for task in worker.tasks.values():
            if task.phase is TaskPhase.FAILED:
                self.ledger.sums.wasted["late"] += task.cut(task.num_kept)
        held = [(task, task.fence) for task in self.ledger.held_by(worker.name)]
        self._is_gone(worker)
        beat_s = math.floor(now_s / (ttl_s / BEATS_PER_TTL)) * (ttl_s / BEATS_PER_TTL)
        found_s = beat_s + ttl_s if back_after_s is None else min(beat_s + ttl_s, now_s + back_after_s)
        self.events.at(max(found_s, now_s), self._expire, (worker, held))
        if back_after_s is not None:
            self.events.after(back_after_s, self._come_back, worker)

    def _is_gone(self, worker: SimulatedWorker) -> None:
        worker.life += 1
        worker.doing = Doing.GONE
        worker.num_running = worker.num_unsent = 0
        worker.tasks.clear()
        worker.fetching = worker.fetched = None
        worker.due_s = math.inf
        self._parked.pop(worker.name, None)
        worker.mark(self.events.now_s)

    def _expire(self, what: tuple[SimulatedWorker, list[tuple[SimulatedTask, int]]]) -> None:
        worker, held = what
        by_id = {task.id: task for task, _ in held}
        leases = [Lease(task.id, fence, worker.name) for task, fence in held if task.fence == fence]
        lost, _ = lost_and_kept(leases, ())
        self.ledger.lose([by_id[lease.task] for lease in lost])
        if worker.doing is Doing.GONE:
            self._forget(worker)
        self._notify_all()

    def _forget(self, worker: SimulatedWorker) -> None:
        if worker.is_present:
            worker.is_present = False
            self._total_slots -= worker.kind.slots
            self._members.left(worker.name)

    def _come_back(self, worker: SimulatedWorker) -> None:
        if not worker.is_present:
            self._total_slots += worker.kind.slots
            worker.is_present = True
        replica = worker.replica
        fresh = Replica(
            worker.kind.speed,
            capacity_tokens=worker.kind.kv_tokens,
            keeps_kv=self.scenario.keeps_kv,
            kv_lag=self.scenario.kv_lag,
        )
        fresh.slowness, fresh.now_s = replica.slowness, self.events.now_s
        for name in ("num_generated", "num_prefilled", "num_preempted", "row_s", "busy_s"):
            setattr(fresh, name, getattr(replica, name))
        worker.replica = fresh
        worker.doing = Doing.FREE
        worker.mark(self.events.now_s)
        self._pull(worker)

    def _drain(self, worker: SimulatedWorker) -> None:
        """Lets a worker leave: it hands back what it has."""
        ended, stopped = worker.replica.abort_all(self.events.now_s)
        self._submit_ended(worker, ended)
        self._hand_back(worker, stopped)
        worker.doing = Doing.LEAVING
        self._parked.pop(worker.name, None)
        self.events.at(worker.replica.now_s + worker.kind.round_trip_s, self._left, worker)

    def _left(self, worker: SimulatedWorker) -> None:
        if worker.tasks:  # not all of them have been handed back
            self.events.after(max(worker.kind.round_trip_s, 1e-3), self._left, worker)
            return
        self.ledger.give_back(self.ledger.held_by(worker.name))
        self._is_gone(worker)
        self._forget(worker)
        self._notify_all()

    # Leases

    def _pull(self, worker: SimulatedWorker) -> None:
        """Begins a lease call if the worker has room and is not busy with another call or a version."""
        if worker.doing is not Doing.FREE or not worker.num_free:
            worker.mark(self.events.now_s)
            return
        if worker.fetched is not None and self.scenario.finishes:
            self._load_if_it_may(worker)
            return
        worker.doing = Doing.CALLING
        worker.mark(self.events.now_s)
        self.events.after(worker.kind.round_trip_s / 2, self._lease, (worker, worker.life))

    def _serve(self, seconds: float) -> float:
        """Occupies the coordinator; returns the time at which it is done."""
        begins_s = max(self.events.now_s, self._coordinator_free_s)
        self._coordinator_free_s = begins_s + seconds
        self._totals.coordinator_busy_s += seconds
        return self._coordinator_free_s

    def _lease(self, what: tuple[SimulatedWorker, int]) -> None:
        worker, life = what
        if worker.life != life:
            return
        if not self._answer_lease(worker):
            worker.doing = Doing.PARKED
            self._parked[worker.name] = None
            worker.mark(self.events.now_s)

    def _answer_lease(self, worker: SimulatedWorker) -> bool:
        """Answers a lease call with tasks or a version; returns whether there was anything to answer with."""
        tasks, number = self._hand_out(worker)
        if tasks:
            done_s = self._serve(self.scenario.coordinator.lease_s)
            self.events.at(done_s + worker.kind.round_trip_s / 2, self._begin, (worker, worker.life, tasks, number))
            return True
        wanted = self.ledger.wanted_version()
        if wanted is not None and wanted != worker.version:
            done_s = self._serve(self.scenario.coordinator.lease_s)
            worker.doing, worker.taking = Doing.TAKING, wanted
            worker.mark(self.events.now_s)
            self.events.at(done_s + worker.kind.round_trip_s / 2, self._take, (worker, worker.life))
            return True
        return False

    def _hand_out(self, worker: SimulatedWorker) -> tuple[list[SimulatedTask], int | None]:
        if self._may_draw:
            self._may_draw = False
            self.ledger.draw(self._provisioning.factor())
        number = self._round()
        if not self._members.may_join(worker.name, number, worker.version):
            return [], number
        capacity = worker.num_free
        if self.scenario.round_robin:
            share = self.ledger.num_drawn * self.ledger.group_size / len(self.workers)
            capacity = min(capacity, math.ceil(share) - worker.num_leased)
        tasks = self.ledger.lease(worker.name, capacity, worker.version, self._total_slots)
        if tasks:
            worker.num_leased += len(tasks)
            self._totals.num_leases += 1
            self._times.leased()
            requires = tasks[0].group.require_version is not None
            self._provisioning.handed_out(requires_version=requires)
            if not requires:
                self._members.joined(worker.name, number, worker.version)
        return tasks, number

    def _round(self) -> int | None:
        if not self.scenario.ledger.in_rounds:
            return None
        return None if self.ledger.claimed is not None else self.ledger.newest

    def _begin(self, what: tuple[SimulatedWorker, int, list[SimulatedTask], int | None]) -> None:
        worker, life, tasks, number = what
        if worker.life != life:
            return
        is_leaving = worker.doing is Doing.LEAVING
        if not is_leaving:
            worker.doing = Doing.FREE
        if is_leaving or (number is not None and number <= worker.last_round_over):
            self.ledger.give_back(tasks, untouched=True)
            self._notify_workers()
        else:
            worker.round = number
            worker.num_running += len(tasks)
            worker.tasks.update((task.id, task) for task in tasks)
            self._submit_ended(worker, worker.replica.add(tasks, self.events.now_s))
            self._schedule(worker)
        self._after_call(worker)

    def _after_call(self, worker: SimulatedWorker) -> None:
        if worker.fetched is not None:
            self._load_if_it_may(worker)
        self._pull(worker)

    def _notify_workers(self) -> None:
        """Has waiting lease calls looked at again: there may be new tasks, or room for more groups."""
        self._may_draw = True
        if self._parked and not self._is_waking:
            self._is_waking = True
            self.events.after(0.0, self._wake, None)

    def _notify_all(self) -> None:
        self._try_claim()
        self._notify_workers()

    def _wake(self, _: None) -> None:
        self._is_waking = False
        refused: set[int | None] = set()
        for name in list(self._parked):
            worker = self.workers[name]
            if worker.version in refused:
                continue
            del self._parked[name]
            worker.doing = Doing.CALLING
            if not self._answer_lease(worker):
                worker.doing = Doing.PARKED
                self._parked[name] = None
                if not self.scenario.round_robin and not self.ledger.suspects:
                    refused.add(worker.version)  # the rules see no difference between such workers

    # The engine

    def _schedule(self, worker: SimulatedWorker) -> None:
        due_s = worker.replica.due_s()
        if due_s < worker.due_s:
            worker.due_s = due_s
            self.events.at(due_s, self._advance, (worker, worker.life, due_s))

    def _advance(self, what: tuple[SimulatedWorker, int, float]) -> None:
        worker, life, due_s = what
        if worker.life != life or due_s != worker.due_s:
            return
        worker.due_s = math.inf
        ended = worker.replica.advance(self.events.now_s)
        if ended:
            self._ended((worker, life, [row.task for row in ended]))
        self._schedule(worker)

    def _submit_ended(self, worker: SimulatedWorker, ended: Sequence[Row]) -> None:
        """Sends ended answers at the end of the step that ended them."""
        if not ended:
            return
        at_s = max(worker.replica.loaded_from_s if worker.doing is Doing.LOADING else worker.replica.now_s, 0.0)
        self.events.at(max(at_s, self.events.now_s), self._ended, (worker, worker.life, [row.task for row in ended]))

    def _ended(self, what: tuple[SimulatedWorker, int, list[SimulatedTask]]) -> None:
        worker, life, tasks = what
        if worker.life != life:
            return
        worker.num_running -= len(tasks)
        worker.num_unsent += len(tasks)
        self.events.after(worker.kind.round_trip_s / 2, self._submit, (worker, life, tasks))
        if worker.fetched is not None and worker.doing in (Doing.FREE, Doing.TAKING):
            self._load_if_it_may(worker)
        self._pull(worker)

    def _hand_back(self, worker: SimulatedWorker, stopped: Sequence[Row]) -> None:
        """Hands back unfinished answers: those with new tokens as partials, the others untouched."""
        if stopped:
            tasks = [row.task for row in stopped]
            self.events.at(worker.replica.now_s, self._stopped, (worker, worker.life, tasks))

    def _stopped(self, what: tuple[SimulatedWorker, int, list[SimulatedTask]]) -> None:
        worker, life, tasks = what
        if worker.life != life:
            return
        worker.num_running -= len(tasks)
        grown = [task for task in tasks if task.num_tokens > task.num_kept]
        worker.num_unsent += len(grown)
        self.events.after(worker.kind.round_trip_s / 2, self._submit, (worker, life, grown))
        untouched = [task for task in tasks if task.num_tokens == task.num_kept]
        for task in untouched:
            del worker.tasks[task.id]
        self.events.after(worker.kind.round_trip_s / 2, self._give_back, untouched)
        self._pull(worker)

    def _give_back(self, tasks: list[SimulatedTask]) -> None:
        self.ledger.give_back(tasks, untouched=True)
        self._notify_workers()

    # Submissions and rewards

    def _submit(self, what: tuple[SimulatedWorker, int, list[SimulatedTask]]) -> None:
        cost_s, num_answers = self.scenario.coordinator.submit_s, len(what[2])
        if cost_s and num_answers:
            done_s = self._serve(cost_s * num_answers)
            self.events.at(done_s, self._stored, what)
        else:
            self._stored(what)

    def _stored(self, what: tuple[SimulatedWorker, int, list[SimulatedTask]]) -> None:
        worker, life, tasks = what
        if worker.life == life:
            worker.num_unsent -= len(tasks)
        scored, has_partial, is_cleared = [], False, False
        for task in tasks:
            worker.tasks.pop(task.id, None)
            before, was_suspect = task.num_kept, task.id in self.ledger.suspects
            outcome = self.ledger.submit(task, worker.name)
            if outcome == "stored":
                self._totals.num_delivered += task.num_tokens
                self._provisioning.ended(task.num_tokens)
                scored.append(task)
                is_cleared |= was_suspect
            elif outcome == "partial":
                has_partial = True
            else:
                self.ledger.sums.wasted["late"] += task.num_tokens - before
        if tasks:
            self._times.submitted()
        if scored:
            self._reward(scored)
        if has_partial or is_cleared or (scored and self.scenario.baseline.pool):
            self._notify_workers()

    def _reward(self, tasks: list[SimulatedTask]) -> None:
        model = self.scenario.coordinator
        if not model.reward_s:
            self.events.after(model.reward_delay_s, self._scored, tasks)
            return
        for task in tasks:
            free_s = heapq.heappop(self._rewarding)
            done_s = max(free_s, self.events.now_s) + model.reward_s
            heapq.heappush(self._rewarding, done_s)
            self.events.at(done_s + model.reward_delay_s, self._scored, [task])

    def _scored(self, tasks: list[SimulatedTask]) -> None:
        num_dropped = self.ledger.num_groups_dropped.total()
        has_changed = [self.ledger.scored(task) for task in tasks]
        if any(has_changed):
            self._try_claim()
        if self.ledger.num_groups_dropped.total() != num_dropped:
            self._notify_workers()

    # Versions

    def _announce(self, version: int) -> None:
        """A version is published: a round begins, and workers fetch it."""
        self._provisioning.began(self._total_slots)
        self._notify_all()
        if version == 0 or not self.scenario.overlap:
            return  # workers learn of it when they ask for tasks
        for worker in self.workers.values():
            if worker.doing is not Doing.GONE and worker.fetching is None:
                self._fetch(worker, worker.kind.round_trip_s / 2)

    def _take(self, what: tuple[SimulatedWorker, int]) -> None:
        worker, life = what
        if worker.life != life:
            return
        if worker.fetched == worker.taking:
            self._load_if_it_may(worker)
        elif worker.fetching is None:
            self._fetch(worker, 0.0)

    def _fetch(self, worker: SimulatedWorker, after_s: float) -> None:
        wanted = worker.taking if worker.doing is Doing.TAKING else self.ledger.newest
        assert wanted is not None
        worker.fetching = wanted
        self.events.after(after_s + worker.fetch_s, self._fetched, (worker, worker.life, wanted))

    def _fetched(self, what: tuple[SimulatedWorker, int, int]) -> None:
        worker, life, version = what
        if worker.life != life:
            return
        worker.fetching, worker.fetched = None, version
        if worker.doing is Doing.LEAVING:
            return
        if worker.doing is Doing.TAKING and version != worker.taking:
            worker.fetched = None  # its lease call named a newer one, which it fetches before it asks again
            self._fetch(worker, 0.0)
            return
        if worker.doing is Doing.PARKED:
            del self._parked[worker.name]
            worker.doing = Doing.FREE
        if worker.doing is not Doing.CALLING:  # otherwise it loads after the call
            self._load_if_it_may(worker)

    def _load_if_it_may(self, worker: SimulatedWorker) -> None:
        version = worker.fetched
        if version is None or worker.doing is Doing.LOADING:
            return
        if self.scenario.finishes and worker.num_running:
            return
        worker.fetched = None
        ended = worker.replica.load(version, self.events.now_s)
        worker.doing = Doing.LOADING
        self._submit_ended(worker, ended)
        worker.mark(self.events.now_s)
        self.events.at(worker.replica.now_s, self._loaded, (worker, worker.life))
        worker.due_s = math.inf
        self._schedule(worker)

    def _loaded(self, what: tuple[SimulatedWorker, int]) -> None:
        worker, life = what
        if worker.life != life:
            return
        worker.doing = Doing.FREE
        if worker.fetched is not None:
            self._load_if_it_may(worker)
            return
        newest = self.ledger.newest
        if self.scenario.overlap and newest != worker.version and worker.fetching is None:
            self._fetch(worker, worker.kind.round_trip_s / 2)
        self._pull(worker)

    # The trainer

    def _try_claim(self) -> None:
        step = self._wants
        if step is None or self.ledger.newest is None:
            return
        is_ahead = self.ledger.newest + 1 == step and self.ledger.claimed is not None
        if self.ledger.newest != step and not is_ahead:
            return
        num_dropped = self.ledger.num_groups_dropped.total()
        batch = self.ledger.claim(step)
        if self.ledger.num_groups_dropped.total() != num_dropped:
            self._notify_workers()
        if batch is None:
            return
        self._wants = None
        self._times.claimed(step)
        self._end_round()
        self._notify_workers()
        self.events.after(self.scenario.trainer.claim_s, self._got_batch, batch)

    def _end_round(self) -> None:
        if not self.scenario.ledger.in_rounds:
            return
        number = self.ledger.newest
        assert number is not None
        for worker in self.workers.values():
            if worker.doing is not Doing.GONE:
                self.events.after(worker.kind.round_trip_s / 2, self._stop_round, (worker, worker.life, number))

    def _stop_round(self, what: tuple[SimulatedWorker, int, int]) -> None:
        worker, life, number = what
        if worker.life != life:
            return
        worker.last_round_over = number
        if worker.round is not None and worker.round <= number:
            worker.round = None
            ended, stopped = worker.replica.abort_all(self.events.now_s)
            self._submit_ended(worker, ended)
            self._hand_back(worker, stopped)

    def _got_batch(self, batch: SimulatedBatch) -> None:
        self._batch = batch
        if not self._is_training:
            self._train()

    def _train(self) -> None:
        """Trains on the batch that is there, and claims the next one ahead if generation goes on."""
        batch, self._batch = self._batch, None
        assert batch is not None
        self._trainer_is("train")
        self._is_training, self._train_began_s = True, self.events.now_s
        self.events.after(self.scenario.trainer.seconds(batch), self._trained, batch)
        following = batch.step + 1
        if self.scenario.overlap and following < self.scenario.ledger.num_steps:
            self._when_published(self._claim_ahead, following)

    def _claim_ahead(self, step: int) -> None:
        self._wants = step
        self._try_claim()

    def _when_published(self, call: Any, what: Any) -> None:
        """Calls `call(what)` once no version is being written: the ledger refuses a claim two steps ahead."""
        if self._is_publishing:
            self._after_publishing.append((call, what))
        else:
            call(what)

    def _trained(self, batch: SimulatedBatch) -> None:
        self._train_ended_s = self.events.now_s
        self._trainer_is("publish")
        self._when_published(self._publish, (batch, self._train_began_s))

    def _publish(self, what: tuple[SimulatedBatch, float]) -> None:
        batch, began_s = what
        row = (batch, began_s - self._step_began_s, self._train_ended_s - began_s, self.events.now_s)
        self._is_publishing = True
        self.events.after(self.scenario.trainer.publish_s, self._committed, row)
        if self._batch is not None:  # the next batch is there: the version is written behind its training
            self._next_step()

    def _next_step(self) -> None:
        self._is_training = False
        self._step_began_s = self.events.now_s
        if self._batch is not None:
            self._train()
        else:
            self._trainer_is("wait")

    def _committed(self, what: tuple[SimulatedBatch, float, float, float]) -> None:
        batch, wait_s, train_s, published_from_s = what
        self._is_publishing = False
        self.ledger.commit(batch)
        self._note_step(batch, wait_s, train_s, self.events.now_s - published_from_s)
        if (took := self._times.committed(batch.step)) is not None:
            self._provisioning.trained(*took)
        is_last = batch.step + 1 >= (self.scenario.num_measured or self.scenario.ledger.num_steps)
        if batch.step + 1 == self.scenario.num_warmup:
            self.start = self._snapshot()
        if is_last:
            self._trainer_is("end")
            self.events.stop()
            return
        waiting, self._after_publishing = self._after_publishing, []
        for call, arguments in waiting:
            call(arguments)
        if self._is_training and not self._is_publishing and self._trainer_state == "publish":
            self._next_step()
            if not self.scenario.overlap:
                self._wants = batch.step + 1
        self._announce(batch.step + 1)

    def _note_step(self, batch: SimulatedBatch, wait_s: float, train_s: float, publish_s: float) -> None:
        totals = self._totals
        totals.num_trained += batch.num_trained
        totals.num_masked += batch.num_masked
        totals.num_answers += batch.num_answers
        totals.num_over += batch.num_over_answers
        totals.num_steps += 1
        totals.by_staleness.update(batch.by_staleness)
        mean = sum(age * count for age, count in batch.by_staleness.items()) / max(batch.num_trained, 1)
        self.rows.append(
            StepRow(
                batch.step,
                self.events.now_s,
                wait_s,
                train_s,
                publish_s,
                batch.num_answers,
                batch.num_trained,
                batch.num_masked,
                mean,
            )
        )

    def _trainer_is(self, state: str) -> None:
        now_s = self.events.now_s
        self._totals.trainer[self._trainer_state] += now_s - self._trainer_since_s
        if self._records_spans and now_s > self._trainer_since_s:
            self.spans.append(("trainer", self._trainer_state, self._trainer_since_s, now_s))
        self._trainer_state, self._trainer_since_s = state, now_s

    # Accounts

    def missing_tokens(self) -> int:
        """Returns the number of generated tokens of which it is not known where they went; must be 0."""
        waiting, kept = self.ledger.waiting_tokens()
        in_flight = sum(worker.replica.held_tokens() for worker in self.workers.values())
        for worker in self.workers.values():
            held = {**worker.tasks, **{task.id: task for task in self.ledger.held_by(worker.name)}}
            in_flight += sum(task.num_tokens - task.num_kept for task in held.values())
        sums = self.ledger.sums
        accounted = waiting + kept + in_flight + sums.trained + sums.masked + sums.wasted.total()
        return sum(worker.replica.num_generated for worker in self.workers.values()) - accounted

    def _snapshot(self) -> Totals:
        now_s = self.events.now_s
        self._totals.trainer[self._trainer_state] += now_s - self._trainer_since_s
        self._trainer_since_s = now_s
        seconds = {kind.name: defaultdict[str, float](float) for kind in self.scenario.fleet}
        dollars = self.scenario.trainer.accelerators * self.scenario.trainer.price_per_h * now_s / 3600
        for worker in self.workers.values():
            worker.settle(now_s)
            for state, spent_s in worker.seconds.items():
                seconds[worker.kind.name][state] += spent_s
            paid_s = sum(worker.seconds.values()) - worker.seconds["gone"]
            dollars += worker.kind.accelerators * worker.kind.price_per_h * paid_s / 3600
        replicas = [worker.replica for worker in self.workers.values()]
        return replace(
            self._totals,
            at_s=now_s,
            num_generated=sum(replica.num_generated for replica in replicas),
            num_prefilled=sum(replica.num_prefilled for replica in replicas),
            num_preempted=sum(replica.num_preempted for replica in replicas),
            by_staleness=Counter(self._totals.by_staleness),
            wasted=Counter(self.ledger.sums.wasted),
            seconds=seconds,
            trainer=defaultdict(float, self._totals.trainer),
            dollars=dollars,
        )
