"""Prompts: the problems of a source, and their token ids. Sampling and training use only the ids, never the text.

A source is a pure function of its seed and an ordinal, so the ledger's count of draws is the only data cursor: after a
restart no problem is skipped or repeated.

A text prompt goes through the chat template if its source's `chat` is True, or if `chat` is None and the model has a
template; chat messages always do. Plain text gets the tokenizer's leading special tokens, but no trailing end token. A
prompt that is too long is refused, with its source, ordinal and length; it is never cut.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jinja2
import numpy as np
from blake3 import blake3

from offbeat.errors import UserError


class Rendered(Protocol):
    """The properties of a problem's source that `Renderer` reads; `WeightedSource` has them."""

    @property
    def name(self) -> str: ...

    @property
    def chat(self) -> bool | None: ...

    @property
    def system(self) -> str | None: ...


class Renderer:
    """Turns prompts into token ids with a transformers tokenizer. `template_hash` identifies the chat template; None:
    no template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int = 0,
        window_tokens: int | None = None,
    ):
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self.max_new_tokens, self.window_tokens = max_new_tokens, window_tokens
        self.template = _template_of(tokenizer)
        self.template_hash = blake3(self.template.encode()).hexdigest() if self.template else None

    def tokens(self, source: Rendered, problem: Problem, ordinal: int) -> np.ndarray:
        """Returns the problem's prompt as int32 token ids; `ordinal` is only used in error messages."""
        place = f"{source.name}, problem {ordinal}"
        if isinstance(problem.prompt, str):
            chat = self.template is not None if source.chat is None else source.chat
            messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": problem.prompt}]
        else:
            chat, messages = True, problem.prompt
        if chat:
            ids = self._chat(_with_system(messages, source.system), place)
        elif source.system is not None:
            raise UserError(
                f"task.system of {source.name}: it needs task.chat and a chat template; these prompts are plain text"
            )
        else:
            ids = self._raw(str(problem.prompt))
        self._check_length(len(ids), place)
        return np.asarray(ids, np.int32)

    def _chat(self, messages: Sequence[Mapping[str, Any]], place: str) -> list[int]:
        if self.template is None:
            raise UserError(
                f"{place}: chat messages need a chat template and the tokenizer has none; set model.chat_template"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"{place}: the chat template refuses its messages: {' '.join(str(error).split())}"
            ) from error
        # The template writes its own special tokens; adding the tokenizer's would double the first.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _raw(self, text: str) -> list[int]:
        ids, bare = self.tokenizer(text)["input_ids"], self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # Some tokenizers append an end token to every text, which would end the answer before it begins.
        ends_it = ids[-1:] == [self.tokenizer.eos_token_id] and ids[-1 - len(bare) : -1] == bare
        return ids[:-1] if ends_it else ids

    def _check_length(self, length: int, place: str) -> None:
        if length == 0:
            raise UserError(f"{place}: its prompt is empty; a prompt needs at least one token")
        if length > self.max_prompt_tokens:
            raise UserError(
                f"{place}: its prompt has {length} tokens, over rollout.max_prompt_tokens = {self.max_prompt_tokens}; "
                f"raise that to {length} or more, or leave the problem out"
            )
        if self.window_tokens is not None and length + self.max_new_tokens > self.window_tokens:
            raise UserError(
                f"{place}: its prompt has {length} tokens, which with rollout.max_new_tokens = {self.max_new_tokens} "
                f"is over the model's window of {self.window_tokens}; lower max_new_tokens or leave the problem out"
            )


def _with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> Sequence[Mapping[str, Any]]:
    """Returns `messages` with a system message in front, unless they begin with their own."""
    if system is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _template_of(tokenizer: Any) -> str | None:
    """Returns the tokenizer's chat template (the default one if it has several); None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, Mapping) else template


@dataclass(frozen=True)
class Problem:
    """A prompt, as text or as chat messages, with the expected answer, if any, and further data for its reward."""

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-like facts about the problem, for the reward."""


class PromptSource(Protocol):
    @property
    def name(self) -> str:
        """Name of the source, unique within a run; stored with every group."""
        ...

    @property
    def default_reward(self) -> str | None:
        """Reward used if the configuration does not name one; None: the user must choose one."""
        ...

    @property
    def chat(self) -> bool | None:
        """Whether a text prompt goes through the chat template; None: only if the model has one."""
        ...

    def problem(self, ordinal: int) -> Problem:
        """Returns the training problem at `ordinal`, which may be any number from 0: a finite source starts another
        epoch."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Returns up to `count` problems that training never draws, always the same ones."""
        ...


def plain(value: Any) -> Any:
    """Converts a value to JSON types. Bytes, such as images, become None, because they are too large for `info`."""
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
    """Converts an answer to text: 42 becomes "42", a list becomes JSON; None stays None."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(plain(value)) if isinstance(value, Mapping | Sequence) else str(value)


def prompt_messages(value: Any, place: str) -> list[Mapping[str, Any]]:
    """Checks that `value` is a list of chat messages and returns them as JSON types; `place` is for error messages."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{place} is {value!r:.60}; chat messages are a list of {{role, content}}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{place} holds {message!r:.60}; a chat message needs role and content")
    return [plain(message) for message in value]


def prompt_text(value: Any, place: str) -> str:
    """Checks that `value` is a non-empty text and returns it; `place` is for error messages."""
    if isinstance(value, str) and value:
        return value
    kind = "empty" if value == "" else f"{value!r:.60}, a {type(value).__name__}"
    raise UserError(f"{place} is {kind}; a prompt must be text, and not empty")
