"""How turns look in tokens: what ends a turn, how calls are read from it, and what is appended after it.

`PlainFormat` is for models without a chat template. A call stands in brackets, `[37*48]`, and its result in braces,
`{1776}`. With several tools, or more than one argument, a call begins with the tool's name, as in `[add: 1, 2]`. What
an environment says is appended as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offbeat.environments.protocol import Call, CallStatus, Turn
from offbeat.environments.wire import PartInfo, ToolInfo
from offbeat.errors import UserError

CUT_MARK = " ... "
"""Stands for the middle of an observation that was too long."""
OPEN, CLOSE = "[", "]"


class TurnFormat(Protocol):
    """How the turns of one task look in tokens."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a turn."""
        ...

    def opening(self, content: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens that follow the prompt before the first turn."""
        ...

    def turn(self, number: int, tokens: Sequence[int]) -> Turn:
        """Reads a finished turn."""
        ...

    def reply(self, turn: Turn, content: str | Sequence[str], stop: int | None = None) -> list[int]:
        """Returns the tokens of an observation, or of one for each call of `turn`, up to where the next turn begins.
        `stop` is the token with which the turn ended."""
        ...


def shortened(tokenizer: Any, text: str, max_tokens: int) -> str:
    """Returns an observation, without its middle if it has more than `max_tokens` tokens."""
    if len(text) <= max_tokens:  # a token has at least one character
        return text
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) <= max_tokens:
        return text
    mark = len(tokenizer(CUT_MARK, add_special_tokens=False)["input_ids"])
    half = max(1, (max_tokens - mark) // 2)
    return tokenizer.decode(ids[:half]) + CUT_MARK + tokenizer.decode(ids[-half:])


class PlainFormat:
    """Turns of a model without a chat template. `stop_token_ids` are the model's own."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], info: PartInfo, source: str, max_observation_tokens: int
    ):
        self.tokenizer, self.tools, self.max_observation_tokens = tokenizer, info.tools, max_observation_tokens
        texts = (*info.stop_tokens, *((CLOSE,) if info.tools else ()))
        own = {text: _single_token(tokenizer, text, source) for text in texts}
        self._stop_texts = {token: text for text, token in own.items()}
        self._close = own.get(CLOSE)
        self.stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *own.values())))

    def opening(self, content: str | Sequence[Mapping[str, Any]]) -> list[int]:
        text = content if isinstance(content, str) else "\n".join(str(entry.get("content", "")) for entry in content)
        return self._ids(text)

    def turn(self, number: int, tokens: Sequence[int]) -> Turn:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if not self.tools or tokens[-1] != self._close:
            return Turn(number, text.removesuffix(self._stop_texts.get(tokens[-1], "")))
        before, found, written = text.removesuffix(CLOSE).rpartition(OPEN)
        if not found:
            problem = f"the call has no {OPEN}"
            return Turn(number, "", (Call("", status=CallStatus.MALFORMED, problem=problem, text=text),))
        return Turn(number, before, (self._call(written),))

    def reply(self, turn: Turn, content: str | Sequence[str], stop: int | None = None) -> list[int]:
        if isinstance(content, str):
            return self._ids(shortened(self.tokenizer, content, self.max_observation_tokens))
        each = max(1, self.max_observation_tokens // max(1, len(content)))
        return self._ids("".join(f"{{{shortened(self.tokenizer, text, each)}}}" for text in content))

    def _call(self, written: str) -> Call:
        shown = OPEN + written + CLOSE
        tool, given = self.tools[0], written
        name, colon, rest = written.partition(":")
        named = next((tool for tool in self.tools if tool.name == name.strip()), None)
        if named is not None and colon:
            tool, given = named, rest.strip()
        elif len(self.tools) > 1:
            known = ", ".join(one.name for one in self.tools)
            status = CallStatus.UNKNOWN_TOOL if colon else CallStatus.NO_NAME
            return Call(
                name.strip(), status=status, problem=f"begin a call with one of {known} and a colon", text=shown
            )
        return _with_arguments(tool, given, shown)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids


def _with_arguments(tool: ToolInfo, given: str, shown: str) -> Call:
    """Returns a call whose arguments, separated by commas, are those of the tool's parameters in their order. The last
    one takes the rest of the text. The tool converts them."""
    names = list(tool.schema["function"]["parameters"]["properties"])
    if len(names) <= 1:
        return Call(tool.name, dict.fromkeys(names, given), text=shown)
    values = [value.strip() for value in given.split(",", len(names) - 1)]
    return Call(tool.name, dict(zip(names, values, strict=False)), text=shown)


def _single_token(tokenizer: Any, text: str, source: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise UserError(
            f"task {source}: {text!r} shall end a turn, but the tokenizer writes it as {len(ids)} tokens; a turn ends "
            "by a single token, so choose another stop token, or a model with a chat template"
        )
    return int(ids[0])
