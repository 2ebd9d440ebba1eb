"""The paced engine's time: which step ends when, and what happens between two steps. No waiting, no clock of its own.

All rows take a step together. Between two steps, in this order: rows that are done leave, commands that came meanwhile
are taken in the order in which they came, waiting requests take the free slots. While nothing of that happens all steps
take the same time, so the next event is computed, never stepped towards: `due_s` names it, `advance` lets it happen. A
load stops all steps for its time; afterwards what runs is fed again, because no KV of older weights may be used. So a
request that was cut and is carried on is fed only what is new to it, unless a load came between: free slots hold the
rest (see `held`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from offbeat.rollout.engine import EngineFigures, Finish, Generation, KvMode, Request
from offbeat.rollout.engines.held import Held, HeldPrefixes
from offbeat.rollout.engines.paced import noise
from offbeat.rollout.engines.paced.settings import PacedSettings
from offbeat.trajectory import Segment

SAME = 1e-9
"""As a share of a step: a moment this near to a step's end is its end, whatever rounding made of it."""

Outcome = tuple[object, Generation | None]
"""Who waited, and the generation that came of it; none for those who waited for a command to be done."""


@dataclass(frozen=True)
class Submit:
    request: Request


@dataclass(frozen=True)
class Abort:
    ids: Sequence[str] | None
    """None means all."""
    key: object


@dataclass(frozen=True)
class Load:
    version: int
    key: object


Command = Submit | Abort | Load


@dataclass(frozen=True)
class Row:
    """A request in a slot: its first token comes with the step after `first_step`."""

    request: Request
    first_step: int
    num_tokens: int
    finish: Finish

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_tokens

    def context_at(self, step: int) -> int:
        """How many tokens it has after a step."""
        return len(self.request.tokens) + step - self.first_step


class Pace:
    """See the module. Times are of any clock that goes forward, the same one in all calls."""

    def __init__(self, settings: PacedSettings, version: int | None, worker: str, fingerprint: str):
        self.settings, self.version, self.worker, self.fingerprint = settings, version, worker, fingerprint
        self._rows: dict[str, Row] = {}
        self._waiting: dict[str, Request] = {}
        self._ends: list[tuple[int, str]] = []
        """Last steps and ids, soonest first; those of aborted rows are skipped when their turn comes."""
        self._commands: deque[tuple[float, Command]] = deque()
        self._loading: tuple[float, Load] | None = None
        self._versions: list[tuple[int, int]] = [] if version is None else [(0, version)]
        """From which step on which version was in force."""
        self._unfed: dict[str, int] = {}
        """Rows that are fed before the next step, and how many tokens."""
        self._held, self._places = HeldPrefixes(), count()
        self._context = 0
        """Tokens of all rows, after the last event."""
        self.figures = EngineFigures()
        self._step, self._start_s, self._feed_s, self._step_s = 0, -math.inf, 0.0, 0.0
        """The last event: after which step, when, and how long feeding before and each step after it take."""

    @property
    def num_requests(self) -> int:
        return len(self._rows) + len(self._waiting) + sum(isinstance(c, Submit) for _, c in self._commands)

    def command(self, command: Command, now_s: float) -> None:
        """Takes a command at the end of the step that is under way; call `advance` up to now before and after."""
        self._commands.append((now_s, command))

    def due_s(self) -> float | None:
        """When something happens next, if nothing is asked meanwhile."""
        if self._loading is not None:
            return self._loading[0]
        step, at_s = self._next_step(), None
        if step is not None:
            at_s = self._time_of(step)
        elif self._commands:
            at_s = max(self._start_s, self._commands[0][0])
        return at_s

    def advance(self, now_s: float) -> list[Outcome]:
        """Lets everything happen that is due by now."""
        outcomes: list[Outcome] = []
        while (due_s := self.due_s()) is not None and due_s <= now_s:
            outcomes += self._end_load() if self._loading is not None else self._between_steps(due_s)
        return outcomes

    def stop(self, now_s: float) -> list[Outcome]:
        """Ends all requests here and now, with the tokens of whole steps."""
        outcomes = self.advance(now_s)
        if self._rows and self._loading is None and now_s > self._start_s:
            self._go_to(self._step + max(0, math.floor((now_s - self._start_s - self._feed_s) / self._step_s + SAME)))
        left = [command for _, command in self._commands]
        self._commands.clear()
        self._waiting |= {command.request.id: command.request for command in left if isinstance(command, Submit)}
        aborted = [(command.key, None) for command in left if isinstance(command, Abort)]
        return [*outcomes, *self._abort(None), *aborted]

    def _next_step(self) -> int | None:
        """After which step something happens next; None with no row running."""
        while self._ends and not self._is_live(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._rows:
            return None
        step = self._ends[0][0]
        return min(step, self._step_at(self._commands[0][0])) if self._commands else step

    def _step_at(self, moment_s: float) -> int:
        """The first step that ends at a moment or after it."""
        if moment_s <= self._start_s:
            return self._step
        return self._step + max(1, math.ceil((moment_s - self._start_s - self._feed_s) / self._step_s - SAME))

    def _time_of(self, step: int) -> float:
        num_steps = step - self._step
        return self._start_s + self._feed_s + num_steps * self._step_s if num_steps else self._start_s

    def _between_steps(self, now_s: float) -> list[Outcome]:
        step = self._next_step()
        if step is not None:
            self._go_to(step)
        came = [command for at_s, command in self._commands if at_s <= now_s + SAME * self._step_s]
        self._start_s = now_s
        outcomes = list(self._leave())
        for command in came:
            if self._loading is not None:
                break
            self._commands.popleft()
            outcomes += self._take(command, now_s)
        self._fill_slots()
        return outcomes

    def _go_to(self, step: int) -> None:
        """All steps up to this one are done, and what was to be fed before them."""
        num_steps, num_rows = step - self._step, len(self._rows)
        if not num_steps:
            return
        self.figures += EngineFigures(
            num_steps=num_steps,
            num_rows=num_steps * num_rows,
            num_context_tokens=num_steps * self._context + num_rows * num_steps * (num_steps - 1) // 2,
            num_prefilled_tokens=self._num_unfed,
            busy_seconds=self._feed_s + num_steps * self._step_s,
        )
        self._context += num_steps * num_rows
        self._step = step
        self._unfed.clear()

    @property
    def _num_unfed(self) -> int:
        return sum(num_tokens for name, num_tokens in self._unfed.items() if name in self._rows)

    def _leave(self) -> Iterator[Outcome]:
        while self._ends and self._ends[0][0] <= self._step:
            if self._is_live(self._ends[0]):
                row = self._remove(self._ends[0][1])
                yield row.request.id, self._generation(row, row.finish)
            heapq.heappop(self._ends)

    def _is_live(self, end: tuple[int, str]) -> bool:
        row = self._rows.get(end[1])
        return row is not None and row.last_step == end[0]

    def _take(self, command: Command, now_s: float) -> list[Outcome]:
        match command:
            case Submit(request):
                self._waiting[request.id] = request
            case Abort(ids, key):
                return [*self._abort(ids), (key, None)]
            case Load():
                self._loading = (now_s + self.settings.load_s, command)
        return []

    def _end_load(self) -> list[Outcome]:
        assert self._loading is not None
        self._start_s, load = self._loading
        self._loading, self.version = None, load.version
        self._versions = [*(self._versions if self._rows else ()), (self._step, load.version)]
        self._held.load(load.version)
        self._unfed = {name: row.context_at(self._step) for name, row in self._rows.items()}
        self._fill_slots()
        return [(load.key, None)]

    def _fill_slots(self) -> None:
        """Lets waiting requests begin, and with that settles how long the steps from here on take."""
        if self._loading is not None:
            return
        while self._waiting and len(self._rows) < self.settings.num_slots:
            name = next(iter(self._waiting))
            row = self._planned(self._waiting.pop(name))
            self._rows[name] = row
            self._unfed[name] = self._num_to_feed(row.request)
            self._context += len(row.request.tokens)
            heapq.heappush(self._ends, (row.last_step, name))
        self._held.keep_newest(self.settings.num_slots - len(self._rows))
        self._feed_s = self.settings.fill_s(self._num_unfed)
        self._step_s = self.settings.step_s(len(self._rows))

    def _num_to_feed(self, request: Request) -> int:
        """All tokens of a request, or those beyond what is held of it and the one that its first step takes."""
        held = None if self.version is None else self._held.find(request, self.version)
        if held is None:
            return len(request.tokens)
        self._held.drop(held.place)
        num_resumed = held.num_of_use(request)
        self.figures += EngineFigures(num_resumed_tokens=num_resumed)
        return len(request.tokens) - 1 - num_resumed

    def _planned(self, request: Request) -> Row:
        budget = request.sampling.max_new_tokens
        if request.sampling.stop_token_ids:
            left = max(1, self.settings.lengths.num_tokens(request.seed) - request.position)
            if left <= budget:
                return Row(request, self._step, left, Finish.STOP)
        return Row(request, self._step, budget, Finish.LENGTH)

    def _abort(self, ids: Sequence[str] | None) -> Iterator[Outcome]:
        for name in [*self._rows, *self._waiting] if ids is None else ids:
            if name in self._rows:
                row = self._remove(name)
                generation = self._generation(row, Finish.ABORT)
                self._hold(row.request, generation)
                yield name, generation
            elif self._waiting.pop(name, None) is not None:
                yield name, Generation(name, (), Finish.ABORT)

    def _remove(self, name: str) -> Row:
        row = self._rows.pop(name)
        self._context -= row.context_at(self._step)
        return row

    def _hold(self, request: Request, generation: Generation) -> None:
        """What a request that is being cut has computed: all of its tokens but the last."""
        if request.kv is KvMode.REFILL or not generation.segments:
            return
        assert self.version is not None
        tokens = np.concatenate([request.tokens, *(segment.tokens for segment in generation.segments)])
        num_prompt = len(request.tokens) - request.position
        self._held.hold(Held(next(self._places), tokens[:-1], num_prompt, self.version))

    def _generation(self, row: Row, finish: Finish) -> Generation:
        """What a row has sampled up to now, in segments by version."""
        cuts = [(max(step, row.first_step), version) for step, version in self._versions]
        segments: list[Segment] = []
        for (start, version), end in zip(cuts, [*(step for step, _ in cuts[1:]), self._step], strict=True):
            if end > start:
                segments.append(self._segment(row, start, end, version))
        if finish is Finish.STOP:
            segments[-1].tokens[-1] = row.request.sampling.stop_token_ids[0]
        return Generation(row.request.id, tuple(segments), finish)

    def _segment(self, row: Row, first_step: int, last_step: int, version: int) -> Segment:
        request, count = row.request, last_step - first_step
        start = request.position + first_step - row.first_step
        stops = request.sampling.stop_token_ids
        return Segment(
            start=start,
            tokens=noise.tokens(request.seed, start, count, self.settings.vocab_size, stops),
            logprobs=noise.logprobs(request.seed, start, count, version),
            version=version,
            kv_version=version,
            worker=self.worker,
            engine=self.fingerprint,
        )
