"""The trainer's speed on one GPU: `python -m benchmarks.train_speed [--quick] [--shape 4b] [--trl-python PATH]`.

Offbeat's training step beside two steps written with transformers and torch alone, and beside TRL's GRPOTrainer, on the
same 128 answers of uneven length, with random weights in bfloat16 in the shape of a real model:

- plain: padded micro-batches of eight answers, sorted by length;
- varlen: packed rows, torch's kernel for sequences of uneven length, logits in chunks, layers compiled or not;
- TRL: its own trainer on given answers, at the fastest settings that fit.

Offbeat runs with several sizes of micro-batches, and with gradient checkpointing. Each round builds every model anew,
so a memory peak is that of one way alone. Steps after the first are timed, since the first one compiles.

Figures are answer tokens per second of whole steps, the peak of allocated memory, and the share of the card's peak
that the FLOP of Offbeat's rows are. The varlen baseline computes each prompt eight times; Offbeat once a row. A quick
run trains a tiny shape on the CPU and decides nothing. `--head` measures the output layer by itself, over 16,384 answer
tokens and 151,936 words: in chunks, as Offbeat computes it, in one chunk, and by autograd.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.common.shapes import SHAPES, Shape
from benchmarks.train_speed.head import HeadCost, measure_head
from benchmarks.train_speed.plain import PlainTrainer, VarlenTrainer
from benchmarks.train_speed.workload import FULL, QUICK, batch, new_model, step_flops
from offbeat.errors import UserError
from offbeat.model.devices import avoid_fragments
from offbeat.model.loading import resolve
from offbeat.planner.inputs import hardware
from offbeat.trainer.host_adamw import SETTLED_UPDATES, HostAdamW
from offbeat.trainer.packing import Sample
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepMetrics, StepSettings, train_step

TOKENS_TARGET, MEMORY_TARGET_GIB = 42_000.0, 60.0
UPDATE_SHARE_TARGET = 0.1
HEAD_TARGET_GB, HEAD_SLOWER_TARGET = 1.5, 1.08
COMPILED_TARGET, TRL_TARGET, PEAK_TARGET = 1.1, 1.5, 0.35
LR = 1e-6
GIB = 2**30
TRL_WAYS = ((4, ""), (8, ""), (8, "checkpointing"), (8, "compiled"), (8, "Liger's kernels"))
"""Answers in a micro-batch of TRL's, and how its layers are computed."""
TRL_WITHIN_S = 180.0
say = partial(report.say, "train_speed")

Step = Callable[[Sequence[Sample]], object]


@dataclass(frozen=True)
class Way:
    """One trainer with its settings: `kind` is ours, plain or varlen."""

    name: str
    kind: str
    row_tokens: int = 0
    checkpointing: bool | float = False
    compiles: bool = False
    moments_on_host: bool = False

    def new_step(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> Step:
        model = new_model(shape, device, dtype)
        if self.kind == "plain":
            return PlainTrainer(model, 8, LR, by_length=True).step
        if self.kind == "varlen":
            return VarlenTrainer(model, self.row_tokens, LR, compiles=self.compiles).step
        policy = Policy(
            *(model, AdamSettings()),
            gradient_checkpointing=self.checkpointing,
            compiles=self.compiles,
            moments_on_host=self.moments_on_host,
        )
        return OurStep(policy, StepSettings(tokens_per_microbatch=self.row_tokens, aggregate="token_mean"))


class OurStep:
    """Offbeat's training step, which times its updates where moments are in host memory."""

    def __init__(self, policy: Policy, settings: StepSettings) -> None:
        self.policy, self.settings = policy, settings
        self.update_s: list[float] = []
        self.num_warm = 1
        """Steps before the first that is timed."""
        if isinstance(policy.optimizer, HostAdamW):
            self.num_warm += SETTLED_UPDATES
            policy.optimizer.register_step_pre_hook(self._start_update)
            policy.optimizer.register_step_post_hook(self._end_update)

    def __call__(self, samples: Sequence[Sample]) -> StepMetrics:
        return train_step(self.policy, samples, self.settings, LR)

    def _start_update(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.update_s.append(-time.perf_counter())

    def _end_update(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.update_s[-1] += time.perf_counter()


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step in one round, the peak of GPU memory, and the share of the step that its update took
    where moments are in host memory."""

    step_s: float
    peak_gib: float | None
    num_row_tokens: int | None = None
    update_share: float | None = None


Rounds = Mapping[Way, Sequence[Measured | None]]  # a value per round; None: out of memory


def ways_of(*, quick: bool) -> list[Way]:
    if quick:
        return [Way("Offbeat", "ours", 512), Way("Offbeat, checkpointing", "ours", 1024, True), Way("plain", "plain")]
    return [
        Way("Offbeat, 8k", "ours", 8192, compiles=True),
        Way("Offbeat, 16k", "ours", 16384, compiles=True),
        Way("Offbeat, 16k, not compiled", "ours", 16384),
        Way("Offbeat, 24k, half checkpointing", "ours", 24576, 0.5, True),
        Way("Offbeat, 32k, checkpointing", "ours", 32768, True, True),
        Way("Offbeat, 8k, checkpointing", "ours", 8192, True, True),
        Way("Offbeat, 16k, checkpointing, moments on the host", "ours", 16384, True, True, moments_on_host=True),
        Way("plain, padded", "plain"),
        Way("varlen, 32k", "varlen", 32768),
        Way("varlen, 32k, compiled", "varlen", 32768, compiles=True),
    ]


def measure(
    ways: Sequence[Way],
    shape: Shape,
    num_rounds: int,
    num_steps: int,
    samples: Sequence[Sample],
    device: torch.device,
) -> Rounds:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[Way, list[Measured | None]] = {way: [] for way in ways}
    for number in range(num_rounds):
        for way, results in found.items():
            start_s = time.perf_counter()
            try:
                results.append(timed(way.new_step(shape, device, dtype), num_steps, samples, device))
            except (torch.OutOfMemoryError, UserError) as error:
                say(str(error).splitlines()[0])
                results.append(None)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            last, taken_s = results[-1], time.perf_counter() - start_s
            text = "out of memory" if last is None else f"{last.step_s:.3f} s a step, peak {last.peak_gib or 0:.1f} GiB"
            say(f"round {number + 1}, {way.name}: {text} ({taken_s:.0f} s in all)")
    return found


def timed(step: Step, num_steps: int, samples: Sequence[Sample], device: torch.device) -> Measured:
    has_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if has_gpu else lambda: None
    for _ in range(step.num_warm if isinstance(step, OurStep) else 1):
        done = step(samples)
    wait()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken_s = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        step(samples)
        wait()
        taken_s.append(time.perf_counter() - start_s)
    peak_gib = torch.cuda.max_memory_allocated() / GIB if has_gpu else None
    num_row_tokens, update_share = None, None
    if isinstance(step, OurStep) and isinstance(done, StepMetrics):
        num_row_tokens = done.num_row_tokens
        update_share = sum(step.update_s[-num_steps:]) / sum(taken_s) if step.update_s else None
    return Measured(statistics.median(taken_s), peak_gib, num_row_tokens, update_share)


def trl_rounds(
    python: Path, shape: Shape, num_steps: int, samples: Sequence[Sample], cap: int
) -> dict[str, Measured | None]:
    """Steps of TRL's trainer at several settings."""
    answers = [
        {"prompt": one.prompt.tolist(), "response": one.response.tolist(), "reward": one.reward} for one in samples
    ]
    found: dict[str, Measured | None] = {}
    for num_samples, how in TRL_WAYS:
        name = f"TRL, {num_samples} answers{', ' * bool(how)}{how}"
        with report.scratch("train_speed") as folder:
            spec = {"config": shape.config(), "answers": answers, "scratch": str(folder), "steps": num_steps + 1}
            spec |= {"samples": num_samples, "how": how, "cap": cap}
            spec |= {"group_size": len(samples) // len({one.group for one in samples})}
            spec["tokenizer"] = str(resolve("offbeat-tiny"))
            (folder / "spec.json").write_text(json.dumps(spec))
            script = Path(__file__).with_name("trl_step.py")
            command = [str(python), str(script), str(folder / "spec.json"), str(folder / "result.json")]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TRL_WITHIN_S, check=False)
            except subprocess.TimeoutExpired:
                found[name] = None
                say(f"{name}: not done within {TRL_WITHIN_S:.0f} s")
                continue
            if done.returncode == 0:
                result = json.loads((folder / "result.json").read_text())
                one = found[name] = Measured(statistics.median(result["step_s"]), result["peak_gib"])
                say(f"{name}: {one.step_s:.3f} s a step, peak {one.peak_gib or 0:.1f} GiB")
            else:
                found[name] = None
                say(f"{name}: {done.stderr.strip().splitlines()[-1][:300] if done.stderr else done.returncode}")
    return found


def seconds_of(found: Rounds, kind: str, max_gib: float = float("inf")) -> list[float]:
    """Seconds of a step by round, of the fastest way of a kind; empty if none had memory enough, or all took more than
    `max_gib`."""
    complete = [
        [one.step_s for one in results if one]
        for way, results in found.items()
        if way.kind == kind and all(one and (one.peak_gib or 0) <= max_gib for one in results)
    ]
    return min(complete, key=statistics.median, default=[])


def bars_of(
    found: Rounds, trl: Mapping[str, Measured | None], num_tokens: int, flops: float, peak_flops: float | None
) -> dict[str, report.Bar | report.Unmeasured]:
    small_s, ours_s = seconds_of(found, "ours", MEMORY_TARGET_GIB), seconds_of(found, "ours")
    plain_s, trl_s = seconds_of(found, "varlen"), [one.step_s for one in trl.values() if one]
    saving = [results for way, results in found.items() if way.name == "Offbeat, 32k, checkpointing"]
    peaks = [one.peak_gib for results in saving for one in results if one and one.peak_gib]
    asked = {
        "answer tokens/s within 60 GiB": (TOKENS_TARGET, [num_tokens / s for s in small_s]),
        "over the best varlen": (COMPILED_TARGET, [b / a for a, b in zip(small_s, plain_s, strict=False)]),
        "over TRL": (TRL_TARGET, [min(trl_s) / s for s in ours_s] if trl_s else []),
        "share of peak": (PEAK_TARGET, [flops / s / peak_flops for s in ours_s] if peak_flops else []),
    }
    bars: dict[str, report.Bar | report.Unmeasured] = {
        name: report.at_least(target, values, quick=False) if values else report.Unmeasured(target)
        for name, (target, values) in asked.items()
    }
    updates = [one.update_share for results in found.values() for one in results if one and one.update_share]
    for name, target, values in (
        ("peak GiB of 32k with checkpointing", MEMORY_TARGET_GIB, peaks),
        ("update with moments on the host, share of the step", UPDATE_SHARE_TARGET, updates),
    ):
        bars[name] = report.at_most(target, values, quick=False) if values else report.Unmeasured(target)
    return bars


def head_bars(heads: Mapping[str, HeadCost], difference: float) -> dict[str, report.Bar | report.Unmeasured]:
    if not heads:
        targets = {"head GB": HEAD_TARGET_GB, "head over one chunk": HEAD_SLOWER_TARGET, "head difference": 0.0}
        return {name: report.Unmeasured(target) for name, target in targets.items()}
    ratio = heads["chunks"].seconds / heads["one chunk"].seconds
    return {
        "head GB": report.at_most(HEAD_TARGET_GB, [heads["chunks"].added_gb], quick=False),
        "head over one chunk": report.at_most(HEAD_SLOWER_TARGET, [ratio], quick=False),
        "head difference": report.at_most(0.0, [difference], quick=False),
    }


def rows_of(
    found: Rounds, trl: Mapping[str, Measured | None], num_tokens: int, flops: float, peak_flops: float | None
) -> list[tuple[str, ...]]:
    named = {way.name: list(results) for way, results in found.items()} | {name: [one] for name, one in trl.items()}
    rows: list[tuple[str, ...]] = []
    for name, results in named.items():
        done = [one for one in results if one]
        if not done:
            rows.append((name, "out of memory", "", "", ""))
            continue
        seconds = [one.step_s for one in done]
        step_s, spread = statistics.median(seconds), f" ({min(seconds):.2f} to {max(seconds):.2f})"
        share = f"{flops / step_s / peak_flops:.2f}" if peak_flops else ""
        memory = max((one.peak_gib for one in done if one.peak_gib), default=None)
        shown = "" if memory is None else f"{memory:.1f}"
        rows.append((name, f"{step_s:.3f}{spread}", f"{num_tokens / step_s:,.0f}", share, shown))
    return rows


def peak_of(device: torch.device, called: str | None) -> float | None:
    """Dense bf16 FLOP per second of the card, by the planner's catalogue; None where it is not listed."""
    gpu = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").split()[0] if device.type == "cuda" else ""
    name = called or gpu
    return hardware.accelerator(name).flops if hardware.is_known(name) else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_speed", description="The trainer's speed.")
    parser.add_argument("--quick", action="store_true", help="a tiny shape on the CPU: decides nothing")
    parser.add_argument("--shape", default="1.5b", choices=sorted(SHAPES), help="of the model (1.5b)")
    parser.add_argument("--rounds", type=int, default=2, help="models built for each way (2)")
    parser.add_argument("--steps", type=int, default=2, help="timed in each round, after the first (2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose names contain one of TEXT,TEXT")
    parser.add_argument("--head", action="store_true", help="measure the output layer by itself, too")
    parser.add_argument("--accelerator", metavar="NAME", help="the GPU's name in the planner's catalogue")
    parser.add_argument("--trl-python", metavar="PATH", help="of an environment with TRL; without it, TRL is left out")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        say("needs a GPU; --quick trains a tiny shape on the CPU")
        return 2
    size, load = QUICK if options.quick else FULL, Load()
    shape = SHAPES["tiny" if options.quick else options.shape]
    device = torch.device("cpu" if options.quick else "cuda")
    avoid_fragments(device)
    samples = batch(size)
    ways = [way for way in ways_of(quick=options.quick) if any(t in way.name for t in options.only.split(","))]
    found = measure(ways, shape, options.rounds, options.steps, samples, device)
    trl = (
        trl_rounds(Path(options.trl_python), shape, options.steps, samples, size.cap_tokens)
        if options.trl_python
        else {}
    )
    num_tokens = sum(sample.num_tokens for sample in samples)
    num_rows = [one.num_row_tokens for results in found.values() for one in results if one and one.num_row_tokens]
    flops = step_flops(shape, samples, min(num_rows, default=num_tokens))
    peak_flops = peak_of(device, options.accelerator)
    heads, difference = measure_head(device) if options.head else ({}, 0.0)
    for name, cost in heads.items():
        say(f"output layer, {name}: {1000 * cost.seconds:.0f} ms, {cost.added_gb:.2f} GB")
    bars = bars_of(found, trl, num_tokens, flops, peak_flops) | head_bars(heads, difference)
    report.show(
        "train_speed",
        ("way", "s a step", "answer tokens/s", "share of peak", "peak GiB"),
        rows_of(found, trl, num_tokens, flops, peak_flops),
        {name: report.Unmeasured(bar.target) for name, bar in bars.items()} if options.quick else bars,
        **{"quick": options.quick, "shape": asdict(shape), "size": asdict(size)},
        **{"num_tokens": num_tokens, "step_flops": flops, "peak_flops": peak_flops},
        rounds={way.name: [one and asdict(one) for one in results] for way, results in found.items()},
        trl={name: one and asdict(one) for name, one in trl.items()},
        head={name: asdict(cost) for name, cost in heads.items()},
        **load.shares(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
