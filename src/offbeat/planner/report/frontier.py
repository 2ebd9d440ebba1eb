"""Plots price against throughput as an HTML page. It shows the best plans of an inventory, and the plans of each class
of nodes alone for the same price. It also shows the split by class that AReaL-Hex (another system) evidently ran.
"""

from __future__ import annotations

import dataclasses
import html
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import UserError
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory, with_alike_joined
from offbeat.planner.inputs.model_shapes import weight_bytes
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.placing import Placer
from offbeat.planner.planning import fastest_placed
from offbeat.planner.problem import RolloutColumn
from offbeat.planner.report.explain import least_price

NUM_POINTS = 12
POINT_S = 1.0
"""Seconds of processor time for each point."""
COPIES = 5.0
"""Number of copies of the weights that AReaL-Hex is assumed to send over the link between training and rollout for each
version. Its published update times correspond to 4.2, 5.7 and 5.7 copies."""


@dataclass(frozen=True)
class Point:
    price_per_h: float
    tokens_per_s: float


def mixed(inventory: Inventory, workload: Workload, constants: Constants | None = None) -> list[Point]:
    """Price and throughput of the best plans on all classes of nodes together, on the nodes that they use, the fastest
    plan first. Each plan is the fastest for less money than the one before."""
    constants, inventory = constants or Constants(), with_alike_joined(inventory)
    placer = Placer(inventory, workload, constants, problem_of(inventory, workload, constants))
    points: list[Point] = []
    budget, cheapest = None, least_price(placer.problem)
    if cheapest.solution is None:
        return []
    while len(points) < NUM_POINTS:
        answer = fastest_placed(placer, budget, time.process_time() + POINT_S)
        if answer is None:
            break
        points.append(Point(answer.price_per_h, answer.tokens_per_s))
        step = (answer.price_per_h - cheapest.price_per_h) / max(NUM_POINTS - len(points), 1)
        if step <= 0:
            break
        budget = answer.price_per_h - step
    best: list[Point] = []
    for point in reversed(points):  # a plan of more money is shown only if it is faster
        if not best or point.tokens_per_s > best[-1].tokens_per_s:
            best.append(point)
    return best[::-1]


def homogeneous(
    inventory: Inventory, workload: Workload, constants: Constants | None = None
) -> Mapping[str, list[Point]]:
    """Returns price and throughput of the best plans on each class of nodes alone, by class. The class has as many
    nodes as the price of the whole inventory buys. The list is empty if the model does not fit."""
    money = sum(machines.node_price_per_h * machines.num_nodes for machines in inventory.classes.values())
    found: dict[str, list[Point]] = {}
    for name in inventory.classes:
        try:
            found[name] = mixed(alone(inventory, name, money), workload, constants)
        except UserError:
            found[name] = []
    return found


def alone(inventory: Inventory, name: str, money_per_h: float) -> Inventory:
    """Returns an inventory with the node class `name` alone, and as many of its nodes as `money_per_h` buys, at least
    one node. The number of nodes does not change if they cost nothing, or if the inventory has no link between two
    nodes of the class."""
    machines = inventory.classes[name]
    link = inventory.links.get(frozenset((name,)))
    if machines.node_price_per_h and link is not None:
        machines = dataclasses.replace(machines, num_nodes=max(1, int(money_per_h / machines.node_price_per_h + 1e-9)))
    links = {} if link is None else {frozenset((name,)): link}
    return Inventory({name: machines}, links, inventory.default_links)


def split_by_class(inventory: Inventory, workload: Workload, constants: Constants | None = None) -> Point | None:
    """Returns price and throughput of the plan that AReaL-Hex (arXiv 2511.00796) evidently ran; None if there is no
    such plan.

    The class of nodes with the most FLOPS per accelerator trains, all others generate, and every node is rented. At
    each new version, generation waits while `COPIES` copies of the weights cross the link. Replica shapes and
    concurrency are the best that our search finds."""
    trainer = max(inventory.classes, key=lambda name: inventory.classes[name].accelerator.flops)
    problem = problem_of(inventory, workload, constants)
    narrowed = dataclasses.replace(
        problem,
        gangs=tuple(gang for gang in problem.gangs if set(gang.nodes) == {trainer}),
        rollout=tuple(
            _waiting(column, COPIES * weight_bytes(workload.model) / inventory.link(trainer, column.offer).bytes_per_s)
            for column in problem.rollout
            if column.offer != trainer
        ),
    )
    if not narrowed.gangs or not narrowed.rollout:
        return None
    placer = Placer(inventory, workload, constants or Constants(), narrowed)
    answer = fastest_placed(placer, None, time.process_time() + POINT_S)
    if answer is None:
        return None
    rent = sum(offer.num_nodes * offer.node_price_per_h for offer in problem.offers.values())
    return Point(rent + problem.fixed_price_per_h, answer.tokens_per_s)


def _waiting(column: RolloutColumn, seconds: float) -> RolloutColumn:
    """Copy of a rollout column (replica shape) that loses `seconds` more of generation at each new version."""
    return dataclasses.replace(column, blocking_s={root: lost + seconds for root, lost in column.blocking_s.items()})


WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 90, 190, 24, 60
COLOURS = ("#d1495b", "#edae49", "#00798c", "#66a182", "#8d6a9f", "#a0522d", "#5c6b73", "#b56576")
MIXED_COLOUR = "#1d3557"
SPLIT, SPLIT_COLOUR = "split by class", "#111"
SPLIT_TOLD = (
    "<p>Split by class: what AReaL-Hex (arXiv 2511.00796) evidently ran, under the same cost model. The class with the "
    "most FLOPS per accelerator trains, all others generate, every machine is rented, and "
    f"{COPIES:g} copies of the weights cross the link while generation waits.</p>"
)
NUM_TICKS = 6
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:900px;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.15em .9em;text-align:right}th{border-bottom:1px solid #999}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def frontier_page(
    title: str, points: Sequence[Point], fleets: Mapping[str, Sequence[Point]], split: Point | None = None
) -> str:
    """Returns an HTML page without scripts or external files. It shows the frontier of all node classes together
    (`points`), the frontier of each class alone (`fleets`, by name) and the result of `split_by_class` (`split`). It
    also names the classes for which no plan exists. A frontier is the best throughput at each price."""
    lines = _lines(points, fleets, split)
    without = [name for name, (fleet, _) in lines.items() if not fleet]
    missing = f"<p>No plan exists for: {html.escape(', '.join(without))}.</p>" if without else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<p>Each point is the fastest plan for its price. A line has at most {NUM_POINTS} points; between two "
        "points it shows the throughput of the cheaper plan. A class alone has as many nodes as the price of the whole "
        "inventory buys. Rates are those on the chosen nodes and their links.</p>"
        f"{figure(title, points, fleets, split)}{missing}{SPLIT_TOLD if split else ''}{_table(lines)}</body></html>\n"
    )


def ticks(top: float) -> list[float]:
    """Round numbers at even steps, from 0 to the first that is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def figure(
    title: str, points: Sequence[Point], fleets: Mapping[str, Sequence[Point]], split: Point | None = None
) -> str:
    """The plot of price against throughput, as SVG."""
    lines = _lines(points, fleets, split)
    every = [point for points, _ in lines.values() for point in points]
    prices = ticks(max((point.price_per_h for point in every), default=0.0))
    rates = ticks(max((point.tokens_per_s for point in every), default=0.0))
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + across * point.price_per_h / prices[-1]
        return round(x, 1), round(TOP + down * (1 - point.tokens_per_s / rates[-1]), 1)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" fill="#222" '
        f'font-family="system-ui, sans-serif" font-size="14" aria-label="{html.escape(title)}">'
    ]
    for rate in rates:
        _, y = place(Point(0, rate))
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="5">{rate:,.10g}</text>')
    for price in prices:
        x, _ = place(Point(price, 0))
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{price:,.10g}</text>')
    middle_x, middle_y = LEFT + across / 2, TOP + down / 2
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 12}" text-anchor="middle">price of what is rented, $/h</text>')
    turned = f'transform="rotate(-90 20 {middle_y})"'
    parts.append(f'<text x="20" y="{middle_y}" text-anchor="middle" {turned}>tokens/s, generated and trained</text>')
    for i, (name, (line, colour)) in reversed(list(enumerate(lines.items()))):  # the best mix is drawn last, on top
        is_split = name == SPLIT
        parts.append(_path([place(point) for point in line], colour))
        for point in line:
            label = f"{html.escape(name)}: {point.tokens_per_s:,.0f} tokens/s at {point.price_per_h:,.2f} $/h"
            parts.append(_mark(*place(point), colour, is_split, label))
        x, y = WIDTH - RIGHT + 24, TOP + 10 + 26 * i
        parts.append(_mark(x, y, colour, is_split, ""))
        parts.append(f'<text x="{x + 14}" y="{y}" dy="5">{html.escape(name)}</text>')
        if is_split:
            parts.append(f'<text x="{x + 14}" y="{y + 18}" dy="5" fill="#666">as AReaL-Hex ran</text>')
    return "".join([*parts, "</svg>"])


def _lines(
    points: Sequence[Point], fleets: Mapping[str, Sequence[Point]], split: Point | None
) -> dict[str, tuple[Sequence[Point], str]]:
    """Points and colour of each line of the plot, by the line's name."""
    lines: dict[str, tuple[Sequence[Point], str]] = {"best mix": (points, MIXED_COLOUR)}
    for i, (name, fleet) in enumerate(fleets.items()):
        lines[f"{name} alone"] = (fleet, COLOURS[i % len(COLOURS)])
    return lines | ({SPLIT: ([split], SPLIT_COLOUR)} if split else {})


def _path(places: Sequence[tuple[float, float]], colour: str) -> str:
    """SVG of a step line: between two prices it shows the throughput of the cheaper plan. Empty for fewer than two
    points."""
    (x, y), *rest = sorted(places) or [(0.0, 0.0)]
    steps = "".join(f"H{x}V{y}" for x, y in rest)
    return f'<path d="M{x} {y}{steps}" fill="none" stroke="{colour}" stroke-width="2"/>' if rest else ""


def _mark(x: float, y: float, colour: str, is_split: bool, label: str) -> str:
    title = f"<title>{label}</title>" if label else ""
    if is_split:
        return f'<path d="M{x} {y - 8:g}l8 8l-8 8l-8 -8z" fill="{colour}">{title}</path>'
    return f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}">{title}</circle>'


def _table(lines: Mapping[str, tuple[Sequence[Point], str]]) -> str:
    rows = ["<table><tr><th>fleet</th><th>$/h</th><th>tokens/s</th><th>$ per million tokens</th></tr>"]
    for name, (points, _) in lines.items():
        for point in points:
            each = point.price_per_h / 3600 / point.tokens_per_s * 1e6
            cells = (html.escape(name), f"{point.price_per_h:,.2f}", f"{point.tokens_per_s:,.0f}", f"{each:.3g}")
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "".join([*rows, "</table>"])
