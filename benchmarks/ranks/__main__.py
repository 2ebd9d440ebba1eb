"""A trainer of several ranks against one of one rank: `python -m benchmarks.ranks [--quick] [--only NAME,NAME]`.

- ranks-exact: steps with run.exact on 1, 2, 3 and 4 ranks end in one digest, for full training, LoRA with a KL term, a
  value head, and two updates a step;
- ranks-close: without run.exact, one step of 2 ranks against one of 1 rank, and 2 ranks repeated;
- ranks-resize: 2, 1, 3 and 2 ranks take turns, from checkpoint to checkpoint;
- ranks-memory: peak memory of a rank of two that loads, trains, saves and publishes a model of some 400 MB;
- ranks-publish: two versions from 1, 2 and 3 ranks: equal digests, sizes of the deltas;
- ranks-balance: share of the ranks' time that is spent on micro-batches: 8 ranks, long-tailed answers of a 7B model;
- ranks-speed: trained tokens per second of two ranks of one thread over those of one rank of one thread, interleaved;
- ranks-trl: the same two ranks against TRL's GRPOTrainer with accelerate's FSDP2, on two processes of one thread;
- fsdp-of-one, two-on-one (need a GPU): FSDP2 on one rank, and two ranks on one card, against the plain policy;
- publish-speed (needs a GPU, a smaller form does not): versions of a 7.6B model in which one value in a hundred
  changed, from one rank and from two on one card: GB/s until they are durable, seconds that training stands still.

Ranks are processes on this machine, on a CPU over gloo. All train random models on random answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.common.trl_environment import trl_python
from benchmarks.ranks.one_rank import WITHIN_S, Task, make_model, samples_of
from benchmarks.ranks.publishing import Publishing
from benchmarks.report import Bar, Unmeasured, at_least, at_most
from offbeat.model.loading import resolve
from offbeat.trainer.rounds import balance, cost

say = partial(report.say, "ranks")
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "bfloat16": {"dtype": "bfloat16"},
    "LoRA": {"lora": True},
    "value head": {"value_head": True},
    "two updates": {"updates_per_step": 2},
}
MAX_OTHERS = 0.1
"""Largest share of the cores that other processes may use while speed is measured."""
TIMES = 5
"""Repetitions of what is compared in speed."""
TRL_SAMPLES = (12, 6, 4)
"""Sizes of TRL's micro-batches to try, in answers per process, of which a step has 12."""
SPEED = Task(
    last=3, exact=False, width=384, layers=4, vocabulary=2048, groups=6, group_size=4, tokens_per_microbatch=1024
)
DISK_BYTES = 48 * 10**9
"""Free disk that publish-speed needs: three versions at a time."""
COPIES = {"load": 1, "train": 4, "save": 6, "publish": 8}
"""Copies of a rank's float32 share in each phase: the masters; gradients and two moments; the copies of masters and
moments that are written while training goes on, which stay; the rows of a version, and the parts that they become."""
MEMORY = Task(last=1, exact=False, width=768, layers=12, vocabulary=16384, groups=1, tokens_per_microbatch=256)


def run(task: Any, size: int, folder: Path, program: str = "one_rank", threads: int = 1) -> list[dict[str, Any]]:
    """Gives `task` to a `program` of this benchmark on `size` ranks; returns what each of them tells."""
    return _run([sys.executable, "-m", f"benchmarks.ranks.{program}"], asdict(task), size, folder, threads)


def _run(program: list[str], task: dict[str, Any], size: int, folder: Path, threads: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given = folder / "task.json"
    given.write_text(json.dumps(task))
    ranks, outs = [], [folder / f"out{rank}.json" for rank in range(size)]
    for rank, out in enumerate(outs):
        out.unlink(missing_ok=True)
        place = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "OMP_NUM_THREADS": threads,
        }
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen([*program, str(given), str(out)], env=environment))
    try:
        for process in ranks:
            if process.wait(WITHIN_S):
                raise RuntimeError(f"a rank of {size} ended with status {process.returncode}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(out.read_text()) for out in outs]


def exact(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    bars, rows = {}, []
    sizes = (2,) if quick else (2, 3, 4)
    cases = {"full": CASES["full"]} if quick else CASES
    for name, options in cases.items():
        task = Task(last=2 if quick else 20, **options)
        wanted = run(task, 1, folder)[0]["digest"]
        found = {size: run(task, size, folder)[0]["digest"] for size in sizes}
        equal = [digest == wanted for digest in found.values()]
        bars[f"ranks-exact, {name}"] = at_least(1.0, [float(one) for one in equal], quick=False)
        rows.append([f"exact, {name}, {task.last} steps", f"{sum(equal)} of {len(equal)} sizes equal one rank"])
        say(rows[-1][1])
    return bars, rows


def close(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    task = Task(last=1, exact=False)
    one, two = run(task, 1, folder)[0], run(task, 2, folder)[0]
    again = [run(task, 2, folder)[0]["digest"] == two["digest"] for _ in range(1 if quick else 10)]
    norm = abs(two["norms"][0] / one["norms"][0] - 1)
    rows = [["close", f"norm differs by {norm:.1e}, {sum(again)} of {len(again)} repeats equal"]]
    bars = {
        "ranks-close, norm": at_most(1e-6, [norm], quick=False),
        "ranks-close, repeats equal": at_least(1.0, [float(one) for one in again], quick=False),
    }
    return bars, rows


def resize(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    sizes = (2, 1) if quick else (2, 1, 3, 2)
    wanted = run(Task(last=len(sizes)), 1, folder)[0]["digest"]
    checkpoints = str(folder / "checkpoints")
    found = [
        run(Task(first=step, last=step + 1, folder=checkpoints), size, folder)[0]["digest"]
        for step, size in enumerate(sizes)
    ]
    equal = float(found[-1] == wanted)
    told = f"{' → '.join(map(str, sizes))} ranks {'equal' if equal else 'differ from'} one rank"
    return {"ranks-resize": at_least(1.0, [equal], quick=False)}, [["resize", told]]


def memory(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    """Compares the peak of each phase with what a rank had before it loaded the model (torch, its libraries, the
    gang), its share of what it must hold then, and the largest tensor."""
    small = replace(MEMORY, layers=4) if quick else MEMORY
    make_model(small).save_pretrained(folder / "model")
    task = replace(small, folder=str(folder / "memory"), path=str(folder / "model"), publishes=str(folder / "versions"))
    ranks = run(task, 2, folder)
    largest = 4 * task.vocabulary * task.width
    rows, bars = [], {}
    for what, copies in COPIES.items():
        over = [
            (one["peak_bytes"][what] - one["peak_bytes"]["start"] - copies * one["held_bytes"] - largest) / 1e6
            for one in ranks
        ]
        bars[f"ranks-memory, {what}, MB over its share"] = at_most(300.0, over, quick=False)
        rows.append([f"memory, {what}", f"{max(over):.0f} MB over a rank's share and the largest tensor"])
    return bars, rows


def balanced(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    shares = []
    for seed in range(5 if quick else 50):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.lognormal(np.log(3670), 0.8, 512).astype(int), 27648)
        packed: list[list[int]] = []
        for length in lengths.tolist():
            if not packed or sum(packed[-1]) + length > 16384:
                packed.append([])
            packed[-1].append(length)
        shares.append(balance([cost(sum(row), row, 3584) for row in packed], 8))
    told = f"{statistics.median(shares):.3f} of 8 ranks' time is spent on micro-batches"
    return {"ranks-balance": at_least(0.93, shares, quick=False)}, [["balance", told]]


def speed(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    ratios, load = [], Load()
    for _ in range(1 if quick else TIMES):
        rates = [_rate(run(SPEED, size, folder)[0]) for size in (1, 2)]
        ratios.append(rates[1] / rates[0])
        say(f"one rank {rates[0]:.0f} tokens/s, two ranks {rates[1]:.0f}")
    others = load.shares()["others_share_of_cores"]
    bar = at_least(1.6, ratios, quick=quick)
    if others > MAX_OTHERS:
        bar = replace(bar, holds=None)
    told = f"two ranks {statistics.median(ratios):.2f} times one; others used {others:.0%} of the cores"
    return {"ranks-speed": bar}, [["speed", told]]


def beside_trl(folder: Path, *, quick: bool) -> tuple[dict[str, Bar | Unmeasured], list[list[str]]]:
    """Two ranks of one thread against TRL's GRPOTrainer with accelerate's FSDP2 on two processes of one thread, on the
    same answers; TRL with the micro-batch that suits it best."""
    if quick:
        return {"ranks-trl": Unmeasured(1.5)}, []
    python = str(trl_python())
    answers = [samples_of(SPEED, step) for step in range(SPEED.last)]
    given = {
        "config": make_model(SPEED).config.to_dict(),
        "steps": [
            [{"prompt": one.prompt.tolist(), "response": one.response.tolist(), "reward": one.reward} for one in step]
            for step in answers
        ],
        "scratch": str(folder / "trl"),
        "group_size": SPEED.group_size,
        "cap": SPEED.longest,
        "tokenizer": str(resolve("offbeat-tiny")),
    }
    num_tokens = [sum(sample.num_tokens for sample in step) for step in answers][1:]
    ratios, load = [], Load()
    for _ in range(TIMES):
        ours = _rate(run(SPEED, 2, folder)[0])
        theirs = []
        for num_samples in TRL_SAMPLES:
            program = [python, str(Path(__file__).with_name("trl_rank.py"))]
            told = _run(program, {**given, "samples": num_samples}, 2, folder, 1)[0]
            theirs.append(max(tokens / seconds for tokens, seconds in zip(num_tokens, told["seconds"], strict=True)))
        ratios.append(ours / max(theirs))
        say(f"Offbeat {ours:.0f} tokens/s, TRL {', '.join(f'{rate:.0f}' for rate in theirs)}")
    others = load.shares()["others_share_of_cores"]
    bar = at_least(1.5, ratios, quick=False)
    if others > MAX_OTHERS:
        bar = replace(bar, holds=None)
    told_text = f"{statistics.median(ratios):.2f} times TRL with FSDP2; others used {others:.0%} of the cores"
    return {"ranks-trl": bar}, [["two ranks beside TRL", told_text]]


def _rate(told: dict[str, Any]) -> float:
    """Tokens per second of the fastest step but the first."""
    return max(tokens / seconds for tokens, seconds in list(zip(told["tokens"], told["seconds"], strict=True))[1:])


def of_one(folder: Path, *, quick: bool) -> tuple[dict[str, Bar | Unmeasured], list[list[str]]]:
    if not torch.cuda.is_available():
        return {"fsdp-of-one, bits": Unmeasured(1.0), "fsdp-of-one, speed": Unmeasured(0.97)}, []
    task = Task(last=3 if quick else 6, exact=False, dtype="bfloat16", device="cuda:0", width=1536, layers=16)
    task = replace(task, vocabulary=32000, groups=8, group_size=8, median=600, longest=2048, tokens_per_microbatch=8192)
    equal, ratios = [], []
    for _ in range(1 if quick else 3):
        plain, ranked = run(task, 1, folder)[0], run(replace(task, in_gang=True), 1, folder)[0]
        equal.append(float(plain["digest"] == ranked["digest"]))
        ratios.append(_rate(ranked) / _rate(plain))
    bars: dict[str, Bar | Unmeasured] = {
        "fsdp-of-one, bits": at_least(1.0, equal, quick=False),
        "fsdp-of-one, speed": at_least(0.97, ratios, quick=quick),
    }
    return bars, [["FSDP2 on one rank", f"{statistics.median(ratios):.3f} times the plain policy's speed"]]


def on_one(folder: Path, *, quick: bool) -> tuple[dict[str, Bar | Unmeasured], list[list[str]]]:
    if not torch.cuda.is_available():
        return {"two-on-one": Unmeasured(1.0)}, []
    equal = []
    for dtype in ("float32", "bfloat16"):
        task = Task(last=3, dtype=dtype, device="cuda:0", width=256)
        equal.append(float(run(task, 1, folder)[0]["digest"] == run(task, 2, folder)[0]["digest"]))
    told = f"{int(sum(equal))} of 2 dtypes equal one rank"
    return {"two-on-one": at_least(1.0, equal, quick=False)}, [["two ranks on one card", told]]


def publish(folder: Path, *, quick: bool) -> tuple[dict[str, Bar], list[list[str]]]:
    sizes, told = (1, 2) if quick else (1, 2, 3), []
    task = replace(MEMORY, exact=True, dtype="bfloat16", layers=2 if quick else MEMORY.layers)
    for size in sizes:
        told.append(run(replace(task, publishes=str(folder / f"versions{size}")), size, folder)[0]["versions"])
    equal = [float([v["digest"] for v in own] == [v["digest"] for v in told[0]]) for own in told[1:]]
    apart = [abs(own[1]["coded_bytes"] / told[0][1]["coded_bytes"] - 1) for own in told[1:]]
    rates = [own[1]["num_bytes"] / own[1]["whole_s"] / 1e9 for own in told]
    bars = {
        "ranks-publish, digest": at_least(1.0, equal, quick=False),
        "ranks-publish, size of a delta": at_most(0.02, apart, quick=False),
    }
    speeds = ", ".join(f"{rate:.2f} GB/s on {size}" for rate, size in zip(rates, sizes, strict=True))
    return bars, [["publish", f"{int(sum(equal))} of {len(equal)} sizes equal one rank; {speeds}"]]


def publish_speed(folder: Path, *, quick: bool) -> tuple[dict[str, Bar | Unmeasured], list[list[str]]]:
    """Publishes versions of 15 GB from one rank and from two on one card; a small model where there is no card."""
    has_gpu = torch.cuda.is_available() and not quick
    bars: dict[str, Bar | Unmeasured] = {}
    rows, digests = [], []
    if has_gpu and (free := shutil.disk_usage(folder).free) < DISK_BYTES:
        told = f"not tried: {folder} has {free / 1e9:.0f} GB of free disk, and {DISK_BYTES / 1e9:.0f} are needed"
        return {"publish-speed, GB/s": Unmeasured(2.0)}, [["publish-speed", told]]
    for size, first in ((1, 1), (2, 3)):
        shape = "7.6b" if has_gpu else "tiny" if quick else "135m"
        task = Publishing(shape, "cuda:0" if has_gpu else "cpu", str(folder / "v"), first)
        found = run(task, size, folder, "publishing", threads=max((os.cpu_count() or 1) // size, 1))
        lead, name = found[0], f"{size} rank{'s' * (size > 1)}"
        rate = lead["num_bytes"] / (lead["encode_s"] + lead["flush_s"]) / 1e9
        still_s = max(one["stands_still_s"] for one in found)
        bars[f"publish-speed, {name}, GB/s"] = at_least(2.0, [rate], quick=False)
        bars[f"publish-speed, {name}, s of standing still"] = at_most(1.0, [still_s], quick=False)
        seconds = f"coded in {lead['encode_s']:.2f} s, flushed in {lead['flush_s']:.2f} s, still for {still_s:.2f} s"
        size_told = f"{lead['num_bytes'] / 1e9:.2f} GB, {lead['density']:.2%} changed"
        rows.append([f"publish, {name}", f"{size_told}: {rate:.2f} GB/s ({seconds})"])
        say(rows[-1][1])
        digests.append(lead["digest"])
    if not has_gpu:  # a small model says nothing about these targets
        bars = {name: Unmeasured(bar.target) for name, bar in bars.items()}
    bars["publish-speed, digests equal"] = at_least(1.0, [float(digests[0] == digests[1])], quick=False)
    return bars, rows


PARTS: dict[str, Callable[..., tuple[dict[str, Any], list[list[str]]]]] = {
    "ranks-exact": exact,
    "ranks-close": close,
    "ranks-resize": resize,
    "ranks-memory": memory,
    "ranks-publish": publish,
    "ranks-balance": balanced,
    "ranks-speed": speed,
    "ranks-trl": beside_trl,
    "fsdp-of-one": of_one,
    "two-on-one": on_one,
    "publish-speed": publish_speed,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks")
    parser.add_argument("--quick", action="store_true", help="fewer cases, sizes and steps")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"parts of it: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    chosen = (arguments.only or ",".join(PARTS)).split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(PARTS)}")
    bars: dict[str, Any] = {}
    rows: list[list[str]] = []
    for name in chosen:
        say(name)
        with report.scratch("ranks") as folder:
            found, lines = PARTS[name](folder, quick=arguments.quick)
        bars |= found
        rows += lines
    report.show("ranks", ("part", "result"), rows, bars, quick=arguments.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
