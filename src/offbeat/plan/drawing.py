"""Draws cost against throughput as one HTML page with the figure inside: no script, nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from offbeat.plan.fleets import Point

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 170, 30, 60
COLOURS = ("#d1495b", "#edae49", "#00798c", "#66a182", "#8d6a9f", "#a0522d", "#5c6b73", "#b56576")
MIXED_COLOUR = "#1d3557"
NUM_TICKS = 5
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:900px;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.15em .9em;text-align:right}th{border-bottom:1px solid #999}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def frontier_page(title: str, points: Sequence[Point], fleets: Mapping[str, Sequence[Point]]) -> str:
    """The page; `fleets` are drawn beside the frontier, and those without a plan are named."""
    lines = {"best mix": (list(points), MIXED_COLOUR)}
    lines |= {
        f"{name} alone": (list(fleet), COLOURS[i % len(COLOURS)]) for i, (name, fleet) in enumerate(fleets.items())
    }
    without = [name for name, (fleet, _) in lines.items() if not fleet]
    missing = f"<p>No plan: {html.escape(', '.join(without))}.</p>" if without else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        "<p>Each point is the cheapest plan of its throughput. A class alone has as many nodes as the whole "
        "inventory's price buys.</p>"
        f"{_figure(lines)}{missing}{_table(lines)}</body></html>\n"
    )


def ticks(top: float) -> list[float]:
    """From 0 in round steps to the first that is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def _figure(lines: Mapping[str, tuple[Sequence[Point], str]]) -> str:
    every = [point for points, _ in lines.values() for point in points]
    prices = ticks(max((point.price_per_h for point in every), default=0.0))
    rates = ticks(max((point.tokens_per_s for point in every), default=0.0))
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(price: float) -> str:
        return f"{LEFT + across * price / prices[-1]:.1f}"

    def y(rate: float) -> str:
        return f"{TOP + down * (1 - rate / rates[-1]):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13" fill="#222">']
    for rate in rates:
        parts.append(f'<path d="M{LEFT} {y(rate)}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(rate)}" text-anchor="end" dy="4">{rate:,g}</text>')
    for price in prices:
        parts.append(f'<text x="{x(price)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{price:,g}</text>')
    parts.append(f'<text x="{LEFT + across / 2}" y="{HEIGHT - 12}" text-anchor="middle">$/h</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 12}" text-anchor="middle">tokens/s</text>')
    for i, (name, (points, colour)) in enumerate(lines.items()):
        path = " ".join(f"{x(point.price_per_h)},{y(point.tokens_per_s)}" for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            told = f"{html.escape(name)}: {point.tokens_per_s:,.0f} tokens/s at {point.price_per_h:,.2f} $/h"
            at = f'cx="{x(point.price_per_h)}" cy="{y(point.tokens_per_s)}"'
            parts.append(f'<circle {at} r="4" fill="{colour}"><title>{told}</title></circle>')
        top = TOP + 20 * i
        parts.append(f'<rect x="{WIDTH - RIGHT + 15}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 33}" y="{top + 11}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _table(lines: Mapping[str, tuple[Sequence[Point], str]]) -> str:
    rows = ["<table><tr><th>fleet</th><th>$/h</th><th>tokens/s</th><th>$ per million tokens</th></tr>"]
    for name, (points, _) in lines.items():
        for point in points:
            each = point.price_per_h / 3600 / point.tokens_per_s * 1e6
            cells = (html.escape(name), f"{point.price_per_h:,.2f}", f"{point.tokens_per_s:,.0f}", f"{each:.3g}")
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "".join([*rows, "</table>"])
