"""Rules of other systems, to compare with Offbeat's: when they start work, and what they train on.

- AReaL bounds staleness at admission only: at most (bound + version + 1) × groups per step are ever started, and a
  finished group is trained however old it has become.
- APRIL starts more groups than a step needs and stops once enough are done; there is no bound. Groups that end in the
  same moment beyond those that the step needs are thrown away.
- CoPRIS keeps a fixed number of answers running and stops once enough groups are done; PipelineRL never stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.rules.groups import AdmissionState, AdmissionTarget


@dataclass(frozen=True)
class Baseline:
    """Which of Offbeat's rules another one replaces; the default replaces none."""

    name: str = "offbeat"
    admits_once: bool = False
    """Admission is AReaL's."""
    burst: bool = False
    """Admission counts groups in flight, and starts a factor's worth at every version, however old what waits is."""
    takes_first_ready: bool = False
    """A step takes the groups that were ready first, however old they are."""
    drops_surplus: bool = False
    pool: bool = False
    """Admission keeps a factor's worth of answers running: a new group begins once as many answers have ended."""
    leases_in_order: bool = False
    """Open tasks are leased in order, without pacing."""

    def admit(
        self,
        state: AdmissionState,
        target: AdmissionTarget,
        *,
        num_drawn: int,
        num_unfinished: int,
        group_size: int,
        max_staleness: int,
    ) -> int | None:
        """Returns how many groups to draw; None: Offbeat's rule decides. `num_drawn` groups were drawn so far, and
        `num_unfinished` of their answers have not ended."""
        if state.step is None or not (self.admits_once or self.burst or self.pool):
            return None
        if self.pool:
            room = target.over_provision * target.groups_per_step * group_size - num_unfinished
            return max(0, math.floor(room / group_size + 1e-9))
        if self.admits_once:
            steps = max_staleness + state.step + 1
            if target.num_steps is not None:
                steps = min(steps, target.num_steps)
            return max(0, steps * target.groups_per_step - num_drawn)
        return max(0, math.ceil(target.over_provision * target.groups_per_step) - state.num_alive)


OFFBEAT = Baseline()
AREAL = Baseline("areal", admits_once=True, takes_first_ready=True, leases_in_order=True)
APRIL = Baseline("april", burst=True, takes_first_ready=True, drops_surplus=True, leases_in_order=True)
COPRIS = Baseline("copris", pool=True, takes_first_ready=True, leases_in_order=True)
PIPELINE = Baseline("pipeline", pool=True, takes_first_ready=True, leases_in_order=True)
BASELINES = {one.name: one for one in (OFFBEAT, AREAL, APRIL, COPRIS, PIPELINE)}
