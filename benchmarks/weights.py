"""The weight codec on updates of training: bytes against entropy, a whole copy and other codes; seconds against a copy.

Bytes: every step of every sequence is coded part by part, as publishing does, and set against
- the entropy of positions and signs of its changes, were they anywhere alike: N H(d) + one bit per change, with d taken
  part by part; what a change moves a weight by comes on top of that in the code, not in the entropy;
- a full version as it would be published (parts coded densely, at the sequence's first step);
- rivals: XOR + zstd, int32 index + value + zstd, XOR + zlib.

Sequences are recorded from training (`--sequence`; `benchmarks.deltas.record` makes them on a GPU) and made up, with
layers in the shapes of a 1.5B model: one of its 28 stands for all, since 3 GB of weights, masters and moments would not
fit here. Without recordings a made-up sequence with SmolLM2's shapes stands in, and what should be said of real updates
is left open.

Seconds: publishing and applying a version of such a model at 1 % changed, hashes and fsync included, as ratios to a
copy in memory of its bytes in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.deltas.passes import LAYER, Model, Passes
from benchmarks.deltas.rivals import RIVALS
from benchmarks.deltas.sequences import DTYPE, MadeUp, Updates, UpdatesOfPart, read_sequences
from benchmarks.load import Load
from offbeat.errors import UserError
from offbeat.weights.codec import encode, find_changes
from offbeat.weights.manifest import Coding
from offbeat.weights.parallel import in_parallel

ENTROPY_TARGET, FULL_TARGET, RIVAL_TARGET = 1.35, 0.03, 1.0
USUAL_LR = 1e-6
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
SMOLLM2 = {"q_proj": (576, 576), "gate_proj": (1536, 576), "embed_tokens": (8192, 576), "norm": (576,)}
"""Some of its tensors; of the embedding, a sixth."""
STAGES = {
    "publish": ("read base", "compare", "encode", "hash", "write", "flush"),
    "apply": ("read base", "decode", "hash", "write", "flush"),
}

Bytes = Counter[str]
"""Of one step: sums over parts, by what was summed."""


def measured(updates: UpdatesOfPart) -> list[Bytes]:
    """One part through all of its steps."""
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
    """All steps of a sequence, by what the bars want."""
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


def made_up(quick: bool) -> Iterator[Updates]:
    num_steps = 4 if quick else 20
    shapes = {name: LAYER[name] for name in (("q_proj", "norm") if quick else LAYER)}
    for lr in LEARNING_RATES:
        yield MadeUp("made up, 1.5B shapes", shapes, lr, num_steps)


def stand_ins(quick: bool) -> Iterator[Updates]:
    for lr in LEARNING_RATES:
        yield MadeUp("stand-in, SmolLM2's shapes", SMOLLM2, lr, 4 if quick else 20)


def passes(folder: Path, num_layers: int, num_rounds: int) -> dict[str, Any]:
    model = Model(num_layers, density=0.01)
    run = Passes(model, folder)
    rounds = [run.round() for _ in range(num_rounds + 1)][1:]  # the first warms up
    ratios = {name: [taken[name] / taken["memcpy"] for taken in rounds] for name in rounds[0]}
    medians = {name: statistics.median(taken[name] for taken in rounds) for name in rounds[0]}
    return {"num_bytes": model.num_bytes, "seconds": medians, "over_memcpy": ratios}


# The report


def worst(target: float, values: Sequence[float], *, quick: bool, decides: bool) -> report.Bar:
    """The largest of several figures against an upper bound; left open where they are not what the bar speaks of."""
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


def rows_of(sequences: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for found in sequences:
        density = f"{found['density'][0]:.2%} to {found['density'][-1]:.2%}"
        rivals = ", ".join(f"{ratio:.2f}" for ratio in found["over_rivals"].values())
        sizes = f"{found['bytes_per_change']:.2f}", f"{found['over_full']:.4f}", f"{found['over_entropy']:.2f}", rivals
        rows.append((found["name"], density, *sizes))

    def timed(label: str, name: str) -> tuple[str, ...]:
        speed = timing["num_bytes"] / timing["seconds"][name] / 1e9
        return label, f"{speed:.2f} GB/s", f"{statistics.median(timing['over_memcpy'][name]):.1f}", "", "", ""

    rows.append(timed(f"memcpy of {timing['num_bytes'] / 1e6:.0f} MB", "memcpy"))
    for name, stages in STAGES.items():
        rows += [timed(name, name), *(timed(f"  {stage} alone", stage) for stage in stages)]
    return rows


def say(text: str) -> None:
    print(f"weights: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The weight codec on updates of training.")
    parser.add_argument("--quick", action="store_true", help="fewer steps, parts and rounds: ends within a minute")
    parser.add_argument("--sequence", type=Path, help="a folder of recordings, or of consecutive safetensors files")
    parser.add_argument("--model", type=Path, help="the folder that recordings begin with; SmolLM2's unless given")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    quick, load = options.quick, Load()
    try:
        real = read_sequences(options.sequence, options.model) if options.sequence else list(stand_ins(quick))
    except UserError as error:
        parser.error(str(error))
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="weights-") as folder:
        timing = passes(Path(folder), num_layers=1 if quick else 5, num_rounds=3 if quick else options.rounds)
    say("publish and apply: done")
    sequences = []
    for sequence in [*real, *made_up(quick)]:
        sequences.append(sizes_of(sequence))
        say(f"{sequence.name}: done")
    report.show(
        "weights",
        ("", "changed, or speed", "bytes a change, or x memcpy", "x full", "x entropy", "x rivals"),
        rows_of(sequences, timing),
        bars_of(sequences, quick),
        quick=quick,
        **load.shares(),
        sequences=sequences,
        timing=timing,
    )


if __name__ == "__main__":
    main()
