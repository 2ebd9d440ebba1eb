"""Continuous batching: assigns requests to slots of preallocated keys and values, and decodes all of them in one step.

There are no threads and no asyncio here. The state of the slots is held in tensors (`SlotRows`); Python handles a
request only when it starts or ends and when weights change.

- Without `exact`, the live slots, which hold running requests, come first, so that a step computes no other rows. On a
  CPU, rows that are much longer come first among the live ones, so that only these read a long context
  (`attention.num_long_rows`).
- A prefill computes all tokens that a request brings (prompt and response so far) but the last one, which the first
  decode step feeds. A request that is resumed before its old slot is overwritten continues from the keys and values
  there (`cached_prefixes`), and so do the turns of an episode.
- With `exact` and a fixed number of threads and slots, a token depends on weights, prompt and seed alone, to the bit.
  For that, every step runs all slots, and prompts are prefilled one at a time. The response of a resumed request is fed
  token by token, in the same shapes in which it was sampled.
- On a GPU, without `exact`, steps and prefills are replayed as CUDA graphs (`graphs`). Their shapes are rounded up, so
  dead rows (without a request) take part; they change nothing that a live row or a cached prefix needs.
- A model whose attention cannot be replaced (`model.usage`) has no KV slots: each step computes its rows from the first
  token on (`decode_forward.Recomputed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.engines.cached_prefixes import CachedPrefix, CachedPrefixes, is_worth_reusing
from offbeat.engines.embedded.attention import KeyValueSlots, exchanges, num_long_rows, use_slot_attention
from offbeat.engines.embedded.decode_forward import (
    MIN_ROWS,
    DecodeForward,
    Forward,
    Recomputed,
    inputs_of_all_sizes,
    recorded,
    recorded_in_parts,
    use_few_rows,
)
from offbeat.engines.embedded.graphs import CudaGraphs, Graphs, padded_rows, padded_tokens
from offbeat.engines.embedded.prefill import Prefill, Wanted, round_up
from offbeat.engines.embedded.sampling import RowSampling, draw, is_filtered, is_greedy, noise_key, uniform
from offbeat.engines.embedded.weights import Staged, swap
from offbeat.engines.protocol import EngineMetrics, Finish, Generation, KvMode, Request
from offbeat.errors import UserError
from offbeat.model import usage
from offbeat.model.loading import context_window
from offbeat.trajectory import Sampling, Segment

READ_BUCKET_TOKENS = 16
"""Multiple to which a step rounds up the number of context tokens that it reads; keeps vector registers full and shapes
stable."""
SMALL_STEP_FLOPS = 1e9
"""Number of operations below which a forward pass runs on one thread (without `exact`), because more threads would
mostly wait."""
MAX_FED_TOKENS = 32
"""Number of new tokens up to which the next turn of an episode goes on from the keys and values of the last one. They
are fed in decode steps that run anyway for other rows, while a prefill would make all of those wait."""
ADMIT_EVERY_STEPS, ADMIT_SHARE = 8, 1 / 16
"""With CUDA graphs, waiting requests start once `ADMIT_SHARE` of the slots are free, or `ADMIT_EVERY_STEPS` steps after
requests last started. On a GPU, starting one request takes as long as starting many, several times as long as a
step."""


class Stepper:
    """Schedules requests over slots. Not thread-safe; must be called under `torch.inference_mode()`.

    `version` is the version whose weights `model` holds; None: call `load` before the first `step`.
    `worker` and `fingerprint` are written into every segment.
    """

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
        longest = context_window(model.config)
        if max_context_tokens > longest:
            raise UserError(
                f"embedded engine: max_context_tokens = {max_context_tokens}, but {usage.kind_of(model)} takes "
                f"at most {longest} tokens; lower rollout.max_prompt_tokens or rollout.max_new_tokens"
            )
        self.usage = use_slot_attention(model)
        self.model, self.num_slots, self.max_context_tokens, self.exact = model, num_slots, max_context_tokens, exact
        self.worker, self.fingerprint, self.version = worker, fingerprint, version
        self.metrics = EngineMetrics()
        """Replaced as a whole at each change, so that another thread may read it at any time."""
        room = round_up(max_context_tokens, READ_BUCKET_TOKENS)  # so that no read is cut short
        self.kv = KeyValueSlots(num_slots, room)
        self.rows = SlotRows(num_slots, room, model.dtype, model.device)
        self.prefill = Prefill(model, self.kv, max_context_tokens, exact, self._use_threads)
        self.cached = CachedPrefixes()
        """Keys and values that aborted requests left in free slots."""
        self.waiting: deque[Request] = deque()
        self.running: dict[int, SlotState] = {}
        self.free = list(range(num_slots))
        self.num_steps = 0
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_threads = self._threads_now = torch.get_num_threads()
        with usage.one_line_errors(model, "a step of the embedded engine"), usage.without_random(model):
            self._forward = self._make_forward()
            self._check()
        self._graphs: Graphs | None = None
        self._admitted_at = 0
        """Number of the step at which requests last started."""
        self._forward_in_parts: Forward | None = None
        """Forward pass for steps of two parts (see `_parts`); None until first used, because most runs never need
        it."""
        self.num_long = num_slots
        """The first `num_long` slots read as much context as the longest row needs; the others read less."""
        self._has_started = False
        """Whether requests have started since long rows were last moved to the front."""
        self._count()

    def record(self) -> None:
        """Records the decode step, if that is possible and allowed (`decode_forward`, `graphs`), to make steps faster.
        May be called once, before the first request."""
        if not self.usage.has_slots or self.exact:
            return
        if self.model.device.type == "cuda":
            self.use_graphs(CudaGraphs())
        else:
            with usage.without_random(self.model):
                self._forward = recorded(DecodeForward(self.model), self._decode_inputs())

    def use_graphs(self, graphs: Graphs) -> None:
        """Runs steps and prefills through `graphs` from now on."""
        self._graphs = self.prefill.graphs = graphs

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def abort(self, ids: Iterable[str] | None) -> list[Generation]:
        """Ends the requests with these ids, or all requests if None; returns their tokens so far."""
        named = None if ids is None else set(ids)
        slots = [slot for slot, running in self.running.items() if named is None or running.request.id in named]
        ended = self._end(slots, Finish.ABORT)
        ended += [Generation(r.id, (), Finish.ABORT) for r in self.waiting if named is None or r.id in named]
        self.waiting = deque(r for r in self.waiting if named is not None and r.id not in named)
        return ended

    def load(self, number: int, staged: Staged) -> None:
        """Swaps in the weights of version `number`; recomputes the KV of running requests that may not keep old KV."""
        swap(staged)
        for slot, running in self.running.items():
            assert self.version is not None
            running.close_span(self._num_tokens(slot), self.version)
        self.version = number
        self.prefill.prompts.clear()
        self.cached.load(number)
        keeps = self.usage.has_slots
        again = [slot for slot, one in self.running.items() if not (keeps and one.may_keep_kv(number))]
        self._refill(sorted(again))

    def step(self) -> list[Generation]:
        """Starts waiting requests in free slots, then decodes a token in every live slot; returns ended requests."""
        if self.is_idle:
            return []
        if self.waiting and self.free and self._is_time_to_admit():
            self._admit()
        if not self.exact:
            self._compact()
            if self._has_started and self.usage.has_slots and self._graphs is None:
                self._put_long_rows_first()
        parts = self._parts()
        ended = self._end(self._decode(parts), None)
        num_rows, num_read = sum(num for num, _ in parts), sum(num * reach for num, reach in parts)
        self.metrics += EngineMetrics(1, num_rows, num_read)
        return ended

    def _parts(self) -> list[tuple[int, int]]:
        """Splits the slots of the next step into one or two parts, so that only long rows read a long context. Returns
        each part, long rows first, as (number of slots, number of context tokens that each slot reads)."""
        if self.exact:  # the context read decides how sums are split, so it must not depend on other rows
            return [(self.num_slots, round_up(self.max_context_tokens, READ_BUCKET_TOKENS))]
        num_rows = len(self.running)
        long, short = (round_up(self.num_steps + most + 1, READ_BUCKET_TOKENS) for most in self.largest_offsets)
        if self._graphs is not None:
            room = round_up(self.max_context_tokens, READ_BUCKET_TOKENS)
            return [(padded_rows(num_rows, self.num_slots), padded_tokens(long, room))]
        if self.num_long >= num_rows or short >= long:
            return [(num_rows, long)]
        return [(self.num_long, long), (num_rows - self.num_long, short)]

    def _decode(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """Runs one decode step over `parts` (see `_parts`) and stores the new tokens; returns the slots whose requests
        have ended."""
        any_feeding = self.num_steps < self.feeding_until_step
        if self._graphs is None:
            done = self._draw_next(parts, any_feeding=any_feeding)
        else:  # everything that decides which kernels run
            kinds = (self.any_greedy, self.any_filtered, self.any_stops, any_feeding, self.rows.stops.shape[1])
            work = partial(self._draw_next, parts, any_feeding=any_feeding)
            done = self._graphs.run(("step", *parts[0], *kinds), work)
        self.num_steps += 1
        slots: list[int] = done.nonzero().squeeze(1).tolist()
        return slots

    def _draw_next(self, parts: Sequence[tuple[int, int]], *, any_feeding: bool) -> torch.Tensor:
        """Draws the next token of each row and stores it; returns a mask of the rows that are done. So that a graph can
        replay it, it reads nothing back from the device and changes the state of the slots in place."""
        num_rows, rows = sum(num for num, _ in parts), self.rows
        logits = self._next_logits(num_rows, parts)
        sampling = rows.sampling(num_rows, any_greedy=self.any_greedy, any_filtered=self.any_filtered)
        noise = uniform(sampling.keys, rows.response_positions(num_rows))
        drawn, logprobs = draw(logits.float(), sampling, noise)
        return rows.advance(drawn, logprobs, any_stops=self.any_stops, any_feeding=any_feeding)

    def _next_logits(self, num_rows: int, parts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Returns the logits after each row's current token; feeds that token or, without KV slots, the whole row."""
        if not self.usage.has_slots:
            reach = min(parts[0][1], self.max_context_tokens)  # rounding up may exceed the model's positions
            self._use_threads(num_rows * reach)
            return self._forward(self.rows.tokens[:num_rows, :reach], self.rows.positions(num_rows))
        self._use_threads(num_rows)
        rows, tokens = self.rows, self.rows.feed(num_rows)
        masks = [rows.mask[:num_rows, None, None, : parts[0][1]]]
        masks += [rows.mask[num_rows - num : num_rows, None, None, :reach] for num, reach in parts[1:]]
        forward = self._forward if len(parts) == 1 else self._in_parts()
        return forward(tokens, rows.positions(num_rows), *masks, *self.kv.keys, *self.kv.values)

    def _make_forward(self) -> Forward:
        if not self.usage.has_slots:
            return Recomputed(self.model, self.usage.picks_logits and not self.exact)
        self.prefill.compute([Wanted(0, np.zeros(1, np.int64), is_shared=False)])  # allocates the KV
        if not self.exact:
            use_few_rows(self.model)
        return DecodeForward(self.model)

    def _check(self) -> None:
        """Raises a `UserError` if this engine's logits differ from those of the model's own code. Runs a step of
        `MIN_ROWS` rows, or of fewer if there are fewer slots: one row of several tokens, the others of one token. So
        many rows are needed to test `decode_forward.product` too."""
        tokens = np.array(usage.probe_tokens(self.model, 7))
        own_prompts = [tokens[:6][: self.max_context_tokens - 1], tokens[6:]][: self.num_slots]
        prompts = [own_prompts[0], *[own_prompts[-1]] * (min(self.num_slots, MIN_ROWS) - 1)]
        slots, num_rows = range(len(prompts)), len(prompts)
        requests = [Request(str(slot), prompts[slot], slot, Sampling(max_new_tokens=1)) for slot in slots]
        self.rows.tokens[:num_rows] = int(tokens[0])  # in a real run, tokens of earlier requests follow the row's own
        self.rows.start(slots, requests, [len(prompt) - 1 for prompt in prompts])
        if self.usage.has_slots and len(prompts[0]) > 1:
            self.prefill.compute([Wanted(0, prompts[0][:-1], is_shared=False)])
        found = self._next_logits(num_rows, [(num_rows, READ_BUCKET_TOKENS)])
        self.rows.clear(slots, [0] * num_rows)
        own = [usage.own_logits(self.model, self.rows.index(prompt.tolist())[None])[0, -1] for prompt in own_prompts]
        own += own[-1:] * (num_rows - len(own))
        gap, allowed = usage.distance(found, torch.stack(own)), usage.max_distance(self.model)
        if gap is not None and not gap <= allowed:
            raise UserError(
                f"model.path: {usage.kind_of(self.model)}: the embedded engine's log-probs differ by {gap:.2g} "
                f"standard deviations from the model's own (allowed {allowed:g}); use "
                'rollout.engine = "vllm", or a model that docs/models.md lists'
            )

    def _in_parts(self) -> Forward:
        self._forward_in_parts = self._forward_in_parts or recorded_in_parts(self.model, self._decode_inputs())
        return self._forward_in_parts

    def _use_threads(self, num_tokens: int) -> None:
        """Sets the number of threads for a forward pass of `num_tokens`; with `exact`, always the same number."""
        is_small = 2 * self.num_parameters * num_tokens < SMALL_STEP_FLOPS
        wanted = 1 if is_small and not self.exact else self.num_threads
        if wanted != self._threads_now:
            torch.set_num_threads(wanted)
            self._threads_now = wanted

    def _decode_inputs(self) -> list[tuple[torch.Tensor, ...]]:
        return inputs_of_all_sizes(self.model, self.kv, self.max_context_tokens, READ_BUCKET_TOKENS)

    # Slots

    def _is_time_to_admit(self) -> bool:
        if self._graphs is None or not self.running or len(self.free) >= ADMIT_SHARE * self.num_slots:
            return True
        return self.num_steps >= self._admitted_at + ADMIT_EVERY_STEPS

    def _admit(self) -> None:
        self._admitted_at = self.num_steps
        assert self.version is not None
        num_started = min(len(self.free), len(self.waiting))
        requests = [self.waiting.popleft() for _ in range(num_started)]
        prefixes = [self._take_cached(request) for request in requests]
        slots = self._choose_slots(prefixes)
        positions, wanted = [], []
        for slot, request, prefix in zip(slots, requests, prefixes, strict=True):
            if prefix is None:
                # All known tokens (with `exact`, only the prompt's) but the last, which the first decode step feeds.
                tokens = request.tokens[: len(request.tokens) - (request.position if self.exact else 0) - 1]
                wanted.append(Wanted(slot, tokens, request.kv is not KvMode.REFILL))
                position, kv_version = len(tokens), self.version
            else:
                position, kv_version = prefix.num_usable(request), prefix.kv_version
                self.metrics += EngineMetrics(num_resumed_tokens=position)
            positions.append(position)
            num_known = len(request.tokens)
            self.running[slot] = SlotState(request, num_known, position - self.num_steps, num_known, kv_version)
        self.rows.start(slots, requests, positions)
        self._prefill(wanted)
        self._has_started = True
        self._count()

    def _prefill(self, wanted: Sequence[Wanted]) -> None:
        if self.usage.has_slots:
            self.metrics += self.prefill.fill(wanted)

    def _take_cached(self, request: Request) -> CachedPrefix | None:
        """Removes a cached prefix that suits a request from the cache, and returns it. Returns None if there is none,
        or if prefilling all tokens costs less than reusing it."""
        assert self.version is not None
        prefix = self.cached.find(request, self.version)
        if prefix is None:
            return None
        num_cached = prefix.num_usable(request)
        num_missing = len(request.tokens) - 1 - num_cached
        is_short = request.is_turn and num_missing <= MAX_FED_TOKENS
        if not self.exact and not is_short and not is_worth_reusing(num_cached, num_missing):
            return None
        self.cached.drop(prefix.slot)
        return prefix

    def _choose_slots(self, prefixes: Sequence[CachedPrefix | None]) -> list[int]:
        """Takes a free slot for each request and returns these slots. `prefixes` holds each request's cached prefix or
        None. A request gets the slot of its prefix; without a prefix, the next free slot in eviction order."""
        own = {prefix.slot for prefix in prefixes if prefix is not None}
        others = iter(self.cached.eviction_order(slot for slot in self.free if slot not in own))
        slots = [next(others) if prefix is None else prefix.slot for prefix in prefixes]
        for slot in slots:
            self.cached.drop(slot)
        self.free = sorted(set(self.free) - set(slots))
        return slots

    def _num_kept(self, slot: int) -> int:
        """Number of tokens of a live slot that have keys and values; the next step feeds the token after them."""
        return self.num_steps + self.running[slot].step_offset

    def _num_tokens(self, slot: int) -> int:
        """Number of tokens in a live slot so far: those that the request brought, and those sampled since."""
        running = self.running[slot]
        return max(running.num_known, self._num_kept(slot) + 1)

    def _compact(self) -> None:
        """Moves the last live slots into free slots before them, so that all live slots come first; with graphs, only
        if the next step then runs fewer rows."""
        num_live = len(self.running)
        sources = [slot for slot in self.running if slot >= num_live]
        if not sources:
            return
        if self._graphs is not None and padded_rows(max(sources) + 1) == padded_rows(num_live):
            return
        targets = sorted(slot for slot in self.free if slot < num_live)
        self.rows.move(sources, targets)
        self._move_kv(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running.pop(source)
            self.prefill.prompts.exchange(source, target)
        self.free = list(range(num_live, self.num_slots))
        if self._graphs is not None:
            self._clear(sources)

    def _put_long_rows_first(self) -> None:
        """On a CPU, moves long rows to the first slots if steps then read less context; called after requests start."""
        self._has_started = False
        num_rows = len(self.running)
        self.num_long = num_rows
        if self.rows.device.type == "cpu":  # elsewhere one kernel skips masked tokens
            lengths = [self._num_kept(slot) for slot in range(num_rows)]
            self.num_long = num_long_rows(lengths)
            if pairs := exchanges(lengths, self.num_long):
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
        """Moves the KV of live slots from `sources` to `targets`; a prefix cached in a target moves to the source."""
        swapped = [(source, target) for source, target in zip(sources, targets, strict=True) if target in self.cached]
        froms, tos = [*sources, *(target for _, target in swapped)], [*targets, *(source for source, _ in swapped)]
        longest = max([*map(self._num_tokens, sources), *(self.cached.num_tokens(target) for _, target in swapped)])
        self.kv.copy(froms, tos, longest)
        for source, target in swapped:
            self.cached.move(target, source)

    def _end(self, slots: Sequence[int], finish: Finish | None) -> list[Generation]:
        """Ends the requests in `slots`, frees the slots and returns the requests' results. `finish` is why they end; if
        None, it is `STOP` where the last token is a stop token, else `LENGTH`."""
        if not slots:
            return []
        tokens, logprobs = self.rows.read(slots, max(map(self._num_tokens, slots)))
        generations = []
        for row, slot in enumerate(slots):
            assert self.version is not None
            num_tokens, running = self._num_tokens(slot), self.running[slot]
            stopped = int(tokens[row, num_tokens - 1]) in running.request.sampling.stop_token_ids
            if finish is Finish.ABORT or (running.request.is_turn and stopped):
                self._cache(slot, tokens[row])
            del self.running[slot]
            running.close_span(num_tokens, self.version)
            why = finish or (Finish.STOP if stopped else Finish.LENGTH)
            generations.append(running.generation(tokens[row], logprobs[row], why, self.worker, self.fingerprint))
            self.prefill.prompts.drop(slot)
        self.free.extend(slots)
        if self.exact or self._graphs is not None:  # otherwise steps do not run dead rows
            self._clear(slots)
        self._count()
        return generations

    def _clear(self, slots: Sequence[int]) -> None:
        """Marks the rows of free slots as dead. A dead row's position lies after the KV cached in its slot, so that
        steps overwrite none of it."""
        self.rows.clear(slots, [self.cached.num_tokens(slot) if slot in self.cached else 0 for slot in slots])

    def _cache(self, slot: int, tokens: np.ndarray) -> None:
        """Lists the keys and values of an aborted request as cached, so that the request can resume from them."""
        running = self.running[slot]
        request, num_kept, num_prompt = running.request, self._num_kept(slot), running.num_prompt
        if request.kv is KvMode.REFILL or num_kept < num_prompt or not self.usage.has_slots:
            return
        lag = request.kv_lag if request.kv is KvMode.STALE else 0
        self.cached.add(CachedPrefix(slot, tokens[:num_kept].copy(), num_prompt, running.kv_version, lag))

    def _count(self) -> None:
        """Updates the facts about all live slots that steps use, such as `any_greedy`, so that steps need not read them
        from the device. Called when the set or the order of live slots changes."""
        live = self.running.values()
        ways = {running.request.sampling for running in live}  # few distinct settings, even with many requests
        self.any_greedy, self.any_filtered = any(map(is_greedy, ways)), any(map(is_filtered, ways))
        self.any_stops = any(way.stop_token_ids for way in ways)
        short = [running.step_offset for slot, running in self.running.items() if slot >= self.num_long]
        self.largest_offsets = max((running.step_offset for running in live), default=0), max(short, default=0)
        """Largest `step_offset` among all live slots, and among the live slots from number `num_long` on (the short
        rows)."""
        self.feeding_until_step = max((r.num_known - 1 - r.step_offset for r in live), default=0)

    def _refill(self, slots: Sequence[int]) -> None:
        """Computes the KV of these live slots again, with the weights just loaded. With `exact`, computes only that of
        the prompts; the next steps feed the response's tokens again, one by one."""
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
            running.num_known, running.step_offset = num_known[row], end - 1 - self.num_steps
            running.kv_version = self.version
        self.rows.restart(slots, [len(one.tokens) for one in wanted], num_known)
        self._prefill(wanted)
        self._count()


@dataclass
class SlotState:
    """A request in a slot, with the versions of its tokens and of its keys and values."""

    request: Request
    num_known: int
    """Number of tokens, prompt included, that existed when the slot was last filled; later ones are sampled."""
    step_offset: int
    """Index of the token that a step feeds, minus the number of the step: constant, because both grow by 1 per step."""
    open_start: int
    """Index, into prompt + response, of the first token of the segment being sampled."""
    kv_version: int
    """Number of the oldest version of the weights that computed any of the slot's keys and values."""
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Finished segments as (start, end, version, `kv_version`); start and end are indices into prompt + response."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens) - self.request.position

    def may_keep_kv(self, number: int) -> bool:
        """Whether the request may keep its keys and values when version `number` is loaded."""
        return self.request.kv is KvMode.STALE and 0 <= number - self.kv_version <= self.request.kv_lag

    def close_span(self, end: int, version: int) -> None:
        if end > self.open_start:
            self.spans.append((self.open_start, end, version, self.kv_version))
            self.open_start = end

    def generation(
        self, tokens: np.ndarray, logprobs: np.ndarray, finish: Finish, worker: str, fingerprint: str
    ) -> Generation:
        """Returns the request's result, given the tokens and log-probs of its slot."""
        segments = tuple(
            Segment(
                start=start - self.num_prompt,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                version=version,
                kv_version=kv_version,
                worker=worker,
                engine=fingerprint,
            )
            for start, end, version, kv_version in self.spans
        )
        return Generation(self.request.id, segments, finish)


POSITION, LIMIT, PROMPT, KNOWN, ALIVE, KEY, TOP_K = range(7)
"""Columns of `SlotRows.ints`: index of the token that the next step feeds, number of tokens at which the request ends,
prompt length, number of tokens that exist already and are not sampled. Then: 1 for a live row and 0 for a dead one,
noise key, top-k."""
TEMPERATURE, TOP_P, MIN_P = range(3)
"""Columns of `SlotRows.floats`."""
NEVER = 2**62


class SlotRows:
    """State of the slots for decode steps, in tensors with one row per slot.

    A row is written when its request starts, moved when slots are compacted, and read when the request ends. Each step
    updates it in `feed` and `advance`. Tokens and log-probs are stored at the token's index in prompt + response.
    """

    def __init__(self, num_slots: int, max_context_tokens: int, dtype: torch.dtype, device: torch.device):
        self.device = device
        self.tokens = torch.zeros((num_slots, max_context_tokens), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((num_slots, max_context_tokens), dtype=torch.float32, device=device)
        self.mask = torch.full((num_slots, max_context_tokens), -torch.inf, dtype=dtype, device=device)
        """Added to attention scores: 0 where the row may attend, -inf elsewhere."""
        self.ints = torch.zeros((num_slots, 7), dtype=torch.int64, device=device)
        self.floats = torch.ones((num_slots, 3), dtype=torch.float32, device=device)
        self.stops = torch.full((num_slots, 1), -1, dtype=torch.int64, device=device)
        self.clear(range(num_slots), [0] * num_slots)

    def clear(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Marks rows as dead (without a request) and sets their positions. Steps then leave a dead row at its position,
        change nothing before it, and never report the row as done."""
        rows = self.index(slots)
        self.ints[rows] = 0
        self.ints[rows, POSITION] = self.index(positions)
        self.ints[rows, LIMIT] = NEVER
        self.floats[rows] = 1.0
        self.stops[rows] = -1

    def start(self, slots: Sequence[int], requests: Sequence[Request], positions: Sequence[int]) -> None:
        """Writes each request into its slot's row; `positions` are the indices of the tokens to feed next."""
        num_stops = max(len(request.sampling.stop_token_ids) for request in requests)
        if num_stops > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(self.stops, (0, num_stops - self.stops.shape[1]), value=-1)
        longest = max(len(request.tokens) for request in requests)
        tokens = np.zeros((len(slots), longest), np.int64)
        ints = np.zeros((len(slots), self.ints.shape[1]), np.int64)
        floats = np.ones((len(slots), self.floats.shape[1]), np.float32)
        stops = np.full((len(slots), self.stops.shape[1]), -1, np.int64)
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            sampling, known = request.sampling, len(request.tokens)
            limit, prompt = known + sampling.max_new_tokens, known - request.position
            tokens[row, :known] = request.tokens
            ints[row] = (position, limit, prompt, known, 1, noise_key(request.seed), sampling.top_k)
            floats[row] = (sampling.temperature, sampling.top_p, sampling.min_p)
            stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        rows = self.index(slots)
        self.tokens[rows, :longest] = torch.from_numpy(tokens).to(self.device)
        self.ints[rows] = torch.from_numpy(ints).to(self.device)
        self.floats[rows] = torch.from_numpy(floats).to(self.device)
        self.stops[rows] = torch.from_numpy(stops).to(self.device)
        self._show(rows, positions)

    def restart(self, slots: Sequence[int], positions: Sequence[int], known: Sequence[int]) -> None:
        """Sets live rows back to `positions`, to feed their tokens again from there. The first `known[i]` tokens of the
        row of `slots[i]` are not sampled again."""
        rows = self.index(slots)
        self.ints[rows, POSITION] = self.index(positions)
        self.ints[rows, KNOWN] = self.index(known)
        self._show(rows, positions)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = self.index(sources), self.index(targets)
        for tensor in (self.tokens, self.logprobs, self.mask, self.ints, self.floats, self.stops):
            tensor[target] = tensor[source]

    def read(self, slots: Sequence[int], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first `num_tokens` tokens of the slots' rows, and their log-probs, as arrays in CPU memory."""
        rows = self.index(slots)
        return self.tokens[rows, :num_tokens].cpu().numpy(), self.logprobs[rows, :num_tokens].cpu().numpy()

    def positions(self, num_rows: int) -> torch.Tensor:
        return self.ints[:num_rows, POSITION]

    def response_positions(self, num_rows: int) -> torch.Tensor:
        """Returns the position in the response of the token that each row samples next."""
        return self.ints[:num_rows, POSITION] + 1 - self.ints[:num_rows, PROMPT]

    def sampling(self, num_rows: int, any_greedy: bool, any_filtered: bool) -> RowSampling:
        floats = self.floats[:num_rows]
        return RowSampling(
            keys=self.ints[:num_rows, KEY],
            temperature=floats[:, TEMPERATURE],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            top_k=self.ints[:num_rows, TOP_K],
            any_greedy=any_greedy,
            any_filtered=any_filtered,
        )

    def feed(self, num_rows: int) -> torch.Tensor:
        """Returns the next input token of each row, shape (rows, 1), and unmasks its position."""
        index = self.positions(num_rows).unsqueeze(1)
        self.mask[:num_rows].scatter_(1, index, 0.0)
        return self.tokens[:num_rows].gather(1, index)

    def advance(
        self, drawn: torch.Tensor, logprobs: torch.Tensor, *, any_stops: bool, any_feeding: bool
    ) -> torch.Tensor:
        """Stores each row's drawn token and log-prob and moves live rows on by one; returns a mask of the rows that are
        done. A row whose next token exists already, as in a resumed request, keeps that token instead. `any_feeding`
        must be True if there are such rows, `any_stops` if any row has stop tokens."""
        num_rows = drawn.shape[0]
        ints = self.ints[:num_rows]
        position = ints[:, POSITION]
        after = position.unsqueeze(1) + 1
        tokens, stored = self.tokens[:num_rows], self.logprobs[:num_rows]
        sampled = None
        if any_feeding:
            sampled = position + 1 >= ints[:, KNOWN]
            drawn = torch.where(sampled, drawn, tokens.gather(1, after).squeeze(1))
            logprobs = torch.where(sampled, logprobs, stored.gather(1, after).squeeze(1))
        tokens.scatter_(1, after, drawn.unsqueeze(1))
        stored.scatter_(1, after, logprobs.unsqueeze(1))
        position += ints[:, ALIVE]
        done = position + 1 >= ints[:, LIMIT]
        if any_stops:
            stopped = (self.stops[:num_rows] == drawn.unsqueeze(1)).any(1)
            done |= stopped if sampled is None else stopped & sampled
        return done

    def index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _show(self, rows: torch.Tensor, num_tokens: Sequence[int]) -> None:
        """Lets each row attend to its first `num_tokens` tokens only; `feed` then unmasks the others one by one."""
        hidden = torch.arange(self.mask.shape[1], device=self.device) >= self.index(num_tokens).unsqueeze(1)
        shown = torch.zeros(hidden.shape, dtype=self.mask.dtype, device=self.device)
        self.mask[rows] = shown.masked_fill_(hidden, -torch.inf)
