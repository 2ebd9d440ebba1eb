"""Suggests names in place of a name that does not exist: the most similar name, or a list. Also names the kind of a
value. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 12
"""Largest number of names that a suggestion lists."""
FEW = 9
"""Largest number of allowed values that are listed beside the most similar one."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that is most similar to a misspelt word; None if no choice is similar. A choice that differs
    only by two swapped neighbouring letters, the commonest slip, is preferred."""
    plain = {_plain(name): name for name in reversed(list(choices))}
    wanted = _plain(word)
    if swapped := next((name for name in plain if _is_swap(wanted, name)), None):
        return plain[swapped]
    found = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.65)
    if not found and len(wanted) >= 3:
        found = [name for name in plain if name.startswith(wanted) or wanted.startswith(name)][:1]
    return plain[found[0]] if found else None


def suggest(word: str, choices: Iterable[str], before: str = "there are", *, lists_few: bool = False) -> str:
    """Returns a hint such as `did you mean 'number'?` or `there are exact, math, number`. `before` begins a list of
    choices. With `lists_few`, a list of at most `FEW` choices also follows the most similar name."""
    names = list(choices)
    if near := nearest(word, names):
        is_listed = lists_few and 1 < len(names) <= FEW
        return f"did you mean {near!r}?" + (f" {before} {', '.join(names)}" if is_listed else "")
    if not names:
        return "there are no others"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{before} {', '.join(names[:MAX_LISTED])}{more}"


def a_kind(value: object) -> str:
    """Returns the name of a value's type with its article, such as `an int` or `a list`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _is_swap(one: str, other: str) -> bool:
    """Whether two words differ only by two swapped neighbouring letters."""
    at = [index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return (
        len(one) == len(other)
        and len(at) == 2
        and at[1] == at[0] + 1
        and (one[at[0]], one[at[1]]) == (other[at[1]], other[at[0]])
    )


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
