"""Turns of one task as tokens: what ends a turn, what it says and calls, and what is appended after it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from offbeat.environments.calls import ONLY, FORMATS, find_format
from offbeat.environments.protocol import Call, CallStatus, Turn
from offbeat.environments.turns import TurnTokens
from offbeat.environments.wire import PartInfo, ToolInfo
from offbeat.errors import UserError

BRACKETS = "brackets"
"""Format of calls for models without a chat template."""


class TurnFormat(Protocol):
    """How the turns of one task look in tokens."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a turn."""
        ...

    def opening(self, content: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens that follow the prompt before the first turn."""
        ...

    def turn(self, number: int, tokens: Sequence[int]) -> Turn:
        """Reads a finished turn from its tokens, the one that ended it among them."""
        ...

    def reply(self, turn: Turn, content: str | Sequence[str], stop: int) -> list[int]:
        """Returns the tokens of an observation, or of one for each call of `turn`, up to where the next turn begins.
        `stop` is the token that ended the turn."""
        ...


class TaskFormat:
    """The turns of a task. `template` is the chat template that its prompts go through; None: they are plain text.
    `after_opening` is what the template writes behind the environment's opening."""

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        info: PartInfo,
        *,
        source: str,
        stop_token_ids: Sequence[int],
        max_observation_tokens: int,
        call_format: str | None = None,
        after_opening: str = "",
    ):
        self.tokenizer, self.tools, self.after_opening = tokenizer, info.tools, after_opening
        self.max_observation_tokens = max_observation_tokens
        name = call_format or (BRACKETS if template is None else None)
        chosen = find_format(name, "environment.calls") if name and info.tools else None
        for text in info.stop_tokens:
            if len(tokenizer(text, add_special_tokens=False)["input_ids"]) != 1:
                raise UserError(
                    f"task {source}: stop_tokens = {text!r}: a turn ends by a single token, and this text is none of "
                    "the model's; choose another one"
                )
        self.tokens = TurnTokens(
            tokenizer,
            template,
            tools=[tool.schema for tool in info.tools],
            call_format=chosen,
            stop_ids=stop_token_ids,
            stop_tokens=info.stop_tokens,
        )
        self._reader = self.tokens.reader()
        self._stop_texts = tuple(text for text in info.stop_tokens)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self.tokens.stop_ids

    def opening(self, content: str | Sequence[Mapping[str, Any]]) -> list[int]:
        text = content if isinstance(content, str) else "\n".join(str(entry.get("content", "")) for entry in content)
        text += self.after_opening
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    def turn(self, number: int, tokens: Sequence[int]) -> Turn:
        if self._reader is not None:
            turn = self._reader.read(tokens, number)
            return replace(turn, calls=tuple(map(self._resolved, turn.calls)))
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in self._stop_texts:
            text = text.removesuffix(stop)
        return Turn(number, text)

    def reply(self, turn: Turn, content: str | Sequence[str], stop: int) -> list[int]:
        if turn.calls and not isinstance(content, str):
            each = max(1, self.max_observation_tokens // len(content))
            texts = [self.tokens.shorten(text, each) for text in content]
            return [int(token) for token in self.tokens.results(turn.calls, texts, stop)]
        text = content if isinstance(content, str) else "\n".join(content)
        return [int(token) for token in self.tokens.message(self.tokens.shorten(text, self.max_observation_tokens), stop)]

    def _resolved(self, call: Call) -> Call:
        """Returns a call in brackets with the names of its tool and its parameter; any other call as it is."""
        if call.status is not CallStatus.OK or ONLY not in call.arguments:
            return call
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None and call.name == ONLY and len(self.tools) == 1:
            tool = self.tools[0]
        if tool is None:
            known = ", ".join(tool.name for tool in self.tools)
            status = CallStatus.NO_NAME if call.name == ONLY else CallStatus.UNKNOWN_TOOL
            return replace(call, arguments={}, status=status, problem=f"begin a call with a tool's name and a colon: {known}")
        return _with_argument(call, tool, call.arguments[ONLY])


def _with_argument(call: Call, tool: ToolInfo, value: str) -> Call:
    properties = tool.schema["function"]["parameters"]["properties"]
    if not properties:
        return replace(call, name=tool.name, arguments={})
    name, schema = next(iter(properties.items()))
    if schema.get("type", "string") == "string":
        return replace(call, name=tool.name, arguments={name: value})
    try:
        return replace(call, name=tool.name, arguments={name: json.loads(value)})
    except ValueError:
        problem = f"{name} must be a JSON {schema['type']}, not {value!r}"
        return replace(call, name=tool.name, arguments={}, status=CallStatus.INVALID_JSON, problem=problem)


CALL_FORMATS = tuple(FORMATS)
