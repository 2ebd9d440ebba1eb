"""Continuous batching over KV slots: which request sits where, and one decode step for all of them.

No threads and no asyncio here: `submit`, `abort` and `load` say what is wanted, `step` does the next piece of work and
returns what ended. Everything about a slot that a step needs lies in tensors; Python touches a request when it starts,
when it ends, and when weights change under it.

The first slots are the live ones: when one ends and nobody waits, the last live slot moves into the gap, so a step
costs what its live rows cost. All but the last known token of a request is prefilled; the last is fed by the first
decode step, so there is one way in which tokens are sampled.

With `exact`, a token depends on weights, prompt and seed alone, to the bit: every step runs all slots, prompts are
prefilled one at a time, and a prefix that is carried on is fed token by token, in the shape in which it was sampled.
(Alone, that is, for one number of threads and of slots: with several threads, a library may split a large product by
its number of rows. On one thread the number of slots does not matter either.)
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.rollout.engine import Finish, Generation, KvMode, Request
from offbeat.rollout.engines.embedded.attention import use_slot_attention
from offbeat.rollout.engines.embedded.prompts import HeldPrompts
from offbeat.rollout.engines.embedded.recorded import DecodeForward, recorded
from offbeat.rollout.engines.embedded.rows import Rows
from offbeat.rollout.engines.embedded.sampling import draw, is_filtered, is_greedy, uniform
from offbeat.rollout.engines.embedded.slots import KeyValueSlots
from offbeat.rollout.engines.embedded.weights import Staged, swap
from offbeat.trajectory import Segment

READ_BUCKET_TOKENS = 16
"""Slots are read in multiples of this: vector lanes stay full and the shapes of a step change seldom."""
PREFILL_TOKENS = 4096
"""Most tokens, padding included, in one prefill: bounds its memory and how long live slots wait for it."""
SMALL_STEP_FLOPS = 1e9
"""A step with less arithmetic than this runs on one thread: several would mostly wait for one another."""
MIN_EXACT_ROWS = 16
"""Matrix products with fewer rows take other paths: their results would depend on the rows' number and on threads."""


@dataclass
class Running:
    """A request in a slot, and which of its tokens which version sampled."""

    request: Request
    num_known: int
    """Tokens that were there when the slot was last filled."""
    step_offset: int
    """The index of the token that step n feeds is n plus this."""
    open_start: int
    """Where the segment begins that is being sampled."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Finished segments: start and end, by index into prompt + response, and version."""

    def close_span(self, end: int, version: int) -> None:
        if end > self.open_start:
            self.spans.append((self.open_start, end, version))
            self.open_start = end


class Stepper:
    """See the module. Not thread-safe; every call belongs under `torch.inference_mode()`."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_context_tokens: int,
        exact: bool,
        worker: str,
        fingerprint: str,
        version: int | None,
    ):
        use_slot_attention(model, max_context_tokens)
        self.model, self.num_slots, self.max_context_tokens, self.exact = model, num_slots, max_context_tokens, exact
        self.worker, self.fingerprint, self.version = worker, fingerprint, version
        room = _round_up(max_context_tokens, READ_BUCKET_TOKENS)  # so that no read is ever cut short
        self.kv = KeyValueSlots(num_slots, room)
        self.rows = Rows(num_slots, room, model.dtype, model.device)
        self.prompts = HeldPrompts()
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Running] = {}
        self.free = list(range(num_slots))
        self.num_steps = 0
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_threads = self._threads_now = torch.get_num_threads()
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prefill_options = {"logits_to_keep": 1} if keeps_logits else {}
        self._prefill([(0, np.zeros(1, np.int64))])  # allocates the KV, and fails here if the model cannot be served
        forward = DecodeForward(model)
        self._forward = forward if exact else recorded(forward, self._decode_inputs_of_all_sizes())
        self._count()

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def abort(self, ids: Iterable[str] | None) -> list[Generation]:
        """Ends the named requests, or all, and returns what they had so far."""
        named = None if ids is None else set(ids)
        slots = [slot for slot, running in self.running.items() if named is None or running.request.id in named]
        ended = self._end(slots, Finish.ABORT)
        ended += [Generation(r.id, (), Finish.ABORT) for r in self.waiting if named is None or r.id in named]
        self.waiting = deque(r for r in self.waiting if named is not None and r.id not in named)
        return ended

    def load(self, number: int, staged: Staged) -> None:
        """Changes the weights; the KV of whatever is running is made again under them."""
        swap(staged)
        for slot, running in self.running.items():
            assert self.version is not None
            running.close_span(self._num_tokens(slot), self.version)
        self.version = number
        self.prompts.clear()
        self._fill_again()

    def step(self) -> list[Generation]:
        """Fills free slots, then samples a token in every live one; returns what ended."""
        if self.waiting and self.free:
            self._admit()
        if not self.exact:
            self._compact()
        if not self.running:
            return []
        return self._end(self._decode(), None)

    def _decode(self) -> list[int]:
        """One token for every live row; returns the slots that are done."""
        num_rows = self.num_slots if self.exact else len(self.running)
        # How far slots are read decides how sums are split: with `exact` it must not depend on the neighbours.
        reach = self.max_context_tokens if self.exact else self.num_steps + self.largest_offset + 1
        read_tokens = _round_up(reach, READ_BUCKET_TOKENS)
        self._use_threads(num_rows)
        rows, tokens = self.rows, self.rows.feed(num_rows)
        mask = rows.mask[:num_rows, None, None, :read_tokens]
        logits = self._forward(tokens, rows.positions(num_rows), mask, *self.kv.keys, *self.kv.values)
        sampling = rows.sampling(num_rows, any_greedy=self.any_greedy, any_filtered=self.any_filtered)
        noise = uniform(sampling.keys, rows.response_positions(num_rows))
        drawn, logprobs = draw(logits.float(), sampling, noise)
        any_feeding = self.num_steps < self.feeding_until_step
        done = rows.advance(drawn, logprobs, any_stops=self.any_stops, any_feeding=any_feeding)
        self.num_steps += 1
        slots: list[int] = done.nonzero().squeeze(1).tolist()
        return slots

    def _use_threads(self, num_tokens: int) -> None:
        """Chooses how many threads a forward pass gets; with `exact` that must not depend on its size."""
        is_small = 2 * self.num_parameters * num_tokens < SMALL_STEP_FLOPS
        wanted = 1 if is_small and not self.exact else self.num_threads
        if wanted != self._threads_now:
            torch.set_num_threads(wanted)
            self._threads_now = wanted

    def _decode_inputs_of_all_sizes(self) -> list[tuple[torch.Tensor, ...]]:
        """Inputs that differ in whatever may differ between two steps, for a recording to be compared on."""
        few, more, bucket = min(2, self.num_slots), min(8, self.num_slots), READ_BUCKET_TOKENS
        inputs = []
        for num_rows, read_tokens in ((few, bucket), (1, bucket), (more, min(2 * bucket, self.kv.max_context_tokens))):
            number = torch.arange(num_rows, device=self.rows.device)
            positions = number % self.max_context_tokens % read_tokens
            tokens = (number * 7 % self.model.config.get_text_config().vocab_size).unsqueeze(1)
            hidden = torch.arange(read_tokens, device=self.rows.device) > positions.unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=self.rows.mask.dtype, device=self.rows.device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
            inputs.append((tokens, positions, mask, *self.kv.keys, *self.kv.values))
        return inputs

    # Slots

    def _admit(self) -> None:
        self.free.sort()
        num_started = min(len(self.free), len(self.waiting))
        slots, self.free = self.free[:num_started], self.free[num_started:]
        requests = [self.waiting.popleft() for _ in slots]
        prefills = [self._to_prefill(request) for request in requests]
        positions = [len(tokens) for tokens in prefills]
        self.rows.start(slots, requests, positions)
        for slot, request, position in zip(slots, requests, positions, strict=True):
            num_known = len(request.tokens)
            self.running[slot] = Running(request, num_known, position - self.num_steps, num_known)
        self._fill(slots, prefills)
        self._count()

    def _to_prefill(self, request: Request) -> np.ndarray:
        """All known tokens but the one that the first decode step feeds; with `exact`, only those of the prompt."""
        end = len(request.tokens) - (request.position if self.exact else 0)
        return request.tokens[: end - 1]

    def _num_tokens(self, slot: int) -> int:
        """How many tokens of a live slot are known: given, or sampled so far."""
        running = self.running[slot]
        return max(running.num_known, self.num_steps + running.step_offset + 1)

    def _compact(self) -> None:
        """Moves the last live slots into the gaps before them."""
        num_live = len(self.running)
        sources = [slot for slot in self.running if slot >= num_live]
        if not sources:
            return
        targets = [slot for slot in self.free if slot < num_live]
        self.rows.move(sources, targets)
        self.kv.copy(sources, targets, max(map(self._num_tokens, sources)))
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running.pop(source)
            self.prompts.move(source, target)
        self.free = list(range(num_live, self.num_slots))

    def _end(self, slots: Sequence[int], finish: Finish | None) -> list[Generation]:
        """Frees slots and returns what was generated there; without a finish, their last token tells it."""
        if not slots:
            return []
        tokens, logprobs = self.rows.read(slots, max(map(self._num_tokens, slots)))
        generations = []
        for row, slot in enumerate(slots):
            num_tokens, running = self._num_tokens(slot), self.running.pop(slot)
            assert self.version is not None
            running.close_span(num_tokens, self.version)
            stopped = int(tokens[row, num_tokens - 1]) in running.request.sampling.stop_token_ids
            why = finish or (Finish.STOP if stopped else Finish.LENGTH)
            generations.append(self._generation(running, tokens[row], logprobs[row], why))
            self.prompts.drop(slot)
        self.free.extend(slots)
        if self.exact:
            self.rows.clear(slots)  # the others are not stepped before a new request is written over them
        self._count()
        return generations

    def _generation(self, running: Running, tokens: np.ndarray, logprobs: np.ndarray, finish: Finish) -> Generation:
        prompt = len(running.request.tokens) - running.request.position
        segments = tuple(
            Segment(
                start=start - prompt,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                version=version,
                kv_version=version,
                worker=self.worker,
                engine=self.fingerprint,
            )
            for start, end, version in running.spans
        )
        return Generation(running.request.id, segments, finish)

    def _count(self) -> None:
        """What the host must know of the live slots before a step; it changes only when one starts or ends."""
        live = self.running.values()
        ways = {running.request.sampling for running in live}  # few, however many requests there are
        self.any_greedy, self.any_filtered = any(map(is_greedy, ways)), any(map(is_filtered, ways))
        self.any_stops = any(way.stop_token_ids for way in ways)
        self.largest_offset = max((running.step_offset for running in live), default=0)
        self.feeding_until_step = max((r.num_known - 1 - r.step_offset for r in live), default=0)

    # Prefill

    def _fill(self, slots: Sequence[int], wanted: Sequence[np.ndarray]) -> None:
        """Makes the KV of these tokens in these slots, once for each different sequence."""
        missing: list[tuple[int, np.ndarray]] = []
        sources: list[int] = []
        targets: list[int] = []
        for slot, tokens in zip(slots, wanted, strict=True):
            if len(tokens) == 0:
                continue
            is_shared = self.running[slot].request.kv is not KvMode.REFILL
            source = self.prompts.find(tokens) if is_shared else None
            if source is None:
                missing.append((slot, tokens))
            else:
                sources.append(source)
                targets.append(slot)
            self.prompts.hold(slot, tokens)
        for batch in self._prefill_batches(missing):
            self._prefill(batch)
        if sources:
            self.kv.copy(sources, targets, max(len(tokens) for tokens in wanted))

    def _prefill_batches(self, missing: list[tuple[int, np.ndarray]]) -> list[list[tuple[int, np.ndarray]]]:
        """Sequences of like length together; with `exact`, one at a time."""
        batches: list[list[tuple[int, np.ndarray]]] = []
        for slot, tokens in sorted(missing, key=lambda pair: -len(pair[1])):
            room = 1 if self.exact else max(1, PREFILL_TOKENS // len(batches[-1][0][1])) if batches else 0
            if not batches or len(batches[-1]) >= room:
                batches.append([])
            batches[-1].append((slot, tokens))
        return batches

    def _prefill(self, batch: Sequence[tuple[int, np.ndarray]]) -> None:
        longest = max(len(tokens) for _, tokens in batch)
        if self.exact:
            longest = _round_up(longest, MIN_EXACT_ROWS)
        padded = np.zeros((len(batch), longest), np.int64)
        for row, (_, tokens) in enumerate(batch):
            padded[row, : len(tokens)] = tokens
        self._use_threads(padded.size)
        self.kv.begin_prefill(self.rows.index([slot for slot, _ in batch]))
        device = self.rows.device
        positions = torch.arange(longest, device=device).clamp_(max=self.max_context_tokens - 1)
        self.model(
            input_ids=torch.from_numpy(padded).to(device),
            position_ids=positions.expand(len(batch), longest),
            past_key_values=self.kv,
            use_cache=True,
            **self._prefill_options,
        )

    def _fill_again(self) -> None:
        """Makes the KV of all live slots anew, after weights changed."""
        if not self.running:
            return
        slots = sorted(self.running)
        num_known = [self._num_tokens(slot) for slot in slots]
        tokens, _ = self.rows.read(slots, max(num_known))
        wanted = []
        for row, slot in enumerate(slots):
            running = self.running[slot]
            prompt = len(running.request.tokens) - running.request.position
            end = prompt if self.exact else num_known[row]
            wanted.append(tokens[row, : end - 1])
            running.num_known, running.step_offset = num_known[row], end - 1 - self.num_steps
        self.rows.restart(slots, [len(known) for known in wanted], num_known)
        self._fill(slots, wanted)
        self._count()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
