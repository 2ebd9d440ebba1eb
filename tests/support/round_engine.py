"""An engine whose time is a `StepTime`, played answer by answer: what the predictions of control/ are measured against.

It shares no code with the event model: every answer is an object with its tokens by step, batches are chosen by
`select` itself, and time advances from one end of an answer to the next. Lengths are drawn before anything runs, the
same for every factor; whoever decides sees only what has happened.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offbeat.rules import padding_split
from offbeat.rules.event_model import EventModelConfig, Survivor
from offbeat.rules.groups import Candidate, VersionRun, select
from offbeat.rules.length_model import LengthEstimator
from offbeat.rules.step_time import StepTime, Timing

TIMINGS_PER_ROUND = 8
"""A worker reports with its heartbeats, several times a round."""


@dataclass(eq=False)
class Answer:
    length: int
    group: Group
    member: int
    num_tokens: int = 0
    by_step: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    """What a batch is made of: with the gate open to samples, a single answer."""

    ordinal: int
    prompt: int
    answers: list[Answer] = field(default_factory=list)
    num_open: int = 0

    def candidate(self) -> Candidate:
        stretches = [VersionRun(num, step) for answer in self.answers for step, num in answer.by_step.items()]
        first_step = min((stretch.step for stretch in stretches), default=None)
        return Candidate(self.ordinal, self.ordinal, not self.num_open, None, first_step, tuple(stretches))


@dataclass
class Round:
    """What one round gave."""

    seconds: float
    num_generated: int
    num_delivered: int
    timings: list[Timing]
    max_staleness: int


class RoundEngine:
    """Rounds of burst admission; `lengths(prompt)` are those of a group's answers."""

    def __init__(self, setting: EventModelConfig, step_time: StepTime, lengths: Callable[[int], Sequence[int]]):
        self.setting, self.step_time, self.lengths = setting, step_time, lengths
        self.per_prompt = 1 if setting.gate == "strict" else setting.group_size
        self.num_wanted = setting.groups_per_step * self.per_prompt
        self.step = self.num_prompts = 0
        self.ordinals = itertools.count()
        self.alive: list[Group] = []
        self.seen: list[Answer] = []
        """Answers that had tokens in the last round."""

    def play(self, factor: float) -> Round:
        while len(self.alive) < round(factor * self.setting.groups_per_step) * self.per_prompt:
            self._begin()
        play = _Play(self)
        while not (taken := self._batch()):
            play.next_end(self.step)
        play.stop(self.step)
        self.seen = play.begun
        self.alive = [group for group in self.alive if group not in taken]
        answers = [answer for group in taken for answer in group.answers]
        self.step += 1
        return Round(
            self.step_time.seconds(*_total(play.sums)) + self.setting.update_s,
            _total(play.sums)[1],
            sum(answer.length for answer in answers),
            self._timings(play.sums),
            self.step - 1 - min(step for answer in answers for step in answer.by_step),
        )

    def survivors(self) -> list[Survivor]:
        """Groups that were begun and are not whole; answers of one prompt make one."""
        by_prompt: dict[int, list[Answer]] = {}
        for group in self.alive:
            by_prompt.setdefault(group.prompt, []).extend(group.answers)
        return [
            Survivor(
                self.step - min(step for answer in answers for step in answer.by_step),
                tuple(answer.num_tokens for answer in answers),
                tuple(answer.num_tokens == answer.length for answer in answers),
            )
            for answers in by_prompt.values()
            if any(answer.by_step for answer in answers)
        ]

    def tell(self, lengths: LengthEstimator) -> None:
        """Reports the last round's answers."""
        for answer in self.seen:
            is_over = answer.num_tokens == answer.length
            report = lengths.finished if is_over else lengths.running
            report((answer.group.prompt, answer.member), answer.num_tokens, answer.group.prompt)
        lengths.advance()

    def _begin(self) -> None:
        drawn = self.lengths(self.num_prompts)
        members = [range(len(drawn))] if self.per_prompt == 1 else [[member] for member in range(len(drawn))]
        for some in members:
            group = Group(next(self.ordinals), self.num_prompts)
            group.answers = [Answer(int(drawn[member]), group, member) for member in some]
            group.num_open = len(group.answers)
            self.alive.append(group)
        self.num_prompts += 1

    def _batch(self) -> list[Group]:
        if sum(not group.num_open for group in self.alive) < self.num_wanted:
            return []
        candidates = [group.candidate() for group in self.alive]
        take = {*select(candidates, self.step, self.num_wanted, self.setting.max_staleness, in_order=False).take}
        return [group for group in self.alive if group.ordinal in take]

    def _timings(self, sums: list[tuple]) -> list[Timing]:
        size = math.ceil(len(sums) / TIMINGS_PER_ROUND) or 1
        parts = [_total(sums[begin : begin + size]) for begin in range(0, len(sums), size)]
        return [Timing(*part, self.step_time.seconds(*part)) for part in parts]


def _total(sums: list[tuple]) -> list[int]:
    return [sum(column) for column in zip((0, 0, 0, 0), *sums, strict=True)]


class _Play:
    """The answers that run in one round, by the step at which they end."""

    def __init__(self, engine: RoundEngine):
        self.setting = engine.setting
        self.now = self.num_context = 0
        self.sums: list[tuple] = []
        """Steps, rows, context and prefilled tokens, from one end to the next."""
        self.begun: list[Answer] = []
        self.ends: list[tuple[int, int, int, Answer]] = []
        self.waiting = [a for group in engine.alive for a in group.answers if a.num_tokens < a.length]
        self.waiting.reverse()
        self.far = self._read_far(self.waiting)
        """Answers that engines which pad read apart from the others."""

    def _read_far(self, answers: list[Answer]) -> set[Answer]:
        """Every way to split them in two, tried out."""
        longest_first = sorted(answers, key=lambda answer: -answer.num_tokens)
        contexts = [self.setting.prompt_tokens + answer.num_tokens for answer in longest_first]
        whole = len(contexts) * contexts[0]
        reads = {num: num * contexts[0] + (len(contexts) - num) * contexts[num] for num in range(1, len(contexts))}
        best = min(reads, key=lambda num: reads[num], default=0)
        is_worth_it = reads and whole - reads[best] >= padding_split.MIN_SAVED_TOKENS
        return set(longest_first[:best] if is_worth_it else longest_first)

    def _fill(self) -> None:
        slots = self.setting.slots or math.inf
        num_prefilled = 0
        while self.waiting and len(self.ends) < slots:
            answer = self.waiting.pop()
            context = self.setting.prompt_tokens + answer.num_tokens
            num_prefilled += 0 if self.setting.resumes and answer.num_tokens else context
            end = self.now + answer.length - answer.num_tokens
            heapq.heappush(self.ends, (end, len(self.begun), self.now, answer))
            self.begun.append(answer)
            self.num_context += context
        if num_prefilled:
            self.sums.append((0, 0, 0, num_prefilled))

    def next_end(self, step: int) -> None:
        """Decodes until an answer ends, with all that there are rows for."""
        self._fill()
        num_rows, num_steps = len(self.ends), self.ends[0][0] - self.now
        read = self._padded() if self.setting.pads else self.num_context
        grown = num_rows * num_steps * (num_steps + 1) // 2
        self.sums.append((num_steps, num_rows * num_steps, read * num_steps + grown, 0))
        self.now += num_steps
        self.num_context += num_rows * num_steps
        while self.ends and self.ends[0][0] == self.now:
            _, _, start, answer = heapq.heappop(self.ends)
            self._write(answer, self.now - start, step)
            answer.group.num_open -= 1
            self.num_context -= self.setting.prompt_tokens + answer.length

    def _padded(self) -> int:
        """What the next step reads but for what it adds itself."""
        contexts = {
            answer: self.setting.prompt_tokens + answer.num_tokens + self.now - start
            for _, _, start, answer in self.ends
        }
        parts = [[contexts[a] for a in contexts if (a in self.far) is is_far] for is_far in (True, False)]
        return sum(len(part) * max(part) for part in parts if part)

    def stop(self, step: int) -> None:
        for _, _, start, answer in self.ends:
            self._write(answer, self.now - start, step)

    def _write(self, answer: Answer, num_tokens: int, step: int) -> None:
        answer.num_tokens += num_tokens
        answer.by_step[step] = num_tokens
