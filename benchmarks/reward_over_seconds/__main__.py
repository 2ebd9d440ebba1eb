"""Held-out reward over seconds, beside TRL: `python -m benchmarks.reward_over_seconds COMMAND FOLDER`.

    train FOLDER --systems overlap,alternate,TRL --seeds 1,2,3    one run after another, each in a folder of its own
    evaluate FOLDER                                               every kept version that has no reward yet
    report FOLDER --level 0.4                                     the table, the bars and the picture, anywhere

SmolLM2-135M-Instruct learns word problems with a long tail of lengths, 256 answers a step. Every `--every` steps a
version is kept. Its time is that since the run's first token began to be generated; starting up is shown apart, and
judging versions is not counted, nor is keeping them, which costs Offbeat a link to a file. Afterwards each version
answers 1,000 other problems four times.

`--level` is a held-out reward that a pilot of TRL's reached, fixed before the runs. A run reaches it where the line
between two neighbouring versions crosses it. The area under reward over samples compares learning per sample.
`--quick` does all three with the tiny model on a CPU and without TRL, and decides nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from benchmarks import report
from benchmarks.common import word_problems
from benchmarks.common.runs import python_path, read_rows, run_command
from offbeat.config import from_dict
from offbeat.errors import OffbeatError, UserError
from offbeat.launch.wiring import make_mixture
from offbeat.model.loading import load_model, load_state, load_tokenizer, resolve, save_hf
from offbeat.model.smollm2 import write
from offbeat.tools.evaluate import evaluate as evaluate_model
from offbeat.weights.version import FILE_NAME

HERE = Path(__file__).parent
SCHEDULES = {
    "overlap": ("--schedule.mode=overlap",),
    "alternate": ("--schedule.mode=alternate",),
}
TRL_SCRIPT = HERE.parent / "overlap" / "trl_words.py"
TRAINING, HELD_OUT, KEPT, TIMES, REWARDS, TASK = (
    "train.jsonl",
    "held_out.jsonl",
    "kept",
    "times.json",
    "rewards.json",
    "task.json",
)
HELD_OUT_SEED, NUM_HELD_OUT, ANSWERS_EACH = 8, 1000, 4
HELD_OUT_SHARE = 0.5
"""Share of the rows of an evaluation's file that are held out, and so used."""
TARGETS = {"TRL": 0.67, "alternate": 0.75}
"""Largest ratio of seconds to the level, overlap over another system."""
AREA_TARGET, LOSS_TARGET = 0.95, -0.01
LOOK_EVERY_S = 0.05
say = partial(report.say, "reward_over_seconds")


@dataclass(frozen=True)
class Task:
    """Sizes of a run, the same for every system; stored beside the runs."""

    num_steps: int
    every: int
    groups_per_step: int = 32
    group_size: int = 8
    max_new_tokens: int = word_problems.MAX_NEW_TOKENS
    num_held_out: int = NUM_HELD_OUT

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def kept_steps(self) -> list[int]:
        return list(range(self.every, self.num_steps + 1, self.every))


@dataclass(frozen=True)
class Point:
    """A kept version: steps trained, seconds since generation began, and its held-out reward."""

    step: int
    seconds: float
    reward: float


# Training


class Keeper:
    """Keeps published versions of a run of Offbeat's: links their files as soon as they are there, beside the run."""

    def __init__(self, weights: Path, kept: Path, steps: Sequence[int]):
        self.weights, self.kept, self.missing = weights, kept, set(steps)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for step in sorted(self.missing):
            if (file := self.weights / f"{step:08d}" / FILE_NAME).exists():
                self.kept.mkdir(parents=True, exist_ok=True)
                os.link(file, self.kept / f"{step:08d}.safetensors")
                self.missing.discard(step)


def train_with_offbeat(task: Task, words: Sequence[str], home: Path, folder: Path) -> None:
    """Trains with Offbeat's command line; leaves kept versions and their times in the folder."""
    sizes = {"groups_per_step": task.groups_per_step, "group_size": task.group_size}
    config = word_problems.sections(str(home / "model"), home / TRAINING, task.num_steps, **sizes)
    config["rollout"]["max_new_tokens"] = task.max_new_tokens
    config["weights"] = {"deltas": "never"}
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "offbeat", "train", "config.json", "--run.name=a", *words]
    run, started_s = folder / "runs" / "a", time.time()
    with Keeper(run / "weights", folder / KEPT, task.kept_steps) as keeper:
        run_command(command, folder, python_path(sys.executable))
    if keeper.missing:
        raise OffbeatError(f"{folder}: versions {sorted(keeper.missing)} were gone before they could be kept")
    trace = json.loads((run / "trace.json").read_text())
    spans = [event for event in trace if event["ph"] == "X"]
    first_s = min(span["ts"] for span in spans if span["name"] == "generate") / 1e6
    ends_s = sorted((span["ts"] + span["dur"]) / 1e6 for span in spans if span["name"] == "publish")  # one a step
    note_times(folder, {step: ends_s[step - 1] - first_s for step in task.kept_steps}, start_s=first_s - started_s)


def train_with_trl(task: Task, python: str, seed: int, home: Path, folder: Path) -> None:
    """Trains with TRL, which leaves kept versions and writes a row a step."""
    spec = {
        "model": str(home / "model"),
        "rows": str(home / TRAINING),
        "steps": task.num_steps,
        "samples": task.samples_per_step,
        "group_size": task.group_size,
        "max_new_tokens": task.max_new_tokens,
        "max_tokens": word_problems.MAX_PROMPT_TOKENS + task.max_new_tokens,
        "seed": seed,
        "keep": {str(step): str(folder / KEPT / f"{step:08d}") for step in task.kept_steps},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    started_s = time.time()
    run_command([python, str(TRL_SCRIPT), "spec.json"], folder, python_path(python))
    rows = read_rows(folder / "rows.jsonl")
    ends_s = list(accumulate(row["seconds"] for row in rows))
    times = {step: ends_s[step - 1] for step in task.kept_steps}
    note_times(folder, times, start_s=rows[0]["began"] - started_s)
    for step in task.kept_steps:  # as a folder of transformers
        saved = folder / KEPT / f"{step:08d}"
        (saved / FILE_NAME).rename(folder / KEPT / f"{step:08d}.safetensors")
        shutil.rmtree(saved)


def note_times(folder: Path, times: Mapping[int, float], *, start_s: float) -> None:
    (folder / TIMES).write_text(json.dumps({"start_s": start_s, "times": {str(k): v for k, v in times.items()}}))


# Judging


def evaluate(folder: Path) -> None:
    """Judges every kept version below the folder that has no reward yet, and the model that all runs began with."""
    task = Task(**json.loads((folder / TASK).read_text()))
    model = load_model(folder / "model", torch.bfloat16, torch.device("cpu"))
    for run in runs_of(folder):
        file = run / REWARDS
        rewards = json.loads(file.read_text()) if file.is_file() else {}
        for step in [0, *task.kept_steps]:
            if str(step) in rewards:
                continue
            if step:
                load_state(model, load_file(run / KEPT / f"{step:08d}.safetensors"))
            rewards[str(step)] = judge(task, folder, folder / "model" if not step else model)
            file.write_text(json.dumps(rewards))
            say(f"{run.name}, step {step}: held-out reward {rewards[str(step)]:.3f}")


def judge(task: Task, home: Path, model: Path | PreTrainedModel) -> float:
    """Returns the mean reward of a model's answers to the held-out problems."""
    with tempfile.TemporaryDirectory() as scratch:
        place = model if isinstance(model, Path) else Path(scratch) / "model"
        if not isinstance(model, Path):
            save_hf(model, load_tokenizer(home / "model"), place)
        keys = word_problems.sections(str(place), home / HELD_OUT, 2)
        keys["task"][0]["held_out"] = HELD_OUT_SHARE
        keys["rollout"] |= {"slots": 512, "max_new_tokens": task.max_new_tokens, "engine": "embedded"}
        keys["eval"] = {"prompts": task.num_held_out, "samples": ANSWERS_EACH, "temperature": 1.0}
        config = from_dict(keys)
        return evaluate_model(config, make_mixture(config))[f"eval_mean@{ANSWERS_EACH}"]


# The figures


def runs_of(folder: Path) -> list[Path]:
    """Returns the folders of finished runs, named SYSTEM-SEED."""
    return sorted(file.parent for file in folder.glob(f"*/{TIMES}"))


def curve(run: Path) -> list[Point]:
    times = json.loads((run / TIMES).read_text())["times"]
    rewards = json.loads((run / REWARDS).read_text())
    return [Point(0, 0.0, rewards["0"]), *(Point(int(k), v, rewards[k]) for k, v in times.items())]


def seconds_to(level: float, points: Sequence[Point]) -> float | None:
    """Returns the seconds at which the curve first crosses the level; None if it stays below."""
    for one, other in pairwise(points):
        if one.reward < level <= other.reward:
            return one.seconds + (other.seconds - one.seconds) * (level - one.reward) / (other.reward - one.reward)
    return None


def area(points: Sequence[Point]) -> float:
    """Returns the mean reward over the samples of a run, which is its area over samples but for a constant."""
    whole = sum((other.step - one.step) * (one.reward + other.reward) / 2 for one, other in pairwise(points))
    return whole / points[-1].step


Curves = Mapping[str, Mapping[int, Sequence[Point]]]  # by system and seed


def curves_of(folder: Path) -> Curves:
    found: dict[str, dict[int, list[Point]]] = {}
    for run in runs_of(folder):
        system, _, seed = run.name.rpartition("-")
        if (run / REWARDS).is_file():
            found.setdefault(system, {})[int(seed)] = curve(run)
    return found


def bars_of(curves: Curves, level: float, *, quick: bool) -> dict[str, report.Bar | report.Unmeasured]:
    """Compares overlap with the others, seed by seed."""
    ours, bars = curves.get("overlap", {}), dict[str, report.Bar | report.Unmeasured]()
    for name, target in TARGETS.items():
        theirs = curves.get(name, {})
        pairs = [(seconds_to(level, ours[seed]), seconds_to(level, theirs[seed])) for seed in ours if seed in theirs]
        ratios = [one / other for one, other in pairs if one is not None and other is not None]
        bar = f"seconds to the level, over {name}'s"
        bars[bar] = report.at_most(target, ratios, quick=quick) if ratios else report.Unmeasured(target)
        losses = [ours[seed][-1].reward - theirs[seed][-1].reward for seed in ours if seed in theirs]
        bar = f"final reward above {name}'s"
        is_known = losses and not quick
        bars[bar] = report.at_least(LOSS_TARGET, losses, quick=False) if is_known else report.Unmeasured(LOSS_TARGET)
    plain = curves.get("alternate", {})
    areas = [area(ours[seed]) / area(plain[seed]) for seed in ours if seed in plain if area(plain[seed])]
    bar = "area over samples, over alternate's"
    bars[bar] = report.at_least(AREA_TARGET, areas, quick=quick) if areas else report.Unmeasured(AREA_TARGET)
    return bars


def rows_of(folder: Path, curves: Curves, level: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for system, seeds in curves.items():
        for seed, points in seeds.items():
            reached, last = seconds_to(level, points), points[-1]
            start_s = json.loads((folder / f"{system}-{seed}" / TIMES).read_text())["start_s"]
            shown = "not reached" if reached is None else f"{reached:.0f}"
            rows.append((system, str(seed), shown, f"{last.reward:.3f}", f"{last.seconds:.0f}", f"{start_s:.0f}"))
    return rows


def draw(curves: Curves, level: float, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for number, (system, seeds) in enumerate(curves.items()):
        for seed, points in seeds.items():
            label = system if seed == min(seeds) else None
            seconds, rewards = [point.seconds for point in points], [point.reward for point in points]
            axes.plot(seconds, rewards, color=f"C{number}", label=label, alpha=0.8)
    axes.axhline(level, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds since the first token")
    axes.set_ylabel("held-out reward")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def show(folder: Path, level: float, *, quick: bool) -> None:
    curves = curves_of(folder)
    draw(curves, level, folder / "reward_over_seconds.png")
    header = ["system", "seed", "seconds to the level", "final reward", "seconds", "start s"]
    raw = {
        system: {seed: [asdict(point) for point in points] for seed, points in seeds.items()}
        for system, seeds in curves.items()
    }
    bars = bars_of(curves, level, quick=quick)
    report.show(
        "reward_over_seconds", header, rows_of(folder, curves, level), bars, quick=quick, level=level, curves=raw
    )


def prepare(folder: Path, task: Task, *, is_tiny: bool) -> None:
    """Writes model, problems and the task's sizes into the folder, unless they are there."""
    if (folder / TASK).is_file():
        if Task(**json.loads((folder / TASK).read_text())) != task:
            raise UserError(f"{folder}: its runs were begun with other sizes; take another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    word_problems.write_rows(folder / TRAINING)
    word_problems.write_rows(folder / HELD_OUT, 50 + math.ceil(task.num_held_out / HELD_OUT_SHARE), HELD_OUT_SEED)
    if is_tiny:
        shutil.copytree(resolve("offbeat-tiny"), folder / "model")
    else:
        write(folder / "model")
    (folder / TASK).write_text(json.dumps(asdict(task)))


def train(
    folder: Path, task: Task, systems: Sequence[str], seeds: Sequence[int], words: Sequence[str], python: str
) -> None:
    for seed in seeds:
        for system in systems:
            place = folder / f"{system}-{seed}"
            if (place / TIMES).is_file():
                continue
            shutil.rmtree(place, ignore_errors=True)  # left by a run that was interrupted
            place.mkdir()
            if system == "TRL":
                train_with_trl(task, python, seed, folder, place)
            else:
                train_with_offbeat(task, [*SCHEDULES[system], f"--run.seed={seed}", *words], folder, place)
            say(f"{place.name}: {task.num_steps} steps")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reward_over_seconds", description="Reward over seconds."
    )
    parser.add_argument("command", nargs="?", choices=("train", "evaluate", "report"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true", help="all with the tiny model on a CPU: decides nothing")
    parser.add_argument("--systems", default="overlap,alternate,TRL", metavar="NAMES")
    parser.add_argument("--seeds", default="1", metavar="NUMBERS")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=12, help="steps between versions that are kept (12)")
    parser.add_argument("--level", type=float, default=0.4, help="held-out reward to reach (0.4)")
    parser.add_argument(
        "--keys", default="", metavar="WORDS", help="keys of Offbeat's runs, such as --rollout.slots=512"
    )
    parser.add_argument(
        "--trl-python", default=sys.executable, metavar="PATH", help="of an environment with TRL and vLLM"
    )
    options = parser.parse_args()
    if options.quick:
        words = ["--model.device=cpu", "--rollout.engine=embedded", "--task.system=none", "--log.console=quiet"]
        task = Task(4, 2, groups_per_step=2, group_size=2, max_new_tokens=8, num_held_out=8)
        with report.scratch("reward_over_seconds") as folder:
            prepare(folder, task, is_tiny=True)
            train(folder, task, list(SCHEDULES), [1], words, sys.executable)
            evaluate(folder)
            show(folder, options.level, quick=True)
        return 0
    if options.folder is None:
        parser.error("give a command and a folder, or --quick")
    folder = options.folder.absolute()
    if options.command == "train":
        task = Task(options.steps, options.every)
        prepare(folder, task, is_tiny=False)
        systems, seeds = options.systems.split(","), [int(seed) for seed in options.seeds.split(",")]
        train(folder, task, systems, seeds, options.keys.split(), options.trl_python)
    elif options.command == "evaluate":
        evaluate(folder)
    else:
        show(folder, options.level, quick=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
