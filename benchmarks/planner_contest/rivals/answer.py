"""A contestant's answer: a gang, replicas by column, and the way of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.planner_contest.judge import plan as judged
from offbeat.planner.problem import Gang, PlanningProblem


@dataclass(frozen=True)
class Answer:
    gang: Gang
    replicas: Mapping[str, int]
    """Number of replicas by rollout column."""
    gap: float | None = None
    """Proven gap to the optimum; None if the contestant proves nothing."""

    def plan(self, problem: PlanningProblem, sync: judged.Sync, copies: float = 1.0) -> judged.Plan:
        columns = {column.name: column for column in problem.rollout}
        gang = self.gang
        return judged.Plan(
            judged.Gang(
                gang.nodes,
                gang.tp,
                gang.pp,
                gang.dp,
                gang.layers if len(gang.nodes) > 1 else (),
                gang.batch_shares,
                gang.zero,
            ),
            tuple(
                judged.Replicas(columns[name].offer, columns[name].tp, columns[name].concurrency, count)
                for name, count in self.replicas.items()
            ),
            sync,
            copies,
        )
