"""Samples a card's memory in use, several times a second, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

from benchmarks.common.supervised import until

EVERY_MS = 200
MIB = 2**20
FIRST_WITHIN_S = 60.0
POLL = f"""\
import time, torch
while True:
    free, total = torch.cuda.mem_get_info(0)
    print((total - free) / {MIB}, flush=True)
    time.sleep({EVERY_MS / 1e3})
"""
"""Python program for machines without `nvidia-smi`. The memory that it takes itself is there before the run starts."""


def commands() -> list[list[str]]:
    """Returns the commands that may print the memory in use, in MiB a line, the best first."""
    poll = [sys.executable, "-c", POLL]
    if not (smi := shutil.which("nvidia-smi")):
        return [poll]
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = [smi, f"--id={card}", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", str(EVERY_MS)]
    by_line = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []  # or the last lines stay in its buffer
    return [[*by_line, *query], poll]


def bytes_of(line: str) -> float | None:
    """Returns the bytes of a printed line; None for anything but a number of MiB."""
    try:
        return float(line) * MIB
    except ValueError:
        return None


class MemoryInUse:
    """Samples from entering to leaving, in bytes."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.said: list[str] = []
        """Lines that the sampler printed besides samples, such as its errors."""

    def __enter__(self) -> Self:
        for command in commands():
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
            self.reader.start()
            try:
                until(lambda: self.samples or self.process.poll() is not None, "a sample", FIRST_WITHIN_S)
            except TimeoutError:
                self.said.append(f"{command[0]}: no sample within {FIRST_WITHIN_S:.0f} s")
            if self.samples:
                return self
            self._end()
        raise OSError("the GPU's memory in use cannot be read: " + "; ".join(self.said[-5:]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_early = self.process.poll() is not None
        self._end()
        if ended_early and error is None:
            raise OSError(f"sampling the GPU's memory ended with status {self.process.returncode}: {self.said[-5:]}")

    @property
    def peak_bytes(self) -> float:
        """The most memory in use, without what was in use by others. That is the least: at the start, memory of a
        process that has just ended may still be counted."""
        return max(self.samples) - min(self.samples)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if (found := bytes_of(line)) is None:
                self.said.append(line.strip())
            else:
                self.samples.append(found)

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
