"""Counts the modules that one prompt and one version pass through: python scripts/journey.py [SRC …].

Each SRC is the `src` folder of a checkout of Offbeat, this one's by default; several are compared with the first. A run
of two steps in one process is profiled: every module with at least one call counts.

`prompt`: the configuration's way from TOML to a `Config`, then from the first problem that is drawn for step 1 until
the optimizer has trained on its tokens. Starting up, which ends before step 1, does not count.
`version`: from the end of the optimizer's first step until a token is sampled from the version that it made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1] / "src"
CHILD = """
import inspect, json, sys, threading
from pathlib import Path
src = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(src), "."]
import torch
import offbeat
from offbeat.config import load

HOME = str(src / "offbeat")
legs = {"prompt": set(), "version": set()}
open_legs = {"prompt"}  # the configuration
num_steps = 0

def is_import(frame):
    while frame:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False

def note(frame, event, argument):
    global num_steps
    code = frame.f_code
    name, place = code.co_name, code.co_filename
    if event == "call":
        if num_steps == 1 and name == "problem_of" and place.endswith("journey_task.py"):
            open_legs.add("prompt")
        if open_legs and place.startswith(HOME) and code.co_flags & inspect.CO_OPTIMIZED:  # no module's or class's body
            module = place[len(HOME) + 1 :]
            for leg in open_legs:
                if module not in legs[leg] and not is_import(frame):
                    legs[leg].add(module)
    elif event == "return":
        if name == "step" and place.endswith(("adam.py", "adamw.py")):
            num_steps += 1
            open_legs.clear()
            if num_steps == 1:
                open_legs.add("version")
        elif name == "draw" and place.startswith(HOME) and place.endswith("sampling.py"):
            open_legs.discard("version")

threading.setprofile(note)
sys.setprofile(note)
config = load(Path("journey.toml"))
open_legs.clear()
offbeat.train(config)
print(json.dumps({name: sorted(found) for name, found in legs.items()}))
"""
TASK = """
def problem_of(ordinal: int) -> dict:
    return {"prompt": f"{ordinal % 7} + 1 =", "answer": str(ordinal % 7 + 1)}
"""
CONFIG = """
[run]
name = "journey"
steps = 2
[schedule]
mode = "alternate"
max_staleness = 0
[batch]
groups_per_step = 2
group_size = 2
[rollout]
max_new_tokens = 8
[eval]
every = 0
[log]
console = "quiet"
[[task]]
source = "function"
path = "journey_task.py:problem_of"
reward = "exact"
"""


def journey(src: Path) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "journey_task.py").write_text(TASK)
        Path(folder, "journey.toml").write_text(CONFIG)
        command = [sys.executable, "-c", CHILD, str(src)]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(folders: list[Path]) -> None:
    first: dict[str, int] = {}
    for src in folders:
        for name, modules in journey(src).items():
            first.setdefault(name, len(modules))
            print(f"{src}: {name}: {len(modules)} modules, {len(modules) / first[name]:.2f} of the first")
            print("  " + " ".join(modules))


if __name__ == "__main__":
    main([Path(word).resolve() for word in sys.argv[1:]] or [HERE])
