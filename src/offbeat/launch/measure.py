"""Times this machine for calibration: decode steps and prefill of the embedded engine, and a training step.

Each size is timed in interleaved rounds, of which the fastest counts: neighbours on the machine only add. The context
of a decode step is what attention really reads, in whole buckets. Nothing here judges the figures; that is the fit's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch

from offbeat.errors import UserError
from offbeat.learn.packing import pack
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.samples import Sample
from offbeat.model.devices import empty_cache, memory_bytes, synchronize
from offbeat.model.loading import context_window, load_model
from offbeat.plan.cost.measured import Measurement
from offbeat.plan.inputs.shapes import kv_bytes_per_token
from offbeat.plan.inputs.workload import ModelShape
from offbeat.rollout.engine import KvMode, Request
from offbeat.rollout.engines.embedded.prefill import round_up
from offbeat.rollout.engines.embedded.stepper import READ_BUCKET_TOKENS, Stepper
from offbeat.trajectory import Sampling

STEPS_PER_CELL = 6
KV_SHARE_OF_FREE = 0.5
"""Of a GPU's free memory; logits, prefill and torch itself need the rest."""
CONTEXT_SHARES = (0.12, 0.5, 0.9)
"""Of the longest context; the last leaves room for the steps that are timed."""


@dataclass(frozen=True)
class Sizes:
    """What is varied."""

    rows: tuple[int, ...]
    longest_context: int
    prefill_rows: tuple[int, ...]
    train_samples: tuple[int, ...]
    num_rounds: int

    def contexts(self, window: int) -> list[int]:
        longest = min(self.longest_context, window)
        return [max(2, int(share * longest) - STEPS_PER_CELL) for share in CONTEXT_SHARES]


QUICK = Sizes((1, 4, 16, 48), 512, (1, 4), (1, 4), num_rounds=2)
CPU = Sizes((1, 2, 4, 8, 16, 32, 64), 1024, (1, 2, 4), (1, 2, 4), num_rounds=5)
GPU = Sizes((1, 4, 16, 32, 64, 128, 256), 4096, (1, 2, 4, 8), (1, 2, 4), num_rounds=5)
"""Few samples: a large vocabulary's logits of thousands of tokens, in float32, must fit beside the optimizer."""


def measure(
    path: str, shape: ModelShape, dtype: torch.dtype, device: torch.device, name: str, sizes: Sizes
) -> list[Measurement]:
    """What decode, prefill and training took on this device, which is called `name`; where training does not fit into
    its memory, the first two."""
    try:
        generating, length = _measure_engine(path, shape, dtype, device, name, sizes)
    except torch.OutOfMemoryError:
        raise UserError(
            f"model.path = {path!r}: does not fit into the memory of {name}; take a smaller model"
        ) from None
    empty_cache(device)
    try:
        return generating + _measure_training(path, dtype, device, name, sizes, length)
    except torch.OutOfMemoryError:
        return generating


def _measure_engine(
    path: str, shape: ModelShape, dtype: torch.dtype, device: torch.device, name: str, sizes: Sizes
) -> tuple[list[Measurement], int]:
    """Decode and prefill; and the context of middling length."""
    model = load_model(path, dtype, device)
    contexts = sizes.contexts(context_window(model.config))
    if len(set(contexts)) < len(contexts):
        raise UserError(f"model.path = {path!r}: takes {contexts[-1]} tokens; too few to tell contexts apart")
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
    """The most rows whose keys and values fit; the decode fit wants three of them."""
    memory = memory_bytes(device)
    if memory is None:
        return rows[-1]
    most = KV_SHARE_OF_FREE * memory[0] / ((context + READ_BUCKET_TOKENS) * kv_bytes_per_token(shape))
    fitting = [num for num in rows if num <= most]
    if len(fitting) < 3:
        raise UserError(f"{shape.name}: {most:.0f} answers of {context} tokens fit into memory; take a smaller model")
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
        """Equal prompts, so that all but one are copied: only the steps count."""
        self._submit(rows, context, KvMode.SAME)
        self._step_s()
        seconds = self._median_step_s()
        self.stepper.abort(None)
        read = [round_up(context + 1 + step, READ_BUCKET_TOKENS) for step in range(STEPS_PER_CELL)]
        return Measurement("decode", self.name, seconds, rows=rows, context=statistics.mean(read))

    def prefill(self, rows: int, context: int) -> Measurement:
        """The first step, less what later ones take: all but the last token of each row is prefilled."""
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
    """Forward and backward over so many samples, one micro-batch each; the update is left out, as in the cost model."""
    policy = Policy(load_model(path, dtype, device), AdamSettings())
    vocab = policy.model.config.get_text_config().vocab_size

    def probe(num_samples: int) -> Measurement:
        samples = [_sample(number, _tokens(vocab, length, number)) for number in range(num_samples)]
        batch = pack(samples, range(num_samples), device)
        seconds = _seconds(lambda: policy.forward_backward(batch, lambda found: -found.logprobs.mean()), device)
        policy.optimizer.zero_grad(set_to_none=True)
        row = length - 1  # what is packed of a sample: its last token predicts nothing
        return Measurement("train", name, seconds, tokens=num_samples * row, sum_square_tokens=num_samples * row**2)

    return _fastest([partial(probe, num_samples) for num_samples in sizes.train_samples], sizes.num_rounds)


def _sample(group: int, tokens: np.ndarray) -> Sample:
    response = tokens[1:]
    return Sample(group, tokens[:1], response, np.zeros(len(response), np.float32), np.ones(len(response), bool), 0.0)


def _tokens(vocab: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((length, seed)).integers(0, vocab, length)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Where one thread does all the work, of that thread: waiting for neighbours on the machine does not count."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_one_thread else time.perf_counter
    synchronize(device)
    start_s = clock()
    work()
    synchronize(device)
    return clock() - start_s
