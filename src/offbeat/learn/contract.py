"""What training relies on in a loss or an advantage, tried out on one of the user's own.

Each check is a sentence that holds, does not, or is a warning: that may be meant otherwise. `loss_contract` and
`advantage_contract` have the sentences; here is what they share, and how a function is told for a loss or an advantage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from offbeat.errors import UserError
from offbeat.locate import one_line

PARAMETERS = {"loss": ("tokens", "settings"), "advantage": ("rewards", "groups")}


class Mark(StrEnum):
    HOLDS = "holds"
    WARNS = "warns"
    """It may be meant so; whoever wrote it should know."""
    FAILS = "fails"


@dataclass(frozen=True)
class Finding:
    """What came of one check."""

    check: str
    mark: Mark = Mark.HOLDS
    detail: str = ""


class Broke(Exception):
    """A check does not hold; the message says how that shows, and why it matters."""

    def __init__(self, detail: str, mark: Mark = Mark.FAILS):
        super().__init__(detail)
        self.detail, self.mark = detail, mark


Check = tuple[str, Callable[[], str | None]]
"""A sentence, and what tries it: raises `Broke`, or returns what is worth knowing."""


def run_checks(checks: Sequence[Check]) -> Iterator[Finding]:
    """Tries all of them; if the first, about what is returned at all, does not hold, the others mean nothing."""
    for number, check in enumerate(checks):
        finding = _run(*check)
        yield finding
        if number == 0 and finding.mark is Mark.FAILS:
            return


def _run(sentence: str, check: Callable[[], str | None]) -> Finding:
    try:
        return Finding(sentence, Mark.HOLDS, check() or "")
    except Broke as broke:
        return Finding(sentence, broke.mark, broke.detail)
    except Exception as error:  # noqa: BLE001  # a user's function may raise anything
        return Finding(sentence, Mark.FAILS, one_line(error))


def kind_of(function: Callable[..., Any], spec: str) -> str:
    """Whether a function is a loss or an advantage, by the names of its parameters."""
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise UserError(f"{spec}: its parameters cannot be read ({error}); wrap it in a def, or add --kind") from error
    found = [kind for kind, wanted in PARAMETERS.items() if names & set(wanted)]
    if len(found) != 1:
        raise UserError(
            f"{spec}: takes {', '.join(sorted(names)) or 'nothing'}; a loss takes tokens and settings, an advantage "
            "rewards and groups; name them so, or add --kind loss or --kind advantage"
        )
    return found[0]
