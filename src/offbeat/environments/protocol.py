"""The protocol between an environment and the worker that runs episodes in it.

An environment is a class of the user's with `begin` and `step`; a tool is a function with type hints and a docstring.
Nothing needs to be inherited, and every method may be plain or async. An object lives for one episode: it is made with
`task.options` as arguments, `begin` is called once, `step` once for each turn of the model, and `close`, if there is
one, at the end. All values that cross this border are JSON-like.

    def calculator(expression: str) -> str:                  # tools = ["calculator.py:calculator"]
        \"\"\"Works out sums and products, such as 37*48.\"\"\"

    class Guess:                                             # source = "environment", path = "guess.py:Guess"
        deterministic = True

        def begin(self, problem, seed):
            self.secret = random.Random(seed).randint(1, 31)
            return "Guess a number from 1 to 31."

        def step(self, turn):
            if int(turn.text) == self.secret:
                return Done(1.0)
            return "higher" if int(turn.text) < self.secret else "lower"

What `step` or a tool raises is told to the model as an error. What `begin` or the class raises fails the attempt.
Episodes that start from the same problem and seed must start in the same state: the members of a group are compared
with each other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

Json = Any
"""A value of JSON's types: None, bool, int, float, str, a list, or a dict with str keys."""
Message = Mapping[str, Json]
"""A chat message: `role`, `content` and what else a chat template reads."""
Tool = Callable[..., Any]
"""A function with type hints and a docstring, plain or async. Its result is turned into text for the model."""


class EpisodeFailed(Exception):
    """Raised by an environment or a tool that cannot go on, such as one whose server has died. It fails the attempt at
    the episode, and is no mistake of the model's, which is not told of it."""


class CallStatus(StrEnum):
    """Outcome of reading a call that the model wrote."""

    OK = "ok"
    """The call could be read and names a tool. What the tool made of it stands in the observation."""
    INVALID_JSON = "invalid_json"
    """The arguments are not JSON, where the format wants JSON."""
    UNCLOSED = "unclosed"
    """The call begins but does not end."""
    NO_NAME = "no_name"
    """The call names no tool."""
    MALFORMED = "malformed"
    """The call can be read, but its arguments do not fit the tool's parameters, or are no mapping."""
    UNKNOWN_TOOL = "unknown_tool"
    """The call names a tool that the episode does not have."""


@dataclass(frozen=True)
class Call:
    """A call of a tool, as read from a finished turn."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    status: CallStatus = CallStatus.OK
    problem: str = ""
    """Mistake in the call, in words that the model is told; "" if `status` is OK."""
    text: str = ""
    """The call as the model wrote it."""


@dataclass(frozen=True)
class Turn:
    """A finished turn of the model."""

    number: int
    """Number of the turn in its episode, from 0."""
    text: str
    """Text of the turn without its calls and without special tokens."""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Opening:
    """Result of `begin`: text to append to the prompt, and tools that this episode has beside those of its task.
    A plain text or a list of messages stands for an opening without tools, None for one without anything."""

    content: str | Sequence[Message] = ""
    tools: Sequence[Tool] = ()


@dataclass(frozen=True)
class Reply:
    """Result of `step` if the episode goes on. A plain text or a list stands for a reply without a reward."""

    content: str | Sequence[str] = ""
    """One observation, or a list with one for each call of the turn."""
    reward: float = 0.0
    """Reward of this turn; it counts at the turn's last token."""


@dataclass(frozen=True)
class Done:
    """Result of `step` if the episode is over."""

    reward: float | Mapping[str, float] = 0.0
    """Reward at the episode's end, or several rewards by name."""
    state: Mapping[str, Json] = field(default_factory=dict)
    """Facts about the end that a reward function gets as `state`."""


Begun = Opening | str | Sequence[Message] | None
Stepped = Reply | Done | str | Sequence[str] | None


@runtime_checkable
class Environment(Protocol):
    """The methods that every environment has. Optional are `close()`, `save() -> bytes` and `load(data: bytes)`, which
    replaces `begin` and the steps so far, and the class facts of `Facts`."""

    def begin(self, problem: Mapping[str, Json], seed: int) -> Begun | Awaitable[Begun]:
        """Starts the episode. `problem` has the keys `prompt`, `answer` and `info`; `seed` is the same for all members
        of a group."""
        ...

    def step(self, turn: Turn) -> Stepped | Awaitable[Stepped]: ...


@dataclass(frozen=True)
class Facts:
    """Class attributes by which an environment, or attributes by which a tool, says what may be done with it."""

    deterministic: bool = False
    """Whether equal seeds and turns give equal replies, so that an episode can be replayed from its tokens."""
    isolated: bool = False
    """Whether each episode needs a process of its own."""
    sequential: bool = False
    """Whether the calls of one turn must run one after another, in their order."""
    stop_tokens: tuple[str, ...] = ()
    """Texts of single tokens that end a turn, beside the end-of-turn tokens of the model."""
    can_save: bool = False
    """Whether it has `save` and `load`."""


def facts_of(part: Any) -> Facts:
    """Returns the facts about an environment class, an environment object or a tool."""
    stop_tokens = getattr(part, "stop_tokens", ())
    return Facts(
        deterministic=bool(getattr(part, "deterministic", False)),
        isolated=bool(getattr(part, "isolated", False)),
        sequential=bool(getattr(part, "sequential", False)),
        stop_tokens=(stop_tokens,) if isinstance(stop_tokens, str) else tuple(stop_tokens),
        can_save=callable(getattr(part, "save", None)) and callable(getattr(part, "load", None)),
    )
