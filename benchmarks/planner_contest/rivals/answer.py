"""What a contestant answers: a gang, replicas by column, and how weights travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.planner_contest.judge import plan as judged
from offbeat.planner.problem import Gang, PlanningProblem


@dataclass(frozen=True)
class Answer:
    gang: Gang
    replicas: Mapping[str, int]
    """By rollout column."""
    gap: float | None = None
    """Proven, where the contestant proves anything."""

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
