"""The embedded engine's own stepper with the tiny model, on the wall clock.

Lengths are enforced as remaining tokens, no stop token is given, token ids go in and out. What is aborted comes back
with its tokens and is sent again with them, to be prefilled anew. What is not aborted keeps its slot over an update.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.partial.engines import Engine
from benchmarks.partial.laws import PROMPT_TOKENS, Lengths
from benchmarks.partial.samples import Sample
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.protocol import Generation, KvMode, Request
from offbeat.model.loading import TINY, load_model
from offbeat.trajectory import Sampling

VOCAB_SIZE = 256
"""Of bytes; the tiny model's other tokens are special."""


def set_torch_up() -> None:
    """What every process of the benchmark does first."""
    torch.set_num_threads(1)  # as the stepper itself does for steps of this size; so runs can stand side by side
    if platform.machine() == "aarch64":
        # There oneDNN packs the weights anew for every product of more than a few rows, which costs more than the
        # product: 16 rows took five times as long as 8, and no schedule could gain from a fuller engine.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def new_stepper(num_slots: int, max_context_tokens: int) -> Stepper:
    model = load_model(TINY, torch.float32, torch.device("cpu")).eval()
    with torch.inference_mode():
        return Stepper(model, num_slots, max_context_tokens, exact=False, worker="tail", fingerprint="tail", version=0)


class RealEngine(Engine):
    """Steps a stepper that has nothing to do, and that `abort` leaves so; a pause moves the clock, without sleeping."""

    def __init__(self, lengths: Lengths, stepper: Stepper):
        super().__init__(lengths)
        assert stepper.is_idle
        self.stepper, self._paused_s, self._start_s = stepper, 0.0, time.perf_counter()
        self._tokens: dict[Sample, np.ndarray] = {}
        """Prompt and response so far of samples that were added."""
        self._ids: dict[str, Sample] = {}

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._start_s + self._paused_s

    def pause(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        start_s = time.perf_counter()
        meanwhile()
        self._paused_s += max(0.0, seconds - (time.perf_counter() - start_s))

    def _prefill(self, samples: Sequence[Sample]) -> None:
        """Hands samples to the stepper, which prefills them at its next step."""
        for sample in samples:
            if sample not in self._tokens:
                self._tokens[sample] = self._prompt_of(sample)
            left = self.length_of(sample) - sample.num_tokens
            name = f"{sample.group.number}.{sample.member}"
            self._ids[name] = sample
            # Whoever was aborted pays for its prefix, whatever the engine may still hold of it.
            kv = KvMode.REFILL if sample.num_tokens else KvMode.SAME
            sampling, position = Sampling(max_new_tokens=left), sample.num_tokens
            self.stepper.submit(Request(name, self._tokens[sample], sample.member, sampling, position, kv))

    def _decode(self, num_steps: int, num_ending: int) -> None:
        ended: list[Generation] = []
        with torch.inference_mode():
            for _ in range(num_steps):
                ended += self.stepper.step()
        assert len(ended) == num_ending, f"{len(ended)} samples ended where {num_ending} should"
        for generation in ended:
            self._tokens.pop(self._ids.pop(generation.id))

    def _forget(self, samples: Sequence[Sample]) -> None:
        names = [f"{sample.group.number}.{sample.member}" for sample in samples]
        with torch.inference_mode():
            stopped = self.stepper.abort(names)
        for generation in stopped:
            sample = self._ids.pop(generation.id)
            new = [segment.tokens for segment in generation.segments]
            self._tokens[sample] = np.concatenate([self._tokens[sample], *new])
            assert len(self._tokens[sample]) == sample.num_context_tokens

    def _prompt_of(self, sample: Sample) -> np.ndarray:
        rng = np.random.default_rng((self.lengths.seed, sample.group.prompt))
        return rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS)
