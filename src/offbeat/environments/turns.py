"""The tokens between two sampled turns: results of tools or a message of the user, in the words of the chat template.

An episode is only ever added to. What the model sampled stays as it was sampled, also where the chat template would
write the conversation so far in another way: no sampled token is decoded and encoded again. To find out what the
template puts between two turns, a short made-up conversation is rendered, and what stands in it behind the made-up
answer is taken. So a turn's tokens take the same time however many turns went before.

A turn ends with a token, never with a text. That token stays in the episode as it was sampled, and what is added begins
right behind it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Any

import jinja2
import numpy as np

from offbeat.environments.calls import FORMATS, NO_CALLS, THINK, THOUGHT, CallFormat, TurnReader, recognise_format
from offbeat.environments.protocol import Call, Turn
from offbeat.environments.wire import PartInfo
from offbeat.errors import UserError

MARK = "offbeatanswer"
"""Made-up text of one word, which no template writes by itself."""
PROBE, PROBE_ARGUMENTS = "look_up", {"key": "some value"}
"""Made-up call, by which the format of calls is recognised."""
LEADS = (("system", "user"), ("user",), ("system",))
"""Roles of the messages in front of a made-up answer, to be tried in turn."""
MAX_TOKEN_CHARS = 64
"""Characters per token that are looked at when a text is shortened: a tool may return a megabyte."""
BEGUN_TAG = re.compile(r"[<\[{][^>\]}\s]*\Z")
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""Errors by which templates refuse a conversation."""


class TemplateProblem(UserError):
    """A chat template that cannot be used for an episode; the message is one line and names the remedy."""


@dataclass(frozen=True)
class Conversation:
    """A made-up conversation, in a form that a template accepts."""

    lead: tuple[str, ...]
    """Roles of the messages in front of the made-up answer."""
    has_text_arguments: bool = False
    """Whether arguments of calls are JSON texts, and not objects."""
    has_parts: bool = False
    """Whether contents are lists of parts, and not texts."""
    has_reasoning: bool = False
    calls_without_content: bool = False
    """Whether the content of an answer that calls tools is None, and not ""."""

    def start(self) -> list[dict[str, Any]]:
        return [self._message(role, "A question.") for role in self.lead]

    def answered(self, text: str) -> list[dict[str, Any]]:
        return [*self.start(), self._message("assistant", text)]

    def asked_again(self, text: str) -> list[dict[str, Any]]:
        return [*self.answered(MARK), self._message("user", text)]

    def called(self, names: Sequence[str]) -> list[dict[str, Any]]:
        arguments = json.dumps(PROBE_ARGUMENTS) if self.has_text_arguments else PROBE_ARGUMENTS
        calls = [
            {"id": call_id(i), "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name in enumerate(names)
        ]
        answer = self._message("assistant", None if self.calls_without_content else "", tool_calls=calls)
        return [*self.start(), {**answer, "reasoning_content": "A thought."} if self.has_reasoning else answer]

    def returned(self, names: Sequence[str], texts: Sequence[str]) -> list[dict[str, Any]]:
        pairs = enumerate(zip(names, texts, strict=True))
        return [self._message("tool", text, name=name, tool_call_id=call_id(i)) for i, (name, text) in pairs]

    def _message(self, role: str, text: str | None, **more: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": text}] if self.has_parts and text is not None else text
        return {"role": role, "content": content, **more}


def _behind_common(one: str, other: str) -> str:
    """Returns what follows in `other` where it stops being like `one`, with the whole of a tag that has begun there."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    at = sum(1 for _ in same)
    begun = BEGUN_TAG.search(other[:at])
    return other[begun.start() if begun else at :]


def call_id(index: int) -> str:
    """Returns the id of a call for templates that write one. Nine letters and digits are what Mistral's want."""
    return f"call{index:05}"


def _conversations_with_tools() -> Iterator[Conversation]:
    for as_text, reasons, without, lead in product((False, True), (False, True), (False, True), LEADS):
        yield Conversation(lead, as_text, has_reasoning=reasons, calls_without_content=without)


def _conversations() -> Iterator[Conversation]:
    for has_parts, lead in product((False, True), LEADS[:2]):
        yield Conversation(lead, has_parts=has_parts)


@dataclass(frozen=True)
class Written:
    """What a template writes behind a made-up answer."""

    closing: str
    """Text of the token with which the template ends the answer; "" if it ends an answer with nothing."""
    text: str
    """Everything behind that."""


class TurnTokens:
    """The tokens that a chat template puts between the turns of an episode.

    `tools` are the JSON schemas of the episode's tools. `call_format` is recognised from the template if it is None.
    `stop_ids` are the tokens that end a turn of this model anyway, and `stop_tokens` texts of further ones. Raises
    `TemplateProblem` if there are tools and the template has no place for them.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        call_format: CallFormat | None = None,
        stop_ids: Iterable[int] = (),
        stop_tokens: Iterable[str] = (),
    ):
        self.tokenizer, self.template, self.tools = tokenizer, template, [dict(tool) for tool in tools]
        self.call_format = call_format
        special = set(tokenizer.all_special_ids)
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        self._special = sorted((text for text, id in self._added.items() if id in special), key=len, reverse=True)
        self._for_messages = self._find_for_messages()
        self._for_results = None
        if tools:
            self._for_results = self._find_for_results()
            self.call_format = call_format or self._recognise(self._for_results)
        self.is_thinking = self._ends_in_thought()
        """Whether the template begins each answer inside a block of reasoning."""
        self.stop_ids = frozenset(stop_ids) | self._find_stops(stop_tokens)
        """Tokens that end a turn."""
        self._guarded = self._guard()

    def results(self, calls: Sequence[Call], texts: Sequence[str], stop: int | None = None) -> np.ndarray:
        """Returns the tokens of the results of calls, one text for each call, up to where the model goes on. `stop` is
        the token with which the model's turn ended."""
        hidden: dict[str, str] = {}
        shown = [self._hide(text, hidden) for text in texts]
        assert self._for_results is not None, "these turns have no tools"
        written = self._write_results(self._for_results, [call.name or PROBE for call in calls], shown)
        return self._behind(written, hidden, stop)

    def message(self, text: str, stop: int | None = None) -> np.ndarray:
        """Returns the tokens of a message of the user, up to where the model goes on. `stop` is the token with which
        the model's turn ended."""
        hidden: dict[str, str] = {}
        shown = self._hide(text, hidden)
        return self._behind(self._write_message(self._for_messages, shown), hidden, stop)

    def first_message(self, text: str) -> np.ndarray:
        """Returns the tokens of a message of the user behind a prompt that has ended with the beginning of an answer:
        the answer is closed without a word."""
        hidden: dict[str, str] = {}
        written = self._write_message(self._for_messages, self._hide(text, hidden))
        return self._encode(written.closing + written.text, hidden)

    def shorten(self, text: str, max_tokens: int) -> str:
        """Returns a text of at most `max_tokens` tokens: the text, or its beginning and its end with a note between
        them that says how much is left out."""
        longest = MAX_TOKEN_CHARS * max_tokens
        if len(text) <= longest and self._count(text) <= max_tokens:
            return text

        def both_ends(kept: int) -> str:
            note = f"\n[{len(text) - kept} characters left out]\n"
            return text[: (kept + 1) // 2] + note + text[len(text) - kept // 2 :]

        def beginning(kept: int) -> str:
            return text[:kept]

        cut = both_ends if self._count(both_ends(0)) <= max_tokens else beginning
        lengths = range(1, min(len(text), longest) + 1)
        kept = bisect_right(lengths, False, key=lambda kept: self._count(cut(kept)) > max_tokens)
        while kept and self._count(cut(kept)) > max_tokens:  # a longer text may have fewer tokens
            kept -= 1
        return cut(kept)

    # What the template does

    def _find_for_messages(self) -> Conversation:
        why = ""
        for tried in _conversations():
            try:
                self._check_in_place(self._write_message(tried, "Another."), tried.asked_again("Another."))
                return tried
            except REFUSALS as error:
                why = " ".join(str(error).split())
        raise TemplateProblem(
            f"model.chat_template: it takes no second message of the user: {why}; set model.chat_template to one that "
            "does, or run episodes of one turn"
        )

    def _find_for_results(self) -> Conversation:
        if self.call_format is None and not self._shows_tools():
            raise TemplateProblem(
                "model.chat_template: it does not show the model its tools; set model.chat_template to one that does, "
                "or tell of them in your prompts and set environment.calls to the format of calls, such as "
                f"{' or '.join(list(FORMATS)[:2])}"
            )
        name, ways = self._first_tool(), list[tuple[Conversation, Written, bool]]()
        for tried in _conversations_with_tools():
            try:
                written = self._write_results(tried, [name], [MARK])
                self._check_in_place(written, [*tried.called([name]), *tried.returned([name], [MARK])])
                shows_call = self._render(tried.called([MARK]), False).count(MARK) > 0
            except REFUSALS:
                continue
            ways.append((tried, written, shows_call))
        if not ways:
            raise TemplateProblem(
                "model.chat_template: it has no place for results of tools; set model.chat_template to one that has"
            )
        # An answer whose call the template leaves out is to the template an answer without one.
        ways = [way for way in ways if way[2]] or ways
        if len({written for _, written, _ in ways}) > 1:
            raise TemplateProblem(
                "model.chat_template: it writes the result of a tool in different ways, depending on what went before, "
                "so that results cannot simply be added; set model.chat_template to another one"
            )
        return ways[0][0]

    def _first_tool(self) -> str:
        return str(self.tools[0]["function"]["name"])

    def _shows_tools(self) -> bool:
        for lead in LEADS:
            try:
                if self._first_tool() in self._render(Conversation(lead).start(), True):
                    return True
            except REFUSALS:
                continue
        return False

    def _recognise(self, conversation: Conversation) -> CallFormat:
        for without_content in (conversation.calls_without_content, True):
            tried = replace(conversation, calls_without_content=without_content)
            try:
                begun, written = self._render(tried.start(), True), self._render(tried.called([PROBE]), False)
            except REFUSALS:
                continue
            answer = _behind_common(begun, written).rpartition(THOUGHT)[2]
            if found := recognise_format(self.tokenizer, answer, PROBE, PROBE_ARGUMENTS):
                return found
        raise TemplateProblem(
            "model.chat_template: it writes calls of tools in a format that is not known; set environment.calls to the "
            "format in which the model writes them"
        )

    def _ends_in_thought(self) -> bool:
        return self._render(self._for_messages.start(), True).rstrip().endswith(THINK)

    def _find_stops(self, stop_tokens: Iterable[str]) -> frozenset[int]:
        ends = [self._write_message(self._for_messages, MARK)]
        if self._for_results is not None:
            ends.append(self._write_results(self._for_results, [self._first_tool()], [MARK]))
        texts = {end.closing or self._special_at_start(end.text) for end in ends}
        found = {self._added[text] for text in texts if text}
        for text in self.call_format.stop_tokens if self.call_format else ():
            if text in self._added:
                found.add(self._added[text])
        for text in stop_tokens:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise UserError(f"stop_tokens: {text!r} is {len(ids)} tokens of this model; name texts of one token")
            found.add(ids[0])
        return frozenset(found)

    # Writing

    def _write_results(self, conversation: Conversation, names: Sequence[str], texts: Sequence[str]) -> Written:
        try:
            return self._write_results_of(conversation, names, names, texts)
        except REFUSALS:
            if len(names) == 1:
                raise
            return self._write_results_of(conversation, names[:1], names, texts)  # it takes one call at a time

    def _write_results_of(
        self, conversation: Conversation, called: Sequence[str], names: Sequence[str], texts: Sequence[str]
    ) -> Written:
        called_so_far = conversation.called(called)
        shorter = self._render(called_so_far, False)
        longer = self._render([*called_so_far, *conversation.returned(names, texts)], True)
        if not longer.startswith(shorter):
            raise ValueError("it writes the answer in another way once a result follows")
        if any(text not in longer[len(shorter) :] for text in texts if text.isalnum()):
            raise ValueError("it leaves out the result")
        closing = next((text for text in self._special if shorter.rstrip().endswith(text)), "")
        between = shorter[len(shorter.rstrip()) :] if closing else ""
        return Written(closing, between + longer[len(shorter) :])

    def _write_message(self, conversation: Conversation, text: str) -> Written:
        longer = self._render(conversation.asked_again(text), True)
        behind = longer.partition(MARK)[2]
        if longer.count(MARK) != 1 + text.count(MARK) or (text.isalnum() and text not in behind):
            raise ValueError("it leaves out a message")
        ending = self._render(conversation.answered(MARK), False).partition(MARK)[2]
        if not self._special_at_start(ending.lstrip()):  # a new message is all that ends an answer
            return Written("", behind)
        behind, ending = behind.lstrip(), ending.lstrip()
        closing = self._special_at_start(behind)
        behind, ending = behind[len(closing) :], ending.removeprefix(closing)
        while (further := self._special_at_start(behind)) and ending.startswith(further):  # an answer has two ends
            closing, behind, ending = further, behind[len(further) :], ending[len(further) :]
        return Written(closing, behind)

    def _special_at_start(self, text: str) -> str:
        return next((special for special in self._special if text.startswith(special)), "")

    def _render(self, messages: Sequence[Mapping[str, Any]], begins_answer: bool) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.template,
            tools=self.tools or None,
            tokenize=False,
            add_generation_prompt=begins_answer,
        )

    # From text to tokens

    def _behind(self, written: Written, hidden: Mapping[str, str], stop: int | None) -> np.ndarray:
        """Returns the tokens behind a turn that ended with `stop`. What the template closes an answer with is not added
        where the model has closed it itself, though perhaps with another token."""
        if written.closing:
            return self._encode(written.text, hidden, behind=written.closing)
        ids = self._encode(written.text, hidden, behind=self.tokenizer.eos_token or "")
        return ids[1:] if len(ids) and ids[0] == stop else ids

    def _encode(self, text: str, hidden: Mapping[str, str], behind: str = "") -> np.ndarray:
        """Returns the tokens of a text as they are in place: `behind` is the text of the token before it."""
        parts = re.split("(" + "|".join(hidden) + ")", text) if hidden else [text]
        first = self._ids(behind + parts[0])
        if behind:
            first = first[first.index(self._added[behind]) + 1 :] if self._added.get(behind) in first else first
        ids = list(first)
        for part in parts[1:]:
            if part in hidden:  # in two pieces, so that it is not the token
                ids += [*self._ids(hidden[part][:1]), *self._ids(hidden[part][1:])]
            else:
                ids += self._ids(part)
        return np.asarray(ids, np.int32)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _count(self, text: str) -> int:
        hidden: dict[str, str] = {}
        return len(self._encode(self._hide(text, hidden), hidden))

    def _guard(self) -> re.Pattern[str] | None:
        """Returns a pattern of all texts by which a result or a message could pass for something else: tokens that are
        special, or that the template or the format of calls uses."""
        used = set(self._special) | {THINK, THOUGHT} | set(self.call_format.tags if self.call_format else ())
        used |= {text for text in self._added if len(text) > 2 and text in self.template}
        texts = [text for text in used if text in self._added and len(text) > 1 and text.strip()]
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None

    def _hide(self, text: str, hidden: dict[str, str]) -> str:
        """Returns a text with words in place of all that is guarded in it, and notes in `hidden` what they stand for.
        So a template cannot make tokens of them."""
        if self._guarded is None or not self._guarded.search(text):
            return text
        word = "offbeathidden"
        while word in text:
            word += "n"

        def hide(found: re.Match[str]) -> str:
            placeholder = f"{word}{len(hidden)}x"
            hidden[placeholder] = found.group()
            return placeholder

        return self._guarded.sub(hide, text)

    def _check_in_place(self, written: Written, conversation: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if the tokens behind an answer are others in the whole conversation than by themselves."""
        whole = self._ids(self._render(conversation, True))
        ids = self._behind(written, {}, None).tolist()
        if not ids or whole[-len(ids) :] != ids:
            raise ValueError("its text has other tokens inside a conversation than behind an answer")


class ChatFormat:
    """Turns of a model with a chat template: the format of calls and the tokens between turns.

    `stop_token_ids` are the model's own. `info` says what `task.tools` and the environment of the task `source` are.
    An observation has at most `max_observation_tokens` tokens, all results of a turn together. `after_opening` is
    what the template writes between the environment's opening, with which the prompt's last message ends, and the first
    turn; None: prompts are whole.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        stop_token_ids: Sequence[int],
        info: PartInfo,
        source: str,
        max_observation_tokens: int,
        call_format: CallFormat | None = None,
        after_opening: str | None = None,
    ):
        self.after_opening = after_opening
        schemas = [tool.schema for tool in info.tools]
        try:
            self.tokens = TurnTokens(
                *(tokenizer, template),
                tools=schemas,
                call_format=call_format,
                stop_ids=stop_token_ids,
                stop_tokens=info.stop_tokens,
            )
        except TemplateProblem as problem:
            raise TemplateProblem(f"task {source}: {problem}") from None
        self.max_observation_tokens = max_observation_tokens
        self.stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *sorted(self.tokens.stop_ids))))
        found = self.tokens.call_format or NO_CALLS
        self._reader = TurnReader(tokenizer, found, is_thinking=self.tokens.is_thinking)

    def opening(self, content: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of what an environment says first. Where the prompt has ended with the beginning of an
        answer, this is closed without a word."""
        text = content if isinstance(content, str) else "\n\n".join(str(one.get("content", "")) for one in content)
        if self.after_opening is not None:
            ids: list[int] = self.tokens.tokenizer(text + self.after_opening, add_special_tokens=False)["input_ids"]
            return ids
        return self.tokens.first_message(text).tolist() if text else []

    def turn(self, number: int, tokens: Sequence[int]) -> Turn:
        return self._reader.read(tokens, number)

    def reply(self, turn: Turn, content: str | Sequence[str], stop: int | None = None) -> list[int]:
        """`stop` is the token with which the turn ended."""
        if isinstance(content, str):
            return self.tokens.message(self.tokens.shorten(content, self.max_observation_tokens), stop).tolist()
        each = max(1, self.max_observation_tokens // max(1, len(content)))
        return self.tokens.results(turn.calls, [self.tokens.shorten(text, each) for text in content], stop).tolist()
