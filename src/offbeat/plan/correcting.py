"""Rounds between the solver and the machines: what a placed plan really takes goes back into its columns.

Columns assume the best links. Where the places that a solution gets are slower, by more than the tolerance and in a way
that lengthens its period, the gang's step and the classes' lags are replaced by what they were, so are the steps of
other gangs that promise more than was placed, and it is solved again.
A solution whose period stands as placed ends the rounds: it holds in the slower problem too, where nothing is better
than before. Figures only ever become slower, there are at most `MAX_ROUNDS` rounds, and the best placed plan of all is
kept: it is never worse than the first, and the first solve's lower bound holds for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offbeat.plan.place.placing import Placer, Placing
from offbeat.plan.place.realised import ROUNDING, slowed
from offbeat.plan.problem import Problem
from offbeat.plan.solution import Solution
from offbeat.plan.solve.search import Result

MAX_ROUNDS = 3
"""Of solving again."""
TOLERANCE = 0.02
"""Of a figure: the cost model is no better than that."""


@dataclass(frozen=True)
class Round:
    """One solution with its places."""

    solution: Solution
    price_per_h: float
    placing: Placing


def rounds(placer: Placer, first: Result, solve: Callable[[Problem], Result], by: float = TOLERANCE) -> list[Round]:
    """The first placed plan and those of the rounds after it; `first` is what `solve` makes of the placer's problem."""
    problem, result, found = placer.problem, first, list[Round]()
    while result.solution is not None:
        placing = placer.place(result.solution)
        found.append(Round(result.solution, result.price_per_h, placing))
        slower = slowed(problem, placing.assumed, placing.step_s, placing.lags_s, by)
        stands = placing.tau_s <= result.solution.tau_s * (1 + by)
        if stands or slower is problem or len(found) > MAX_ROUNDS:
            break
        problem = _rivals_slowed(placer, slower, placing.tau_s, by)
        result = solve(problem)
    return found


def _rivals_slowed(placer: Placer, problem: Problem, tau_s: float, by: float) -> Problem:
    """Gangs that promise a shorter period than was placed, on the best nodes for each of them: without that a round
    would go to each neighbour of the gang, which has to use the same bad links."""
    if not placer.inventory.measured:
        return problem
    for gang in problem.gangs:
        if gang.period_s < tau_s:
            problem = slowed(problem, gang, placer.best_step_s(gang), {}, by)
    return problem


def fastest_round(found: list[Round]) -> Round:
    """The shortest placed period; of those the cheapest."""
    return min(found, key=lambda each: (each.placing.tau_s, each.price_per_h))


def cheapest_round(found: list[Round]) -> Round | None:
    """The cheapest that keeps its period where it is placed; None where none does."""
    kept = [each for each in found if each.placing.tau_s <= each.solution.tau_s * (1 + ROUNDING)]
    return min(kept, key=lambda each: each.price_per_h, default=None)
