"""Reads what to simulate from a TOML file: the run's rules under their keys of a training configuration, and the fleet.

[batch], [schedule] and [rollout] mean the same as in a training configuration. The fleet is in [workers.NAME], or comes
from a plan; then `cluster` and `workload` name the files that the plan was made from.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from offbeat.config.explain import ValueOrigin
from offbeat.config.load import load_as
from offbeat.config.schema import DEFAULT_BOUND, Section
from offbeat.errors import UserError
from offbeat.simulator import lengths as laws
from offbeat.simulator.baselines import BASELINES
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.lengths import GivenLengths, Law, Lengths
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, linear
from offbeat.simulator.simulation import CoordinatorModel, FleetEvent, Scenario, TrainerModel
from offbeat.spelling import suggest

ReadRun = Callable[[str], Sequence[tuple[Sequence[int], int]]]
"""Returns the answer lengths and the prompt length of each group of a run, given the run's folder."""


class RunTable(Section):
    steps: int = Field(20, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)
    warmup: int | None = Field(None, ge=0)
    """Steps at the beginning that the figures leave out; without it, a fifth of all."""


class BatchTable(Section):
    groups_per_step: int = Field(32, ge=1)
    group_size: int = Field(8, ge=1)
    min_group: int = Field(2, ge=1)
    max_redraws: float = Field(4.0, ge=0)
    drop_no_signal: bool = False


class ScheduleTable(Section):
    mode: Literal["alternate", "overlap"] = "overlap"
    max_staleness: int | None = Field(None, ge=0, le=64)
    over_provision: float | Literal["auto"] = "auto"
    new_version: Literal["interrupt", "finish"] = "interrupt"

    @property
    def bound(self) -> int:
        if self.max_staleness is not None:
            return self.max_staleness
        return DEFAULT_BOUND if self.mode == "overlap" else 0


class RolloutTable(Section):
    kv: Literal["same", "refill", "stale"] = "same"
    kv_lag: int = Field(1, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    max_attempts: int = Field(3, ge=1)
    lease_s: float = Field(60.0, gt=0)


class LengthsTable(Section):
    tokens: float | None = Field(None, gt=0)
    median: float | None = Field(None, gt=0)
    sigma: float | None = Field(None, ge=0)
    longest: int | None = Field(None, ge=1)
    edges: list[float] | None = None
    counts: list[float] | None = None
    run: str | None = None
    shared: float = Field(0.0, ge=0, le=1)
    no_signal: float = Field(0.0, ge=0, le=1)


class WorkersTable(Section):
    count: int = Field(1, ge=1, le=100_000)
    slots: int = Field(ge=1)
    base_s: float = Field(ge=0)
    per_row_s: float = Field(0.0, ge=0)
    per_context_token_s: float = Field(0.0, ge=0)
    prefill_s: float = Field(0.0, ge=0)
    load_s: float = Field(0.0, ge=0)
    speed: float = Field(1.0, gt=0)
    spread: float = Field(0.0, ge=0, le=2)
    kv_tokens: float | None = Field(None, gt=0)
    accelerators: int = Field(1, ge=1)
    price: float = Field(0.0, ge=0)
    round_trip_s: float = Field(0.0, ge=0)
    site: str = ""
    root_gbytes_per_s: float | None = Field(None, gt=0)
    site_gbytes_per_s: float | None = Field(None, gt=0)


class TrainerTable(Section):
    fixed_s: float = Field(0.0, ge=0)
    token_s: float = Field(0.0, ge=0)
    publish_s: float = Field(0.0, ge=0)
    accelerators: int = Field(1, ge=1)
    price: float = Field(0.0, ge=0)


class RewardTable(Section):
    seconds: float = Field(0.0, ge=0)
    slots: int = Field(1, ge=1)


class CoordinatorTable(Section):
    lease_s: float = Field(0.0, ge=0)
    submit_s: float = Field(0.0, ge=0)
    uplink_gbytes_per_s: float | None = Field(None, gt=0)


class EventTable(Section):
    at_s: float = Field(ge=0)
    kind: Literal["crash", "reclaim", "leave", "join", "slow"]
    workers: str
    count: int = Field(1, ge=1)
    seconds: float | None = Field(None, ge=0)
    factor: float = Field(1.0, gt=0)


class PolicyTable(Section):
    name: str = "offbeat"
    round_robin: bool = False


class ScenarioFile(Section):
    cluster: str | None = None
    workload: str | None = None
    run: RunTable = RunTable()
    batch: BatchTable = BatchTable()
    schedule: ScheduleTable = ScheduleTable()
    rollout: RolloutTable = RolloutTable()
    answer: LengthsTable | None = None
    prompt: LengthsTable = LengthsTable(tokens=64)
    weight_bytes: float = Field(0.0, ge=0)
    workers: dict[str, WorkersTable] = Field({})
    trainer: TrainerTable | None = None
    reward: RewardTable = RewardTable()
    coordinator: CoordinatorTable = CoordinatorTable()
    events: list[EventTable] = Field([])
    policy: PolicyTable = PolicyTable()


def _refusal(data: Mapping[str, Any]) -> str:
    if "classes" in data:
        return "describes a cluster; give a simulation's file, which has [workers.NAME] and [answer]"
    return "" if data else "is empty; describe a simulation: [workers.NAME], [trainer], [answer] and [batch]"


def load_scenario(path: pathlib.Path | str) -> tuple[ScenarioFile, ValueOrigin]:
    return load_as(path, ScenarioFile, _refusal)


def scenario_of(
    file: ScenarioFile,
    origin: ValueOrigin,
    *,
    fleet: tuple[WorkerClass, ...] | None = None,
    trainer: TrainerModel | None = None,
    read_run: ReadRun | None = None,
) -> tuple[Scenario, Lengths]:
    """Returns the scenario of a file and its lengths. `fleet` and `trainer` come from a plan; None: from the file."""
    if fleet is None:
        if not file.workers:
            raise UserError(
                f"{origin.before(('workers',))}[workers.NAME] is missing; describe the workers, or give --plan"
            )
        fleet = tuple(_kind(name, table) for name, table in file.workers.items())
    if trainer is None:
        if file.trainer is None:
            raise UserError(f"{origin.before(('trainer',))}[trainer] is missing; give fixed_s or token_s, or --plan")
        table = file.trainer
        trainer = TrainerModel(
            table.fixed_s,
            table.token_s,
            publish_s=table.publish_s,
            accelerators=table.accelerators,
            price_per_h=table.price,
        )
    baseline = _baseline(file, origin)
    events = tuple(_event(event, index, fleet, origin) for index, event in enumerate(file.events))
    schedule, batch = file.schedule, file.batch
    bound, overlap = schedule.bound, schedule.mode == "overlap"
    factor: float | Literal["auto"] = schedule.over_provision
    if factor != "auto" and not 1 <= factor <= bound + 1 and baseline.name == "offbeat":
        raise UserError(
            f"{origin.before(('schedule', 'over_provision'))}schedule.over_provision = {factor:g}: allowed 1 to "
            f"max_staleness + 1 = {bound + 1}"
        )
    if factor == "auto" and (bound == 0 or baseline.name != "offbeat"):
        factor = 1.0 if bound == 0 else 2.0
    max_no_signal = batch.max_redraws * batch.groups_per_step if batch.drop_no_signal else 0.0
    scenario = Scenario(
        fleet,
        LedgerSettings(
            batch.groups_per_step,
            bound,
            file.run.steps,
            in_rounds=not overlap and bound > 0,
            min_group=min(batch.min_group, batch.group_size),
            max_attempts=file.rollout.max_attempts,
            max_no_signal=max_no_signal,
        ),
        trainer,
        CoordinatorModel(
            lease_s=file.coordinator.lease_s,
            submit_s=file.coordinator.submit_s,
            reward_s=file.reward.seconds,
            reward_slots=file.reward.slots,
            uplink_bytes_per_s=_bytes(file.coordinator.uplink_gbytes_per_s),
        ),
        overlap=overlap,
        over_provision=factor,
        finishes=schedule.new_version == "finish",
        keeps_kv=file.rollout.kv == "stale",
        kv_lag=file.rollout.kv_lag,
        weight_bytes=file.weight_bytes,
        lease_ttl_s=file.rollout.lease_s,
        events=events,
        baseline=baseline,
        round_robin=file.policy.round_robin,
        seed=file.run.seed,
        num_warmup=file.run.steps // 5 if file.run.warmup is None else file.run.warmup,
    )
    if scenario.num_warmup >= file.run.steps:
        raise UserError(
            f"{origin.before(('run', 'warmup'))}run.warmup = {scenario.num_warmup}: must be below run.steps = "
            f"{file.run.steps}, because the steps after it are counted"
        )
    return scenario, _lengths(file, origin, read_run)


def _bytes(gbytes_per_s: float | None) -> float:
    return math.inf if gbytes_per_s is None else 1e9 * gbytes_per_s


def _kind(name: str, table: WorkersTable) -> WorkerClass:
    if table.base_s + table.per_row_s <= 0:
        raise UserError(f"workers.{name}: base_s and per_row_s are both 0, but a step must take time; set one above 0")
    return WorkerClass(
        name,
        table.count,
        table.slots,
        EngineSpeed(
            linear(table.base_s, table.per_row_s, table.slots, table.speed),
            table.per_context_token_s / table.speed,
            table.prefill_s / table.speed,
            load_s=table.load_s,
        ),
        kv_tokens=math.inf if table.kv_tokens is None else table.kv_tokens,
        accelerators=table.accelerators,
        price_per_h=table.price,
        round_trip_s=table.round_trip_s,
        site=table.site,
        root_bytes_per_s=_bytes(table.root_gbytes_per_s),
        site_bytes_per_s=_bytes(table.site_gbytes_per_s),
        spread=table.spread,
    )


def _baseline(file: ScenarioFile, origin: ValueOrigin) -> Any:
    name = file.policy.name
    where = f'{origin.before(("policy", "name"))}policy.name = "{name}"'
    if name not in BASELINES:
        raise UserError(f"{where}: unknown policy; {suggest(name, list(BASELINES), lists_few=True)}")
    wanted = {"areal": "overlap", "pipeline": "overlap", "april": "alternate", "copris": "alternate"}.get(name)
    if wanted is not None and file.schedule.mode != wanted:
        raise UserError(f'{where}: needs schedule.mode = "{wanted}"')
    if wanted == "alternate" and file.schedule.bound == 0:
        raise UserError(f"{where}: needs schedule.max_staleness of 1 or more, because unfinished answers go on later")
    return BASELINES[name]


def _event(event: EventTable, index: int, fleet: tuple[WorkerClass, ...], origin: ValueOrigin) -> FleetEvent:
    names = [kind.name for kind in fleet]
    if event.workers not in names:
        raise UserError(
            f'{origin.before(("events", index))}events.workers = "{event.workers}": no such workers; '
            f"{suggest(event.workers, names, lists_few=True)}"
        )
    return FleetEvent(event.at_s, event.kind, event.workers, event.count, event.seconds, event.factor)


def _lengths(file: ScenarioFile, origin: ValueOrigin, read_run: ReadRun | None) -> Lengths:
    if file.answer is None:
        raise UserError(
            f"{origin.before(('answer',))}[answer] is missing; give tokens, or median + sigma + longest, or edges + "
            "counts, or run"
        )
    if file.answer.run is not None and read_run is not None:
        return GivenLengths(read_run(file.answer.run))
    longest = file.rollout.max_new_tokens or file.answer.longest or 10**9
    return Lengths(
        _law("answer", file.answer, origin),
        file.batch.group_size,
        prompt=_law("prompt", file.prompt, origin),
        longest=longest,
        shared=file.answer.shared,
        no_signal=file.answer.no_signal,
        seed=file.run.seed,
    )


def _law(name: str, table: LengthsTable, origin: ValueOrigin) -> Law:
    if table.tokens is not None:
        return laws.constant(table.tokens)
    if table.edges is not None and table.counts is not None:
        edges, counts = table.edges, table.counts
        rises = all(low < high for low, high in itertools.pairwise(edges))
        if len(edges) == len(counts) + 1 and rises and min(counts) >= 0 and sum(counts) > 0:
            return laws.of_histogram(edges, counts)
        raise UserError(f"{origin.before((name,))}[{name}]: give rising edges, one more than counts of 0 or more")
    if table.median is not None and table.sigma is not None and table.longest is not None:
        return laws.LogNormal(table.median, table.sigma, table.longest)
    raise UserError(
        f"{origin.before((name,))}[{name}]: give tokens, or median + sigma + longest, or edges + counts, or run"
    )
