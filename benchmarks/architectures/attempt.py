"""Tries architectures in separate processes, each within a limit of CPU time."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import tiny
from benchmarks.architectures.compare import Result, engine, judge, trainer

NUM_PROCESSES = 2
LIMIT_CPU_S = 60.0
"""Limit of CPU time for one architecture. Most take a second or two; one builds tables of its real size."""


def attempt(names: Sequence[str]) -> list[Result]:
    """Tries each architecture in a process pool; results are sorted by name."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with context.Pool(min(NUM_PROCESSES, len(names)), _begin) as pool:
        return sorted(pool.imap_unordered(try_out, names), key=lambda result: result.name)


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()


def try_out(name: str) -> Result:
    """Builds one architecture and compares it."""
    kind = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    make = partial(tiny.tiny_model, name)
    try:
        with _limited():
            model = make()
            with torch.no_grad():  # one that does not run by itself is no fault of ours
                model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    except Exception as error:  # noqa: BLE001 - it is told with the results
        return Result(name, kind, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    with _limited():
        return Result(name, kind, None, judge(partial(trainer, make)), judge(partial(engine, make)))


@contextmanager
def _limited() -> Iterator[None]:
    """Raises an error in the block once it has used its CPU time; time waiting for a busy machine does not count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {LIMIT_CPU_S:.0f} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
