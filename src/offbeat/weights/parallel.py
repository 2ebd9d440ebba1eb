"""Threads over the parts of a model's tensors: numpy, zstd, blake3 and the file system all let go of the interpreter.

Guarantees: results come in the order of the items; no more items are under way than keeps the threads busy, so memory
stays bounded whatever the model weighs; when the loop ends, however it ends, no thread works on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 8
"""Each holds a part and what is made of it, some 50 MiB; more threads mostly wait for memory or the disk."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """`work` done on every item; the first error ends it."""
    num_threads = min(_num_cores(), MAX_THREADS)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > num_threads + 1:  # one waits, so that no thread does
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _num_cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
