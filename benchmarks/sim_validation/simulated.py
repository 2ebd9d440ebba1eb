"""The simulation of a case, with the answer lengths that its engines draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from benchmarks.sim_validation.cases import Case
from offbeat.ledger.records import derive_seed
from offbeat.simulator import report
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.lengths import GivenLengths
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, linear
from offbeat.simulator.simulation import CoordinatorModel, FleetEvent, Scenario, Simulation, TrainerModel
from offbeat.testing.paced import LogNormalLength

PROMPT_TOKENS = 12
"""Prompt of the built-in arithmetic task, about."""


@dataclass(frozen=True)
class CallTimes:
    """Constants of a coordinator, measured in runs that are not validated."""

    call_s: float
    """Time of a call to the coordinator and back."""
    lease_s: float
    """Time of a lease call."""
    reward_s: float
    """Time from an answer's commit to that of its reward."""


@dataclass(frozen=True)
class Predicted:
    samples_per_s: float
    staleness: float
    idle: tuple[float, ...]
    trainer_waits: float


def lengths_of(case: Case) -> GivenLengths:
    """Returns the lengths that the paced engines draw from the seeds of the run's tasks."""
    law = LogNormalLength(case.median_tokens, case.sigma, case.max_tokens)
    groups = []
    for ordinal in range((case.num_steps + 6) * case.groups_per_step):
        seed = derive_seed(case.seed, ordinal)
        answers = [law.num_tokens(derive_seed(seed, member)) for member in range(case.group_size)]
        groups.append((answers, PROMPT_TOKENS))
    return GivenLengths(groups)


def scenario_of(case: Case, times: CallTimes) -> Scenario:
    fleet = tuple(
        WorkerClass(
            f"w{number}",
            1,
            case.slots,
            EngineSpeed(
                linear(case.base_s, case.per_row_s, case.slots, speed),
                prefill_s=case.prefill_s / speed,
                load_s=case.load_s,
            ),
            round_trip_s=times.call_s,
            fetch_s=case.fetch_s.get(number, 0.0),
        )
        for number, speed in enumerate(case.speeds)
    )
    events = []
    if case.killed is not None:
        events.append(FleetEvent(case.killed[1], "crash", f"w{case.killed[0]}"))
    overlap = case.mode == "overlap"
    return Scenario(
        fleet,
        LedgerSettings(case.groups_per_step, case.bound, case.num_steps + 6, in_rounds=not overlap and case.bound > 0),
        TrainerModel(fixed_s=case.train_s, claim_s=times.call_s / 2),
        CoordinatorModel(lease_s=max(times.lease_s - times.call_s, 0.0), reward_delay_s=times.reward_s),
        overlap=overlap,
        over_provision=cast(float, case.over_provision_value),
        finishes=case.finishes,
        lease_ttl_s=case.lease_s,
        events=tuple(events),
        num_warmup=case.num_warmup,
        num_measured=case.num_steps,
    )


def predict(case: Case, times: CallTimes) -> Predicted:
    simulation = Simulation(scenario_of(case, times), lengths_of(case))
    simulation.run()
    found = report.figures(simulation)
    idle = tuple(1.0 - found["workers"][f"w{number}"]["busy"] for number in range(len(case.speeds)))
    return Predicted(found["samples_per_s"], found["staleness"], idle, found["trainer"]["wait"])
