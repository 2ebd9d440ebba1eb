"""The highest rate at which training and generation run side by side on one card: both canned, each in a process.

The two processes share three numbers in a file: tokens generated, tokens trained, and whether to stop. The trainer
waits for a step's tokens; the generator waits when it is two steps ahead. So both run at one rate, the trainer's.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.runs import python_path
from benchmarks.engines.processes import Settings, end_group, last_lines
from offbeat.config import load
from offbeat.engines.process import commands
from offbeat.errors import OffbeatError
from offbeat.launch.gpu_memory import server_share
from offbeat.model.loading import load_tokenizer
from offbeat.run import Run

HERE = Path(__file__).parent
GENERATED, TRAINED, STOP = range(3)
WITHIN_S, END_WITHIN_S = 600.0, 30.0


class Counters:
    """Numbers that two processes share through a file."""

    def __init__(self, file: Path):
        if not file.exists():
            file.write_bytes(bytes(3 * 8))
        with file.open("r+b") as opened:
            self._values = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.int64)

    def __getitem__(self, which: int) -> int:
        return int(self._values[which])

    def __setitem__(self, which: int, value: int) -> None:
        self._values[which] = value


@dataclass(frozen=True)
class Canned:
    """Lengths of a run's answers and prompts, in tokens, group by group, and the configuration that they came from."""

    config: str
    group_size: int
    samples_per_step: int
    lengths: list[tuple[int, int]]
    """(prompt, answer) of each sample; samples of a group are neighbours."""

    @classmethod
    def of(cls, run: Path, num_warmup: int) -> Canned:
        config = load(run / "config.json")
        tokenizer = load_tokenizer(config.model.path)
        groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for one in Run(run).trajectories(purpose="train", newest_first=False):
            if one["step"] > num_warmup and one["num_tokens"]:
                num_prompt_tokens = len(tokenizer(one["prompt"], add_special_tokens=False).input_ids)
                groups.setdefault((one["step"], one["prompt"]), []).append((num_prompt_tokens, one["num_tokens"]))
        size = config.batch.group_size
        lengths = [pair for group in groups.values() if len(group) == size for pair in group]
        if not lengths:
            raise OffbeatError(f"{run}: has no whole group of answers after its first {num_warmup} steps")
        return cls(str(run / "config.json"), size, config.batch.groups_per_step * size, lengths)


def measure_ceiling(
    canned: Canned, num_rows: int, keys: Sequence[str], folder: Path, *, num_steps: int, num_warmup: int
) -> tuple[float, Mapping[str, float]]:
    """Returns trained tokens per second, and further figures, with `num_rows` requests in flight. `keys` are those of
    the engine."""
    folder.mkdir(parents=True)
    words = [*keys, f"--rollout.slots={num_rows}", "--rollout.engine=vllm", "--rollout.workers=1"]
    spec = {**asdict(canned), "words": words, "num_rows": num_rows, "num_steps": num_steps, "num_warmup": num_warmup}
    spec |= {"counters": str(folder / "counters"), "result": str(folder / "result.json"), "folder": str(folder)}
    file, counters = folder / "spec.json", Counters(folder / "counters")
    file.write_text(json.dumps(spec))
    generating = subprocess.Popen(**_generator(canned.config, words, file, folder))
    try:
        with (folder / "training.log").open("w") as log:
            command = [sys.executable, "-m", "benchmarks.overlap.canned_training", str(file)]
            training = subprocess.run(
                command,
                stdout=log,
                stderr=log,
                timeout=WITHIN_S,
                check=False,
                env={**os.environ, **python_path(sys.executable)},
            )
    finally:
        counters[STOP] = 1
        with suppress(subprocess.TimeoutExpired):  # it may still be starting
            generating.wait(END_WITHIN_S)
        status = generating.poll()
        end_group(generating)
    if training.returncode or status != 0:
        which = "training" if training.returncode else "generation"
        raise OffbeatError(f"canned {which} broke:\n{last_lines(folder / f'{which}.log')}")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found.pop("tokens_per_s"), found


def _generator(file: str, words: Sequence[str], spec: Path, folder: Path) -> dict[str, Any]:
    """Returns the arguments of the generating process: vLLM with the worker's settings, and its share of the card."""
    config = load(file, words)
    environment = commands.environment(config, os.environ)
    probing = commands.probe_interpreter(config, environment, share_of=partial(server_share, config))
    settings = Settings(config, asyncio.run(probing), environment)
    command = settings.offline_command(HERE / "canned_generation.py")
    log = (folder / "generation.log").open("w")
    return {
        "args": command,
        "env": {**commands.suited(config, environment, settings.machine), "OFFBEAT_CANNED": str(spec)},
        "stdout": log,
        "stderr": log,
        "text": True,
        "start_new_session": True,
    }
