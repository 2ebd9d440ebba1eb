"""Plots a run's rewards from its metrics with matplotlib: training reward as a thin line and as a running mean,
held-out reward as points.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from offbeat.observability.console import Row, held_out

INK, TRAIN, EVAL, GRID = "#3a3f47", "#3b7dd8", "#d8662b", "#e6e8eb"
NUM_WINDOWS = 25
"""The running mean spans 1 / `NUM_WINDOWS` of the run, which smooths the curve without flattening it."""


def plot_rewards(rows: Sequence[Row], picture: Path, title: str = "") -> bool:
    """Plots the rewards in a run's metric rows to the file `picture`. Returns False, without a plot, if the rows have
    no reward or matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None or not any(row.get("reward") is not None for row in rows):
        return False
    from matplotlib.figure import Figure

    train = [(row["step"], row["reward"]) for row in rows if row.get("reward") is not None]
    evals = [(row["step"], score) for row in rows if (score := held_out(row)) is not None]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    steps, rewards = [step for step, _ in train], [reward for _, reward in train]
    axes.plot(steps, rewards, color=TRAIN, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(rewards), color=TRAIN, linewidth=2.2, label="training reward (running mean)")
    if evals:
        at, scores = [step for step, _ in evals], [score for _, score in evals]
        axes.plot(at, scores, "o-", color=EVAL, linewidth=1.2, markersize=4.5, label="held-out reward")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("reward", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    figure.savefig(picture)
    return True


def smooth(values: Sequence[float]) -> list[float]:
    """Returns a centred running mean, over fewer values near the ends."""
    reach = max(1, len(values) // NUM_WINDOWS) // 2
    means = []
    for i in range(len(values)):
        near = values[max(0, i - reach) : i + reach + 1]
        means.append(sum(near) / len(near))
    return means
