"""One task and its trajectory on the screen: texts coloured by version, log-probs, rewards and history."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from offbeat.ledger.look import Look, Stretch
from offbeat.trajectory import Segment, Trajectory

Words = Callable[[np.ndarray], str]
"""From token ids to text."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""Of sampled segments, in turn: neighbours of different versions never share one."""


def as_data(look: Look, words: Words, with_tokens: bool) -> dict[str, Any]:
    """Everything that is known, for a program."""
    segments = [] if look.trajectory is None else list(look.trajectory.segments)
    texts = [] if look.trajectory is None else _pieces(look.trajectory, words)
    told = []
    for place, stretch in enumerate(look.stretches):
        part: dict[str, Any] = {
            "start": stretch.start,
            "num_tokens": stretch.num_tokens,
            "version": stretch.version,
            "step": stretch.step,
            "is_abandoned": stretch.is_abandoned,
            "staleness": stretch.staleness,
        }
        if segments:
            part |= {"worker": segments[place].worker, "engine": segments[place].engine}
            part |= {"text": texts[place], "logprobs": _summary(segments[place].logprobs)}
        if segments and with_tokens:
            logprobs = segments[place].logprobs
            part["tokens"] = segments[place].tokens.tolist()
            part["token_logprobs"] = None if logprobs is None else logprobs.tolist()
        told.append(part)
    return {
        "task": look.task,
        "group": look.group,
        "ordinal": look.ordinal,
        "member": look.member,
        "purpose": look.purpose,
        "source": look.source,
        "state": look.state,
        "reason": look.reason,
        "group_state": look.group_state,
        "group_reason": look.group_reason,
        "step": look.step,
        "prompt": words(look.prompt),
        "problem": look.problem,
        "response": None if look.trajectory is None else words(look.trajectory.tokens),
        "is_partial": look.trajectory is not None and look.trajectory.is_partial,
        "is_pruned": look.is_pruned,
        "segments": told,
        "reward": look.reward,
        "rewards": [
            {"name": part.name, "value": part.value, "position": part.position, "weight": part.weight}
            for part in look.rewards
        ],
        "error": look.error,
        "history": [{"at": event.at, "what": event.what} for event in look.history],
    }


def printable(text: str) -> str:
    """A text without what would command a terminal: a model may well say it."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def display(look: Look, words: Words, with_tokens: bool) -> None:
    """Prints it; colours only where there is a terminal."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for line in _lines(look, words, with_tokens):
        console.print(line)


def _lines(look: Look, words: Words, with_tokens: bool) -> Iterator[Text | str]:
    state = look.state + (f" ({look.reason})" if look.reason else "")
    group = look.group_state + (f" ({look.group_reason})" if look.group_reason else "")
    yield f"task {look.task}: {state}; member {look.member} of group {look.group}, which is {group}"
    yield f"for {look.purpose}, from {look.source!r}, ordinal {look.ordinal}"
    yield from ("", _title("prompt"), printable(words(look.prompt)), "")
    yield _title("response" if look.trajectory is None or not look.trajectory.is_partial else "response so far")
    yield _response(look, words)
    yield ""
    for stretch, segment in zip(look.stretches, _segments(look), strict=True):
        yield Text("  ").append(_about(stretch, segment), style=_style(look, stretch))
        if with_tokens and segment is not None:
            yield f"    tokens    {segment.tokens.tolist()}"
            if segment.logprobs is not None:
                yield f"    log-probs {[round(float(value), 4) for value in segment.logprobs]}"
    yield from ("", _title("reward"))
    yield from _reward(look)
    yield from ("", _title("history"))
    for event in look.history:
        yield f"  {_moment(event.at):<20}{printable(event.what)}"


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _segments(look: Look) -> list[Segment | None]:
    if look.trajectory is None:
        return [None] * len(look.stretches)
    return list(look.trajectory.segments)


def _response(look: Look, words: Words) -> Text | str:
    if look.trajectory is None:
        return "(its bytes were pruned)" if look.is_pruned else "(none yet)"
    text = Text()
    for stretch, piece in zip(look.stretches, _pieces(look.trajectory, words), strict=True):
        text.append(printable(piece), style=_style(look, stretch))
    return text


def _pieces(trajectory: Trajectory, words: Words) -> list[str]:
    """The segments' texts; a character whose tokens lie in two of them belongs to the second."""
    pieces, before = [], ""
    for segment in trajectory.segments:
        until = words(trajectory.tokens[: segment.end])
        before = before.rstrip("\ufffd") if not until.startswith(before) else before
        pieces.append(until[len(before) :])
        before = until
    return pieces


def _style(look: Look, stretch: Stretch) -> str:
    numbers = sorted({s.version for s in look.stretches if s.version is not None})
    return "dim" if stretch.version is None else COLOURS[numbers.index(stretch.version) % len(COLOURS)]


def _about(stretch: Stretch, segment: Segment | None) -> str:
    place = f"{stretch.start}-{stretch.start + stretch.num_tokens - 1}"
    if stretch.version is None:
        return f"{place}: given"
    parts = [
        f"{place}: version {stretch.version} of step {stretch.step}" + (", abandoned" if stretch.is_abandoned else "")
    ]
    if stretch.staleness is not None:
        parts.append(f"staleness {stretch.staleness}")
    if segment is not None:
        parts.append(f"by {segment.worker or 'nobody named'}" + (f" ({segment.engine})" if segment.engine else ""))
        summary = _summary(segment.logprobs)
        if summary is not None:
            parts.append("log-probs mean {mean:.3f}, least {least:.3f}".format(**summary))
    return ", ".join(parts)


def _summary(logprobs: np.ndarray | None) -> dict[str, float] | None:
    if logprobs is None or not len(logprobs):
        return None
    return {"mean": float(logprobs.mean()), "least": float(logprobs.min())}


def _reward(look: Look) -> list[str]:
    if look.error is not None:
        return [f"  failed: {printable(look.error)}"]
    if look.reward is None:
        return ["  none yet"]
    parts = [
        f"    {part.value:g} {part.name}"
        + ("" if part.position < 0 else f" at {part.position}")
        + ("" if part.weight == 1 else f", counts {part.weight:g} times")
        for part in look.rewards
    ]
    return [f"  {look.reward:g}", *(parts if len(parts) > 1 or look.rewards[0].weight != 1 else [])]


def _moment(at: float | None) -> str:
    return "" if at is None else f"{datetime.datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
