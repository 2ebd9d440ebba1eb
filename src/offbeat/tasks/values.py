"""Values from files and user code, brought into the forms that problems are made of."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.errors import UserError


def plain(value: Any) -> Any:
    """A value as JSON can keep it; bytes, such as images, are too much for a reward's facts and become None."""
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
