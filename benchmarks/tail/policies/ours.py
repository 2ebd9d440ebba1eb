"""`ours`: a burst of groups at every version, survivors first, kept and not thrown away; every part can be switched.

A round begins with `factor` times a step's work alive: what earlier rounds left, topped up with new groups. It ends
when a step's worth is ready and nothing that is overdue still runs. What is ready beyond that waits for the next round;
what is unfinished goes on in it. With `stale` its keys and values stay where they are, for at most `kv_lag` versions;
with `refill` they are made anew. (`same` would be `refill` here, since every round brings a version of its own; and a
gate that takes the whole batch as baseline delivers what `release` delivers.)

Guarantee: no token older than `max_staleness` is delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.tail.rollouts import Rollouts
from benchmarks.tail.samples import Group, Sample


class Gate(StrEnum):
    STRICT = "strict"
    """Groups are delivered whole."""
    RELEASE = "release"
    """Samples are delivered when they end."""


class Admit(StrEnum):
    BURST = "burst"
    """New groups begin right after an update."""
    CONSTANT = "constant"
    """Whenever fewer are alive than the factor says."""


class Kv(StrEnum):
    REFILL = "refill"
    STALE = "stale"


@dataclass(frozen=True)
class Switches:
    """The parts of the schedule."""

    factor: float = 1.5
    gate: Gate = Gate.STRICT
    admit: Admit = Admit.BURST
    kv: Kv = Kv.STALE
    kv_lag: int = 4
    max_staleness: int = 4
    min_rows: int = 0
    """Fewer running rows than this let another group begin, at any time: 0 for never."""


class Ours:
    def __init__(self, switches: Switches):
        self.switches = switches
        self.alive: list[Group] = []
        """Groups with something that was not delivered, oldest first."""
        self.ready: list[Group | Sample] = []
        """What may be delivered, in the order in which it ended."""

    def step(self, rollouts: Rollouts) -> None:
        self._top_up(rollouts)
        wanted = self._num_wanted(rollouts)
        while len(self.ready) < wanted or self._is_any_overdue(rollouts):
            ended = rollouts.engine.step()
            assert ended, "nothing runs, and the step has too little"
            self._note(ended)
            if len(self.ready) < wanted:
                self._refill(rollouts)
        self._deliver(rollouts, wanted)
        rollouts.row.factor = self.switches.factor
        self._release_kv(rollouts)
        rollouts.update()

    def _num_wanted(self, rollouts: Rollouts) -> int:
        is_strict = self.switches.gate is Gate.STRICT
        return rollouts.groups_per_step if is_strict else rollouts.samples_per_step

    def _num_alive(self) -> int:
        """In the unit that is delivered."""
        if self.switches.gate is Gate.STRICT:
            return len(self.alive)
        return len(self.ready) + sum(not sample.is_done for group in self.alive for sample in group.samples)

    def _top_up(self, rollouts: Rollouts) -> None:
        waiting = [s for group in self.alive for s in group.samples if not s.is_done and s.kv_version is None]
        goal = self.switches.factor * self._num_wanted(rollouts)
        begun: list[Group] = []
        per_group = 1 if self.switches.gate is Gate.STRICT else rollouts.group_size
        num_missing = round((goal - self._num_alive()) / per_group)
        begun = [rollouts.begin() for _ in range(num_missing)]
        self.alive += begun
        rollouts.engine.add([*waiting, *(sample for group in begun for sample in group.samples)])

    def _refill(self, rollouts: Rollouts) -> None:
        if self.switches.admit is Admit.CONSTANT:
            self._top_up(rollouts)
        elif rollouts.engine.num_running < self.switches.min_rows:
            group = rollouts.begin()
            self.alive.append(group)
            rollouts.engine.add(group.samples)

    def _note(self, ended: Sequence[Sample]) -> None:
        if self.switches.gate is Gate.STRICT:
            self.ready += dict.fromkeys(sample.group for sample in ended if sample.group.is_done)
        else:
            self.ready += ended

    def _is_any_overdue(self, rollouts: Rollouts) -> bool:
        """Whether something unfinished has tokens that the next version could not train on."""
        last = rollouts.version - self.switches.max_staleness
        return any(_is_due(group, self.switches.gate, last) for group in self.alive if not group.is_done)

    def _deliver(self, rollouts: Rollouts, wanted: int) -> None:
        """The oldest first, so that nothing waits past its bound."""
        self.ready.sort(key=lambda unit: unit.oldest_version or 0)
        taken, self.ready = self.ready[:wanted], self.ready[wanted:]
        samples = [sample for unit in taken for sample in unit.samples]
        rollouts.deliver(samples)
        kept = {unit if isinstance(unit, Group) else unit.group for unit in self.ready}
        self.alive = [group for group in self.alive if not group.is_done or group in kept]

    def _release_kv(self, rollouts: Rollouts) -> None:
        """Aborts what may not go on with the keys and values that it has."""
        if self.switches.kv is Kv.REFILL:
            rollouts.engine.abort()
            return
        last = rollouts.version + 1 - self.switches.kv_lag
        running = [sample for group in self.alive for sample in group.samples if sample.kv_version is not None]
        rollouts.engine.abort([sample for sample in running if sample.kv_version < last])


def _is_due(group: Group, gate: Gate, last: int) -> bool:
    if gate is Gate.STRICT:
        oldest = group.oldest_version
        return oldest is not None and oldest <= last
    return any(not s.is_done and s.oldest_version is not None and s.oldest_version <= last for s in group.samples)
