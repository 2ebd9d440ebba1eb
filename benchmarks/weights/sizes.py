"""Bytes of a sequence of updates by our codec, by its rivals and by their entropy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.weights.rivals import RIVALS
from benchmarks.weights.sequences import DTYPE, Updates, UpdatesOfPart
from offbeat.weights.codec import encode, find_changes
from offbeat.weights.manifest import Coding
from offbeat.weights.safetensor_file import in_parallel

ENTROPY_TARGET, FULL_TARGET, RIVAL_TARGET = 1.35, 0.03, 1.0
USUAL_LR = 1e-6

Bytes = Counter[str]
"""Bytes of one step, summed over its parts, by the kind of bytes."""


def measured(updates: UpdatesOfPart) -> list[Bytes]:
    """Returns the bytes of one part in each of its steps."""
    steps, full = [], 0
    for update in updates():
        changes = find_changes(update.new, update.old, DTYPE)
        coding, data = encode(update.new, update.old, DTYPE, changes)
        full = full or len(encode(update.new, None, DTYPE)[1])
        num_items, num_changed = update.new.size // 2, changes.positions.size
        found = Bytes({"items": num_items, "changed": num_changed, "ours": len(data), "full": full})
        if coding is Coding.SPARSE:
            found += Bytes({"sparse": len(data), "entropy_bits": round(entropy_bits(num_items, num_changed))})
        found.update({name: len(rival(update.new, update.old, changes)) for name, rival in RIVALS.items()})
        steps.append(found)
    return steps


def entropy_bits(num_items: int, num_changed: int) -> float:
    shares = np.array([num_changed, num_items - num_changed]) / num_items
    return float(-num_items * np.sum(shares * np.log2(np.maximum(shares, 1e-300)))) + num_changed


def sizes_of(sequence: Updates) -> dict[str, Any]:
    """Returns the figures of all steps of a sequence that the bars need."""
    parts = list(in_parallel(measured, sequence.parts()))
    steps = [sum(found, Bytes()) for found in zip(*parts, strict=True)]
    whole = sum(steps, Bytes())
    return {
        "name": sequence.name,
        "is_real": sequence.is_real,
        "lr": sequence.lr,
        "density": [round(step["changed"] / step["items"], 6) for step in steps],
        "bytes_per_change": whole["ours"] / max(whole["changed"], 1),
        "over_entropy": 8 * whole["sparse"] / max(whole["entropy_bits"], 1),
        "over_full": whole["ours"] / whole["full"],
        "over_rivals": {name: max(step["ours"] / step[name] for step in steps) for name in RIVALS},
        "steps": [dict(step) for step in steps],
    }


def worst(target: float, values: Sequence[float], *, quick: bool, decides: bool) -> report.Bar:
    """Compares the largest of several figures with an upper bound; undecided if the figures are not those that the
    bar is about."""
    bar = report.at_most(target, [max(values)], quick=quick)
    return report.Bar(bar.value, target, bar.holds if decides else None, (round(min(values), 3), bar.value))


def bars_of(sequences: Sequence[Mapping[str, Any]], quick: bool) -> dict[str, report.Bar]:
    real = [found for found in sequences if found["is_real"]]
    bars = {}
    for kind, chosen, decides in (
        ("real updates", real or [found for found in sequences if "stand-in" in found["name"]], bool(real)),
        ("made up", [found for found in sequences if "made up" in found["name"]], True),
    ):
        entropy = [found["over_entropy"] for found in chosen]
        bars[f"sparse bytes over entropy, {kind}"] = worst(ENTROPY_TARGET, entropy, quick=quick, decides=decides)
        rivals = [max(found["over_rivals"].values()) for found in chosen]
        bars[f"bytes over the best rival's, {kind}"] = worst(RIVAL_TARGET, rivals, quick=quick, decides=decides)
    usual = [found["over_full"] for found in real if found["lr"] == USUAL_LR]
    values = usual or [found["over_full"] for found in sequences if found["lr"] == USUAL_LR]
    bars["delta over full at lr 1e-6, real updates"] = worst(FULL_TARGET, values, quick=quick, decides=bool(usual))
    return bars
