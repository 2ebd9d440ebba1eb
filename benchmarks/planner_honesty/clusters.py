"""Clusters that are hard to plan: links from 0.05 to 50 GB/s, single nodes, small budgets, short and long answers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import Inventory, Link, MachineClass
from offbeat.planner.inputs.model_shapes import known_model
from offbeat.planner.inputs.workload import KvPolicy, Workload, log_normal

GB = 1e9
CARDS = ("a100-40gb", "a100-80gb", "l40s", "rtx-4090", "h20", "h100-sxm", "h200")
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-4b", "qwen2.5-7b")
SLOWEST_GB_S, FASTEST_GB_S = 0.05, 50.0


@dataclass(frozen=True)
class Case:
    name: str
    inventory: Inventory
    workload: Workload
    budget: float | None = None
    """$/h; None: no limit."""
    is_small: bool = False
    """Whether counting all plans is quick enough."""


def cases(num: int, seed: int) -> list[Case]:
    """Returns the known hard cases and `num` random ones. A seed gives the same random cases for any number."""
    return [*known_cases(), *(random_case(random.Random(f"{seed}/{i}"), i) for i in range(num))]


def known_cases() -> list[Case]:
    """Returns clusters of which earlier planners made much less than their own cost model allows."""
    h100 = hardware.accelerator("h100-sxm")
    many = MachineClass("h100", h100, 8, 16, 3.0)
    slow = Inventory({"h100": many}, {frozenset(["h100"]): Link(1.25 * GB)})
    asked = Workload(
        known_model("qwen2.5-7b"),
        64,
        16,
        log_normal(300, 0.5, 1024),
        log_normal(2000, 0.8, 16_384),
        4,
        kv=KvPolicy.STALE,
    )
    slower = replace(slow, links={frozenset(["h100"]): Link(0.05 * GB)})
    one = Inventory({"h100": replace(many, num_nodes=1)})
    found = [Case("16 x 8 H100, 10 GbE, 7B", slow, asked), Case("16 x 8 H100, 0.05 GB/s, 7B", slower, asked)]
    for bound in (0, 1, 2, 4, 8):
        small = replace(asked, model=known_model("qwen2.5-1.5b"), groups_per_step=16, bound=bound)
        found.append(Case(f"one node of 8 H100, bound {bound}", one, small))
    return found


def random_case(draw: random.Random, number: int) -> Case:
    num_classes = draw.choice([1, 1, 2, 2, 2, 3])
    classes, links = {}, {}
    for i, card in enumerate(draw.sample(CARDS, num_classes)):
        is_owned = draw.random() < 0.25
        price = 0.0 if is_owned else round(draw.uniform(0.5, 4.0), 2)
        per_node, num_nodes = draw.choice([1, 2, 4, 8, 8]), draw.choice([1, 1, 2, 3, 4])
        name = f"c{i}"
        classes[name] = MachineClass(name, hardware.accelerator(card), per_node, num_nodes, price, is_owned=is_owned)
        links[frozenset([name])] = Link(rate(draw))
    for one, other in itertools.combinations(classes, 2):
        links[frozenset([one, other])] = Link(rate(draw), is_shared=draw.random() < 0.3)
    inventory = Inventory(classes, links)
    asked = Workload(
        known_model(draw.choice(MODELS)),
        groups_per_step=draw.choice([4, 8, 16]),
        group_size=draw.choice([4, 8]),
        prompt=log_normal(200, 0.4, 512),
        answer=log_normal(draw.uniform(300, 3000), draw.uniform(0.3, 0.9), 8192),
        bound=draw.choice([0, 1, 1, 2, 4, 8]),
        updates_per_step=draw.choice([1, 2]),
        kv=draw.choice([KvPolicy.STALE, KvPolicy.REFILL]),
    )
    whole = sum(machines.node_price_per_h * machines.num_nodes for machines in classes.values())
    budget = draw.choice([None, None, round(whole * draw.uniform(0.1, 1.0), 2)])
    words = f"{num_classes} classes, {sum(each.num_accelerators for each in classes.values())} cards"
    name = f"random {number}: {words}, {asked.model.name}, bound {asked.bound}"
    return Case(name, inventory, asked, budget, is_small=True)


def rate(draw: random.Random) -> float:
    """Draws bytes per second of a link, evenly in logarithms."""
    return float(SLOWEST_GB_S * (FASTEST_GB_S / SLOWEST_GB_S) ** draw.random() * GB)


def in_halves(case: Case) -> Case | None:
    """Returns the case with its first class of two or more nodes given as two classes; None if it has none."""
    name = next((name for name, machines in case.inventory.classes.items() if machines.num_nodes > 1), None)
    if name is None:
        return None
    machines, links = case.inventory.classes[name], dict(case.inventory.links)
    half = f"{name}-half"
    own = links[frozenset([name])]
    for other in case.inventory.classes:
        links[frozenset([half, other])] = own if other == name else links[frozenset([name, other])]
    links[frozenset([half])] = own
    classes = dict(case.inventory.classes)
    classes[name] = replace(machines, num_nodes=machines.num_nodes // 2)
    classes[half] = replace(machines, name=half, num_nodes=machines.num_nodes - machines.num_nodes // 2)
    return replace(
        case, name=f"{case.name}, in halves", inventory=replace(case.inventory, classes=classes, links=links)
    )


def relabelled(case: Case) -> Case:
    """Returns the case with other names, in another order."""
    new = {name: f"z{9 - i}" for i, name in enumerate(case.inventory.classes)}
    classes = {new[name]: replace(each, name=new[name]) for name, each in reversed([*case.inventory.classes.items()])}
    links = {frozenset(new[name] for name in pair): link for pair, link in case.inventory.links.items()}
    return replace(
        case, name=f"{case.name}, relabelled", inventory=replace(case.inventory, classes=classes, links=links)
    )


def dearer(case: Case) -> Case:
    """Returns the case with prices and budget multiplied by 3."""
    classes = {name: replace(each, price_per_h=each.price_per_h * 3) for name, each in case.inventory.classes.items()}
    budget = None if case.budget is None else case.budget * 3
    return replace(case, name=f"{case.name}, dearer", inventory=replace(case.inventory, classes=classes), budget=budget)


def with_a_gift(case: Case) -> Case:
    """Returns the case with a free, small and badly connected machine more, which no plan needs to use."""
    classes = dict(case.inventory.classes)
    classes["gift"] = MachineClass("gift", hardware.accelerator("rtx-4090"), 1, 1, 0.0, is_owned=True)
    links = dict(case.inventory.links)
    links |= {frozenset(["gift", name]): Link(SLOWEST_GB_S * GB) for name in case.inventory.classes}
    return replace(
        case, name=f"{case.name}, with a gift", inventory=replace(case.inventory, classes=classes, links=links)
    )
