"""`offbeat check-loss`: tries whether a loss or an advantage of the user's own keeps to what training relies on."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser

if TYPE_CHECKING:
    from offbeat.learn.contract import Finding

SIGNS = {"holds": "✓", "warns": "!", "fails": "✗"}
KINDS = ("loss", "advantage")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="module:function or file.py:function")
    parser.add_argument("--kind", choices=KINDS, help="what it is; without it, told by the names of its parameters")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.epilog = "✓ holds, ! may be meant so, ✗ does not hold. Exit status 1 if something does not hold."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.learn.contract import Mark, kind_of
    from offbeat.locate import locate

    spec = arguments.function
    function = locate(spec, "FUNCTION")
    kind = arguments.kind or kind_of(function, spec)
    findings = _check(function, kind)
    num_failed = sum(finding.mark is Mark.FAILS for finding in findings)
    if arguments.json:
        checks = [{"check": f.check, "mark": f.mark.value, "detail": f.detail} for f in findings]
        print(json.dumps({"function": spec, "kind": kind, "holds": num_failed == 0, "checks": checks}))
    else:
        for finding in findings:
            detail = f": {finding.detail}" if finding.detail else ""
            print(f"{SIGNS[finding.mark]} {finding.check}{detail}")
        told = "everything holds" if not num_failed else f"{num_failed} of {len(findings)} checks do not hold"
        print(f"{spec}, as {'a loss' if kind == 'loss' else 'an advantage'}: {told}")
    return 1 if num_failed else 0


def _check(function: object, kind: str) -> list[Finding]:
    assert callable(function)
    if kind == "loss":
        from offbeat.learn.loss_contract import check_loss

        return list(check_loss(function))
    from offbeat.learn.advantage_contract import check_advantage

    return list(check_advantage(function))
