"""Lengths of prompts, measured before a run starts: all rows of files and datasets, a sample of other sources.

The first `MEASURED` rows are always tokenised. A later row is tokenised only if it has so many characters that it might
be too long. So a file of a million short rows takes seconds. Other sources make prompts on demand. A prompt that is too
long and not in the sample is left out when it is drawn, or cut if `rollout.long_prompts` says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offbeat.data.files import FileSource
from offbeat.data.mixture import Mixture, WeightedSource
from offbeat.data.prompts import SKIP_OR_CUT, Problem, Renderer, too_long
from offbeat.errors import UserError

MEASURED = 20_000
"""Number of first rows that are always tokenised, so that the longest prompt of a usual file is found."""
PIECE = 1000
"""Number of prompts that are tokenised together, on all cores."""
SAMPLE, SAMPLE_S = 64, 3.0
"""Limits for the sample of a source that makes problems on demand: number of problems, and seconds to make them."""


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of the prompts of one source."""

    source: str
    num_prompts: int
    """Number of rows, including held-out ones, or the size of the sample."""
    is_sample: bool
    longest: int
    """Tokens of the longest prompt that was tokenised."""
    num_measured: int
    num_long: int = 0
    first_long: str = ""
    """Place of the first prompt that is too long, such as file and line; `first_tokens` is its length."""
    first_tokens: int = 0

    def line(self, policy: str) -> str:
        """Returns a line of text about the prompts. `policy` is `rollout.long_prompts`, which decides what happens to
        long prompts."""
        count = f"a sample of {self.num_prompts:,} prompts" if self.is_sample else f"{self.num_prompts:,} rows"
        text = f"{self.source}: {count}, longest {self.longest:,} tokens"
        if self.num_measured < self.num_prompts:
            text += f" among the {self.num_measured:,} measured (the others are certainly short enough)"
        if self.num_long:
            what = "left out" if policy == "skip" else "cut"
            number = "1 is" if self.num_long == 1 else f"{self.num_long:,} are"
            text += f"; {number} over rollout.max_prompt_tokens and {what}, the first at {self.first_long}"
        return text


def measure_prompts(mixture: Mixture, renderer: Renderer, held_out: int) -> list[PromptLengths]:
    """Measures the prompts of every source, including those of `held_out` (a number) problems for evaluation. Raises
    `UserError` for a row that no value of `rollout.long_prompts` makes usable, such as one that the chat template
    refuses."""
    return [_measure(member, _problems(member, mixture, held_out), renderer) for member in mixture.members.values()]


def refuse_long(found: list[PromptLengths], policy: Literal["error", "skip", "cut"], limit: int) -> None:
    """Raises `UserError` if prompts are too long and `policy` (`rollout.long_prompts`) is "error", or is "skip" and
    would leave out all prompts of a file. `limit` is `rollout.max_prompt_tokens`."""
    for one in found:
        if not one.num_long or policy == "cut":
            continue
        row = "prompts of a sample" if one.is_sample else "rows"
        verb = "is" if one.num_long == 1 else "are"
        count = f"{one.num_long:,} of {one.num_prompts:,} {row} {verb} too long"
        if policy == "error":
            raise UserError(
                f"{too_long(one.first_long, one.first_tokens, limit)}; {count}; raise this limit to {one.longest} or "
                f"more, or set {SKIP_OR_CUT}"
            )
        if one.num_long == one.num_prompts and not one.is_sample:
            raise UserError(
                f'{too_long(one.first_long, one.first_tokens, limit)}; with rollout.long_prompts = "skip" no row is '
                "left; raise the limit"
            )


def _problems(member: WeightedSource, mixture: Mixture, held_out: int) -> Iterator[Problem]:
    if isinstance(member.source, FileSource):
        yield from member.source.every_prompt()
        return
    deadline_s = time.monotonic() + SAMPLE_S
    for ordinal in range(SAMPLE):
        yield _placed(member.source.problem(ordinal), f"{member.name}, problem {ordinal}")
        if time.monotonic() > deadline_s:
            break
    own = [problem for source, problem in mixture.held_out(held_out) if source is member] if held_out else []
    for number, problem in enumerate(own):
        yield _placed(problem, f"{member.name}, held-out problem {number}")


def _placed(problem: Problem, place: str) -> Problem:
    return Problem(problem.prompt, place=problem.place or place)


def _measure(member: WeightedSource, problems: Iterator[Problem], renderer: Renderer) -> PromptLengths:
    found = PromptLengths(member.name, 0, not isinstance(member.source, FileSource), 0, 0)
    room, num_prompts, piece = renderer.ascii_room(member), 0, list[Problem]()
    for num_prompts, problem in enumerate(problems, 1):
        if num_prompts <= MEASURED or not _is_short(problem, room):
            piece.append(problem)
        if len(piece) == PIECE:
            found, piece = _with(found, piece, member, renderer), []
    return replace(_with(found, piece, member, renderer), num_prompts=num_prompts)


def _is_short(problem: Problem, room: int) -> bool:
    return isinstance(problem.prompt, str) and len(problem.prompt) <= room and problem.prompt.isascii()


def _with(found: PromptLengths, piece: list[Problem], member: WeightedSource, renderer: Renderer) -> PromptLengths:
    """Returns the lengths `found` so far, with those of the prompts in `piece` added."""
    lengths = renderer.lengths(member, piece)
    long = [(problem.place, n) for problem, n in zip(piece, lengths, strict=True) if n > renderer.max_prompt_tokens]
    if long and not found.num_long:
        found = replace(found, first_long=long[0][0], first_tokens=long[0][1])
    return replace(
        found,
        longest=max([found.longest, *lengths]),
        num_measured=found.num_measured + len(piece),
        num_long=found.num_long + len(long),
    )
