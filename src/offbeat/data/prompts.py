"""Turns problems into token ids, once: sampling and training use these ids and never the text again.

A text prompt goes through the chat template when its source says so, or says nothing and the model has one; chat
messages always do. Plain text gets the tokenizer's leading special tokens, but no trailing ones. A prompt that is too
long is refused with its source, ordinal and length; it is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
import numpy as np
from blake3 import blake3

from offbeat.data.source import Problem
from offbeat.errors import UserError


class Rendered(Protocol):
    """The part of a source that rendering needs; `WeightedSource` has it."""

    @property
    def name(self) -> str: ...

    @property
    def chat(self) -> bool | None: ...

    @property
    def system(self) -> str | None: ...


class Renderer:
    """Renders with a transformers tokenizer. `template_hash` identifies the chat template."""

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
        """The problem's prompt as int32 token ids."""
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
                f"task.system of {source.name}: needs a chat template and task.chat; its prompts are plain text"
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
        # A tokenizer that ends every text would end the answer before it begins.
        ends_it = ids[-1:] == [self.tokenizer.eos_token_id] and ids[-1 - len(bare) : -1] == bare
        return ids[:-1] if ends_it else ids

    def _check_length(self, length: int, place: str) -> None:
        if length == 0:
            raise UserError(f"{place}: its prompt has no token")
        if length > self.max_prompt_tokens:
            raise UserError(
                f"{place}: its prompt has {length} tokens, over rollout.max_prompt_tokens = {self.max_prompt_tokens}; "
                f"raise that to {length} or more, or leave the problem out"
            )
        if self.window_tokens is not None and length + self.max_new_tokens > self.window_tokens:
            raise UserError(
                f"{place}: its prompt has {length} tokens, which with rollout.max_new_tokens = {self.max_new_tokens} "
                f"is over the model's window of {self.window_tokens}; lower that or leave the problem out"
            )


def _with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> Sequence[Mapping[str, Any]]:
    """A system message in front, unless the problem brings its own."""
    if system is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _template_of(tokenizer: Any) -> str | None:
    """A tokenizer's chat template; of several named ones, the default."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, Mapping) else template
