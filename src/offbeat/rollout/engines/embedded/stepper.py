"""Continuous batching over KV slots: which request sits where, and one decode step for all of them.

No threads and no asyncio here: `submit`, `abort` and `load` say what is wanted, `step` does the next piece of work and
returns what ended. Everything about a slot that a step needs lies in tensors; Python touches a request when it starts,
when it ends, and when weights change under it.

The first slots are the live ones: when one ends and nobody waits, the last live slot moves into the gap, so a step
costs what its live rows cost. Where some are much longer than the others they stand first, so that only they are read
far (see `control.reading`). All but the last known token of a request is prefilled; the last is fed by the first
decode step, so there is one way in which tokens are sampled.

A request that is aborted leaves its keys and values in its slot, which is free. When it is carried on before somebody
else needed that slot, it goes on there, and what it has beyond them is fed token by token (see `held`).

With `exact`, a token depends on weights, prompt and seed alone, to the bit: every step runs all slots, prompts are
prefilled one at a time, and a prefix that is carried on is fed token by token, in the shape in which it was sampled: so
what is held is, to the bit, what would be computed again, and whether it is held changes nothing but time.
(Alone, that is, for one number of threads and of slots: with several threads, a library may split a large product by
its number of rows. On one thread the number of slots does not matter either.)

A model whose attention cannot be replaced (see `model.usage`) has no keys and values here: each of its steps computes
every row from its first token on (see `recomputed`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.control.reading import exchanges, num_read_far
from offbeat.errors import UserError
from offbeat.model.loading import context_window
from offbeat.model.usage import distance, kind_of, max_distance, own_logits, probe_tokens, telling, without_random
from offbeat.rollout.engine import EngineFigures, Finish, Generation, KvMode, Request
from offbeat.rollout.engines.embedded.attention import use_slot_attention
from offbeat.rollout.engines.embedded.occupant import Occupant
from offbeat.rollout.engines.embedded.prefill import Prefill, Wanted, round_up
from offbeat.rollout.engines.embedded.recomputed import Recomputed
from offbeat.rollout.engines.embedded.recorded import (
    DecodeForward,
    Forward,
    inputs_of_all_sizes,
    recorded,
    recorded_in_parts,
)
from offbeat.rollout.engines.embedded.rows import Rows
from offbeat.rollout.engines.embedded.sampling import draw, is_filtered, is_greedy, uniform
from offbeat.rollout.engines.embedded.slots import KeyValueSlots
from offbeat.rollout.engines.embedded.weights import Staged, swap
from offbeat.rollout.engines.held import Held, HeldPrefixes, is_cheaper
from offbeat.trajectory import Sampling

READ_BUCKET_TOKENS = 16
"""Slots are read in multiples of this: vector lanes stay full and the shapes of a step change seldom."""
SMALL_STEP_FLOPS = 1e9
"""A step with less arithmetic than this runs on one thread: several would mostly wait for one another."""


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
        clock: Callable[[], float] = time.perf_counter,
    ):
        longest = context_window(model.config)
        if max_context_tokens > longest:
            raise UserError(
                f"embedded engine: max_context_tokens = {max_context_tokens}, but {kind_of(model)} takes {longest}; "
                "lower rollout.max_prompt_tokens or rollout.max_new_tokens"
            )
        self.usage = use_slot_attention(model)
        self.model, self.num_slots, self.max_context_tokens, self.exact = model, num_slots, max_context_tokens, exact
        self.worker, self.fingerprint, self.version = worker, fingerprint, version
        self.figures = EngineFigures()
        """Replaced as a whole, so that another thread may read it at any time."""
        self._clock = clock
        room = round_up(max_context_tokens, READ_BUCKET_TOKENS)  # so that no read is ever cut short
        self.kv = KeyValueSlots(num_slots, room)
        self.rows = Rows(num_slots, room, model.dtype, model.device)
        self.prefill = Prefill(model, self.kv, max_context_tokens, exact, self._use_threads)
        self.held = HeldPrefixes()
        """What free slots still hold."""
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Occupant] = {}
        self.free = list(range(num_slots))
        self.num_steps = 0
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_threads = self._threads_now = torch.get_num_threads()
        with telling(model, "a step of the embedded engine"), without_random(model):
            self._forward = self._make_forward()
            self._check()
        self._forward_in_parts: Forward | None = None
        """Made when it is first needed: most runs have no tail."""
        self.num_far = num_slots
        """So many of the first slots are read as far as the longest needs, the others no further than they need."""
        self._has_started = False
        """Whether requests have started since rows were last put in order."""
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
        """Changes the weights; the KV of whatever is running is made again under them, unless it may be kept."""
        swap(staged)
        for slot, running in self.running.items():
            assert self.version is not None
            running.close_span(self._num_tokens(slot), self.version)
        self.version = number
        self.prefill.prompts.clear()
        self.held.load(number)
        start_s = self._clock()
        keeps = self.usage.has_slots
        again = [slot for slot, one in self.running.items() if not (keeps and one.may_keep_kv(number))]
        self._fill_again(sorted(again))
        self.figures += EngineFigures(busy_seconds=self._clock() - start_s)

    def step(self) -> list[Generation]:
        """Fills free slots, then samples a token in every live one; returns what ended."""
        if self.is_idle:
            return []
        start_s = self._clock()
        if self.waiting and self.free:
            self._admit()
        if not self.exact:
            self._compact()
            if self._has_started and self.usage.has_slots:
                self._put_far_first()
        parts = self._parts()
        ended = self._end(self._decode(parts), None)
        num_rows, num_read = sum(num for num, _ in parts), sum(num * reach for num, reach in parts)
        self.figures += EngineFigures(1, num_rows, num_read, busy_seconds=self._clock() - start_s)
        return ended

    def _parts(self) -> list[tuple[int, int]]:
        """How many slots the next step takes along, and how far it reads them: all alike, or in two parts."""
        if self.exact:  # how far slots are read decides how sums are split: it must not depend on the neighbours
            return [(self.num_slots, round_up(self.max_context_tokens, READ_BUCKET_TOKENS))]
        num_rows = len(self.running)
        far, near = (round_up(self.num_steps + most + 1, READ_BUCKET_TOKENS) for most in self.largest_offsets)
        if self.num_far >= num_rows or near >= far:
            return [(num_rows, far)]
        return [(self.num_far, far), (num_rows - self.num_far, near)]

    def _decode(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """One token for every live row; returns the slots that are done."""
        num_rows, rows = sum(num for num, _ in parts), self.rows
        logits = (
            self._next_logits(num_rows, parts) if self.usage.has_slots else self._logits_anew(num_rows, parts[0][1])
        )
        sampling = rows.sampling(num_rows, any_greedy=self.any_greedy, any_filtered=self.any_filtered)
        noise = uniform(sampling.keys, rows.response_positions(num_rows))
        drawn, logprobs = draw(logits.float(), sampling, noise)
        any_feeding = self.num_steps < self.feeding_until_step
        done = rows.advance(drawn, logprobs, any_stops=self.any_stops, any_feeding=any_feeding)
        self.num_steps += 1
        slots: list[int] = done.nonzero().squeeze(1).tolist()
        return slots

    def _next_logits(self, num_rows: int, parts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Feeds each row its next token."""
        self._use_threads(num_rows)
        rows, tokens = self.rows, self.rows.feed(num_rows)
        masks = [rows.mask[:num_rows, None, None, : parts[0][1]]]
        masks += [rows.mask[num_rows - num : num_rows, None, None, :reach] for num, reach in parts[1:]]
        forward = self._forward if len(parts) == 1 else self._in_parts()
        return forward(tokens, rows.positions(num_rows), *masks, *self.kv.keys, *self.kv.values)

    def _logits_anew(self, num_rows: int, reach: int) -> torch.Tensor:
        """Feeds each row all its tokens."""
        reach = min(reach, self.max_context_tokens)  # a read may round up to more than the model has positions for
        self._use_threads(num_rows * reach)
        return self._forward(self.rows.tokens[:num_rows, :reach], self.rows.positions(num_rows))

    def _make_forward(self) -> Forward:
        if not self.usage.has_slots:
            return Recomputed(self.model, self.usage.picks_logits and not self.exact)
        self.prefill.compute([Wanted(0, np.zeros(1, np.int64), is_shared=False)])  # allocates the KV
        forward = DecodeForward(self.model)
        return forward if self.exact else recorded(forward, self._decode_inputs())

    def _check(self) -> None:
        """Refuses a model whose next logits, as they are computed here, are not those of its own code: a few tokens
        and, beside them where there is room, a row that begins with one."""
        tokens = np.array(probe_tokens(self.model, 7))
        prompts = [tokens[:6][: self.max_context_tokens - 1], tokens[6:]][: self.num_slots]
        slots, num_rows = range(len(prompts)), len(prompts)
        requests = [Request(str(slot), prompts[slot], slot, Sampling(max_new_tokens=1)) for slot in slots]
        self.rows.tokens[:num_rows] = int(tokens[0])  # behind a row's own stands what others left, not padding
        self.rows.start(slots, requests, [len(prompt) - 1 for prompt in prompts])
        if self.usage.has_slots:
            if len(prompts[0]) > 1:
                self.prefill.compute([Wanted(0, prompts[0][:-1], is_shared=False)])
            found = self._next_logits(num_rows, [(num_rows, READ_BUCKET_TOKENS)])
        else:
            found = self._logits_anew(num_rows, READ_BUCKET_TOKENS)
        self.rows.clear(slots, [0] * num_rows)
        own = [own_logits(self.model, self.rows.index(prompt.tolist())[None])[0, -1] for prompt in prompts]
        gap, allowed = distance(found, torch.stack(own)), max_distance(self.model)
        if gap is not None and not gap <= allowed:
            raise UserError(
                f"model.path: {kind_of(self.model)}: the embedded engine's log-probs are off by {gap:.2g} of their "
                f'spread (allowed {allowed:g}); use rollout.engine = "vllm", or a model that docs/models.md lists'
            )

    def _in_parts(self) -> Forward:
        if self._forward_in_parts is None:
            self._forward_in_parts = recorded_in_parts(self.model, self._decode_inputs())
        return self._forward_in_parts

    def _use_threads(self, num_tokens: int) -> None:
        """Chooses how many threads a forward pass gets; with `exact` that must not depend on its size."""
        is_small = 2 * self.num_parameters * num_tokens < SMALL_STEP_FLOPS
        wanted = 1 if is_small and not self.exact else self.num_threads
        if wanted != self._threads_now:
            torch.set_num_threads(wanted)
            self._threads_now = wanted

    def _decode_inputs(self) -> list[tuple[torch.Tensor, ...]]:
        """For a recording to be compared on."""
        return inputs_of_all_sizes(self.model, self.kv, self.max_context_tokens, READ_BUCKET_TOKENS)

    # Slots

    def _admit(self) -> None:
        assert self.version is not None
        num_started = min(len(self.free), len(self.waiting))
        requests = [self.waiting.popleft() for _ in range(num_started)]
        helds = [self._take_held(request) for request in requests]
        slots = self._choose_slots(helds)
        positions, wanted = [], []
        for slot, request, held in zip(slots, requests, helds, strict=True):
            if held is None:
                tokens = self._to_prefill(request)
                wanted.append(Wanted(slot, tokens, request.kv is not KvMode.REFILL))
                position, kv_version = len(tokens), self.version
            else:
                position, kv_version = held.num_of_use(request), held.kv_version
                self.figures += EngineFigures(num_resumed_tokens=position)
            positions.append(position)
            self.running[slot] = Occupant.of(request, position - self.num_steps, kv_version)
        self.rows.start(slots, requests, positions)
        self._prefill(wanted)
        self._has_started = True
        self._count()

    def _prefill(self, wanted: Sequence[Wanted]) -> None:
        if self.usage.has_slots:
            self.figures += self.prefill.fill(wanted)

    def _take_held(self, request: Request) -> Held | None:
        """What free slots hold for a request, where using it costs less than making it anew."""
        assert self.version is not None
        held = self.held.find(request, self.version)
        if held is None:
            return None
        num_held = held.num_of_use(request)
        if not self.exact and not is_cheaper(num_held, len(request.tokens) - 1 - num_held):
            return None
        self.held.drop(held.place)
        return held

    def _choose_slots(self, helds: Sequence[Held | None]) -> list[int]:
        """Free slots for new requests: its own for one that is held, for all others those that hold the least."""
        own = {held.place for held in helds if held is not None}
        others = iter(self.held.in_order_of_loss(slot for slot in self.free if slot not in own))
        slots = [next(others) if held is None else held.place for held in helds]
        for slot in slots:
            self.held.drop(slot)
        self.free = sorted(set(self.free) - set(slots))
        return slots

    def _to_prefill(self, request: Request) -> np.ndarray:
        """All known tokens but the one that the first decode step feeds; with `exact`, only those of the prompt."""
        end = len(request.tokens) - (request.position if self.exact else 0)
        return request.tokens[: end - 1]

    def _num_kept(self, slot: int) -> int:
        """How many tokens of a live slot have their keys and values: the next one is fed by the next step."""
        return self.num_steps + self.running[slot].step_offset

    def _num_tokens(self, slot: int) -> int:
        """How many tokens of a live slot are known: given, or sampled so far."""
        running = self.running[slot]
        return max(running.num_known, self._num_kept(slot) + 1)

    def _compact(self) -> None:
        """Moves the last live slots into the gaps before them."""
        num_live = len(self.running)
        sources = [slot for slot in self.running if slot >= num_live]
        if not sources:
            return
        targets = sorted(slot for slot in self.free if slot < num_live)
        self.rows.move(sources, targets)
        self._move_kv(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running.pop(source)
            self.prefill.prompts.move(source, target)
        self.free = list(range(num_live, self.num_slots))

    def _put_far_first(self) -> None:
        """After requests have started: has long rows change places with others, where that makes steps read less."""
        self._has_started = False
        num_rows = len(self.running)
        self.num_far = num_rows
        if self.rows.device.type == "cpu":  # elsewhere attention is one kernel, which skips what is masked
            lengths = [self._num_kept(slot) for slot in range(num_rows)]
            self.num_far = int(num_read_far(np.array(lengths)))
            if pairs := exchanges(lengths, self.num_far):
                self._exchange(pairs, max(lengths) + 1)
        self._count()

    def _exchange(self, pairs: Sequence[tuple[int, int]], num_tokens: int) -> None:
        ones, others = [one for one, _ in pairs], [other for _, other in pairs]
        self.rows.move([*ones, *others], [*others, *ones])
        self.kv.copy([*ones, *others], [*others, *ones], num_tokens)
        for one, other in pairs:
            self.running[one], self.running[other] = self.running[other], self.running[one]
            self.prefill.prompts.exchange(one, other)

    def _move_kv(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves the KV of live slots; what a gap holds changes places with it."""
        swapped = [(source, target) for source, target in zip(sources, targets, strict=True) if target in self.held]
        froms, tos = [*sources, *(target for _, target in swapped)], [*targets, *(source for source, _ in swapped)]
        longest = max([*map(self._num_tokens, sources), *(self.held.num_tokens(target) for _, target in swapped)])
        self.kv.copy(froms, tos, longest)
        for source, target in swapped:
            self.held.move(target, source)

    def _end(self, slots: Sequence[int], finish: Finish | None) -> list[Generation]:
        """Frees slots and returns what was generated there; without a finish, their last token tells it."""
        if not slots:
            return []
        tokens, logprobs = self.rows.read(slots, max(map(self._num_tokens, slots)))
        generations = []
        for row, slot in enumerate(slots):
            assert self.version is not None
            if finish is Finish.ABORT:
                self._hold(slot, tokens[row])
            num_tokens, running = self._num_tokens(slot), self.running.pop(slot)
            running.close_span(num_tokens, self.version)
            stopped = int(tokens[row, num_tokens - 1]) in running.request.sampling.stop_token_ids
            why = finish or (Finish.STOP if stopped else Finish.LENGTH)
            generations.append(running.generation(tokens[row], logprobs[row], why, self.worker, self.fingerprint))
            self.prefill.prompts.drop(slot)
        self.free.extend(slots)
        if self.exact:  # the others are not stepped before a new request is written over them
            self.rows.clear(slots, [self.held.num_tokens(slot) if slot in self.held else 0 for slot in slots])
        self._count()
        return generations

    def _hold(self, slot: int, tokens: np.ndarray) -> None:
        """Remembers what a slot that is being cut holds, for the request to be carried on."""
        running = self.running[slot]
        request, num_kept, num_prompt = running.request, self._num_kept(slot), running.num_prompt
        if request.kv is KvMode.REFILL or num_kept < num_prompt or not self.usage.has_slots:
            return
        lag = request.kv_lag if request.kv is KvMode.STALE else 0
        self.held.hold(Held(slot, tokens[:num_kept].copy(), num_prompt, running.kv_version, lag))

    def _count(self) -> None:
        """What the host must know of the live slots before a step; it changes only when one starts or ends."""
        live = self.running.values()
        ways = {running.request.sampling for running in live}  # few, however many requests there are
        self.any_greedy, self.any_filtered = any(map(is_greedy, ways)), any(map(is_filtered, ways))
        self.any_stops = any(way.stop_token_ids for way in ways)
        near = [running.step_offset for slot, running in self.running.items() if slot >= self.num_far]
        self.largest_offsets = max((running.step_offset for running in live), default=0), max(near, default=0)
        """Of all, and of those that are not read far."""
        self.feeding_until_step = max((r.num_known - 1 - r.step_offset for r in live), default=0)

    def _fill_again(self, slots: Sequence[int]) -> None:
        """Makes the KV of live slots anew, after weights changed."""
        if not slots:
            return
        assert self.version is not None
        num_known = [self._num_tokens(slot) for slot in slots]
        tokens, _ = self.rows.read(slots, max(num_known))
        wanted = []
        for row, slot in enumerate(slots):
            running = self.running[slot]
            end = running.num_prompt if self.exact else num_known[row]
            wanted.append(Wanted(slot, tokens[row, : end - 1], running.request.kv is not KvMode.REFILL))
            running.refill(num_known[row], end - 1 - self.num_steps, self.version)
        self.rows.restart(slots, [len(one.tokens) for one in wanted], num_known)
        self._prefill(wanted)
        self._count()
