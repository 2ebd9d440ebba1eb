"""AReaL's published speeds by staleness bound, beside those of the cost model on the same split of the machines.

Published (arXiv 2505.24298): a 1.5B model on 8 GPUs, 64 prompts of 16 answers of at most 8k tokens, three quarters of
the GPUs generate. No constant is fitted to these figures. The lengths of answers are not published; theirs are
assumed."""

from __future__ import annotations

from dataclasses import replace

from offbeat.planner.columns.columns import problem_of
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import Inventory, Link, MachineClass
from offbeat.planner.inputs.model_shapes import known_model
from offbeat.planner.inputs.workload import Workload, log_normal
from offbeat.planner.solve.search import fastest

PUBLISHED = {0: 27_100.0, 1: 47_800.0, 8: 51_500.0}
"""Tokens/s by staleness bound."""
CARD = hardware.accelerator("h800-sxm")
MACHINES = Inventory(
    {"h800": MachineClass("h800", CARD, 2, 4, 3.0)}, {frozenset(["h800"]): Link(CARD.link_bytes_per_s)}
)
"""One node of eight cards, in quarters that NVLink connects."""
WORK = Workload(
    known_model("r1-distill-qwen-1.5b"),
    groups_per_step=64,
    group_size=16,
    prompt=log_normal(150, 0.5, 1024),
    answer=log_normal(3000, 0.8, 8192),
    updates_per_step=4,
    colocates=False,
)


def speeds() -> dict[int, float]:
    """Returns the tokens per second of the cost model by staleness bound, if a quarter of the cards train."""
    found = {}
    for bound in PUBLISHED:
        problem = problem_of(MACHINES, replace(WORK, bound=bound))
        quarter = tuple(gang for gang in problem.gangs if sum(gang.nodes.values()) == 1)
        found[bound] = fastest(replace(problem, gangs=quarter)).tokens_per_s
    return found


def ratios(speeds: dict[int, float]) -> dict[str, float]:
    """Returns the gains of larger bounds, each over the published gain."""
    return {
        f"bound {more} over bound {less}": (speeds[more] / speeds[less]) / (PUBLISHED[more] / PUBLISHED[less])
        for less, more in ((0, 1), (0, 8), (1, 8))
    }
