"""Runs on a GPU that are hurt: their settings, how each is started, killed and resumed."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine_servers import ENGINE_ARGUMENTS

from benchmarks.common.supervised import Supervised, rows, until
from offbeat.engines.vllm.direct import MODULE
from offbeat.ledger.ledger import Ledger

ENGINE_PYTHON = os.environ.get("OFFBEAT_VLLM_PYTHON")
"""The interpreter that has vLLM, where it is not the one that runs the tests."""
HAS_VLLM = ENGINE_PYTHON is not None or importlib.util.find_spec("vllm") is not None
MAX_GAP = 0.1
"""Mean distance of the engine's log-probs from the trainer's in a step. bfloat16 alone gives SmolLM2 0.044 to 0.050 on
an H200, most in steps of a few hundred fresh tokens; one prompt taken for another gives several."""
COMMON = (
    *("--run.name=a", "--run.seed=3", "--batch.groups-per-step=4", "--batch.group-size=4", "--optimizer.lr=3e-4"),
    *("--rollout.max-new-tokens=12", "--rollout.slots=16", "--rollout.lease-s=10", "--log.console=quiet"),
    *("--model.device=cuda", "--eval.every=3", "--eval.prompts=8", "--checkpoint.every=2"),
)


class Setting(NamedTuple):
    """One run: each field is a choice that users make, or what is killed in the middle of it."""

    processes: str
    schedule: str
    engine: str
    trains: str
    dtype: str
    killed: str


CHOICES = {
    "processes": {"one": (), "worker": ("--rollout.workers=1",), "workers": ("--rollout.workers=2",)},
    "schedule": {
        "alternate": (),
        "rounds": ("--schedule.max-staleness=2", "--schedule.over-provision=2"),
        "overlap": ("--schedule.mode=overlap", "--schedule.max-staleness=2"),
    },
    "engine": {
        "embedded": ("--rollout.engine=embedded",),
        "vllm": (
            *("--rollout.engine=vllm", "--engine.memory-share=0.08"),
            f"--engine.arguments={','.join(ENGINE_ARGUMENTS)}",
            *((f"--engine.python={ENGINE_PYTHON}",) if ENGINE_PYTHON else ()),
        ),
    },
    "trains": {"all": (), "lora": ("--model.lora-rank=8",)},
    "dtype": {"bfloat16": ("--model.dtype=bfloat16",), "float32": ("--model.dtype=float32",)},
    "killed": {"trainer": (), "worker": (), "engine": (), "everything": ()},
}

SETTINGS = [
    Setting("one", "alternate", "embedded", "all", "bfloat16", "everything"),
    Setting("one", "rounds", "embedded", "lora", "float32", "everything"),
    Setting("one", "overlap", "embedded", "all", "float32", "everything"),
    Setting("worker", "alternate", "embedded", "lora", "float32", "trainer"),
    Setting("workers", "overlap", "embedded", "lora", "bfloat16", "trainer"),
    Setting("workers", "rounds", "embedded", "all", "float32", "worker"),
    Setting("worker", "alternate", "embedded", "lora", "bfloat16", "worker"),
    Setting("workers", "alternate", "embedded", "all", "float32", "everything"),
    Setting("worker", "rounds", "vllm", "all", "float32", "engine"),
    Setting("workers", "alternate", "vllm", "lora", "bfloat16", "engine"),
    Setting("worker", "overlap", "vllm", "all", "bfloat16", "engine"),
    Setting("workers", "overlap", "vllm", "all", "float32", "worker"),
    Setting("worker", "rounds", "vllm", "lora", "bfloat16", "everything"),
    Setting("workers", "rounds", "vllm", "all", "bfloat16", "trainer"),
]
"""Together they hold every pair of choices that can be made together; a test counts."""


def is_possible(setting: Setting) -> bool:
    if setting.processes == "one" and (setting.engine != "embedded" or setting.killed != "everything"):
        return False  # a server wants a worker; one process is killed whole
    if setting.killed == "engine" and setting.engine == "embedded":
        return False  # it is the worker
    return (setting.engine, setting.trains, setting.dtype) != ("vllm", "lora", "float32")  # vLLM has no such adapters


def pairs_of(setting: Setting) -> set[tuple[str, str, str, str]]:
    return {(*one, *other) for one, other in itertools.combinations(setting._asdict().items(), 2)}


def words_of(setting: Setting) -> list[str]:
    return [*COMMON, *(word for field, choice in setting._asdict().items() for word in CHOICES[field][choice])]


class GpuRun(Supervised):
    """A run that can also lose its engine's server, or everything at once."""

    def kill_part(self, killed: str) -> GpuRun:
        """Kills a part outright; returns the run that goes on: the same, or where nothing was left a resumed one."""
        if killed == "everything":
            return self.kill_everything()
        if killed == "engine":
            self.kill_engine()
        else:
            self.kill({"worker": "worker-1"}.get(killed, killed))
        return self

    def kill_everything(self) -> GpuRun:
        for pid in self.living():
            _kill(pid)
        self.process.wait()
        until(lambda: not self.living(), "every process to be gone", 60.0)
        return GpuRun(self.folder, "--resume", "runs/a")

    def kill_engine(self) -> None:
        """Kills a worker's server, with all that it started."""
        servers = until(self.servers, "an engine's server")
        os.killpg(os.getpgid(servers[0]), signal.SIGKILL)

    def servers(self) -> list[int]:
        """Processes that run vLLM's engine, the parents of all others of it. They are found by whom they come from: an
        engine's environment holds nothing of Offbeat's, so that `living` does not know them."""
        found = []
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"-S" not in words and MODULE.encode() in words:  # their guard, with -S, has all their words
                    found.append(pid)
        return found


def descendants(pid: int) -> list[int]:
    """A process's children, their children and so on."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check_finished(run: Path, num_steps: int) -> list[dict]:
    """A finished run: its ledger holds, its log-probs agree with the trainer's. Returns the rows of its steps."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
    steps = [row for row in rows(run / "metrics.jsonl") if "reward" in row]
    assert steps[-1]["step"] == num_steps
    compared = [row for row in steps if row.get("logprob_gap") is not None]
    assert compared, "no fresh token was compared"
    gaps = [(row["step"], row["logprob_gap"], row["tokens"] * (1 - row["off_policy_share"])) for row in compared]
    assert max(gap for _, gap, _ in gaps) < MAX_GAP, f"(step, gap, number of fresh tokens): {gaps}"
    return steps
