"""What this machine is called and what its peak is: by the catalogue, as told, or, for a processor, by a short look."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offbeat.errors import UserError
from offbeat.model.devices import device_name
from offbeat.plan.inputs import catalogue
from offbeat.plan.inputs.inventory import CPU
from offbeat.spelling import suggest

TERA, GIGA = 1e12, 1e9
SQUARE = 768
"""Of the matrices that are multiplied: large enough to fill every unit, small enough for a slow core."""
COPIED_BYTES = 64 << 20
"""More than the caches of most processors hold."""
NUM_TRIES = 5
MAKERS = ("nvidia-", "amd-", "geforce-", "instinct-", "tesla-")
FIGURES = ("tflops", "memory_gb", "bandwidth_tb_s")

Figures = dict[str, float]
"""By the names in `FIGURES`, and link_gb_s where it is known."""


def figures_of(device: torch.device, called: str | None, told: Figures) -> tuple[str, Figures]:
    """The accelerator's name and its figures; what is told stands above what is known or measured."""
    if device.type == "cpu":
        if called is not None:
            raise UserError(f"--accelerator {called}: there is no GPU here; a processor is called {CPU}")
        return CPU, _measured_cpu(told) | told
    name = called or _plain(device_name(device))
    if catalogue.is_known(name):
        card = catalogue.accelerator(name)
        known = {
            "tflops": card.flops / TERA,
            "memory_gb": card.memory_bytes / GIGA,
            "bandwidth_tb_s": card.memory_bytes_per_s / TERA,
            "link_gb_s": card.link_bytes_per_s / GIGA,
        }
        return card.name, known | told
    if all(figure in told for figure in FIGURES):
        return name, told
    wanted = "give --accelerator, or --tflops, --memory-gb and --bandwidth-tb-s"
    raise UserError(f"accelerator {name!r}: is not in the catalogue; {suggest(name, catalogue.names())}; {wanted}")


def _plain(name: str) -> str:
    plain = name.lower().replace(" ", "-")
    for maker in MAKERS:
        plain = plain.removeprefix(maker)
    return plain


def _measured_cpu(told: Figures) -> Figures:
    """What nobody told: products of float32, copies that read and write, and all memory."""
    found: Figures = {}
    if "tflops" not in told:
        found["tflops"] = _cpu_flops() / TERA
    if "bandwidth_tb_s" not in told:
        found["bandwidth_tb_s"] = _cpu_bytes_per_s() / TERA
    if "memory_gb" not in told:
        found["memory_gb"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIGA
    return found


def _cpu_flops() -> float:
    """One thread's by its own time, times the threads: a peak is what a machine without neighbours has."""
    one, other = torch.rand(SQUARE, SQUARE), torch.rand(SQUARE, SQUARE)
    with _one_thread() as num_threads:
        return num_threads * 2 * SQUARE**3 / _fastest_s(lambda: one @ other, time.thread_time)


def _cpu_bytes_per_s() -> float:
    """Memory is shared, so threads do not add up: one alone, or all together, whichever is faster."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    together_s = _fastest_s(lambda: target.copy_(source), time.perf_counter)
    with _one_thread():
        alone_s = _fastest_s(lambda: target.copy_(source), time.thread_time)
    return 2 * COPIED_BYTES / min(together_s, alone_s)


@contextmanager
def _one_thread() -> Iterator[int]:
    """Gives the number of threads that there are otherwise."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _fastest_s(work: Callable[[], object], clock: Callable[[], float]) -> float:
    work()
    tries = []
    for _ in range(NUM_TRIES):
        start_s = clock()
        work()
        tries.append(clock() - start_s)
    return min(tries)
