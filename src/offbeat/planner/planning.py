"""Finds the best plan for machines and a workload (`plan`).

If the chosen nodes turn out slower than assumed, the problem is solved again (`rounds`). `compose` builds the plan from
a solution and its nodes by arithmetic alone, so that `verifying` can build it again and compare.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import UserError
from offbeat.planner.branches import branches, within
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.columns.gangs import is_complete
from offbeat.planner.cost.constants import NAMES, Constants, FigureSource
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.sync_time import CHUNK_BYTES
from offbeat.planner.inputs.hardware import Inventory, with_alike_joined
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.islands import Placed
from offbeat.planner.place.placing import Placer, Placing
from offbeat.planner.place.realised import ROUNDING, Arrivals, slowed
from offbeat.planner.plan import Placement, Plan, PlanStep, Pool, Staleness, Sync, Training
from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution
from offbeat.planner.report import explain
from offbeat.planner.report.explain import infeasible_because
from offbeat.planner.solve.certificate import (
    BranchProof,
    Certificate,
    Question,
    digest,
    digest_of,
    distance,
    proof_of,
)
from offbeat.planner.solve.program import Status
from offbeat.planner.solve.search import (
    GAP,
    HAIR,
    PRICE_GAP,
    Found,
    Result,
    cheapest,
    fastest,
    find,
    finish,
    note_of,
)
from offbeat.planner.solve.view import MICRO

MAX_ROUNDS = 6
"""Largest number of times that the problem is solved again because the chosen nodes are slower than assumed."""
TOLERANCE = 0.002
"""Relative accuracy of placement. In the search for the fastest plan, the problem is solved again only if the
chosen nodes lengthen the period by more than this share."""


@dataclass(frozen=True)
class Round:
    """Result of one round of solving and placing: a solution, its price and the nodes chosen for it."""

    solution: Solution
    price_per_h: float
    placing: Placing


Solve = Callable[[PlanningProblem], Result]


def rounds(
    placer: Placer, first: Result, solve: Solve, by: float = TOLERANCE, until_s: float = math.inf
) -> list[Round]:
    """Chooses nodes for the solution of `first`. As long as the chosen nodes are slower than assumed, solves the
    problem again with their times. Returns all solutions, each with its nodes.

    At first, columns (candidate gangs and replica shapes) assume the best links. If the chosen nodes lengthen the
    period by more than the share `by`, the next round assumes their step time and their lags (times until a class has a
    new version). If links were measured, the next round also changes every gang whose assumed period is shorter than
    the period on the chosen nodes: it gets its step time on the best nodes for it. Times only grow from round to round,
    so the lower bound of the first round always holds."""
    problem, result, found = placer.problem, first, list[Round]()
    while result.solution is not None:
        placing = placer.place(result.solution)
        found.append(Round(result.solution, result.price_per_h, placing))
        slower = slowed(problem, placing.assumed, placing.step_s, placing.lags, by)
        stands = placing.tau_s <= result.solution.tau_s * (1 + by)
        if stands or slower is problem or len(found) > MAX_ROUNDS or time.process_time() > until_s:
            break
        problem = _rivals_slowed(placer, slower, placing.tau_s, by)
        result = solve(problem)
    return found


def _rivals_slowed(placer: Placer, problem: PlanningProblem, tau_s: float, by: float) -> PlanningProblem:
    """Returns the problem with corrected step times for the gangs that seem faster than the plan just placed, whose
    period is `tau_s`: each gets the step time that the measured links allow on the nodes that suit it best. Otherwise
    the next rounds would choose similar gangs, each slowed by the same links. Changes nothing if no links were
    measured."""
    if not placer.inventory.measured:
        return problem
    for gang in problem.gangs:
        if gang.period_s < tau_s:
            problem = slowed(problem, gang, placer.best_step_s(gang), Arrivals(), by)
    return problem


def fastest_round(found: list[Round]) -> Round:
    """Returns the round with the shortest period on its chosen nodes; if several are equally short, the cheapest."""
    return min(found, key=lambda each: (each.placing.tau_s, each.price_per_h))


COST_MODEL = "roofline with KV reads, version 4"
"""Name of the cost model in certificates; its number rises with every change of a formula."""
ANSWER_S = 3.0
"""Seconds after which no further integer program is started to find or prove a plan; the gap then stays wider."""
PATIENCE = (0.1, 0.3, 1.0)
"""Shares of the time left that each branch may take, in rounds: branches that are not done are searched again."""
FIRST_SHARE = 0.8
"""Share of the time that the search without branches may take, if there may be branches."""
BRANCH_GAP = 1e-3
"""Relative gap at which a branch is no longer searched: less is below what placement can tell."""


def plan(
    inventory: Inventory,
    workload: Workload,
    *,
    constants: Constants | None = None,
    budget: float | None = None,
    throughput: float | None = None,
    within_s: float = ANSWER_S,
) -> Plan:
    """Returns the fastest plan or, if `throughput` (tokens/s) is given, the cheapest plan with at least that
    throughput; in both cases within `budget` ($/h; None: any price). `constants` are those of the cost model (None: the
    defaults). If no plan exists, raises a `UserError` with the reason and a remedy. The search for a better plan or
    proof ends about `within_s` seconds after it began; what is then unproven is in the gap."""
    if budget is not None and not (0 <= budget < math.inf):
        raise UserError(f"budget is {budget:g}; it must be a finite number, 0 or more (0: only machines that are free)")
    if throughput is not None and not (0 < throughput < math.inf):
        raise UserError(f"throughput is {throughput:g}; it must be a finite number above 0")
    constants = constants or Constants()
    inventory = with_alike_joined(inventory)
    problem = problem_of(inventory, workload, constants)
    placer = Placer(inventory, workload, constants, problem)
    until_s = time.process_time() + within_s
    answer = _placed(placer, budget, throughput, until_s)
    takes_turns = answer is None and workload.bound > 0 and workload.colocates
    if takes_turns:  # what is generated and trained in turn is never stale, so it is allowed with any bound
        workload = dataclasses.replace(workload, bound=0)
        placer = dataclasses.replace(placer, workload=workload, problem=problem_of(inventory, workload, constants))
        answer = _placed(placer, budget, throughput, until_s)
    if answer is None:
        raise UserError(f"no plan: {_why_none(problem, budget, throughput, until_s)}")
    chosen = (answer.placing, answer.solution, answer.certificate)
    return compose(inventory, workload, constants, *chosen, budget, throughput, takes_turns=takes_turns)


def _placed(placer: Placer, budget: float | None, throughput: float | None, until_s: float) -> Answer | None:
    if throughput is None:
        return fastest_placed(placer, budget, until_s)
    return cheapest_placed(placer, throughput, budget, until_s)


@dataclass(frozen=True)
class Answer:
    """A solution on its nodes, with its proof."""

    solution: Solution
    placing: Placing
    certificate: Certificate
    price_per_h: float

    @property
    def tokens_per_s(self) -> float:
        return self.placing.problem.demand.tokens / self.solution.tau_s


def fastest_placed(placer: Placer, budget: float | None, until_s: float) -> Answer | None:
    """Returns the plan that is fastest on its nodes; None if there is no plan. If the nodes of the first solution are
    slower than its columns assume, all `branches` are searched, which know their lags; without branches, `rounds` are
    tried."""
    gap = BRANCH_GAP if is_complete(placer.inventory) else GAP
    now_s = time.process_time()
    # Time has to be left for the branches, which know more than the first solution.
    first_s = now_s + FIRST_SHARE * (until_s - now_s) if is_complete(placer.inventory) else until_s
    first = find(placer.problem, budget, gap, until_s=first_s)
    if first.counts is None and first.status is Status.UNKNOWN:
        first = find(placer.problem, budget, gap, until_s=until_s)
    if first.counts is None:
        return None
    result = finish(first, budget)
    assert result.solution is not None
    assert result.certificate is not None
    best = Round(result.solution, result.price_per_h, placer.place(result.solution))
    certificate = result.certificate
    if best.placing.tau_s > certificate.tau_lo_s * (1 + TOLERANCE):
        if branches(placer.problem, placer.inventory):
            best, certificate = _over_branches(placer, best, certificate, budget, until_s)
        else:
            tries = rounds(placer, result, lambda each: fastest(each, budget, until_s=until_s), until_s=until_s)
            best = fastest_round(tries)
    return _answer(placer, best, certificate, None)


def _over_branches(
    placer: Placer, best: Round, certificate: Certificate, budget: float | None, until_s: float
) -> tuple[Round, Certificate]:
    """Searches all branches for a plan that is faster on its nodes than `best`. Returns the fastest, and a certificate
    whose bound is that of the branches if that is tighter."""
    found: dict[int, Found] = {}
    parts = branches(placer.problem, placer.inventory)
    problems = [within(placer.problem, placer.inventory, placer.workload, branch) for branch in parts]
    for share in PATIENCE:  # a good plan from one branch closes others that are hard to search by themselves
        for i, problem in enumerate(problems):
            below_s = best.placing.tau_s / (1 + BRANCH_GAP)
            if i in found and found[i].tau_lo_s >= below_s * (1 - BRANCH_GAP):
                continue
            now_s = time.process_time()
            if now_s > until_s:
                break
            found[i] = find(problem, budget, BRANCH_GAP, below_s=below_s, until_s=now_s + share * (until_s - now_s))
            if found[i].counts is None:
                continue
            result = finish(found[i], budget)
            assert result.solution is not None
            other = Round(result.solution, result.price_per_h, placer.place(result.solution))
            if (other.placing.tau_s, other.price_per_h) < (best.placing.tau_s, best.price_per_h):
                best = other
    if len(found) < len(parts):
        return best, certificate
    lowest_s = min(each.tau_lo_s for each in found.values())
    tau_lo_s = math.nextafter(min(lowest_s / (1 + 2 * HAIR), best.placing.tau_s), 0.0)
    if tau_lo_s <= certificate.tau_lo_s:
        return best, certificate
    proofs = tuple(
        BranchProof(branch, *proof_of(found[i].search.view, found[i].search.pool, tau_lo_s, certificate.price_cap))
        for i, branch in enumerate(parts)
    )
    return best, dataclasses.replace(certificate, tau_lo_s=tau_lo_s, prices=(), by_solver=(), branches=proofs)


def cheapest_placed(placer: Placer, throughput: float, budget: float | None, until_s: float) -> Answer | None:
    """Returns the cheapest plan that has this throughput on its nodes; None if there is no plan. Raises a `UserError`
    if plans have it only before their nodes are chosen."""
    first = cheapest(placer.problem, throughput, budget, until_s=until_s)
    if first.solution is None or first.certificate is None:
        return None
    tau_s, certificate = first.solution.tau_s, first.certificate

    def solve(problem: PlanningProblem) -> Result:
        return cheapest(problem, throughput, budget, until_s=until_s)

    found = rounds(placer, first, solve, ROUNDING, until_s)
    kept = [each for each in found if each.placing.tau_s <= tau_s * (1 + ROUNDING)]
    best = min(kept, key=lambda each: each.price_per_h, default=None)
    lowest = certificate.price_cap or 0
    if best is None or best.price_per_h * MICRO > (lowest + 1) * (1 + PRICE_GAP):
        best, certificate = _cheapest_branch(placer, tau_s, throughput, best, certificate, budget, until_s)
    if best is None:
        most = placer.problem.demand.tokens / min(each.placing.tau_s for each in found)
        raise UserError(
            f"no plan reaches {throughput:,.0f} tokens/s: over the links between the chosen nodes, the plans found "
            f"reach {most:,.0f} at most; ask for that or less"
        )
    return _answer(placer, best, certificate, throughput)


def _cheapest_branch(
    placer: Placer,
    tau_s: float,
    throughput: float,
    best: Round | None,
    certificate: Certificate,
    budget: float | None,
    until_s: float,
) -> tuple[Round | None, Certificate]:
    """Searches all branches for a plan that is cheaper than `best` and whose nodes are fast enough."""
    for branch in branches(placer.problem, placer.inventory):
        if time.process_time() > until_s:
            break
        limit = budget if best is None else best.price_per_h / (1 + PRICE_GAP)
        problem = within(placer.problem, placer.inventory, placer.workload, branch)
        result = cheapest(problem, throughput, limit, until_s=until_s)
        if result.solution is None:
            continue
        other = Round(result.solution, result.price_per_h, placer.place(result.solution))
        is_fast = other.placing.tau_s <= tau_s * (1 + ROUNDING)
        if is_fast and (best is None or other.price_per_h < best.price_per_h):
            best = other
    return best, certificate


def _answer(placer: Placer, best: Round, certificate: Certificate, throughput: float | None) -> Answer:
    problem = placer.problem
    solution = dataclasses.replace(best.solution, tau_s=best.placing.tau_s)
    certificate = dataclasses.replace(certificate, columns_sha256=digest(problem))
    gap = distance(certificate, solution.tau_s, best.price_per_h, is_for_price=throughput is not None)
    return Answer(solution, best.placing, dataclasses.replace(certificate, gap=gap), best.price_per_h)


def question_of(
    inventory: Inventory, workload: Workload, constants: Constants, budget: float | None, throughput: float | None
) -> Question:
    return Question(
        digest_of(inventory),
        digest_of(workload),
        digest_of(constants),
        budget,
        throughput,
        workload.bound,
        COST_MODEL,
    )


def _why_none(problem: PlanningProblem, budget: float | None, throughput: float | None, until_s: float) -> str:
    lines = infeasible_because(problem, budget, throughput, until_s)
    return "; ".join(lines[:2]) or (
        "unknown: the solver ran out of time before it found a plan or proved that there is none; try again with fewer "
        "classes of nodes"
    )


def compose(
    inventory: Inventory,
    workload: Workload,
    constants: Constants,
    placing: Placing,
    solution: Solution,
    certificate: Certificate,
    budget: float | None,
    throughput: float | None,
    takes_turns: bool = False,
) -> Plan:
    """Builds the plan of `solution` on the nodes chosen in `placing`, and computes prices, cards and expected
    staleness."""
    problem, tree = placing.problem, placing.tree
    gang = problem.gang(solution)
    solution = dataclasses.replace(solution, tau_s=placing.tau_s)
    rent = Counter(gang.nodes) + Counter(solution.nodes)
    price_per_h = problem.fixed_price_per_h + sum(problem.offers[name].node_price_per_h * rent[name] for name in rent)
    tokens_per_s = problem.demand.tokens / solution.tau_s
    error = held_out_error(inventory, constants)
    least = None if certificate.price_cap is None else (certificate.price_cap + 1) / MICRO
    return Plan(
        model=workload.model.name,
        budget=budget,
        throughput=throughput,
        rent=dict(rent),
        free=tuple(
            name for name in rent if not inventory.classes[name].price_per_h or inventory.classes[name].is_owned
        ),
        limit=explain.limit(problem, solution, price_per_h, budget, throughput),
        step=PlanStep(
            tau_s=solution.tau_s,
            tau_lo_s=certificate.tau_lo_s if throughput is None else None,
            tokens_per_s=tokens_per_s,
            price_per_h=price_per_h,
            price_lo_per_h=None if throughput is None else least,
            price_per_million_tokens=explain.price_per_million(price_per_h, tokens_per_s),
        ),
        training=dataclasses.replace(
            _training(problem, gang, placing, tokens_per_s, by_price=throughput is not None),
            rate_error=_rate_error(inventory, constants, gang.nodes, "train"),
        ),
        rollout=tuple(
            dataclasses.replace(pool, rate_error=_rate_error(inventory, constants, [pool.offer], "decode"))
            for pool in _pools(problem, gang, solution, placing.places)
        ),
        sync=Sync(tree.root, update_bytes(workload), tree.hops, CHUNK_BYTES, tree.seconds, tree.lower_bound_s),
        staleness=_staleness(workload, problem, solution),
        placement=_placement(placing, gang, solution, certificate.tau_lo_s if throughput is None else None),
        solution=solution,
        certificate=dataclasses.replace(
            certificate,
            held_out_error=error,
            question=question_of(inventory, workload, constants, budget, throughput),
            num_shapes=len(problem.gangs) + len(problem.rollout),
            is_complete=is_complete(inventory),
        ),
        assumptions=(*_assumptions(inventory, workload, constants), *_sharing(problem, gang, solution)),
        note=note_of(problem, solution),
        takes_turns=takes_turns,
    )


def held_out_error(inventory: Inventory, constants: Constants) -> float | None:
    """Largest mean relative error of the cost model on held-out measurements, over the accelerators on offer; None if
    one of them was never measured."""
    errors = []
    for name in {machines.accelerator.name for machines in inventory.classes.values()}:
        known = [error.mean for key, error in constants.errors.items() if key.rpartition(".")[0] == name]
        if not known:
            return None
        errors += known
    return max(errors)


def _rate_error(inventory: Inventory, constants: Constants, classes: Iterable[str], kind: str) -> float | None:
    """Largest mean relative error on held-out measurements of a kind, over these classes; None if one was never
    measured."""
    cards = [inventory.classes[name].accelerator.name for name in classes]
    errors = [constants.errors.get(f"{card}.{kind}") for card in cards]
    return None if None in errors else max(error.mean for error in errors if error is not None)


def _common(column: Gang | RolloutColumn, record: type[Training | Pool]) -> dict[str, Any]:
    """Returns the values of those attributes of `column` that are also fields of `record`, a dataclass of the plan."""
    return {each.name: getattr(column, each.name) for each in dataclasses.fields(record) if hasattr(column, each.name)}


def _training(
    problem: PlanningProblem, gang: Gang, placing: Placing, tokens_per_s: float, *, by_price: bool
) -> Training:
    price = explain.gang_price_per_h(problem, gang)
    return Training(
        **_common(gang, Training),
        stages=placing.stages,
        price_per_million_tokens=explain.price_per_million(price, tokens_per_s),
        why=explain.why_trains(problem, gang, by_price=by_price),
    )


def _pools(problem: PlanningProblem, gang: Gang, solution: Solution, places: Sequence[Placed]) -> tuple[Pool, ...]:
    columns = {column.name: column for column in problem.rollout}
    all_tokens_per_s = sum(columns[name].tokens_per_s * count for name, count in solution.replicas.items())
    pools = []
    for name, count in solution.replicas.items():
        column = columns[name]
        blocking_s = column.blocking_s[gang.root]
        if not problem.demand.bound:  # generation also waits for training and for the new version
            blocking_s += gang.period_s + problem.demand.lag_s + column.lag_from_s(gang.root)
        net = column.tokens_per_s * max(solution.tau_s - blocking_s, 0.0) / solution.tau_s
        price = 0.0 if column.is_home else explain.replica_price_per_h(problem, column)
        pools.append(
            Pool(
                **{**_common(column, Pool), "blocking_s": blocking_s},
                column=name,
                num_replicas=count,
                weight=column.tokens_per_s / all_tokens_per_s,
                places=tuple(placed.group for placed in places if placed.column == name),
                price_per_million_tokens=explain.price_per_million(price, net),
                why=explain.why_generates(problem, column.offer),
                shares_gang=column.is_home,
                beside=column.is_home and problem.demand.bound > 0,
            )
        )
    return tuple(pools)


def _placement(placing: Placing, gang: Gang, solution: Solution, tau_lo_s: float | None) -> Placement:
    lags_s = placing.lags.by_class
    relays = {*gang.nodes, *lags_s} if placing.problem.demand.bound else ()

    def longest_s(columns: Sequence[RolloutColumn]) -> dict[str, float]:
        return {
            name: max((c.lag_from_s(gang.root, relays) for c in columns if c.offer == name), default=0.0)
            for name in lags_s
        }

    assumed, placed = longest_s(placing.columns), longest_s(placing.problem.rollout)
    return Placement(
        assumed_step_s=placing.assumed.step_s,
        assumed_lags_s=assumed,
        lags_s=placed,
        gap=None if tau_lo_s is None else (solution.tau_s - tau_lo_s) / tau_lo_s,
    )


def _staleness(workload: Workload, problem: PlanningProblem, solution: Solution) -> Staleness:
    demand, columns = problem.demand, {column.name: column for column in problem.rollout}
    in_flight = sum(columns[name].concurrency * count for name, count in solution.replicas.items())
    return Staleness(
        bound=demand.bound,
        age_guard=demand.age_guard,
        in_flight=in_flight,
        in_flight_cap=max(demand.bound, 1) * demand.trajectories,
        mean_age=(in_flight + demand.queue) / demand.trajectories if demand.bound else 0.0,
        tail_tokens=demand.tail_tokens,
        tail_share=workload.answer.tail_share,
    )


def _assumptions(inventory: Inventory, workload: Workload, constants: Constants) -> tuple[str, ...]:
    answer = workload.answer
    lines = [
        f"answers: {answer.mean:,.0f} tokens on average, {answer.longest:,.0f} at most; answers of up to "
        f"{answer.tail:,.0f} tokens must end in time to be trained on within the staleness bound",
        f"waste: {workload.waste_share:.0%} of what is generated is not trained on",
    ]
    for name in sorted({machines.accelerator.name for machines in inventory.classes.values()}):
        sources = Counter(constants.source(name, constant) for constant in NAMES)
        if guessed := sources[FigureSource.DEFAULT]:
            lines.append(f"{name}: {guessed} of {len(NAMES)} constants of the cost model are defaults, never measured")
    return (*inventory.assumptions, *workload.assumptions, *lines)


def _sharing(problem: PlanningProblem, gang: Gang, solution: Solution) -> list[str]:
    """Returns one line of text for each class whose cards take turns between training and generation. The line gives
    the training state that stays on the cards, and the time to load the engine's weights again."""
    own = [column for column in problem.rollout if column.is_home and column.name in solution.replicas]
    if problem.demand.bound:
        return [
            f"{name}: {gang.tp * gang.pp * gang.dp} cards of a node train while its other cards generate; that they "
            "slow one another is not counted"
            for name in {column.offer: None for column in own}
        ]
    lines = []
    for offer in {column.offer: None for column in own}:
        wake_s = max(column.blocking_s[gang.root] for column in own if column.offer == offer)
        kept = f"{gang.kept_bytes[offer] / 1e9:.1f} GB of weights and optimizer stay on each while it generates"
        woken = f"engines hold nothing while it trains and load their weights again in {wake_s:.2g} s"
        lines.append(f"{offer} cards that take turns: {kept}; {woken}")
    return lines
