"""Reads the calls of tools in a finished turn, in the formats that models write.

A turn is read from its token ids, once, after it has ended; never from a stream, and never if it was cut. Where a tag
of a format is a token of the model, only this token counts as the tag: the same letters written with other tokens are
text. Reading never raises. What begins like a call and cannot be read is a call with another status than `OK` and with
a problem that is told to the model.

The formats, by their names:

- `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; Qwen 2.5 and 3
- `qwen-xml`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`; Qwen3-Coder, 3.5
- `glm`: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`
- `invoke`: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, with any prefix of the tags
- `llama`: a turn that is nothing but `{"name": …, "parameters": {…}}`, or what follows `<|python_tag|>`
- `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]NAME[ARGS]{…}`
- `deepseek`: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, with or without a fence around the JSON
- `kimi`: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`
- `harmony`: `… to=functions.NAME<|channel|>commentary<|message|>{…}<|call|>`; gpt-oss
- `pythonic`: `<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>`; LFM2
- `gemma`: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>}<tool_call|>`; Gemma 4
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.environments.protocol import Call, CallStatus, Turn
from offbeat.errors import UserError
from offbeat.spelling import suggest

MAX_CALLS = 64
"""Calls that are read in one turn; what follows is neither call nor text."""
MAX_PROBLEM_CHARS = 200
MAX_TRIES = 8
"""Closing tags up to which a call is tried: JSON may hold the text of its closing tag."""
MAX_DEPTH = 64
"""Depth of nested values that is read in formats other than JSON."""
THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class CallFormat:
    """A way in which models write calls."""

    name: str
    read: Callable[[Marked], Parsed]
    tags: tuple[str, ...]
    """Texts that mark calls. Each is looked for as a token where the model has such a token, otherwise as text."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a turn because a call ends with them, beside the model's own."""


@dataclass(frozen=True)
class Parsed:
    text: str
    calls: Sequence[Call]


@dataclass(frozen=True)
class Marked:
    """The text of a turn, and where in it tags are."""

    text: str
    starts: Sequence[int] = ()
    names: Sequence[str] = ()

    def find(self, tag: str, start: int = 0) -> int:
        """Returns where `tag` is for the first time from `start` on; -1 if it is not there."""
        for i in range(bisect_left(self.starts, start), len(self.starts)):
            if self.names[i] == tag:
                return self.starts[i]
        return -1

    def first(self, tags: Sequence[str], start: int = 0) -> tuple[int, str]:
        """Returns where the first of several tags is, and which it is; -1 and "" if none is there."""
        for i in range(bisect_left(self.starts, start), len(self.starts)):
            if self.names[i] in tags:
                return self.starts[i], self.names[i]
        return -1, ""

    def part(self, start: int, end: int) -> Marked:
        low, high = bisect_left(self.starts, start), bisect_left(self.starts, end)
        return Marked(self.text[start:end], [at - start for at in self.starts[low:high]], self.names[low:high])


class TurnReader:
    """Reads the turns of a model with this tokenizer, in one format. With `is_thinking`, the prompt of every turn ends
    inside a block of reasoning. Reasoning is neither text nor call."""

    def __init__(self, tokenizer: Any, call_format: CallFormat, *, is_thinking: bool = False):
        self.tokenizer, self.format, self.is_thinking = tokenizer, call_format, is_thinking
        tags = (*call_format.tags, THINK, THOUGHT)
        self._tags_by_id = {token: tag for tag in tags if (token := token_id(tokenizer, tag)) is not None}
        as_text = sorted(set(tags) - set(self._tags_by_id.values()), key=len, reverse=True)
        self._tags_as_text = re.compile("|".join(map(re.escape, as_text))) if as_text else None
        stops = {token_id(tokenizer, text) for text in call_format.stop_tokens}
        self._special = (frozenset(tokenizer.all_special_ids) | stops) - self._tags_by_id.keys()

    def read(self, tokens: Sequence[int] | np.ndarray, number: int = 0) -> Turn:
        """Returns a finished turn, read from all its tokens. Its calls are not yet checked against the tools."""
        marked = self._without_reasoning(self._mark([int(token) for token in tokens]))
        parsed = self.format.read(marked)
        return Turn(number, parsed.text.strip(), tuple(parsed.calls[:MAX_CALLS]))

    def _mark(self, tokens: list[int]) -> Marked:
        parts: list[str] = []
        starts: list[int] = []
        names: list[str] = []
        length = begun = 0

        def add_text(end: int) -> None:
            nonlocal length
            if end == begun:
                return
            text = self._decode([token for token in tokens[begun:end] if token not in self._special])
            for found in self._tags_as_text.finditer(text) if self._tags_as_text else ():
                starts.append(length + found.start())
                names.append(found.group())
            parts.append(text)
            length += len(text)

        for at, token in enumerate(tokens):
            if (tag := self._tags_by_id.get(token)) is None:
                continue
            add_text(at)
            starts.append(length)
            names.append(tag)
            parts.append(tag)
            length += len(tag)
            begun = at + 1
        add_text(len(tokens))
        return Marked("".join(parts), starts, names)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _without_reasoning(self, marked: Marked) -> Marked:
        """Returns the turn behind its first blocks of reasoning. Later blocks, between calls, are text."""
        start = 0
        if self.is_thinking:
            end = marked.find(THOUGHT)
            start = len(marked.text) if end < 0 else end + len(THOUGHT)
        while marked.find(THINK, start) == (begins := start + _blanks(marked.text, start)):
            end = marked.find(THOUGHT, begins)
            start = len(marked.text) if end < 0 else end + len(THOUGHT)
        return marked.part(start, len(marked.text)) if start else marked


def _blanks(text: str, start: int) -> int:
    return len(text) - start - len(text[start:].lstrip())


def token_id(tokenizer: Any, text: str) -> int | None:
    """Returns the id of the added token with this text; None if the tokenizer has no such token."""
    return tokenizer.get_added_vocab().get(text)


def find_format(name: str, key: str) -> CallFormat:
    """Returns the format of this name; `key` is the configuration key to name in errors."""
    if name not in FORMATS:
        raise UserError(f"{key} = {name!r}: there is no such format of calls; {suggest(name, FORMATS)}")
    return FORMATS[name]


def recognise_format(tokenizer: Any, written: str, name: str, arguments: Mapping[str, Any]) -> CallFormat | None:
    """Returns the format in which `written`, an answer that a chat template has written, holds exactly the call of
    `name` with `arguments`, which are texts; None if no format reads it so."""
    tokens = tokenizer(written, add_special_tokens=False)["input_ids"]
    for one in FORMATS.values():
        calls = TurnReader(tokenizer, one).read(tokens).calls
        found = [(call.status, call.name, dict(call.arguments)) for call in calls]
        if found == [(CallStatus.OK, name, dict(arguments))]:
            return one
    return None


# What all formats share


def _bad(status: CallStatus, problem: str, text: str, name: str = "") -> Call:
    return Call(name, {}, status, problem[:MAX_PROBLEM_CHARS], text)


def _unclosed(tag: str, text: str) -> Call:
    return _bad(CallStatus.UNCLOSED, f"the call does not end with {tag}", text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
"""Reads texts with line breaks in them, too: models write them so."""


def _load(text: str) -> Any:
    """Reads JSON; raises ValueError for all else."""
    value, end = _load_first(text)
    if text[end:].strip():
        raise ValueError("it goes on behind its end")
    return value


def _load_first(text: str) -> tuple[Any, int]:
    """Returns the value of JSON with which a text begins, and where it ends. Raises ValueError for bad JSON, numbers or
    nesting without end, and half characters, which no file or socket could take."""
    try:
        value, end = DECODER.raw_decode(text, _blanks(text, 0))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, end


def _object(text: str, whole: str, key: str | None = None) -> Call:
    """Returns the call that a JSON object describes: its name, and arguments under `key`, or under "arguments" or
    "parameters"."""
    try:
        value = _load(text)
    except ValueError as error:
        return _bad(CallStatus.INVALID_JSON, f"the call is no JSON: {error}", whole)
    return _described(value, whole, key)


def _described(value: Any, whole: str, key: str | None = None) -> Call:
    if not isinstance(value, dict):
        return _bad(CallStatus.MALFORMED, "the call must be a JSON object with name and arguments", whole)
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _bad(CallStatus.NO_NAME, "the call has no name", whole)
    if key is None:
        key = "arguments" if "arguments" in value else "parameters"
    return _with_arguments(name, value.get(key, {}), whole)


def _with_arguments(name: str, arguments: Any, whole: str) -> Call:
    """Returns a call with arguments that are an object, or a text that is the JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = _load(arguments) if arguments.strip() else {}
        except ValueError as error:
            return _bad(CallStatus.INVALID_JSON, f"the arguments of {name} are no JSON: {error}", whole, name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _bad(CallStatus.MALFORMED, f"the arguments of {name} must be a JSON object", whole, name)
    return Call(name, arguments, CallStatus.OK, "", whole)


def _named(name: str, arguments: str, whole: str) -> Call:
    """Returns a call with a name that stands by itself, and arguments that are JSON."""
    name = name.strip()
    return _with_arguments(name, arguments, whole) if name else _no_name(whole)


def _no_name(whole: str) -> Call:
    return _bad(CallStatus.NO_NAME, "the call has no name", whole)


Body = Callable[[str, str], Sequence[Call]]
"""Reads what lies between two tags; the second argument is the same with the tags."""


def _single(body: Callable[[str, str], Call]) -> Body:
    return lambda text, whole: [body(text, whole)]


def _between(marked: Marked, opens: str, closes: str, body: Body) -> Parsed:
    """Reads calls that lie each between two tags. If a body cannot be read, the call may go on to a later closing tag:
    a text in it may hold the tag."""
    texts: list[str] = []
    calls: list[Call] = []
    at = 0
    while (start := marked.find(opens, at)) >= 0 and len(calls) < MAX_CALLS:
        texts.append(marked.text[at:start])
        inner = start + len(opens)
        close = marked.find(closes, inner)
        if close < 0:
            return Parsed("".join(texts), [*calls, _unclosed(closes, marked.text[start:])])
        found, at = body(marked.text[inner:close], marked.text[start : close + len(closes)]), close + len(closes)
        tries, later = 1, close
        while found[0].status is CallStatus.INVALID_JSON and tries < MAX_TRIES:
            later, tries = marked.find(closes, later + len(closes)), tries + 1
            if later < 0:
                break
            whole = marked.text[start : later + len(closes)]
            longer = body(marked.text[inner:later], whole)
            if longer[0].status is CallStatus.OK:
                found, at = longer, later + len(closes)
        calls.extend(found)
    if len(calls) < MAX_CALLS:
        texts.append(marked.text[at:])
    return Parsed("".join(texts), calls)


# One reader for each format

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


def _read_hermes(marked: Marked) -> Parsed:
    return _between(marked, TOOL_CALL, TOOL_CALL_END, _single(_object))


FUNCTION, FUNCTION_END = re.compile(r"\s*<function=([^>\n]*)>"), "</function>"
PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
PARAMETER_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")


def _read_qwen_xml(marked: Marked) -> Parsed:
    return _between(marked, TOOL_CALL, TOOL_CALL_END, _single(_qwen_function))


def _qwen_function(text: str, whole: str) -> Call:
    head = FUNCTION.match(text)
    if head is None:
        return _bad(CallStatus.MALFORMED, "the call must hold <function=NAME> … </function>", whole)
    name, arguments, at = head.group(1).strip(), {}, head.end()
    if not name:
        return _no_name(whole)
    while parameter := PARAMETER.match(text, at):
        end = PARAMETER_END.search(text, parameter.end())
        if end is None:
            return _bad(CallStatus.UNCLOSED, "a parameter does not end with </parameter>", whole, name)
        value = text[parameter.end() : end.start()]
        arguments[parameter.group(1).strip()] = value.removeprefix("\n")
        at = end.end()
    if text[at:].strip() == FUNCTION_END:
        return Call(name, arguments, CallStatus.OK, "", whole)
    if FUNCTION_END not in text[at:]:
        return _bad(CallStatus.UNCLOSED, "the call does not end with </function>", whole, name)
    return _bad(
        CallStatus.MALFORMED, f"only <parameter=KEY> … </parameter> may stand in the call of {name}", whole, name
    )


KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read_glm(marked: Marked) -> Parsed:
    return _between(marked, TOOL_CALL, TOOL_CALL_END, _single(_glm_function))


def _glm_function(text: str, whole: str) -> Call:
    name, key, rest = text.partition(KEY)
    name, rest = name.strip(), key + rest
    arguments = {}
    if not name:
        return _no_name(whole)
    while rest := rest.lstrip():
        if not rest.startswith(KEY):
            return _bad(
                CallStatus.MALFORMED, f"the arguments of {name} must be {KEY}…{KEY_END}{VALUE}…{VALUE_END}", whole, name
            )
        key, found, rest = rest[len(KEY) :].partition(KEY_END)
        opens, found_value, rest = rest.partition(VALUE)
        end = GLM_VALUE_END.search(rest)
        if not found or not found_value or end is None:
            return _bad(CallStatus.UNCLOSED, f"an argument of {name} does not end with {VALUE_END}", whole, name)
        if opens.strip():
            return _bad(CallStatus.MALFORMED, f"{VALUE} must follow {KEY_END}", whole, name)
        arguments[key.strip()], rest = rest[: end.start()], rest[end.end() :]
    return Call(name, arguments, CallStatus.OK, "", whole)


GLM_VALUE_END = re.compile(re.escape(VALUE_END) + rf"(?=\s*(?:{re.escape(KEY)}|\Z))")
DSML = "｜DSML｜"
"""Part of DeepSeek's tags that is a token."""
INVOKE = re.compile(r"<(?P<prefix>[^\s<>/]*)invoke name=(?P<quote>[\"'])(?P<name>.*?)(?P=quote)\s*>")
INVOKE_TAGS = re.compile(r"</?[^\s<>/]*(?:function_calls|tool_calls?)>")


def _read_invoke(marked: Marked) -> Parsed:
    text = marked.text
    texts: list[str] = []
    calls: list[Call] = []
    at = 0
    while (head := INVOKE.search(text, at)) and len(calls) < MAX_CALLS:
        texts.append(text[at : head.start()])
        closes = f"</{head['prefix']}invoke>"
        end = text.find(closes, head.end())
        if end < 0:
            calls.append(_unclosed(closes, text[head.start() :]))
            at = len(text)
            break
        at = end + len(closes)
        calls.append(_invocation(head["name"].strip(), head["prefix"], text[head.end() : end], text[head.start() : at]))
    if len(calls) < MAX_CALLS:
        texts.append(text[at:])
    return Parsed(INVOKE_TAGS.sub("", "".join(texts)), calls)


def _invocation(name: str, prefix: str, text: str, whole: str) -> Call:
    if not name:
        return _no_name(whole)
    arguments: dict[str, Any] = {}
    opens = re.compile(rf"\s*<{re.escape(prefix)}parameter name=([\"'])(.*?)\1(?:\s+string=[\"'](\w+)[\"'])?\s*>")
    closes, at = f"</{prefix}parameter>", 0
    while parameter := opens.match(text, at):
        end = text.find(closes, parameter.end())
        if end < 0:
            return _bad(CallStatus.UNCLOSED, f"a parameter does not end with {closes}", whole, name)
        arguments[parameter.group(2)] = text[parameter.end() : end]
        at = end + len(closes)
    if text[at:].strip():
        return _bad(CallStatus.MALFORMED, f"only parameters may stand in the call of {name}", whole, name)
    return Call(name, arguments, CallStatus.OK, "", whole)


PYTHON_TAG = "<|python_tag|>"
PYTHON = "python"
"""Name of the tool that takes the code behind `<|python_tag|>`."""


def _read_llama(marked: Marked) -> Parsed:
    text, tag = marked.text, marked.find(PYTHON_TAG)
    before, written = (text[:tag], text[tag + len(PYTHON_TAG) :]) if tag >= 0 else ("", text)
    calls = _llama_objects(written)
    if calls is not None:
        return Parsed(before, calls)
    if tag < 0:
        return Parsed(text, [])
    whole = text[tag:]
    if BUILTIN.match(written):
        try:
            return Parsed(before, [_python_call(_expression(BUILTIN.sub(r"\1(", written)), whole)])
        except ValueError as error:
            return Parsed(before, [_bad(CallStatus.INVALID_JSON, f"the call cannot be read: {error}", whole)])
    return Parsed(before, [Call(PYTHON, {"code": written.strip()}, CallStatus.OK, "", whole)])


BUILTIN = re.compile(r"\A\s*(\w+)\.call\(")
"""Begins a call of a tool that Llama knows by itself, `brave_search.call(query="…")`."""
LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')


def _llama_objects(text: str) -> list[Call] | None:
    """Returns the calls of a text that is nothing but JSON objects, separated by semicolons; None if it is something
    else. An object that has neither parameters nor arguments is no call, but the answer."""
    calls: list[Call] = []
    rest = text.strip()
    if not rest.startswith("{"):
        return None
    while rest and len(calls) < MAX_CALLS:
        try:
            value, end = _load_first(rest)
        except ValueError as error:
            if not calls and not LOOKS_LIKE_CALL.match(rest):
                return None
            return [*calls, _bad(CallStatus.INVALID_JSON, f"the call is no JSON: {error}", rest)]
        is_call = isinstance(value, dict) and (
            value.keys() & {"parameters", "arguments"} or isinstance(value.get("function"), dict)
        )
        if not is_call:
            return calls or None
        calls.append(_described(value, rest[:end]))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
        if rest and not rest.startswith("{"):
            return [*calls, _bad(CallStatus.MALFORMED, "nothing but calls may stand beside a call", rest)]
    return calls


TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_mistral(marked: Marked) -> Parsed:
    start = marked.find(TOOL_CALLS)
    if start < 0:
        return Parsed(marked.text, [])
    calls: list[Call] = []
    while start >= 0 and len(calls) < MAX_CALLS:
        end = marked.find(TOOL_CALLS, start + 1)
        part = marked.part(start + len(TOOL_CALLS), len(marked.text) if end < 0 else end)
        calls.extend(_mistral_part(part, TOOL_CALLS + part.text))
        start = end
    return Parsed(marked.text[: marked.find(TOOL_CALLS)], calls)


def _mistral_part(part: Marked, whole: str) -> list[Call]:
    args = part.find(ARGS)
    if args >= 0:
        call_id = part.find(CALL_ID)
        name, arguments = part.text[: call_id if 0 <= call_id < args else args], part.text[args + len(ARGS) :]
        return [_named(name, arguments if arguments.strip() else "{", whole)]  # nothing ends it but its arguments
    text = part.text.strip()
    if not text.startswith("["):
        name, brace, arguments = text.partition("{")
        return [_named(name, brace + arguments or "{", whole)]
    try:
        values = _load(text)
    except ValueError as error:
        return [_bad(CallStatus.INVALID_JSON, f"the calls are no JSON: {error}", whole)]
    return [_described(value, json.dumps(value, ensure_ascii=False)) for value in values]


DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_LIST = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FENCED = re.compile(r"\s*(?P<name>[^\n`]*)\n```(?:json)?\n(?P<arguments>.*?)\n?```\s*\Z", re.DOTALL)


def _read_deepseek(marked: Marked) -> Parsed:
    parsed = _between(marked, DEEPSEEK_BEGIN, DEEPSEEK_END, _single(_deepseek_function))
    return Parsed(_remove(parsed.text, DEEPSEEK_LIST), parsed.calls)


def _deepseek_function(text: str, whole: str) -> Call:
    name, sep, rest = text.partition(DEEPSEEK_SEP)
    if not sep:
        return _bad(CallStatus.MALFORMED, f"the call has no {DEEPSEEK_SEP}", whole)
    if name.strip() == "function" and "```" in rest:
        fenced = FENCED.match(rest)
        if fenced is None:
            return _bad(CallStatus.INVALID_JSON, "the arguments are not fenced as JSON", whole)
        return _named(fenced["name"], fenced["arguments"], whole)
    return _named(name, rest, whole)


def _remove(text: str, tags: Sequence[str]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return text


KIMI_BEGIN, KIMI_END, KIMI_SEP = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
KIMI_LIST = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_ID = re.compile(r"\A\s*(?:functions\.)?(.*?)(?::\d+)?\s*\Z", re.DOTALL)


def _read_kimi(marked: Marked) -> Parsed:
    parsed = _between(marked, KIMI_BEGIN, KIMI_END, _single(_kimi_function))
    return Parsed(_remove(parsed.text, KIMI_LIST), parsed.calls)


def _kimi_function(text: str, whole: str) -> Call:
    name, sep, arguments = text.partition(KIMI_SEP)
    if not sep:
        return _bad(CallStatus.MALFORMED, f"the call has no {KIMI_SEP}", whole)
    found = KIMI_ID.match(name)
    return _named(found.group(1) if found else name, arguments, whole)


START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
CALL, END, RETURN = "<|call|>", "<|end|>", "<|return|>"
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _read_harmony(marked: Marked) -> Parsed:
    """Reads messages that are each a header, `<|message|>`, a body and an end. A header with a recipient makes it a
    call, on whichever channel. Of other messages, those on the channel `analysis` are reasoning."""
    texts: list[str] = []
    calls: list[Call] = []
    at = 0
    while at < len(marked.text) and len(calls) < MAX_CALLS:
        at += len(START) if marked.find(START, at) == at else 0
        end, closing = marked.first((MESSAGE, CALL, END, RETURN, START), at)
        header, content = marked.text[at : end if closing else len(marked.text)], None
        if closing == MESSAGE:
            begins = end + len(MESSAGE)
            end, closing = marked.first((CALL, END, RETURN, START), begins)
            content = marked.text[begins : end if closing else len(marked.text)]
        end = end if closing else len(marked.text)
        whole = marked.text[at : end + len(closing)]
        if recipient := RECIPIENT.search(header):
            name = recipient.group(1)
            if closing == CALL and content is not None:
                calls.append(_with_arguments(name, content, whole))
            else:
                calls.append(_bad(CallStatus.UNCLOSED, f"the call of {name} does not end with {CALL}", whole, name))
        elif content is None:
            texts.append("" if CHANNEL in header else header)
        elif "analysis" not in header:
            texts.append(content)
        at = end if closing == START else end + len(closing)
    return Parsed("\n".join(text for text in texts if text), calls)


PYTHONIC_BEGIN, PYTHONIC_END = "<|tool_call_start|>", "<|tool_call_end|>"


def _read_pythonic(marked: Marked) -> Parsed:
    return _between(marked, PYTHONIC_BEGIN, PYTHONIC_END, _pythonic_list)


def _pythonic_list(text: str, whole: str) -> Sequence[Call]:
    try:
        tree = _expression(text)
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(one, whole) for one in calls] or [_no_name(whole)]
    except ValueError as error:
        return [_bad(CallStatus.INVALID_JSON, f"the calls cannot be read: {error}", whole)]


MAX_EXPRESSION_CHARS = 1 << 16
"""Longest expression of Python that is read: its parser needs much memory, and a stack as deep as its input."""


def _expression(text: str) -> ast.expr:
    """Reads an expression of Python; raises ValueError if it is none."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"{len(text)} characters are too many")
    try:
        with warnings.catch_warnings():  # such as for "\\d", which a model may well write
            warnings.simplefilter("ignore")
            return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deeply") from None


def _python_call(tree: ast.expr, whole: str) -> Call:
    """Returns a call `name(key=value)` with values that are written out; raises ValueError for what is no call."""
    if not isinstance(tree, ast.Call):
        raise ValueError("this is no call of a function")
    name = _dotted(tree.func)
    if tree.args or any(keyword.arg is None for keyword in tree.keywords):
        return _bad(CallStatus.MALFORMED, f"the arguments of {name} must be written as name=value", whole, name)
    try:
        arguments = {str(keyword.arg): _written_out(keyword.value) for keyword in tree.keywords}
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        return _bad(CallStatus.INVALID_JSON, f"the arguments of {name} cannot be read: {error}", whole, name)
    return Call(name, arguments, CallStatus.OK, "", whole)


def _dotted(tree: ast.expr) -> str:
    names = []
    while isinstance(tree, ast.Attribute):
        names.append(tree.attr)
        tree = tree.value
    if not isinstance(tree, ast.Name):
        raise ValueError("this is no call of a function")
    return ".".join([tree.id, *reversed(names)])


def _written_out(tree: ast.expr, depth: int = 0) -> Any:
    """Returns the value of JSON's types that an expression spells out, as Python or as JSON does."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    match tree:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_written_out(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_dict_key(key): _written_out(value, depth + 1) for key, value in pairs}
    raise ValueError("a value must be written out")


def _dict_key(tree: ast.expr | None) -> str:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return tree.value
    raise ValueError("a key must be a text")


GEMMA_BEGIN, GEMMA_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_CALL = re.compile(r"\s*call:([^{\s]*)\s*")


def _read_gemma(marked: Marked) -> Parsed:
    return _between(marked, GEMMA_BEGIN, GEMMA_END, _single(_gemma_function))


def _gemma_function(text: str, whole: str) -> Call:
    head = GEMMA_CALL.match(text)
    if head is None:
        return _bad(CallStatus.MALFORMED, "the call must begin with call:NAME{", whole)
    name = head.group(1)
    if not name:
        return _no_name(whole)
    try:
        value, end = _gemma_value(text, head.end())
    except ValueError as error:
        return _bad(CallStatus.INVALID_JSON, f"the arguments of {name} cannot be read: {error}", whole, name)
    if text[end:].strip():
        return _bad(CallStatus.INVALID_JSON, f"the arguments of {name} go on behind their end", whole, name)
    return _with_arguments(name, value, whole)


GEMMA_WORD = re.compile(r"[^,:{}\[\]]*")


def _gemma_value(text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """Reads a value from `at`: an object with bare keys, a list, a text in its own quotes, or another value of JSON;
    returns it and where it ends."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    at += _blanks(text, at)
    if text.startswith(GEMMA_QUOTE, at):
        end = text.find(GEMMA_QUOTE, at + len(GEMMA_QUOTE))
        if end < 0:
            raise ValueError(f"a text does not end with {GEMMA_QUOTE}")
        return text[at + len(GEMMA_QUOTE) : end], end + len(GEMMA_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _gemma_items(text, at, depth)
    word = GEMMA_WORD.match(text, at)
    assert word is not None, "it matches nothing, too"
    try:
        return _load(word.group()), word.end()
    except ValueError:
        raise ValueError(f"{word.group()[:40]!r} is no value") from None


def _gemma_items(text: str, at: int, depth: int) -> tuple[Any, int]:
    is_object, closes = text[at] == "{", {"{": "}", "[": "]"}[text[at]]
    entries: dict[str, Any] = {}
    items: list[Any] = []
    at += 1 + _blanks(text, at + 1)
    while not text.startswith(closes, at):
        if is_object:
            if text.startswith(GEMMA_QUOTE, at):
                key, at = _gemma_value(text, at, depth)
            else:
                word = GEMMA_WORD.match(text, at)
                assert word is not None, "it matches nothing, too"
                key, at = word.group().strip(), word.end()
            at += _blanks(text, at)
            if not text.startswith(":", at):
                raise ValueError("a key needs a colon")
            entries[key], at = _gemma_value(text, at + 1, depth + 1)
        else:
            value, at = _gemma_value(text, at, depth + 1)
            items.append(value)
        at += _blanks(text, at)
        if text.startswith(",", at):
            at += 1 + _blanks(text, at + 1)
        elif not text.startswith(closes, at):
            raise ValueError(f"no {closes} at the end")
    return (entries if is_object else items), at + 1


FORMATS: Mapping[str, CallFormat] = {
    one.name: one
    for one in (
        CallFormat("hermes", _read_hermes, (TOOL_CALL, TOOL_CALL_END)),
        CallFormat("qwen-xml", _read_qwen_xml, (TOOL_CALL, TOOL_CALL_END)),
        CallFormat("glm", _read_glm, (TOOL_CALL, TOOL_CALL_END, KEY, KEY_END, VALUE, VALUE_END)),
        CallFormat("invoke", _read_invoke, (DSML,)),
        CallFormat("llama", _read_llama, (PYTHON_TAG,), stop_tokens=("<|eom_id|>", "<|eot_id|>")),
        CallFormat("mistral", _read_mistral, (TOOL_CALLS, ARGS, CALL_ID)),
        CallFormat("deepseek", _read_deepseek, (DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END, *DEEPSEEK_LIST)),
        CallFormat("kimi", _read_kimi, (KIMI_BEGIN, KIMI_SEP, KIMI_END, *KIMI_LIST)),
        CallFormat(
            "harmony", _read_harmony, (START, CHANNEL, MESSAGE, CONSTRAIN, CALL, END, RETURN), stop_tokens=(CALL,)
        ),
        CallFormat("pythonic", _read_pythonic, (PYTHONIC_BEGIN, PYTHONIC_END)),
        CallFormat("gemma", _read_gemma, (GEMMA_BEGIN, GEMMA_END, GEMMA_QUOTE), stop_tokens=("<|tool_response>",)),
    )
}

NO_CALLS = CallFormat("none", lambda marked: Parsed(marked.text, ()), ())
"""For episodes without tools: all that is written is text."""
