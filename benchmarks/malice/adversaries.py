"""All adversaries of the benchmark: `strangers` without a token, `members` that lie or take, `forgers` of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from benchmarks.malice.adversary import Adversary
from benchmarks.malice.forgers import FORGERS
from benchmarks.malice.members import MEMBERS
from benchmarks.malice.strangers import STRANGERS

ADVERSARIES: tuple[type[Adversary], ...] = (*STRANGERS, *MEMBERS, *FORGERS)


def chosen(titles: Collection[str]) -> list[type[Adversary]]:
    """Returns the adversaries with these titles, in the order of the list; all if no title is given."""
    return [kind for kind in ADVERSARIES if not titles or kind.title() in titles]


def num_tokens(kinds: Sequence[type[Adversary]]) -> int:
    """Returns the number of join tokens that adversaries need, including that of their accomplice."""
    return 1 + sum(kind.num_tokens for kind in kinds)
