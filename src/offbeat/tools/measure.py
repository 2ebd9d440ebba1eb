"""Times this machine for calibration: decode steps and prefill of the embedded engine, and a training step.

All sizes are timed in several rounds, and the fastest time of each counts, because other processes only add time. The
context of a decode step is the number of tokens that attention reads, rounded up to a multiple of `READ_BUCKET_TOKENS`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch

from offbeat.engines.embedded.prefill import round_up
from offbeat.engines.embedded.stepper import READ_BUCKET_TOKENS, Stepper
from offbeat.engines.protocol import KvMode, Request
from offbeat.errors import UserError
from offbeat.model.devices import device_name, empty_cache, memory_bytes, synchronize
from offbeat.model.loading import context_window, load_model
from offbeat.planner.cost.calibrate import Measurement
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import GIGA, TERA
from offbeat.planner.inputs.inventory import CPU
from offbeat.planner.inputs.model_shapes import kv_bytes_per_token
from offbeat.planner.inputs.workload import ModelShape
from offbeat.spelling import suggest
from offbeat.trainer.packing import Sample, pack
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trajectory import Sampling

STEPS_PER_CELL = 6
KV_SHARE_OF_FREE = 0.5
"""Share of the free memory for the KV cache; logits, prefill and torch itself need the rest."""
CONTEXT_SHARES = (0.12, 0.5, 0.9)
"""Context lengths to time, as shares of the longest context; the last share leaves room for the timed decode steps."""


@dataclass(frozen=True)
class Sizes:
    """Sizes to time: numbers of rows (concurrent answers) and training samples, and the longest context in tokens."""

    rows: tuple[int, ...]
    longest_context: int
    prefill_rows: tuple[int, ...]
    train_samples: tuple[int, ...]
    num_rounds: int

    def contexts(self, window: int) -> list[int]:
        longest = min(self.longest_context, window)
        return [max(2, int(share * longest) - STEPS_PER_CELL) for share in CONTEXT_SHARES]


QUICK = Sizes((1, 4, 16, 48), 512, (1, 4), (1, 4), num_rounds=2)
CPU_SIZES = Sizes((1, 2, 4, 8, 16, 32, 64), 1024, (1, 2, 4), (1, 2, 4), num_rounds=5)
GPU = Sizes((1, 4, 16, 32, 64, 128, 256), 4096, (1, 2, 4, 8), (1, 2, 4), num_rounds=5)
"""Sizes for a GPU. Few training samples, because their float32 logits must fit beside the optimizer."""


def measure(
    path: str, shape: ModelShape, dtype: torch.dtype, device: torch.device, name: str, sizes: Sizes
) -> list[Measurement]:
    """Times decode, prefill and, if it fits into memory, training on `device`, which the measurements call `name`."""
    try:
        generating, length = _measure_engine(path, shape, dtype, device, name, sizes)
    except torch.OutOfMemoryError:
        why = f"does not fit into the memory of {name}; take a smaller model"
        raise UserError(f"model.path = {path!r}: {why}") from None
    empty_cache(device)
    try:
        return generating + _measure_training(path, dtype, device, name, sizes, length)
    except torch.OutOfMemoryError:
        return generating


def _measure_engine(
    path: str, shape: ModelShape, dtype: torch.dtype, device: torch.device, name: str, sizes: Sizes
) -> tuple[list[Measurement], int]:
    """Times decode and prefill at several context lengths. Returns the measurements and the middle context length, at
    which training is to be timed."""
    model = load_model(path, dtype, device)
    contexts = sizes.contexts(context_window(model.config))
    if len(set(contexts)) < len(contexts):
        raise UserError(
            f"model.path = {path!r}: its context window is too short to time several context lengths (the longest "
            f"would be {contexts[-1]} tokens); name a model with a longer window"
        )
    num_slots = _fitting_rows(sizes.rows, contexts[-1], shape, device)
    with torch.inference_mode():
        room = contexts[-1] + STEPS_PER_CELL + 2
        stepper = Stepper(model, num_slots, room, exact=False, worker=name, fingerprint=name, version=0)
        timer = _Timer(stepper, device, name)
        rows = [num for num in sizes.rows if num <= num_slots]
        prefilled = [num for num in sizes.prefill_rows if num <= num_slots]
        found = _fastest(
            [partial(timer.decode, *one) for one in product(rows, contexts)]
            + [partial(timer.prefill, *one) for one in product(prefilled, contexts)],
            sizes.num_rounds,
        )
    return found, contexts[1]


def _fitting_rows(rows: Sequence[int], context: int, shape: ModelShape, device: torch.device) -> int:
    """Returns the largest of `rows` whose KV cache fits into memory; raises `UserError` if fewer than three fit."""
    memory = memory_bytes(device)
    if memory is None:
        return rows[-1]
    most = KV_SHARE_OF_FREE * memory[0] / ((context + READ_BUCKET_TOKENS) * kv_bytes_per_token(shape))
    fitting = [num for num in rows if num <= most]
    if len(fitting) < 3:
        raise UserError(f"{shape.name}: only {most:.0f} answers of {context} tokens fit in memory; use a smaller model")
    return fitting[-1]


def _fastest(probes: Sequence[Callable[[], Measurement]], num_rounds: int) -> list[Measurement]:
    probes[-1]()  # warms up
    rounds = [[probe() for probe in probes] for _ in range(num_rounds)]
    return [min(same, key=lambda one: one.seconds) for same in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class _Timer:
    stepper: Stepper
    device: torch.device
    name: str

    def decode(self, rows: int, context: int) -> Measurement:
        """Times decode steps alone. All prompts are equal, so one prompt is prefilled and the others copy its KV
        cache."""
        self._submit(rows, context, KvMode.SAME)
        self._step_s()
        seconds = self._median_step_s()
        self.stepper.abort(None)
        read = [round_up(context + 1 + step, READ_BUCKET_TOKENS) for step in range(STEPS_PER_CELL)]
        return Measurement("decode", self.name, seconds, rows=rows, context=statistics.mean(read))

    def prefill(self, rows: int, context: int) -> Measurement:
        """Times prefill: the time of the first decode step, which also prefills all but the last token of each row,
        minus the time of a later decode step."""
        self._submit(rows, context, KvMode.REFILL)
        seconds = max(self._step_s() - self._median_step_s(), 1e-9)
        self.stepper.abort(None)
        tokens = context - 1
        return Measurement("prefill", self.name, seconds, tokens=rows * tokens, sum_square_tokens=rows * tokens**2)

    def _submit(self, rows: int, context: int, kv: KvMode) -> None:
        tokens = _tokens(self.stepper.model.config.get_text_config().vocab_size, context)
        sampling = Sampling(max_new_tokens=STEPS_PER_CELL + 2)
        for row in range(rows):
            self.stepper.submit(Request(str(row), tokens, row, sampling, position=1, kv=kv))

    def _median_step_s(self) -> float:
        return statistics.median(self._step_s() for _ in range(STEPS_PER_CELL))

    def _step_s(self) -> float:
        return _seconds(self.stepper.step, self.device)


def _measure_training(
    path: str, dtype: torch.dtype, device: torch.device, name: str, sizes: Sizes, length: int
) -> list[Measurement]:
    """Times forward and backward over micro-batches of several sizes, without the optimizer, as in the cost model."""
    policy = Policy(load_model(path, dtype, device), AdamSettings())
    vocab = policy.model.config.get_text_config().vocab_size

    def probe(num_samples: int) -> Measurement:
        samples = [_sample(number, _tokens(vocab, length, number)) for number in range(num_samples)]
        batch = pack(samples, range(num_samples), device)
        seconds = _seconds(lambda: policy.forward_backward(batch, lambda found: -found.logprobs.mean()), device)
        policy.optimizer.zero_grad(set_to_none=True)
        row = length - 1  # the last token predicts nothing and is not packed
        return Measurement("train", name, seconds, tokens=num_samples * row, sum_square_tokens=num_samples * row**2)

    return _fastest([partial(probe, num_samples) for num_samples in sizes.train_samples], sizes.num_rounds)


def _sample(group: int, tokens: np.ndarray) -> Sample:
    response = tokens[1:]
    return Sample(group, tokens[:1], response, np.zeros(len(response), np.float32), np.ones(len(response), bool), 0.0)


def _tokens(vocab: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((length, seed)).integers(0, vocab, length)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that a call of `work` takes: CPU time if torch uses one CPU thread, so that other processes
    do not count, and wall-clock time otherwise."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_one_thread else time.perf_counter
    synchronize(device)
    start_s = clock()
    work()
    synchronize(device)
    return clock() - start_s


SQUARE = 768
"""Side of the matrices that a CPU multiplies: large enough to use all units of a core, small enough for a slow core."""
COPIED_BYTES = 64 << 20
"""Bytes copied to time the memory: more than the caches of most processors hold."""
NUM_TRIES = 5
MAKERS = ("nvidia-", "amd-", "geforce-", "instinct-", "tesla-")
FIGURES = ("tflops", "memory_gb", "bandwidth_tb_s")

Figures = dict[str, float]
"""An accelerator's figures, by the names in `FIGURES`, and link_gb_s if known."""


def figures_of(device: torch.device, called: str | None, given: Figures) -> tuple[str, Figures]:
    """Returns the name of the accelerator `device` and its figures, such as TFLOPS and memory. Figures that `given`
    lacks come from the catalogue or, for a CPU, are measured. `called` is the user's name for the accelerator; None:
    detect the name."""
    if device.type == "cpu":
        if called is not None:
            raise UserError(f"--accelerator {called}: there is no GPU here; leave the option out to measure the {CPU}")
        return CPU, _measured_cpu(given) | given
    name = called or _plain(device_name(device))
    if hardware.is_known(name):
        card = hardware.accelerator(name)
        known = {
            "tflops": card.flops / TERA,
            "memory_gb": card.memory_bytes / GIGA,
            "bandwidth_tb_s": card.memory_bytes_per_s / TERA,
            "link_gb_s": card.link_bytes_per_s / GIGA,
        }
        return card.name, known | given
    if all(figure in given for figure in FIGURES):
        return name, given
    wanted = "give --accelerator, or --tflops, --memory-gb and --bandwidth-tb-s"
    raise UserError(f"accelerator {name!r}: is not in the catalogue; {suggest(name, hardware.names())}; {wanted}")


def _plain(name: str) -> str:
    plain = name.lower().replace(" ", "-")
    for maker in MAKERS:
        plain = plain.removeprefix(maker)
    return plain


def _measured_cpu(given: Figures) -> Figures:
    """Finds the figures that `given` lacks: speed of float32 products, bandwidth of memory copies, and memory size."""
    found: Figures = {}
    if "tflops" not in given:
        found["tflops"] = _cpu_flops() / TERA
    if "bandwidth_tb_s" not in given:
        found["bandwidth_tb_s"] = _cpu_bytes_per_s() / TERA
    if "memory_gb" not in given:
        found["memory_gb"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIGA
    return found


def _cpu_flops() -> float:
    """Estimates the CPU's float32 operations per second when the machine is idle: the operations that one thread makes
    in a second of CPU time, times the number of threads."""
    one, other = torch.rand(SQUARE, SQUARE), torch.rand(SQUARE, SQUARE)
    with _one_thread() as num_threads:
        return num_threads * 2 * SQUARE**3 / _fastest_s(lambda: one @ other, time.thread_time)


def _cpu_bytes_per_s() -> float:
    """Returns the bytes per second that a copy reads and writes, with one thread or with all, whichever is faster. The
    rates of threads do not add up, because threads share the memory."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    together_s = _fastest_s(lambda: target.copy_(source), time.perf_counter)
    with _one_thread():
        alone_s = _fastest_s(lambda: target.copy_(source), time.thread_time)
    return 2 * COPIED_BYTES / min(together_s, alone_s)


@contextmanager
def _one_thread() -> Iterator[int]:
    """Sets torch to one thread within the block; yields the number of threads before."""
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
