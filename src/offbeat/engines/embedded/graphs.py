"""CUDA graphs: work that was recorded once is launched as a whole.

The host takes longer to launch the hundreds of kernels of a decode step than a GPU takes to run them. A graph replays
them in one launch. It always reads and writes the same memory, in the same shapes. So sizes are rounded up, and a few
graphs serve all sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch

from offbeat.model.devices import recording_lock

log = logging.getLogger(__name__)

T = TypeVar("T")
MIN_TOKENS = 64


class Graphs(Protocol):
    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Does `work` and returns its result, which the next run with the same key overwrites. Work with equal keys
        must launch the same kernels on the same memory; it must not read anything back from the device."""
        ...


class CudaGraphs:
    """Runs the work of a key directly the first time, records it the second time, and replays the recording from then
    on.

    Most keys of a run come once, while requests start or end, so recording them would not pay. Runs on the calling
    thread's current stream, which must not be the default stream, because that cannot be recorded.
    """

    def __init__(self) -> None:
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, object]] = {}
        self._met: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._is_possible = True

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        if key not in self._recorded:
            if key not in self._met or not self._is_possible:
                self._met.add(key)
                return work()
            if not self._record(key, work):
                return work()
        graph, result = self._recorded[key]
        graph.replay()
        return result  # type: ignore[return-value]

    def _record(self, key: Hashable, work: Callable[[], object]) -> bool:
        """Records work without doing it; returns whether that was possible. It is not while the trainer uses the GPU in
        another thread of this process; then the next run with the same key tries again."""
        if not recording_lock.acquire(blocking=False):
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            # Not `torch.cuda.graph`, which empties the memory cache each time. Thread-local, because the trainer may
            # take memory meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        except Exception as error:  # noqa: BLE001 - a model that cannot be recorded can still run
            self._is_possible = False
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("embedded engine: decode steps are slower, because they cannot be recorded: %s", why)
            return False
        finally:
            recording_lock.release()
        self._recorded[key] = graph, result
        return True


def padded_rows(number: int, most: int | None = None) -> int:
    """Returns `number` rounded up to a power of two, or to 1.5 times a power of two; at most `most`."""
    power = 1 << (number - 1).bit_length()
    found = power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power
    return found if most is None else min(found, most)


def padded_tokens(number: int, most: int) -> int:
    """Returns `number` rounded up as in `padded_rows`; at least `MIN_TOKENS` and at most `most`."""
    return min(padded_rows(max(number, MIN_TOKENS)), most)
