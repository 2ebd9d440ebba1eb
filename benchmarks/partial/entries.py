"""Entries of the contest. A policy has a curve of rates over its factor; an entry is one factor on a curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.partial.policies.april import April
from benchmarks.partial.policies.factors import Automatic, Factor, Fixed
from benchmarks.partial.policies.ours import Admit, Gate, Kv, Order, Ours, Switches
from benchmarks.partial.policies.policy import Policy
from benchmarks.partial.policies.pool import Pool
from benchmarks.partial.policies.sync import Sync


@dataclass(frozen=True)
class Entry:
    """A policy with its factor; None if the policy chooses the factor itself, or has none."""

    curve: str
    factor: float | None = None

    @property
    def name(self) -> str:
        if self.factor is not None:
            return f"{self.curve} {self.factor:g}"
        return f"{self.curve} auto" if self.curve in OURS else self.curve

    def policy(self) -> Policy:
        if self.curve in OURS:
            switches = OURS[self.curve]
            factor: Factor = Automatic(switches.max_staleness) if self.factor is None else Fixed(self.factor)
            return Ours(factor, switches)
        return RIVALS[self.curve](self.factor or 1.0)


SYNC = Entry("sync")
STRICT, RELEASE = "ours strict", "ours release"
RIVALS: dict[str, Callable[[float], Policy]] = {
    "sync": lambda _: Sync(),
    "april": April,
    "april, surplus kept": lambda factor: April(factor, drops_surplus=False),
    "copris": lambda factor: Pool(factor, keeps_kv=False),
    "pipeline": lambda factor: Pool(factor, keeps_kv=True),
}
OURS = {
    STRICT: Switches(Gate.STRICT),
    RELEASE: Switches(Gate.RELEASE),
    f"{STRICT}, refill": Switches(Gate.STRICT, kv=Kv.REFILL),
    f"{RELEASE}, refill": Switches(Gate.RELEASE, kv=Kv.REFILL),
    f"{STRICT}, constant": Switches(Gate.STRICT, Admit.CONSTANT),
    f"{RELEASE}, constant": Switches(Gate.RELEASE, Admit.CONSTANT),
    f"{STRICT}, refilled below 16 rows": Switches(Gate.STRICT, min_rows=16),
    f"{STRICT}, 32 rows": Switches(Gate.STRICT, max_rows=32),
    f"{STRICT}, 32 rows in tail order": Switches(Gate.STRICT, max_rows=32, order=Order.TAIL),
}
FACTORS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Of ours: up to as many as a bound of 4 lets live."""
PART_FACTORS = (1.25, 2.0)
"""Of ours with a part switched."""


def entries() -> list[Entry]:
    """Returns all entries, in the order of the table."""
    rivals = [Entry("april", factor) for factor in (1.25, 1.5, 2.0, 3.0)] + [Entry("april, surplus kept", 1.5)]
    pools = [Entry(curve, factor) for curve in ("copris", "pipeline") for factor in (1.0, 1.5, 2.0)]
    ours = [Entry(curve, factor) for curve in (STRICT, RELEASE) for factor in (*FACTORS, None)]
    parts = [Entry(curve, factor) for curve in OURS if curve not in (STRICT, RELEASE) for factor in PART_FACTORS]
    return [SYNC, *rivals, *pools, *ours, *parts]
