"""`ours`: a burst of groups at every version, survivors first, kept and not thrown away; every part can be switched.

A round begins with `factor` times a step's work alive: what earlier rounds left, topped up with new groups. It ends
when `control/select` finds a batch: a step's worth is ready, and nothing at its last chance still runs. What is ready
beyond that waits for the next round; what is unfinished goes on in it. With `stale` its keys and values stay where they
are, for at most `kv_lag` versions; with `refill` they are made anew. (`same` would be `refill` here, since every round
brings a version of its own; and a gate that takes the whole batch as baseline delivers what `release` delivers.)

Guarantee: no token older than `max_staleness` is delivered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from benchmarks.partial.policies.factors import Factor
from benchmarks.partial.rollouts import Rollouts
from benchmarks.partial.samples import Group, Sample
from offbeat.rules.groups import Candidate, VersionRun, select


class Gate(StrEnum):
    STRICT = "strict"
    """Groups are delivered whole."""
    RELEASE = "release"
    """Samples are delivered when they end."""


class Admit(StrEnum):
    BURST = "burst"
    """New groups begin right after an update."""
    CONSTANT = "constant"
    """And whenever fewer are unfinished than the factor says."""


class Order(StrEnum):
    """Who runs first where not all may."""

    FIFO = "fifo"
    TAIL = "tail"
    """Groups that miss fewest members, then those begun first, then whoever has most tokens: the tail is longest."""


class Kv(StrEnum):
    REFILL = "refill"
    STALE = "stale"


@dataclass(frozen=True)
class Switches:
    """The parts of the schedule."""

    gate: Gate = Gate.STRICT
    admit: Admit = Admit.BURST
    kv: Kv = Kv.STALE
    kv_lag: int = 4
    max_staleness: int = 4
    min_rows: int = 0
    """Number of running rows below which another group begins at any time; 0: never."""
    max_rows: int | None = None
    """Largest number of rows that run at a time, chosen by `order`; None: all."""
    order: Order = Order.FIFO


class Ours:
    """Our policy. It works in units: groups, or single samples if these are released one by one."""

    def __init__(self, factor: Factor, switches: Switches):
        self.factor, self.switches = factor, switches
        self.units: list[Group | Sample] = []
        """Units that were begun and not delivered, in the order in which they began."""
        self._num_ready = 0
        """Number of these units that are done."""

    def step(self, rollouts: Rollouts) -> None:
        rollouts.row.factor = self.factor.value
        if not (taken := self._batch(rollouts)):  # otherwise earlier rounds left a whole batch: nothing need run
            self._top_up(rollouts, len(self.units))
        while not taken:
            ended = rollouts.engine.step()
            assert ended, "nothing runs, and the step has too little"
            self._num_ready += len({unit for unit in map(self._unit_of, ended) if unit.is_done})
            taken = self._batch(rollouts)
            if not taken:
                self._refill(rollouts)
        rollouts.deliver(sample for unit in taken for sample in unit.samples)
        self.units = [unit for unit in self.units if unit not in taken]
        self._num_ready -= len(taken)
        self._release_kv(rollouts)
        rollouts.update(meanwhile=lambda: self.factor.ended(rollouts))

    def _num_wanted(self, rollouts: Rollouts) -> int:
        return rollouts.groups_per_step * self._units_per_group(rollouts)

    def _units_per_group(self, rollouts: Rollouts) -> int:
        return 1 if self.switches.gate is Gate.STRICT else rollouts.group_size

    def _unit_of(self, sample: Sample) -> Group | Sample:
        return sample.group if self.switches.gate is Gate.STRICT else sample

    def _batch(self, rollouts: Rollouts) -> set[Group | Sample]:
        """Returns the units that the step trains on, chosen as in real runs; empty while the batch is incomplete."""
        wanted = self._num_wanted(rollouts)
        if self._num_ready < wanted:
            return set()
        candidates = [_candidate(number, unit) for number, unit in enumerate(self.units)]
        selection = select(candidates, rollouts.version, wanted, self.switches.max_staleness, in_order=False)
        assert not selection.stale, f"{len(selection.stale)} units are past the bound"
        return {self.units[number] for number in selection.take}

    def _top_up(self, rollouts: Rollouts, num_units: int) -> None:
        """Begins groups until there are as many units as the factor demands, and runs as many samples as may run."""
        missing = self.factor.value * self._num_wanted(rollouts) - num_units
        missing = min(missing, self._most(rollouts) - len(self.units))
        num_groups = round(missing / self._units_per_group(rollouts))
        for _ in range(num_groups):
            self._begin(rollouts)
        self._fill(rollouts)

    def _refill(self, rollouts: Rollouts) -> None:
        if self.switches.admit is Admit.CONSTANT:
            self._top_up(rollouts, len(self.units) - self._num_ready)
        elif rollouts.engine.num_running < self.switches.min_rows and len(self.units) < self._most(rollouts):
            self._begin(rollouts)
            self._fill(rollouts)
        elif self.switches.max_rows is not None:
            self._fill(rollouts)

    def _fill(self, rollouts: Rollouts) -> None:
        """Runs waiting samples, as far as there are free rows."""
        waiting = [sample for sample in self._unfinished() if sample.kv_version is None]
        if self.switches.order is Order.TAIL:
            waiting.sort(key=_by_tail)
        room = len(waiting) if self.switches.max_rows is None else self.switches.max_rows - rollouts.engine.num_running
        rollouts.engine.add(waiting[: max(room, 0)])

    def _most(self, rollouts: Rollouts) -> int:
        """Largest number of units alive; more could not all be delivered within the bound."""
        return (self.switches.max_staleness + 1) * self._num_wanted(rollouts)

    def _begin(self, rollouts: Rollouts) -> None:
        group = rollouts.begin()
        self.units += [group] if self.switches.gate is Gate.STRICT else group.samples

    def _unfinished(self) -> list[Sample]:
        return [sample for unit in self.units for sample in unit.samples if not sample.is_done]

    def _release_kv(self, rollouts: Rollouts) -> None:
        """Aborts all samples that may not continue with their present keys and values."""
        if self.switches.kv is Kv.REFILL:
            rollouts.engine.abort()
            return
        oldest = rollouts.version + 1 - self.switches.kv_lag
        held = [(sample, sample.kv_version) for sample in self._unfinished()]
        rollouts.engine.abort([sample for sample, version in held if version is not None and version < oldest])


def _by_tail(sample: Sample) -> tuple[int, int, int]:
    num_missing = sum(not one.is_done for one in sample.group.samples)
    return num_missing, sample.group.number, -sample.num_tokens


def _candidate(number: int, unit: Group | Sample) -> Candidate:
    if not unit.is_done:  # what it has so far is not read
        return Candidate(number, number, ready=False, first_step=unit.oldest_version)
    spans = [span for sample in unit.samples for span in sample.spans]
    return Candidate(number, number, ready=True, first_step=unit.oldest_version, runs=_stretches(tuple(spans)))


@lru_cache(maxsize=4096)
def _stretches(spans: tuple[tuple[int, int], ...]) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(num_tokens, version) for version, num_tokens in spans)
