"""Prompts: the problems of a source, and their token ids. Sampling and training use only the ids, never the text.

A source is a pure function of its seed and an ordinal (number of a problem, from 0). So the ledger's count of draws is
the only data cursor: after a restart no problem is skipped or repeated.

Chat messages always go through the chat template. A text prompt goes through it if its source's `chat` is True, or if
`chat` is None and the model has a template. Other text gets the tokenizer's leading special tokens, but no end token.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jinja2
import numpy as np
from blake3 import blake3

from offbeat.errors import UserError
from offbeat.spelling import a_kind


class Rendered(Protocol):
    """The properties of a problem's source that `Renderer` reads; `WeightedSource` has them."""

    @property
    def name(self) -> str: ...

    @property
    def chat(self) -> bool | None: ...

    @property
    def system(self) -> str | None: ...

    @property
    def is_opened(self) -> bool: ...


class BadPrompt(UserError):
    """Raised for a prompt that is too long or empty, or that the chat template refuses. Other prompts of its source may
    be fine. `what` is the message without the remedy."""

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what


class Renderer:
    """Turns prompts into token ids with a transformers tokenizer. `template_hash` identifies the chat template; None:
    no template. `window_tokens` limits prompt and answer together; None: no limit. With `cuts`, the beginning of a
    prompt that is too long is cut off."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int = 0,
        window_tokens: int | None = None,
        cuts: bool = False,
        tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ):
        """`tools` are the JSON schemas of the tools by source, which the chat template shows to the model."""
        self.tools = tools or {}
        self.tokenizer, self.max_prompt_tokens, self.cuts = tokenizer, max_prompt_tokens, cuts
        self.max_new_tokens, self.window_tokens = max_new_tokens, window_tokens
        self.template = _template_of(tokenizer)
        self.template_hash = blake3(self.template.encode()).hexdigest() if self.template else None

    def tokens(self, source: Rendered, problem: Problem, ordinal: int) -> np.ndarray:
        """Returns the problem's prompt as int32 token ids; raises `BadPrompt` if this prompt cannot be used. `ordinal`
        is only used in error messages."""
        place = problem.place or f"{source.name}, problem {ordinal}"
        ids = self._ids(source, problem.prompt, place)
        if self.cuts and len(ids) > self.max_prompt_tokens:
            ids = self._cut(source, problem.prompt, place) or ids
        self._check_length(len(ids), place)
        return np.asarray(ids, np.int32)

    def lengths(self, source: Rendered, problems: Sequence[Problem]) -> list[int]:
        """Returns the number of tokens of each problem's prompt before any cut. Tokenises all together, which is much
        faster. Raises `BadPrompt` for an empty prompt."""
        written = [self._written(source, problem.prompt, problem.place) for problem in problems]
        if source.is_opened:
            written = [(text.partition(OPENING)[0], is_chat) for text, is_chat in written]
        found = [0] * len(written)
        for is_chat in {is_chat for _, is_chat in written}:
            chosen = [i for i, one in enumerate(written) if one[1] is is_chat]
            texts = [written[i][0] for i in chosen]
            rows = self.tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]
            for i, ids in zip(chosen, rows, strict=True):
                found[i] = len(ids)
        for i, problem in enumerate(problems):
            if not 0 < found[i] <= self.max_prompt_tokens:  # may include an end token that `_raw` takes off
                found[i] = len(self._ids(source, problem.prompt, problem.place))
            if not found[i]:
                raise BadPrompt(empty(problem.place))
        return found

    def ascii_room(self, source: Rendered) -> int:
        """Returns the number of characters up to which an ASCII text prompt is certainly not too long, because each
        token covers at least one character. Returns 0 if the tokenizer or the template allows no such conclusion."""
        if not _covers_ascii(self.tokenizer):
            return 0
        mark = "offbeat"
        text, is_chat = self._written(source, mark, source.name)
        before, found, after = text.partition(mark)
        if not found or mark in after:
            return 0
        added = 0 if is_chat else self.tokenizer.num_special_tokens_to_add()
        return max(0, self.max_prompt_tokens - len((before + after).encode()) - added)

    def _ids(self, source: Rendered, prompt: Prompt, place: str) -> list[int]:
        text, is_chat = self._written(source, prompt, place)
        if source.is_opened:
            text = text.partition(OPENING)[0]
        # The template writes its own special tokens; adding the tokenizer's would double the first.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if is_chat else self._raw(text)

    def _cut(self, source: Rendered, prompt: Prompt, place: str) -> list[int] | None:
        """Returns the tokens of a prompt after removing as many characters as needed to make it fit. They are removed
        from the beginning of the prompt or, in a chat, of the last message whose content is text. Returns None if the
        prompt is too long even without that text."""
        if isinstance(prompt, str):
            text = prompt
        else:
            last = max((i for i, m in enumerate(prompt) if isinstance(m["content"], str)), default=None)
            if last is None:
                return None
            text = prompt[last]["content"]

        def ids(start: int) -> list[int]:
            end: Prompt = text[start:]
            if not isinstance(prompt, str):
                end = [{**message, "content": end} if i == last else message for i, message in enumerate(prompt)]
            return self._ids(source, end, place)

        start = bisect_left(range(len(text)), True, key=lambda start: len(ids(start)) <= self.max_prompt_tokens)
        return ids(start) if start < len(text) else None

    def after_opening(self, source: Rendered) -> tuple[str, bool]:
        """Returns what stands between the environment's opening and the first turn, and whether a chat template wrote
        it."""
        text, is_chat = self._written(source, "", source.name)
        return text.partition(OPENING)[2], is_chat

    def _written(self, source: Rendered, prompt: Prompt, place: str) -> tuple[str, bool]:
        """Returns the text to tokenise, and whether a chat template wrote it. The place where an environment adds its
        opening is marked by `OPENING`."""
        if source.is_opened:
            prompt = f"{prompt}{OPENING}"
        if not isinstance(prompt, str):
            return self._chat(_with_system(prompt, source.system), place, source.name), True
        if self.template is not None if source.chat is None else source.chat:
            messages = _with_system([{"role": "user", "content": prompt}], source.system)
            return self._chat(messages, place, source.name), True
        if source.system is not None:
            raise UserError(
                f"task.system of {source.name}: a system message needs task.chat and a chat template, but these "
                "prompts are plain text; set task.chat, or leave task.system out"
            )
        return prompt, False

    def _chat(self, messages: Sequence[Mapping[str, Any]], place: str, source: str) -> str:
        if self.template is None:
            raise UserError(
                f"{place}: chat messages need a chat template and the tokenizer has none; set model.chat_template"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=True,
                **({"tools": list(self.tools[source])} if source in self.tools else {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadPrompt(
                f"{place}: the chat template refuses its messages: {' '.join(str(error).split())}"
            ) from error

    def _raw(self, text: str) -> list[int]:
        ids, bare = self.tokenizer(text)["input_ids"], self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # Some tokenizers append an end token to every text, which would end the answer before it begins.
        ends_it = ids[-1:] == [self.tokenizer.eos_token_id] and ids[-1 - len(bare) : -1] == bare
        return ids[:-1] if ends_it else ids

    def _check_length(self, length: int, place: str) -> None:
        if length == 0:
            raise BadPrompt(empty(place))
        if length > self.max_prompt_tokens:
            raise BadPrompt(too_long(place, length, self.max_prompt_tokens), f"raise this limit, or set {SKIP_OR_CUT}")
        if self.window_tokens is not None and length + self.max_new_tokens > self.window_tokens:
            raise BadPrompt(
                f"{place}: its prompt has {length} tokens, which together with rollout.max_new_tokens = "
                f"{self.max_new_tokens} is over the model's window of {self.window_tokens}",
                "lower rollout.max_new_tokens or leave the problem out",
            )


def empty(place: str) -> str:
    return f"{place}: its prompt is empty; a prompt needs at least one token"


SKIP_OR_CUT = 'rollout.long_prompts = "skip" or "cut"'


def too_long(place: str, length: int, limit: int) -> str:
    return f"{place}: its prompt has {length} tokens, over rollout.max_prompt_tokens = {limit}"


OPENING = "offbeatopening"
"""Stands in a prompt for what the environment says first; the coordinator renders the prompt before it is known."""
KIND, ADDS_SPACE = re.compile(r'"type":"(\w+)"'), re.compile(r'"add_prefix_space":true')
KEEPS_ASCII = {"Sequence", "NFC", "NFD", "NFKC", "NFKD"}
"""Kinds of text normalisation that leave ASCII as it is."""


def _covers_ascii(tokenizer: Any) -> bool:
    """Returns whether each token of an ASCII text certainly covers at least one of its characters. It does if the
    tokenizer neither rewrites the text nor inserts spaces before it splits the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    normalizer = "null" if backend.normalizer is None else backend.normalizer.__getstate__().decode()
    splitter = "" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__().decode()
    kinds = set(KIND.findall(normalizer))
    return kinds <= KEEPS_ASCII and "Metaspace" not in splitter and not ADDS_SPACE.search(splitter)


def _with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> Sequence[Mapping[str, Any]]:
    """Returns `messages` with a system message in front, unless they begin with their own."""
    if system is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _template_of(tokenizer: Any) -> str | None:
    """Returns the tokenizer's chat template (the default one if it has several); None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, Mapping) else template


Prompt = str | Sequence[Mapping[str, Any]]
"""A prompt as text or as chat messages."""


@dataclass(frozen=True)
class Problem:
    """A prompt with the expected answer, if any, and further data for its reward."""

    prompt: Prompt
    answer: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-like facts about the problem, for the reward."""
    place: str = field(default="", compare=False)
    """Where the problem is, such as file and line, for error messages."""


class PromptSource(Protocol):
    @property
    def name(self) -> str:
        """Name of the source, unique within a run; stored with every group."""
        ...

    @property
    def default_reward(self) -> str | None:
        """Name of the reward to use if the configuration names none; None: the user must choose a reward."""
        ...

    @property
    def chat(self) -> bool | None:
        """Whether a text prompt goes through the chat template; None: only if the model has a template."""
        ...

    def problem(self, ordinal: int) -> Problem:
        """Returns the training problem at `ordinal`, which may be any number from 0, because a finite source starts
        over with another epoch."""
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
        raise UserError(f"{place} is {value!r:.60}; give a list of chat messages, {{role, content}}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{place} holds {message!r:.60}; a chat message needs role and content")
    return [plain(message) for message in value]


def prompt_text(value: Any, place: str) -> str:
    """Checks that `value` is a non-empty text and returns it; `place` is for error messages."""
    if isinstance(value, str) and value:
        return value
    kind = "empty" if value == "" else f"{value!r:.60}, {a_kind(value)}"
    raise UserError(f"{place} is {kind}; a prompt must be text, and not empty")
