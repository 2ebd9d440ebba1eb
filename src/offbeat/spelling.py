"""What to say about a name that does not exist: the nearest one that does, or all there are. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 12
"""Longer lists help nobody: then only the nearest spelling is named, or the first few."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a misspelt word most likely meant."""
    plain = {_plain(name): name for name in reversed(list(choices))}
    wanted = _plain(word)
    found = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.65)
    if not found and len(wanted) >= 3:
        found = [name for name in plain if name.startswith(wanted) or wanted.startswith(name)][:1]
    return plain[found[0]] if found else None


def suggest(word: str, choices: Iterable[str]) -> str:
    """Such as `did you mean 'number'?`, or `allowed exact, math, number`."""
    names = list(choices)
    if near := nearest(word, names):
        return f"did you mean {near!r}?"
    if not names:
        return "there are none"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"allowed {', '.join(names[:MAX_LISTED])}{more}"


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
