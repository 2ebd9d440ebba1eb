"""Where prompts come from: the one interface of all sources.

A source is a pure function of its seed and an ordinal, so the ledger's count of what was drawn is the only data cursor
there is: after a restart nothing is skipped and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Problem:
    """One prompt, as text or as chat messages, and what its reward needs to know."""

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-like facts, handed to the reward."""


class Source(Protocol):
    @property
    def name(self) -> str:
        """Tells sources of one run apart; stored with every group."""
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
        """The ordinal-th training problem; any ordinal >= 0 is allowed, epochs follow one another."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Up to `count` problems that training never draws, the same ones each time."""
        ...
