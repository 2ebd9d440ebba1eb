"""`offbeat check-loss`: checks a user's loss or advantage for the properties that training relies on."""

from __future__ import annotations

import argparse
import json

from offbeat.cli.parser import Parser

SIGNS = {"holds": "✓", "warns": "!", "fails": "✗"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="module:function or file.py:function")
    parser.add_argument("--kind", choices=("loss", "advantage"), help="default: chosen by the names of its parameters")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.epilog = "✓ holds, ! may be intended, ✗ does not hold. Exit status 1 if something does not hold."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.locate import locate
    from offbeat.tools.loss_contract import CHECKS, Mark, kind_of

    spec = arguments.function
    function = locate(spec, "FUNCTION")
    kind = arguments.kind or kind_of(function, spec)
    findings = CHECKS[kind](function)
    num_failed = sum(finding.mark is Mark.FAILS for finding in findings)
    if arguments.json:
        checks = [{"check": f.check, "mark": f.mark.value, "detail": f.detail} for f in findings]
        print(json.dumps({"function": spec, "kind": kind, "holds": num_failed == 0, "checks": checks}))
    else:
        for finding in findings:
            detail = f": {finding.detail}" if finding.detail else ""
            print(f"{SIGNS[finding.mark]} {finding.check}{detail}")
        verdict = f"{num_failed} of {len(findings)} checks do not hold" if num_failed else "everything holds"
        print(f"{spec}, as {'a loss' if kind == 'loss' else 'an advantage'}: {verdict}")
    return 1 if num_failed else 0
