"""Counts plans instead of solving for them: every training gang, every number of nodes, every number of answers in
flight.

It shares the planner's cost model, but neither its columns, nor its solver, nor its bounds. Lags are those of the sync
tree on the nodes in question, and pipelines pay for every boundary, so what it finds can really be placed. Nodes are
rented to generate, not only to relay versions to others. Replicas of
one class have one degree of tensor parallelism and numbers of rows that differ by at most one, which is a subset of all
plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_honesty.clusters import Case
from offbeat.planner.columns.replicas import TENSOR_PARALLEL, rollout_column
from offbeat.planner.cost.constants import Constants
from offbeat.planner.cost.memory import kept_bytes, max_rows, spare_bytes, training_bytes, usable_bytes
from offbeat.planner.cost.rollout_time import tail_s
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.sync_time import publish_s, wake_s
from offbeat.planner.cost.training_time import GangFabric, boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.planner.inputs.hardware import Inventory, MachineClass
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.nodes import fabric_of
from offbeat.planner.place.realised import Arrivals, arrivals
from offbeat.planner.place.sync_tree import relay
from offbeat.planner.problem import RolloutColumn

Floats = NDArray[np.float64]
WAYS = tuple(itertools.product((1, 2, 3), (False, True)))
"""ZeRO stage, and whether activations are recomputed."""


@dataclass(frozen=True)
class Trainer:
    """A gang that is not beaten by another on the same nodes with the same publishing class."""

    nodes: tuple[tuple[str, int], ...]
    root: str
    period_s: float
    kept: tuple[tuple[str, float], ...]
    """Bytes of training state on each card between steps, by class."""


@dataclass(frozen=True)
class Counter:
    case: Case
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """Cache of speeds and lags."""

    @property
    def inventory(self) -> Inventory:
        return self.case.inventory

    @property
    def workload(self) -> Workload:
        return self.case.workload

    @cached_property
    def trainers(self) -> list[Trainer]:
        best: dict[tuple[object, ...], list[Trainer]] = {}
        for nodes, step_s, kept in itertools.chain(self._alone(), self._mixed()):
            for root in nodes:
                period_s = step_s + publish_s(self.workload, self.inventory.classes[root])
                one = Trainer(tuple(nodes.items()), root, period_s, tuple(kept.items()))
                rivals = best.setdefault((one.nodes, root), [])
                if not any(_is_as_good(other, one) for other in rivals):
                    rivals[:] = [other for other in rivals if not _is_as_good(one, other)] + [one]
        return sorted((one for rivals in best.values() for one in rivals), key=lambda one: one.period_s)

    def _degrees(self, machines: MachineClass) -> list[int]:
        return [tp for tp in TENSOR_PARALLEL if self.workload.model.num_heads % tp == 0 and machines.per_node % tp == 0]

    def _kept(self, splits: dict[str, tuple[int, float]], dp: int, zero: int) -> dict[str, float]:
        if not self.workload.may_share:
            return {}
        return {name: kept_bytes(self.workload, tp, pp, dp, zero) for name, (tp, pp) in splits.items()}

    def _fits(
        self, machines: MachineClass, tp: int, pp: int, dp: int, zero: int, recompute: bool, share: float
    ) -> bool:
        figures = Constants().of(machines.accelerator.name)
        need = training_bytes(self.workload, tp, pp, dp, zero, recompute=recompute, layer_share=share)
        return need <= usable_bytes(machines.accelerator, figures)

    def _fabric(self, machines: MachineClass) -> GangFabric:
        card = machines.accelerator.link_bytes_per_s
        link = self.inventory.links.get(frozenset([machines.name]))
        return GangFabric(card, link.bytes_per_s if link else card, machines.per_node)

    def _alone(self) -> Iterator[tuple[dict[str, int], float, dict[str, float]]]:
        work, num_layers = self.workload, self.workload.model.num_layers
        for name, machines in self.inventory.classes.items():
            figures, fabric = Constants().of(machines.accelerator.name), self._fabric(machines)
            for num in range(1, machines.num_nodes + 1):
                cards = num * machines.per_node
                for tp, pp in itertools.product(self._degrees(machines), range(1, num_layers + 1)):
                    dp, rest = divmod(cards, tp * pp)
                    if rest or not 1 <= dp <= max(1, work.trajectories_per_step // work.updates_per_step):
                        continue
                    longest = -(-num_layers // pp)
                    for zero, recompute in WAYS:
                        if not self._fits(machines, tp, pp, dp, zero, recompute, longest / num_layers):
                            continue
                        stages = num_layers / longest
                        flops = cards * machines.accelerator.flops * figures.training_share
                        seconds = compute_s(work, flops, recompute=recompute) * bubble(work, pp, dp) * pp / stages
                        seconds += tp_s(work, figures, fabric, tp, stages, dp)
                        seconds += dp_s(work, figures, fabric, tp, stages, dp, zero)
                        seconds = max(seconds, self._boundary_s(machines, tp, pp, dp))
                        yield {name: num}, seconds, self._kept({name: (tp, stages)}, dp, zero)

    def _boundary_s(self, machines: MachineClass, tp: int, pp: int, dp: int) -> float:
        """Seconds of the busiest boundary between two stages, whose groups lie on nodes in order."""
        groups, worst = machines.per_node // tp, 0.0
        for stage in range(pp - 1):
            sent: dict[int, int] = {}
            received: dict[int, int] = {}
            crossing = 0
            for i in range(dp):
                here, there = (stage * dp + i) // groups, ((stage + 1) * dp + i) // groups
                if here != there:
                    sent[here] = sent.get(here, 0) + 1
                    received[there] = received.get(there, 0) + 1
                    crossing += 1
            if crossing:
                link = self.inventory.link(machines.name, machines.name)
                most = crossing if link.is_shared else max(*sent.values(), *received.values())
                worst = max(worst, boundary_s(self.workload, link.bytes_per_s, 1) * most / dp)
        return worst

    def _mixed(self) -> Iterator[tuple[dict[str, int], float, dict[str, float]]]:
        for one, other in itertools.combinations(self.inventory.classes.values(), 2):
            if one.zone != other.zone:
                continue
            for nums in itertools.product(range(1, one.num_nodes + 1), range(1, other.num_nodes + 1)):
                yield from self._pipelines((one, other), nums)
                yield from self._copies((one, other), nums)

    def _pipelines(
        self, classes: tuple[MachineClass, MachineClass], nums: tuple[int, int]
    ) -> Iterator[tuple[dict[str, int], float, dict[str, float]]]:
        work, num_layers = self.workload, self.workload.model.num_layers
        link = self.inventory.link(*(each.name for each in classes))
        for tps in itertools.product(*map(self._degrees, classes)):
            dps = [num * each.per_node / tp for num, each, tp in zip(nums, classes, tps, strict=True)]
            dp = int(dps[0])
            if dps[0] != dps[1] or dp > max(1, work.trajectories_per_step // work.updates_per_step):
                continue
            for layers, (zero, recompute) in itertools.product(range(1, num_layers), WAYS):
                counts = (layers, num_layers - layers)
                slowest = 0.0
                for num, each, tp, count in zip(nums, classes, tps, counts, strict=True):
                    share, figures = count / num_layers, Constants().of(each.accelerator.name)
                    if not self._fits(each, tp, 2, dp, zero, recompute, share):
                        slowest = math.inf
                        break
                    flops = num * each.per_node * each.accelerator.flops * figures.training_share
                    seconds = share * compute_s(work, flops, recompute=recompute) * bubble(work, 2, dp)
                    seconds += tp_s(work, figures, self._fabric(each), tp, 1, dp) * share
                    seconds += dp_s(work, figures, self._fabric(each), tp, 1 / share, dp, zero)
                    slowest = max(slowest, seconds)
                if math.isinf(slowest):
                    continue
                num_links = 1 if link.is_shared else min(nums)
                slowest = max(slowest, boundary_s(work, link.bytes_per_s, num_links))
                nodes = {each.name: num for each, num in zip(classes, nums, strict=True)}
                splits = {
                    each.name: (tp, num_layers / count) for each, tp, count in zip(classes, tps, counts, strict=True)
                }
                yield nodes, slowest, self._kept(splits, dp, zero)

    def _copies(
        self, classes: tuple[MachineClass, MachineClass], nums: tuple[int, int]
    ) -> Iterator[tuple[dict[str, int], float, dict[str, float]]]:
        work = self.workload
        link = self.inventory.link(*(each.name for each in classes))
        crossing = link.bytes_per_s / min(nums) if link.is_shared else link.bytes_per_s
        fabrics = [self._fabric(each) for each in classes]
        slowest = GangFabric(
            min(each.card_bytes_per_s for each in fabrics),
            min(crossing, *(each.node_bytes_per_s for each in fabrics)),
            max(each.per_node for each in fabrics),
        )
        figures = [Constants().of(each.accelerator.name) for each in classes]
        pairs = list(zip(nums, classes, figures, strict=True))
        flops = sum(num * each.per_node * each.accelerator.flops * own.training_share for num, each, own in pairs)
        for tp in set(self._degrees(classes[0])) & set(self._degrees(classes[1])):
            dp = sum(num * each.per_node for num, each in zip(nums, classes, strict=True)) // tp
            if dp > max(1, work.trajectories_per_step // work.updates_per_step):
                continue
            for zero, recompute in WAYS:
                if not all(self._fits(each, tp, 1, dp, zero, recompute, 1.0) for each in classes):
                    continue
                seconds = compute_s(work, flops, recompute=recompute)
                seconds += max(tp_s(work, own, slowest, tp, 1, dp) for own in figures)
                seconds += max(dp_s(work, own, slowest, tp, 1, dp, zero) for own in figures)
                nodes = {each.name: num for each, num in zip(classes, nums, strict=True)}
                yield nodes, seconds, self._kept({each.name: (tp, 1.0) for each in classes}, dp, zero)

    def is_possible(self, tau_s: float) -> bool:
        """Whether a plan has this period, within the budget of the case."""
        return any(self._with(trainer, tau_s) for trainer in self.trainers if trainer.period_s <= tau_s)

    def _with(self, trainer: Trainer, tau_s: float) -> bool:
        classes, trains = self.inventory.classes, dict(trainer.nodes)
        if any(num > classes[name].num_nodes for name, num in trains.items()):
            return False
        paid = sum(num * classes[name].node_price_per_h for name, num in trains.items())
        free = [range(each.num_nodes - trains.get(name, 0) + 1) for name, each in classes.items()]
        homes = [True, False] if self.workload.may_share else [False]
        for counts, is_home in itertools.product(itertools.product(*free), homes):
            rented = {name: num for name, num in zip(classes, counts, strict=True) if num}
            price = paid + sum(num * classes[name].node_price_per_h for name, num in rented.items())
            over = self.case.budget is not None and price > self.case.budget + 1e-9
            if over or not (rented or is_home):
                continue
            if self._generates(trainer, rented, is_home, tau_s):
                return True
        return False

    def _generates(self, trainer: Trainer, rented: dict[str, int], is_home: bool, tau_s: float) -> bool:
        cap = max(self.workload.bound, 1) * self.workload.trajectories_per_step
        lags = self._lags_s(trainer.nodes, trainer.root, tuple(rented.items()), is_home)
        best = np.zeros(cap + 1)
        places = [(name, num, False) for name, num in rented.items()]
        places += [(name, num, True) for name, num in trainer.nodes] if is_home else []
        for name, num, shares in places:
            own = self._tokens(
                trainer, name, num, shares, (lags.home_s if shares else lags.rented_s).get(name, 0.0), tau_s
            )
            if not shares:
                own = np.where((np.arange(len(own)) < num) | (own <= 0), -np.inf, own)  # every rented node generates
            best = own if not best.any() else _joined(best, own)
        return bool(best[-1] >= self.workload.generated_tokens_per_step * (1 + 1e-9))

    def _tokens(self, trainer: Trainer, name: str, num: int, shares: bool, lag_s: float, tau_s: float) -> Floats:
        """Returns the most tokens of all nodes of a place together, by the number of trajectories in flight."""
        work, machines = self.workload, self.inventory.classes[name]
        cap = max(work.bound, 1) * work.trajectories_per_step
        best = np.zeros(cap + 1)
        for tp in self._degrees(machines):
            rates, token_s, lost_s, room = self._speeds(name, tp, shares)
            if not len(rates):
                continue
            waits_s = trainer.period_s + lag_s + self._reward_s()
            ready = tau_s - lost_s - (0.0 if work.bound else waits_s)
            window = np.full(len(rates), (work.bound + 0.5) * tau_s - waits_s) if work.bound else ready
            allowed = work.answer.tail * token_s <= window
            if shares:
                allowed &= room >= dict(trainer.kept).get(name, 0.0)
            each = np.concatenate([[0.0], np.where(allowed, rates * np.maximum(ready, 0.0), 0.0)])
            for replicas in range(1, num * machines.per_node // tp + 1):
                total = np.arange(min(cap, replicas * (len(each) - 1)) + 1)
                low, more = total // replicas, total % replicas
                high = np.minimum(low + 1, len(each) - 1)
                tokens = (replicas - more) * each[low] + more * each[high]
                best[: len(total)] = np.maximum(best[: len(total)], tokens)
        return np.asarray(np.maximum.accumulate(best))

    def _speeds(self, name: str, tp: int, shares: bool) -> tuple[Floats, Floats, Floats, Floats]:
        """Returns, for 1 row, 2 rows and so on: tokens/s, seconds a token, seconds lost at a version, bytes free."""
        if (name, tp, shares) in self._known:
            return self._known[name, tp, shares]
        work, machines = self.workload, self.inventory.classes[name]
        figures = Constants().of(machines.accelerator.name)
        cap = max(work.bound, 1) * work.trajectories_per_step
        most = min(max_rows(work, machines.accelerator, figures, tp), cap)
        columns = [rollout_column(machines, work, figures, tp, rows, [name]) for rows in range(1, most + 1)]
        found = (
            np.array([one.tokens_per_s for one in columns]),
            np.array([one.token_s for one in columns]),
            np.array([self._lost_s(machines, tp, one, shares) for one in columns]),
            np.array([spare_bytes(work, machines.accelerator, figures, tp, one.concurrency) for one in columns]),
        )
        self._known[name, tp, shares] = found
        return found

    def _lost_s(self, machines: MachineClass, tp: int, column: RolloutColumn, shares: bool) -> float:
        """Seconds that a replica loses at a version: on cards that train too, the time to load its weights again."""
        if not shares:
            return column.blocking_s[machines.name]
        card, figures = machines.accelerator, Constants().of(machines.accelerator.name)
        return wake_s(self.workload, card, figures, tp) + tail_s(self.workload, card, figures, tp, column.token_s)

    def _reward_s(self) -> float:
        return self.workload.reward.seconds if self.workload.reward else 0.0

    def _lags_s(
        self, trains: tuple[tuple[str, int], ...], root: str, rented: tuple[tuple[str, int], ...], is_home: bool
    ) -> Arrivals:
        """Seconds until each class has a version, over a tree on the first nodes of each class."""
        key = (trains, root, rented, is_home)
        if key in self._known:
            return self._known[key]
        taken = dict(trains)
        rolls = [f"{name}-{taken.get(name, 0) + i}" for name, num in rented for i in range(num)]
        rolls += [f"{name}-{i}" for name, num in trains for i in range(num)] if is_home else []
        fabric, num_bytes = fabric_of(self.inventory), update_bytes(self.workload)
        trained = [f"{name}-{i}" for name, num in trains for i in range(num)]
        self._known[key] = arrivals(fabric, relay(fabric, f"{root}-0", rolls, num_bytes), num_bytes, trained)
        return self._known[key]


def _joined(one: Floats, other: Floats) -> Floats:
    """Most tokens of two places together, by the number of trajectories in flight."""
    return np.array([(one[: i + 1] + other[i::-1]).max() for i in range(len(one))])


def _is_as_good(one: Trainer, other: Trainer) -> bool:
    kept = dict(one.kept)
    return one.period_s <= other.period_s and all(kept[name] <= size for name, size in other.kept)


def shortest_s(case: Case, tau_s: float, at_least: float) -> float:
    """Returns the shortest period that counting finds, if it is below `tau_s` by more than the share `at_least`;
    otherwise `tau_s`."""
    counter = Counter(case)
    high = tau_s / (1 + at_least)
    if not counter.is_possible(high):
        return tau_s
    low = high / 2
    while counter.is_possible(low):
        low, high = low / 2, low
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if counter.is_possible(middle) else (middle, high)
    return high
