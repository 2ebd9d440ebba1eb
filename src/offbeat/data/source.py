"""Prompt sources: the interface that all of them share.

A source is a pure function of its seed and an ordinal, so the ledger's count of what was drawn is the only data cursor
there is: after a restart nothing is skipped and nothing comes twice.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from offbeat.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One prompt, as text or as chat messages, and the facts that its reward receives."""

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-like facts for the reward."""


class PromptSource(Protocol):
    @property
    def name(self) -> str:
        """Unique within a run; stored with every group."""
        ...

    @property
    def default_reward(self) -> str | None:
        """The reward used when the configuration names none; None where the user must choose one."""
        ...

    @property
    def chat(self) -> bool | None:
        """Whether a text prompt goes through the chat template; None: whenever the model has one."""
        ...

    def problem(self, ordinal: int) -> Problem:
        """The training problem at `ordinal`, which may be any number from 0 on: epochs follow one another."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Up to `count` problems that training never draws, the same ones each time."""
        ...


def plain(value: Any) -> Any:
    """A value as JSON can hold it. Bytes, such as images, become None: they are too large for a reward's facts."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def answer_text(value: Any) -> str | None:
    """An answer as text: 42 is "42", a list is its JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(plain(value)) if isinstance(value, Mapping | Sequence) else str(value)


def prompt_messages(value: Any, place: str) -> list[Mapping[str, Any]]:
    """Chat messages, checked."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{place} is {value!r:.60}; chat messages are a list of {{role, content}}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{place} holds {message!r:.60}; a chat message needs role and content")
    return [plain(message) for message in value]


def prompt_text(value: Any, place: str) -> str:
    """A prompt as text, checked."""
    if isinstance(value, str) and value:
        return value
    kind = "empty" if value == "" else f"{value!r:.60}, a {type(value).__name__}"
    raise UserError(f"{place} is {kind}; a prompt must be text")
