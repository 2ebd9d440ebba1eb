"""Fits a `StepTime` to the embedded engine's steps on this machine, and computes its error.

Rows and context are varied over a grid on the stepper that the real runs use; some cells time decode steps, some a
prefill. The context of a step is the number of tokens that attention really reads: rows times the longest row, in whole
buckets. The fit minimises the relative error.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.partial.engines import READ_BUCKET_TOKENS, StepTime, padded_tokens
from benchmarks.partial.real import VOCAB_SIZE, Stepper
from offbeat.engines.protocol import KvMode, Request
from offbeat.trajectory import Sampling

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (32, 128, 240)
PREFILL_ROWS = (1, 4, 16)
STEPS_PER_CELL = 6


@dataclass(frozen=True)
class Cell:
    """Seconds of a decode step, or of a prefill, at one number of rows and one length of context."""

    num_rows: int
    num_tokens: float
    """Tokens of all rows that are read by a step, or prefilled."""
    seconds: float


@dataclass(frozen=True)
class Calibration:
    model: StepTime
    decode_error: float
    """Mean relative error over the cells."""
    prefill_error: float
    """Mean relative error of prefills. The model ignores that a long prefill costs more per token than a short one."""


def calibrate(stepper: Stepper, num_rounds: int) -> Calibration:
    """Measures in interleaved rounds and takes the fastest of each cell, because other processes only add time."""
    decodes: list[_Decode | _Prefill] = [_Decode(num_rows, context) for num_rows in ROWS for context in CONTEXTS]
    prefills: list[_Decode | _Prefill] = [
        _Prefill(num_rows, context) for num_rows in PREFILL_ROWS for context in CONTEXTS
    ]
    decodes[-1].time(stepper)  # warms up
    rounds = [[probe.time(stepper) for probe in (*decodes, *prefills)] for _ in range(num_rounds)]
    best = [min(same, key=lambda cell: cell.seconds) for same in zip(*rounds, strict=True)]
    return fit(best[: len(decodes)], best[len(decodes) :])


def fit(decodes: Sequence[Cell], prefills: Sequence[Cell]) -> Calibration:
    """Fits by least squares. Each equation is divided by its measured value, so that relative errors count."""
    terms = np.array([(1.0, cell.num_rows, cell.num_tokens) for cell in decodes])
    step_s = np.array([cell.seconds for cell in decodes])
    figures = np.linalg.lstsq(terms / step_s[:, None], np.ones(len(decodes)), rcond=None)[0]
    prefilled = np.array([cell.num_tokens for cell in prefills])
    prefill_s = np.array([cell.seconds for cell in prefills])
    per_prefilled_s = np.linalg.lstsq((prefilled / prefill_s)[:, None], np.ones(len(prefills)), rcond=None)[0][0]
    base_s, per_row_s, per_token_s = map(float, figures)
    return Calibration(
        StepTime(base_s, per_row_s, per_token_s, float(per_prefilled_s)),
        decode_error=float(np.mean(np.abs(terms @ figures / step_s - 1))),
        prefill_error=float(np.mean(np.abs(prefilled * per_prefilled_s / prefill_s - 1))),
    )


@dataclass(frozen=True)
class _Decode:
    num_rows: int
    context_tokens: int

    def time(self, stepper: Stepper) -> Cell:
        """Times steps on equal prompts, of which all but one are copied, so that the prefill takes little time."""
        _submit(stepper, self.num_rows, self.context_tokens, KvMode.SAME)
        stepper.step()
        step_s = statistics.median(_seconds(stepper) for _ in range(STEPS_PER_CELL))
        stepper.abort(None)
        reads = [_round_up(self.context_tokens + 1 + step) for step in range(STEPS_PER_CELL)]
        return Cell(self.num_rows, self.num_rows * statistics.mean(reads), step_s)


@dataclass(frozen=True)
class _Prefill:
    num_rows: int
    context_tokens: int

    def time(self, stepper: Stepper) -> Cell:
        _submit(stepper, self.num_rows, self.context_tokens, KvMode.REFILL)
        first_s = _seconds(stepper)
        rest_s = statistics.median(_seconds(stepper) for _ in range(STEPS_PER_CELL))
        stepper.abort(None)
        return Cell(self.num_rows, padded_tokens([self.context_tokens] * self.num_rows), max(first_s - rest_s, 1e-9))


def _submit(stepper: Stepper, num_rows: int, context_tokens: int, kv: KvMode) -> None:
    tokens = np.random.default_rng(context_tokens).integers(0, VOCAB_SIZE, context_tokens)
    sampling = Sampling(max_new_tokens=STEPS_PER_CELL + 2)
    for row in range(num_rows):
        stepper.submit(Request(str(row), tokens, row, sampling, position=1, kv=kv))


def _seconds(stepper: Stepper) -> float:
    """CPU seconds of this thread, which does all the work; waiting for other processes does not count."""
    start_s = time.thread_time()
    stepper.step()
    return time.thread_time() - start_s


def _round_up(tokens: int) -> int:
    return -(-tokens // READ_BUCKET_TOKENS) * READ_BUCKET_TOKENS
