"""Runs that are measured and simulated: fleets of paced engines, schedules and mishaps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A run. Each worker has `slots` places; its decode steps take `base_s` + `per_row_s` × rows, over its speed."""

    name: str
    speeds: tuple[float, ...]
    mode: str = "overlap"
    bound: int = 4
    over_provision: float | str = "auto"
    finishes: bool = False
    groups_per_step: int = 12
    group_size: int = 4
    slots: int = 8
    base_s: float = 0.048
    per_row_s: float = 0.0012
    prefill_s: float = 0.0
    load_s: float = 0.3
    median_tokens: float = 60.0
    sigma: float = 0.5
    max_tokens: int = 240
    train_s: float = 3.6
    num_warmup: int = 2
    num_steps: int = 9
    seed: int = 0
    fetch_s: dict[int, float] = field(default_factory=dict)
    """Seconds that a worker needs to fetch a version over a slow link, by its number."""
    killed: tuple[int, float] | None = None
    """Number of a worker that is killed, and the seconds after the start."""
    lease_s: float = 60.0

    @property
    def over_provision_value(self) -> float | str:
        return 1.0 if self.bound == 0 else self.over_provision


CALIBRATION = (
    Case("calibration, overlap", (1.0, 2.0), seed=91, groups_per_step=8, num_steps=6),
    Case("calibration, alternate", (1.5, 1.0), "alternate", 0, seed=92, groups_per_step=8, num_steps=5),
)
"""Runs from which the constants come; none of them is validated."""

CASES = (
    Case("overlap, two unequal workers", (1.0, 3.0), seed=1),
    Case("overlap, bound 1, four workers", (1.0, 1.5, 2.0, 3.0), bound=1, groups_per_step=20, train_s=3.0, seed=2),
    Case("overlap, trainer-bound", (2.0, 3.0), train_s=6.6, seed=3),
    Case("alternate, two unequal workers", (1.0, 3.0), "alternate", 0, seed=4),
    Case("alternate, one worker", (3.0,), "alternate", 0, groups_per_step=8, seed=5),
    Case("rounds, bound 3, three workers", (1.0, 2.0, 3.0), "alternate", 3, 2.0, seed=6, prefill_s=3e-4),
    Case("rounds, six workers", (1.0, 1.0, 1.5, 2.0, 2.5, 3.0), "alternate", 2, 1.5, groups_per_step=24, seed=7),
    Case("overlap, a worker killed", (1.0, 2.0, 3.0), killed=(1, 18.0), lease_s=9.0, seed=8),
    Case("overlap, a slow link", (2.0, 2.0), fetch_s={1: 7.5}, seed=9),
    Case("overlap, new versions wait for answers", (1.0, 3.0), finishes=True, seed=10),
)
