"""Draws the main figure: tokens delivered per second against their off-policy share, with a curve for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.partial.contest import Contest
from benchmarks.partial.entries import RELEASE, STRICT, SYNC, Entry
from benchmarks.partial.laws import Law

INK, GRID = "#3a3f47", "#e6e8eb"
COLOURS = {
    "april": "#c8401f",
    "copris": "#d8a02b",
    "pipeline": "#8a6bbf",
    STRICT: "#3b7dd8",
    RELEASE: "#1f9e89",
    f"{STRICT}, refill": "#8fb8e8",
    f"{RELEASE}, refill": "#9ad3c8",
}


def draw(contest: Contest, laws: list[Law], picture: Path) -> None:
    """Draws a panel for each law and a point for each factor; the automatic factor is a star."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(laws) + 1.4, 4.4), dpi=150, layout="constrained")
    for axes, law in zip(figure.subplots(1, len(laws), squeeze=False, sharey=True)[0], laws, strict=True):
        for curve, colour in COLOURS.items():
            _draw_curve(axes, contest, law, curve, colour)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(law.name, loc="left", color=INK, fontsize=11)
        axes.set_xlabel("share of trained tokens that are off-policy", color=INK)
        axes.grid(axis="y", color=GRID)
        axes.tick_params(colors=INK, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("delivered tokens/s over sync", color=INK)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, labelcolor=INK, loc="outside right center", fontsize=8)
    figure.savefig(picture)


def _draw_curve(axes: Any, contest: Contest, law: Law, curve: str, colour: str) -> None:
    def points(some: list[Entry]) -> list[tuple[float, float]]:
        return [(contest.mean(law, entry, "off_policy_share"), contest.over_sync(entry, law)) for entry in some]

    entries = [entry for entry in contest.entries if entry.curve == curve and contest.took_part(law, entry)]
    if not entries:
        return
    fixed = [SYNC, *(entry for entry in entries if entry.factor is not None)]
    shares, rates = zip(*points(fixed), strict=True)
    axes.plot(shares, rates, "o-", color=colour, linewidth=1.6, markersize=4, label=curve)
    for share, rate in points([entry for entry in entries if entry.factor is None]):
        axes.plot(share, rate, "*", color=colour, markersize=13)
