"""The staleness bound is compared with steps in few places: the rules, and the event model that plays them in numpy.

Everything else calls `is_trainable` or gives `oldest_trainable_step` to a query. The verifier is left out, because it
has to find the same answer on its own; so are the planner, whose bound counts batches in flight, and the simulator's
baselines, which are other systems' rules.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "offbeat"
MAY_COMPARE = {"rules/groups.py"}
LEFT_OUT = ("planner/", "ledger/verify.py", "simulator/baselines.py")
BOUND = re.compile(r"max_staleness|bound")
STEP = re.compile(r"(?<!per_)step|round|age")
IN_SQL = re.compile(r"\bBETWEEN\b[^;]*\bbound\b|[<>=-]\s*(\w+\.)?bound\b|\bbound\s*[<>=-]")


def names(node: ast.AST) -> set[str]:
    """Identifiers in an expression, as its words."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def comparisons(source: str) -> Iterator[str]:
    """Comparisons, sums and differences of the bound and a step, and queries that compare with the column `bound`."""
    for node in ast.walk(ast.parse(source)):
        is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
        if is_sum or isinstance(node, ast.Compare):
            found = names(node)
            if any(map(BOUND.fullmatch, found)) and any(map(STEP.search, found)):
                yield ast.unparse(node)
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if "SELECT" in text and IN_SQL.search(text):
            yield text


def test_the_bound_is_compared_with_a_step_in_the_rules_alone():
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith(LEFT_OUT) and (here := list(comparisons(file.read_text()))):
            found[name] = here
    others = {name: here for name, here in found.items() if name not in MAY_COMPARE}
    assert not others, f"call rules.groups.is_trainable or oldest_trainable_step instead: {others}"
    assert set(found) == MAY_COMPARE, "comparisons are no longer found"


@pytest.mark.parametrize(
    "source",
    [
        "step - token_step <= max_staleness",
        "oldest = self.step - self.terms.max_staleness",
        "token_step + bound >= step",
        "query = 'SELECT 1 FROM batches b JOIN versions v WHERE b.step - v.step BETWEEN 0 AND b.bound'",
    ],
)
def test_a_comparison_elsewhere_is_found(source: str):
    assert list(comparisons(source))


@pytest.mark.parametrize(
    "source",
    [
        "is_trainable(token_step, step, max_staleness)",
        "num_groups = (max_staleness + 1) * groups_per_step",
        "query = 'SELECT step, bound FROM batches WHERE id = ?'",
    ],
)
def test_a_call_of_the_rule_is_none(source: str):
    assert not list(comparisons(source))
