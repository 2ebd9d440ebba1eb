"""The trainer's speed on one GPU: `python -m benchmarks.train_speed [--quick] [--accelerator NAME]`.

Compares Offbeat's training step with a plain step with transformers, on the same answers of uneven length, in the shape
of a 1.5B model with random weights in bfloat16. Offbeat runs with micro-batches of two sizes and with gradient
checkpointing. The plain step pads eight answers at a time, in given order and sorted by length. The fastest way of each
side counts. Each round builds every model again, so a memory peak is that of one way alone.

Figures are answer tokens per second of whole steps, the needed FLOP (`step_flops`) as a share of the card's peak, and
the peak of allocated memory. A quick run trains a tiny shape on the CPU and decides nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.common.shapes import SHAPES
from benchmarks.train_speed.plain import PlainTrainer
from benchmarks.train_speed.workload import FULL, QUICK, Size, batch, new_model, step_flops
from offbeat.planner.inputs import hardware
from offbeat.trainer.packing import Sample
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

SPEED_TARGET, PEAK_TARGET = 1.0, 0.35
SPEED_BAR, PEAK_BAR = "answer tokens/s over plain transformers", "share of peak"
PLAIN_SAMPLES = 8
LR = 1e-6
STEPS = 2  # timed in a round, after one that warms up
GIB = 2**30
say = partial(report.say, "train_speed")

Step = Callable[[Sequence[Sample]], object]


@dataclass(frozen=True)
class Way:
    """One trainer with its settings; `microbatch_tokens` is None for the plain step."""

    name: str
    microbatch_tokens: int | None = None
    checkpointing: bool = False
    by_length: bool = False

    def new_step(self, size: Size, device: torch.device, dtype: torch.dtype) -> Step:
        model = new_model(SHAPES[size.shape], device, dtype)
        if self.microbatch_tokens is None:
            return PlainTrainer(model, PLAIN_SAMPLES, LR, by_length=self.by_length).step
        policy = Policy(model, AdamSettings(), gradient_checkpointing=self.checkpointing)
        settings = StepSettings(tokens_per_microbatch=self.microbatch_tokens, aggregate="token_mean")
        return lambda samples: train_step(policy, samples, settings, LR)


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step in one round, and the peak of GPU memory."""

    step_s: float
    peak_gib: float | None


Rounds = Mapping[Way, Sequence[Measured | None]]  # a value per round; None: out of memory


def ways_of(size: Size) -> list[Way]:
    first = size.microbatch_tokens[0]
    ours = [Way(f"Offbeat, micro-batches of {tokens:,}", tokens) for tokens in size.microbatch_tokens]
    ours.append(Way(f"Offbeat, {first:,}, gradient checkpointing", first, checkpointing=True))
    return [*ours, Way("plain, padded"), Way("plain, padded, sorted by length", by_length=True)]


def measure(size: Size, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype) -> Rounds:
    found: dict[Way, list[Measured | None]] = {way: [] for way in ways_of(size)}
    for number in range(size.rounds):
        for way, results in found.items():
            try:
                results.append(timed(way.new_step(size, device, dtype), samples, device))
            except torch.OutOfMemoryError:
                results.append(None)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            last = results[-1]
            say(f"round {number + 1}, {way.name}: {'out of memory' if last is None else f'{last.step_s:.3f} s a step'}")
    return found


def timed(step: Step, samples: Sequence[Sample], device: torch.device) -> Measured:
    has_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if has_gpu else lambda: None
    step(samples)
    wait()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken_s = []
    for _ in range(STEPS):
        start_s = time.perf_counter()
        step(samples)
        wait()
        taken_s.append(time.perf_counter() - start_s)
    return Measured(statistics.median(taken_s), torch.cuda.max_memory_allocated() / GIB if has_gpu else None)


def seconds_of(found: Rounds, *, ours: bool) -> list[float]:
    """Returns the seconds of a step by round for the fastest way of one side; empty if all ran out of memory."""
    side = [results for way, results in found.items() if (way.microbatch_tokens is not None) == ours]
    complete = [[one.step_s for one in results if one] for results in side if all(results)]
    return min(complete, key=statistics.median, default=[])


def bars_of(
    found: Rounds, flops: float, peak_flops: float | None, *, decides: bool
) -> dict[str, report.Bar | report.Unmeasured]:
    ours_s, plain_s = seconds_of(found, ours=True), seconds_of(found, ours=False)
    ratios = [theirs / ours for ours, theirs in zip(ours_s, plain_s, strict=False)]
    shares = [flops / seconds / peak_flops for seconds in ours_s] if peak_flops else []
    bars = {}
    for name, target, values in ((SPEED_BAR, SPEED_TARGET, ratios), (PEAK_BAR, PEAK_TARGET, shares)):
        bar = report.at_least(target, values, quick=False) if values else report.Unmeasured(target)
        bars[name] = bar if decides else replace(bar, holds=None)
    return bars


def rows_of(found: Rounds, num_tokens: int, flops: float, peak_flops: float | None) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for way, results in found.items():
        done = [one for one in results if one]
        step_s = statistics.median(one.step_s for one in done) if done else float("inf")  # inf: out of memory
        share = f"{flops / step_s / peak_flops:.1%}" if peak_flops else ""
        memory = f"{max(one.peak_gib for one in done if one.peak_gib):.1f}" if done and done[0].peak_gib else ""
        rows.append((way.name, f"{step_s:.3f}", f"{num_tokens / step_s:,.0f}", share, memory))
    return rows


def peak_of(device: torch.device, called: str | None) -> float | None:
    """Returns the card's dense bf16 FLOP per second from the planner's catalogue; None if the card is not in it."""
    gpu = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").split()[0] if device.type == "cuda" else ""
    name = called or gpu
    return hardware.accelerator(name).flops if hardware.is_known(name) else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_speed", description="The trainer's speed.")
    parser.add_argument("--quick", action="store_true", help="a tiny shape on the CPU: decides nothing")
    parser.add_argument("--accelerator", metavar="NAME", help="the GPU's name in the planner's catalogue")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        say("needs a GPU; --quick trains a tiny shape on the CPU")
        return 2
    size, load = QUICK if options.quick else FULL, Load()
    device, dtype = (torch.device("cpu"), torch.float32) if options.quick else (torch.device("cuda"), torch.bfloat16)
    samples = batch(size)
    num_tokens = sum(sample.num_tokens for sample in samples)
    flops, peak_flops = step_flops(SHAPES[size.shape], samples), peak_of(device, options.accelerator)
    found = measure(size, samples, device, dtype)
    report.show(
        "train_speed",
        ("way", "s a step", "answer tokens/s", "share of peak", "peak GiB"),
        rows_of(found, num_tokens, flops, peak_flops),
        bars_of(found, flops, peak_flops, decides=not options.quick),
        **{"quick": options.quick, "size": asdict(size), "step_flops": flops, "peak_flops": peak_flops},
        rounds={way.name: [one and asdict(one) for one in results] for way, results in found.items()},
        **load.shares(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
