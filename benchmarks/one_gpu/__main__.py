"""Trainer and vLLM together on one card: `python -m benchmarks.one_gpu [--quick] [--only lora|full]`.

The two examples of the GPU quickstart are run as a user would run them: adapters on a card of 24 GB, all weights on one
of 80 GB. A larger card plays the smaller one: in every process of the run it reports the smaller one's memory, by which
Offbeat and vLLM size themselves, and the memory really taken is sampled by the driver's own count.

The settings are those of the examples, but for: ten steps of 8 groups, no evaluation, a checkpoint every four steps;
random weights in the shape of Qwen2.5-1.5B, so that nearly every answer is as long as it may be; generated word
problems in bytes, which makes prompts three times as long as with a real tokenizer; and a coin as the reward, without
which random weights would have nothing to learn and the trainer nothing to compute.

The trainer is killed once in the middle of a step, and the run has to go on by itself. Figures are the card's peak; the
seconds from the kill until the next step is trained, and those of its training alone; and the rules that the ledger
breaks. Model and run lie in memory if there is room, which spares a checkpoint the disk. A quick run trains a tiny
shape on the CPU with the embedded engine, as adapters unless `--only full`, and decides nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.one_gpu.case import CASES, STEPS, Case, Engine, Outcome, play
from offbeat.errors import OffbeatError
from offbeat.host_memory import host_memory

NEXT_STEP_S, FIRST_TRAIN_S = 60.0, 30.0
IN_MEMORY = Path("/dev/shm")
HOST_GB = 45
"""Memory that trainer and engine take beside a scratch folder in memory, most of it for copies of a checkpoint."""
say = partial(report.say, "one_gpu")


@contextmanager
def scratch(case: Case) -> Iterator[Path]:
    """Makes a temporary folder: in memory if there is room for a run of `case`, else on the repository's disk."""
    has_room = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free >= case.scratch_gb * 1e9
    if has_room and host_memory()[0] >= (case.scratch_gb + HOST_GB) * 1e9:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="one_gpu-") as folder:
            yield Path(folder)
        return
    with report.scratch("one_gpu") as folder:
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < case.scratch_gb:
            raise OSError(f"{folder.parent}: a run needs {case.scratch_gb} GB, {free_gb:.0f} are free")
        yield folder


def bars_of(found: Mapping[str, Outcome], *, quick: bool) -> dict[str, report.Bar | report.Unmeasured]:
    def bar(target: float, values: Sequence[float | None]) -> report.Bar | report.Unmeasured:
        known = [value for value in values if value is not None]
        return report.at_most(target, known, quick=False) if known and not quick else report.Unmeasured(target)

    bars: dict[str, report.Bar | report.Unmeasured] = {}
    for case in CASES:
        own = [found[case.name]] if case.name in found else []
        bars[f"peak GB, {case.name}"] = bar(float(case.card_gb), [one.peak_gb for one in own])
        bars[f"next step s, {case.name}"] = bar(NEXT_STEP_S, [one.next_step_s for one in own])
        bars[f"first step after restart s, {case.name}"] = bar(FIRST_TRAIN_S, [one.first_train_s for one in own])
    num_findings = sum(len(one.findings) for one in found.values())
    # A quick run can only show that a rule is broken, not that none ever is.
    holds = None if quick and num_findings == 0 else num_findings == 0
    bar_of_all = report.Bar(num_findings, 0, holds, (num_findings, num_findings))
    bars["ledger findings"] = bar_of_all if found else report.Unmeasured(0)
    return bars


def rows_of(found: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    def row(name: str, tell: Callable[[Outcome], str]) -> tuple[str, ...]:
        return name, *(tell(one) for one in found.values())

    return [
        row("peak GB", lambda one: "-" if one.peak_gb is None else f"{one.peak_gb:.1f}"),
        row("s from the kill to the next step", lambda one: f"{one.next_step_s:.1f}"),
        row("s from the kill to the interrupted step", lambda one: f"{one.caught_up_s:.1f}"),
        row("s of the first step after the restart", lambda one: f"{one.first_train_s:.1f}"),
        row("killed in mid-step", lambda one: "yes" if one.is_mid_step else "no"),
        row("steps", lambda one: f"{one.num_steps} of {STEPS}"),
        row("tokens in a micro-batch", lambda one: str(one.microbatch_tokens)),
        row("halvings of it", lambda one: str(one.num_halvings)),
        row("lines of logs about memory that ran out", lambda one: str(len(one.memory_warnings))),
        row("vLLM's share of the card", lambda one: "-" if one.engine_share is None else f"{one.engine_share:g}"),
        row("ledger findings", lambda one: str(len(one.findings))),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny shape on the CPU: decides nothing")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one of the cards")
    parser.add_argument(
        "--engine-python",
        metavar="PATH",
        default=os.environ.get("OFFBEAT_VLLM_PYTHON", sys.executable),
        help="of an environment with vLLM (this one)",
    )
    parser.add_argument(
        "--engine-arguments",
        metavar="TEXT",
        default=os.environ.get("OFFBEAT_ENGINE_ARGS", ""),
        help="further arguments of vLLM's server",
    )
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="copy logs, metrics and events there")
    options = parser.parse_args()
    if not options.quick and not has_gpu():
        say("needs a GPU; --quick trains a tiny shape on the CPU")
        return 2
    engine, load = Engine(options.engine_python, shlex.split(options.engine_arguments)), Load()
    found: dict[str, Outcome] = {}
    failures: dict[str, str] = {}
    wanted = [options.only] if options.only else [case.name for case in CASES[: 1 if options.quick else None]]
    for case in CASES:
        if case.name not in wanted:
            continue
        try:
            with report.scratch("one_gpu") if options.quick else scratch(case) as folder:
                say(f"{case.name}: in {folder}")
                found[case.name] = play(case, engine, folder / case.name, options.keep, quick=options.quick)
        except (OffbeatError, OSError) as error:
            failures[case.name] = str(error)
            say(f"{case.name}: {error}")
    bars = bars_of(found, quick=options.quick)
    cases = {name: asdict(one) for name, one in found.items()}
    raw = {"quick": options.quick, "cases": cases, "failures": failures, **load.shares()}
    report.show("one_gpu", ("figure", *found), rows_of(found), bars, **raw)
    return 1 if failures else 0


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
