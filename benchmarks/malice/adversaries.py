"""All adversaries of the benchmark: `strangers` without a token, `members` that lie or take, `forgers` of tokens."""

from __future__ import annotations

from benchmarks.malice.adversary import Adversary
from benchmarks.malice.forgers import FORGERS
from benchmarks.malice.members import MEMBERS
from benchmarks.malice.strangers import STRANGERS

ADVERSARIES: tuple[type[Adversary], ...] = (*STRANGERS, *MEMBERS, *FORGERS)


def num_tokens() -> int:
    """How many join tokens the adversaries need, that of their accomplice among them."""
    return 1 + sum(kind.num_tokens for kind in ADVERSARIES)
