"""Plots a run's rewards from its metrics with matplotlib: training reward as a thin line, in longer runs with a running
mean, and held-out reward as points.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.observability.console import Row, held_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, TRAIN, EVAL, GRID = "#3a3f47", "#3b7dd8", "#d8662b", "#e6e8eb"
NUM_WINDOWS = 25
"""The running mean spans 1 / `NUM_WINDOWS` of the run, which smooths the curve without flattening it."""
MIN_SPAN = 0.02
"""If the largest and smallest reward differ by less than this, the reward axis spans about 1, so that a constant reward
looks constant. The axis then shows 0 to 1 if all rewards lie in this range."""


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_rewards(rows: Sequence[Row], picture: Path, title: str = "") -> bool:
    """Plots the rewards in a run's metric rows to the file `picture`. Returns False, without a plot, if `draw_rewards`
    has nothing to draw."""
    figure = draw_rewards(rows, title)
    if figure is None:
        return False
    figure.savefig(picture)
    return True


def draw_rewards(rows: Sequence[Row], title: str = "") -> Figure | None:
    """Draws the rewards in a run's metric rows; returns None if no row has a training reward, or without matplotlib."""
    if not has_matplotlib() or not any(row.get("reward") is not None for row in rows):
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    train = [(row["step"], row["reward"]) for row in rows if row.get("reward") is not None]
    evals = [(row["step"], score) for row in rows if (score := held_out(row)) is not None]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    steps, rewards = [step for step, _ in train], [reward for _, reward in train]
    window = window_of(len(rewards))
    if window > 1:
        axes.plot(steps, rewards, color=TRAIN, linewidth=0.8, alpha=0.35, label="training reward")
        label = f"mean of {window} steps"
        axes.plot(steps, smooth(rewards), color=TRAIN, linewidth=2.2, label=label)
    else:
        axes.plot(steps, rewards, ".-", color=TRAIN, linewidth=2.2, label="training reward")
    if evals:
        at, scores = [step for step, _ in evals], [score for _, score in evals]
        axes.plot(at, scores, "o-", color=EVAL, linewidth=1.2, markersize=4.5, label="held-out reward")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("reward", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawn = [value for _, value in [*train, *evals]]
    low, high = min(drawn), max(drawn)
    if high - low < MIN_SPAN:
        axes.set_ylim(*((-0.02, 1.02) if low >= 0 and high <= 1 else (low - 0.5, high + 0.5)))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.legend(frameon=False, labelcolor=INK, loc="best")
    return figure


def window_of(num_steps: int) -> int:
    """Returns the number of steps that a running mean spans: an odd number, which is 1 in a short run."""
    return max(1, num_steps // NUM_WINDOWS) // 2 * 2 + 1


def smooth(values: Sequence[float]) -> list[float]:
    """Returns a centred running mean, over fewer values near the ends."""
    reach = window_of(len(values)) // 2
    means = []
    for i in range(len(values)):
        near = values[max(0, i - reach) : i + reach + 1]
        means.append(sum(near) / len(near))
    return means
