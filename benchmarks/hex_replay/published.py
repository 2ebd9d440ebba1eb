"""What AReaL-Hex (arXiv 2511.00796) published, as data: each figure once, with the table or drawing it stands in.

Bars of a drawing were read off it, to about 3 %. Left out: figures that repeat others (the tuned split of Table 3 and
the H800 row of Table 4 are the H800 bar of Fig. 3), Table 1 (its unit cannot be right), and Fig. 5 (its bars labelled
40 are Table 4's 32). In Fig. 4 both H20 bars are equal in all three panels, so they count as one: the step.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("1.5B", "7B", "14B")


@dataclass(frozen=True)
class Point:
    model: str
    name: str
    source: str
    value: float
    is_case_study: bool = False
    """Fig. 2, which contradicts Fig. 4 under any one workload; see the benchmark."""


_FIGURES: dict[str, tuple[str, tuple[float, float, float]]] = {
    "update s, H800": ("Table 2", (4.75, 14.79, 26.00)),
    "update s, H20": ("Table 2", (2.74, 7.46, 13.05)),
    "update s, Hex": ("Table 2", (10.06, 58.34, 112.93)),
    "tokens/s, 24 H800 uniform": ("Table 3", (1.17e4, 3.57e3, 1.29e3)),
    "tokens/s, 24 H800 tuned": ("Table 4", (1.84e4, 5.98e3, 2.16e3)),
    "tokens/s, 8 H800 + 24 H20": ("Table 4", (1.79e4, 6.00e3, 2.30e3)),
    "tokens/s, 64 H20": ("Fig. 3", (8.9e3, 2.84e3, 1.41e3)),
    "tokens/s, 8 H800 + 48 H20": ("Fig. 3", (25.0e3, 7.83e3, 3.24e3)),
    "step s, 64 H20": ("Fig. 4", (333, 601, 1205)),
    "rollout s, 24 H800": ("Fig. 4", (144, 405, 1050)),
    "training s, 24 H800": ("Fig. 4", (95, 246, 455)),
    "rollout s, 8 H800 + 48 H20": ("Fig. 4", (107, 252, 738)),
    "training s, 8 H800 + 48 H20": ("Fig. 4", (107, 250, 568)),
}
_CASE_STUDY: dict[str, tuple[str, tuple[float, float, float]]] = {
    "rollout s, 32 H800": ("Fig. 2", (105, 216, 646)),
    "training s, 32 H800": ("Fig. 2", (93, 176, 563)),
    "rollout s, 88 H20": ("Fig. 2", (111, 227, 680)),
    "training s, 88 H20": ("Fig. 2", (104, 240, 627)),
    "rollout s, 24 H800 + 24 H20": ("Fig. 2", (53, 90, 435)),
    "training s, 24 H800 + 24 H20": ("Fig. 2", (35, 86, 392)),
}
SPEEDUPS = {"1.5B": 1.36, "7B": 1.31, "14B": 1.50}
"""Hex on 8 H800 + 48 H20 over 24 H800 with a tuned split (Fig. 3)."""
HIDDEN_SPEEDUPS = {"1.5B": 1.49, "7B": 1.61, "14B": 1.73}
"""The same with the published seconds of the weight update taken out of Hex's steps: our arithmetic."""
H800_PRICE_PER_H, HEX_PRICE_PER_H = 126.72, 86.64
"""Of 24 H800, and of the 8 H800 + 24 H20 that reach about their throughput (Table 4): 1.46 times as much."""


def points() -> list[Point]:
    return [
        Point(model, name, source, values[column], is_case_study=figures is _CASE_STUDY)
        for figures in (_FIGURES, _CASE_STUDY)
        for name, (source, values) in figures.items()
        for column, model in enumerate(MODELS)
    ]


def value(model: str, name: str) -> float:
    return next(point.value for point in points() if (point.model, point.name) == (model, name))


def speedup_by_seconds(model: str) -> float:
    """What the published seconds (Table 2, Fig. 4) say of Hex over 24 H800 if both train on as many tokens a step."""

    def step_s(machines: str, update: str) -> float:
        longer_s = max(value(model, f"rollout s, {machines}"), value(model, f"training s, {machines}"))
        return value(model, f"update s, {update}") + longer_s

    return step_s("24 H800", "H800") / step_s("8 H800 + 48 H20", "Hex")


def case_study_work(model: str) -> dict[str, float]:
    """Card seconds of Fig. 2 (24 H800 train, 24 H20 roll out) over those of Fig. 4 (8 and 48); 1 if they agreed."""
    machines, breakdown = "24 H800 + 24 H20", "8 H800 + 48 H20"
    return {
        "rollout": 24 * value(model, f"rollout s, {machines}") / (48 * value(model, f"rollout s, {breakdown}")),
        "training": 24 * value(model, f"training s, {machines}") / (8 * value(model, f"training s, {breakdown}")),
    }
