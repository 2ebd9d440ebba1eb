"""Breaks the code on purpose and reports what the tests miss: python scripts/mutants.py SEED COUNT [--jobs N] [--all].

COUNT small changes are drawn with SEED, evenly over packages: a comparison turned round, a statement or an operand
dropped, a constant one higher, a result of None. Each is made in a copy of the tree, where the short tests of its
package, and some that import its module, are run, or with --all those of every package. A change that leaves all tests
as they were is printed as missed. Some changes alter nothing that anybody could see; whoever reads the list decides.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/offbeat")
WITHIN_S = 900.0
MAX_IMPORTERS = 6
"""Test modules elsewhere that are run too, because they import the changed module."""
NO_END = f"the tests do not end within {WITHIN_S:.0f} s"
OTHER_TREES = (".git", ".venv*", ".cache", "runs", "results", "__pycache__", ".mypy_cache", ".hypothesis")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}
SPARED = (ast.Raise, ast.Assert)
"""Statements that are left as they are: they hold the text of errors, or conditions that never fail."""
UNSEEN = re.compile(r"crash_here\(|log\.(debug|info)\(")
"""Calls that are not dropped: tests kill processes at the former, and the latter only tell."""


@dataclass(frozen=True)
class Mutant:
    module: Path
    """Below the package's folder."""
    function: str
    line: int
    before: str
    after: str
    text: str
    """The whole module, changed."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.before} -> {self.after}"


def mutants_of(module: Path, text: str) -> Iterator[Mutant]:
    """All changes of one module."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            spared = {id(inner) for node in ast.walk(function) if isinstance(node, SPARED) for inner in ast.walk(node)}
            for node in ast.walk(function):
                if id(node) not in spared:
                    for changed in _changes(node):
                        yield _mutant(module, text, function.name, node, changed)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp() if type(node.op) in OPERATORS and not _has_text(node):
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.BoolOp(values=[first, *_]):
            yield first
            yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign():
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()) if not UNSEEN.match(ast.unparse(node)):
            yield ast.Pass()
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            yield ast.Constant(number + 1)


def _has_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def _mutant(module: Path, text: str, function: str, node: ast.AST, changed: ast.AST) -> Mutant:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = text.encode()
    before, after = whole[start:stop].decode(), ast.unparse(ast.fix_missing_locations(changed))
    made = f"({after})" if isinstance(node, ast.expr) else after
    return Mutant(module, function, node.lineno, before, after, (whole[:start] + made.encode() + whole[stop:]).decode())


@cache
def _packages() -> dict[str, list[Path]]:
    """Modules with something to change and tests nearby, by package."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        module = path.relative_to(ROOT / SOURCE)
        if module.parts[0] != "testing" and mirrored_tests(module) and any(mutants_of(module, path.read_text())):
            found.setdefault(module.parts[0] if len(module.parts) > 1 else "", []).append(module)
    return found


def draw(seed: int, count: int) -> list[Mutant]:
    """Draws mutants, evenly over packages, no two in one function."""
    packages, rng = _packages(), random.Random(seed)
    names = sorted(packages)
    drawn: dict[tuple[Path, str], Mutant] = {}
    while len(drawn) < count:
        module = rng.choice(packages[names[len(drawn) % len(names)]])
        chosen = rng.choice(list(mutants_of(module, (ROOT / SOURCE / module).read_text())))
        drawn.setdefault((module, chosen.function), chosen)
    return list(drawn.values())


def near_tests(module: Path) -> list[str]:
    """The tests that mirror a module, and a few others that import it."""
    name = ".".join(("offbeat", *module.with_suffix("").parts))
    parent, _, last = name.rpartition(".")
    imports = re.compile(rf"^from {re.escape(name)} import|^from {re.escape(parent)} import .*\b{last}\b", re.MULTILINE)
    mirrored = mirrored_tests(module)
    others = [file for file, text in _test_texts().items() if imports.search(text)]
    return mirrored + [file for file in others if not file.startswith(tuple(mirrored))][:MAX_IMPORTERS]


def mirrored_tests(module: Path) -> list[str]:
    """The tests of a module's package, or its own; empty if there are none."""
    if len(module.parts) == 1:
        near = [f"tests/test_{module.stem}.py"]
    else:
        near = [f"tests/{'/'.join(module.parts[:depth])}" for depth in range(len(module.parts) - 1, 0, -1)]
    return [path for path in near if (ROOT / path).exists()][:1]


@cache
def _test_texts() -> dict[str, str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


class Hunt:
    """Runs tests against mutants. Tests that fail without any mutant are noted once and left out from then on."""

    def __init__(self) -> None:
        self._broken: set[str] = set()

    def caught_by(self, mutant: Mutant, where: Sequence[str]) -> list[str]:
        """Returns tests that fail because of the mutant, a few of them at most; empty if no test does."""
        while failed := failures(where, mutant, self._broken):
            if NO_END in failed or (real := failed - failures(sorted(failed), None)):
                return sorted(failed if NO_END in failed else real)
            self._broken |= failed
        return []


def failures(where: Sequence[str], mutant: Mutant | None, without: Iterable[str] = ()) -> set[str]:
    """Runs tests in a copy of the tree, with a mutant in place, until a few have failed; returns these."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*OTHER_TREES), symlinks=True)
        if mutant is not None:
            (tree / SOURCE / mutant.module).write_text(mutant.text)
        command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-m", "not full", "--maxfail=5"]
        command += [*where, *(f"--deselect={test}" for test in without)]
        paths = os.pathsep.join([str(tree / "src"), str(tree)])
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            return {NO_END}
    return set(re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description="Breaks the code on purpose and reports what the tests miss.")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="mutants at a time")
    parser.add_argument("--all", action="store_true", help="run the short tests of all packages")
    options = parser.parse_args()
    drawn = draw(options.seed, options.count)
    places = {mutant: ["tests"] if options.all else near_tests(mutant.module) for mutant in drawn}
    hunt, num_caught = Hunt(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        hunts = {pool.submit(hunt.caught_by, mutant, places[mutant]): mutant for mutant in drawn}
        for done in as_completed(hunts):
            caught = done.result()
            num_caught += bool(caught)
            print(f"{'caught' if caught else 'MISSED'}  {hunts[done]}  {caught[0] if caught else ''}", flush=True)
    print(f"{num_caught} of {len(drawn)} caught")


if __name__ == "__main__":
    main()
