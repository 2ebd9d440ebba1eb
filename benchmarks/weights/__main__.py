"""The weight codec on updates of training: `python -m benchmarks.weights [--quick] [--sequence FOLDER]`.

Bytes: every step of every sequence is coded part by part, as publishing does, and compared with
- the entropy of positions and signs of its changes, if they were spread evenly: N H(d) + one bit per change, with d
  taken part by part; the size of a change is in the code, but not in this entropy;
- a full version as it would be published (parts coded densely, at the sequence's first step);
- rivals: XOR + zstd, int32 index + value + zstd, XOR + zlib.

Sequences are recorded from training (`--sequence`; `benchmarks.weights.record` makes them on a GPU) and made up, with
layers in the shapes of a 1.5B model: one of its 28 stands for all, since 3 GB of weights, masters and moments would not
fit here. Without recordings a made-up sequence with SmolLM2's shapes stands in, and the bars of real updates stay
undecided.

Seconds: publishing and applying a version of such a model at 1 % changed, hashes and fsync included, as ratios to a
copy in memory of its bytes in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.weights.passes import LAYER, STAGES, Model, Passes
from benchmarks.weights.sequences import MadeUp, Updates, read_sequences
from benchmarks.weights.sizes import bars_of, sizes_of
from offbeat.errors import UserError

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
SMOLLM2 = {"q_proj": (576, 576), "gate_proj": (1536, 576), "embed_tokens": (8192, 576), "norm": (576,)}
"""Some of its tensors; of the embedding, a sixth."""

say = partial(report.say, "weights")


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
    with report.scratch("weights") as folder:
        timing = passes(folder, num_layers=1 if quick else 5, num_rounds=3 if quick else options.rounds)
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
