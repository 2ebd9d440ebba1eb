"""Draws held-out reward by samples trained, one panel with correction and one without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common.learning import Learned

INK, GRID = "#3a3f47", "#e6e8eb"
COLOURS = {0: "#3a3f47", 1: "#8fb8e8", 2: "#3b7dd8", 4: "#d8a02b", 8: "#c8401f"}


def draw(ways: Mapping[tuple[int, str], Sequence[Learned]], threshold: float, picture: Path) -> None:
    """Lines are the mean over seeds, bands from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    corrections = sorted({correction for held_back, correction in ways if held_back}, reverse=True)
    for axes, correction in zip(figure.subplots(1, len(corrections), sharey=True), corrections, strict=True):
        for (held_back, way), learned in sorted(ways.items()):
            if held_back and way != correction:
                continue
            rewards = np.array([one.curve.rewards for one in learned])
            samples, label = learned[0].curve.samples, f"held back {held_back}" if held_back else "fresh"
            axes.plot(samples, rewards.mean(0), color=COLOURS[held_back], linewidth=2, label=label)
            axes.fill_between(
                samples, rewards.min(0), rewards.max(0), color=COLOURS[held_back], alpha=0.12, linewidth=0
            )
        axes.axhline(threshold, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"correction = {correction}", loc="left", color=INK, fontsize=11)
        axes.set_xlabel("samples trained", color=INK)
        axes.grid(axis="y", color=GRID)
        axes.tick_params(colors=INK, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("held-out reward", color=INK)
    figure.axes[0].legend(frameon=False, labelcolor=INK, loc="lower right")
    figure.savefig(picture)
