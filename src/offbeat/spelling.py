"""Words for errors: a suggestion in place of a name that does not exist, and the type of a value with its article.
Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 12
"""Largest number of names that a suggestion lists."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that is most similar to a misspelt word; None if no choice is similar."""
    plain = {_plain(name): name for name in reversed(list(choices))}
    wanted = _plain(word)
    found = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.65)
    if not found and len(wanted) >= 3:
        found = [name for name in plain if name.startswith(wanted) or wanted.startswith(name)][:1]
    return plain[found[0]] if found else None


def suggest(word: str, choices: Iterable[str]) -> str:
    """Returns a hint such as `did you mean 'number'?` or `allowed exact, math, number`."""
    names = list(choices)
    if near := nearest(word, names):
        return f"did you mean {near!r}?"
    if not names:
        return "there are no others"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"allowed {', '.join(names[:MAX_LISTED])}{more}"


def kind_of(value: object) -> str:
    """Returns a value's type with its article, such as `a str` or `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
