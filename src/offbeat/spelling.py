"""What to say about a name that does not exist: the nearest one that does, or all there are. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 12
"""Longer lists help nobody: then only the nearest spelling is named, or the first few."""


def suggest(word: str, choices: Iterable[str]) -> str:
    """Such as `did you mean 'number'?`, or `allowed exact, math, number`."""
    names = list(choices)
    plain = {_plain(name): name for name in reversed(names)}
    if near := difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.65):
        return f"did you mean {plain[near[0]]!r}?"
    if not names:
        return "there are none"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"allowed {', '.join(names[:MAX_LISTED])}{more}"


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
