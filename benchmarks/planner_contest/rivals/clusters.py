"""Clusters and workloads of the contest: those of the AReaL-Hex paper, and random ones from a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from offbeat.planner.inputs.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.planner.inputs.workload import KvPolicy, LengthStatistics, ModelShape, Workload

GB = 1e9
H800 = Accelerator("H800 (paper)", 756e12, 80 * GB, 2000 * GB, 200 * GB, 64 * GB)
H20 = Accelerator("H20", 148e12, 96 * GB, 4000 * GB, 450 * GB, 64 * GB)
CARDS = (
    (H800, 5.28),
    (H20, 1.85),
    (Accelerator("A100 80GB SXM", 312e12, 80 * GB, 2039 * GB, 300 * GB, 32 * GB), 2.0),
    (Accelerator("A100 40GB SXM", 312e12, 40 * GB, 1555 * GB, 300 * GB, 32 * GB), 1.5),
    (Accelerator("L40S", 362e12, 48 * GB, 864 * GB, 32 * GB, 32 * GB), 1.2),
    (Accelerator("H100 PCIe", 756e12, 80 * GB, 2000 * GB, 64 * GB, 64 * GB), 2.4),
    (Accelerator("H100 SXM", 989e12, 80 * GB, 3350 * GB, 450 * GB, 64 * GB), 3.0),
    (Accelerator("H200 SXM", 989e12, 141 * GB, 4800 * GB, 450 * GB, 64 * GB), 3.8),
    (Accelerator("B200 SXM", 2250e12, 180 * GB, 7700 * GB, 900 * GB, 64 * GB), 6.0),
    (Accelerator("MI300X", 1307e12, 192 * GB, 5300 * GB, 448 * GB, 64 * GB), 2.0),
)
"""With indicative prices, $/h."""
MODELS = (
    ModelShape("R1-Distill-Qwen-1.5B", 28, 1536, 12, 2, 128, 8960, 151_936),
    ModelShape("R1-Distill-Qwen-7B", 28, 3584, 28, 4, 128, 18_944, 152_064),
    ModelShape("R1-Distill-Qwen-14B", 48, 5120, 40, 8, 128, 13_824, 152_064),
)
PAPER_H20_NODES = {24: 2, 32: 3, 40: 4, 56: 6}
"""Beside one node of eight H800, by the number of cards."""


@dataclass(frozen=True)
class Case:
    name: str
    inventory: Inventory
    workload: Workload
    is_paper: bool


def paper_cases() -> list[Case]:
    cases = []
    for num_cards, num_nodes in PAPER_H20_NODES.items():
        inventory = Inventory(
            {"h800": MachineClass("h800", H800, 8, 1, 5.28), "h20": MachineClass("h20", H20, 8, num_nodes, 1.85)},
            {
                frozenset(["h800"]): Link(5 * GB),
                frozenset(["h20"]): Link(5 * GB),
                frozenset(["h800", "h20"]): Link(1.5 * GB),
            },
        )
        for model in MODELS:
            workload = _workload(model, 32, 16, 5000, 1.5, bound=8, updates=4)
            cases.append(Case(f"{num_cards} cards, {model.name}", inventory, workload, is_paper=True))
    return cases


def random_cases(num_cases: int, seed: int) -> list[Case]:
    """Returns random cases with 2 to 6 classes and 16 to 4,096 cards. A seed gives the same cases for any number."""
    return [_random_case(random.Random(f"{seed}/{number}"), number) for number in range(num_cases)]


def _random_case(draw: random.Random, number: int) -> Case:
    num_classes = draw.randint(2, 6)
    num_nodes = max(num_classes, round(2 ** draw.uniform(1, 9)))  # of eight cards
    cuts = sorted(draw.sample(range(1, num_nodes), num_classes - 1))
    sizes = [high - low for low, high in zip([0, *cuts], [*cuts, num_nodes], strict=True)]
    classes = {
        f"c{i}": MachineClass(f"c{i}", card, 8, size, round(price * draw.uniform(0.6, 1.6), 2))
        for i, ((card, price), size) in enumerate(zip(draw.sample(CARDS, num_classes), sizes, strict=True))
    }
    links = {frozenset([name]): Link(2 ** draw.uniform(1.3, 5.6) * GB) for name in classes}
    for one, other in itertools.combinations(classes, 2):
        slower = min(links[frozenset([name])].bytes_per_s for name in (one, other))
        links[frozenset([one, other])] = Link(slower * draw.uniform(0.1, 0.8))
    model = draw.choice(MODELS)
    groups = 2 ** max(3, min(9, round(draw.uniform(-1, 1) + num_nodes.bit_length())))
    answer = draw.choice([1000, 2000, 5000, 8000])
    workload = _workload(model, groups, 16, answer, draw.uniform(1.1, 2.0), draw.choice([2, 4, 8]), draw.choice([1, 4]))
    name = f"random {number}: {num_classes} classes, {num_nodes * 8} cards, {model.name}"
    return Case(name, Inventory(classes, links), workload, is_paper=False)


def _workload(
    model: ModelShape, groups: int, group_size: int, answer: float, spread: float, bound: int, updates: int
) -> Workload:
    """`spread` is the mean square of the answers' lengths over the square of their mean."""
    lengths = LengthStatistics(answer, spread * answer**2, 2.5 * answer, 0.05, min(6 * answer, 27_648))
    prompt = LengthStatistics(200, 1.2 * 200**2, 400, 0.05, 1024)
    return Workload(model, groups, group_size, prompt, lengths, bound, updates, kv=KvPolicy.STALE)
