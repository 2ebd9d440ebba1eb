"""Imports point downward: each package may know those below it, and nothing heavier than its duty needs.

Every import statement is read from the source, those inside functions too, except under `if TYPE_CHECKING`.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "offbeat"
TORCH = {"torch", "transformers", "safetensors.torch", "peft", "accelerate"}
HTTP = {"http", "urllib", "aiohttp", "httpx", "requests", "fastapi", "uvicorn", "starlette", "socketserver"}
SQL = {"sqlite3"}

BASE = {"errors", "extras", "files", "host_memory", "locate", "net", "spelling", "testing.crash_points", "waiting"}
"""Small things of the standard library alone, which everyone may use."""

MAY_NOT_IMPORT = {
    **dict.fromkeys(BASE, TORCH | HTTP | SQL | {"numpy"}),
    "trajectory": TORCH | HTTP | SQL,
    "rules": TORCH | HTTP | SQL,
    "planner": TORCH | HTTP | SQL,
    "config": TORCH | HTTP | SQL | {"numpy", "asyncio", "rich"},
    "ledger": TORCH | HTTP,
    "coordinator": TORCH,
    "client": TORCH | SQL,
    "data": TORCH,
    "rewards": TORCH,
    "trainer": HTTP | SQL,
    "environments": TORCH | SQL,
    "worker": TORCH | HTTP | SQL,
    "engines": SQL,
    "weights": SQL,
    "observability": TORCH | SQL,
}
"""Modules from outside, by our own package or module."""

WITHOUT_TORCH = ("version", "manifest", "piece_store", "signing", "download", "receive", "collect", "relay_tree")
"""Modules of the weights that a coordinator and its clients may use."""
WEIGHTS = {f"weights.{module}" for module in WITHOUT_TORCH}

KNOWS: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "trajectory": set(),
    "config": set(),
    "rules": {"trajectory"},
    "planner": {"config", "rules"},
    "simulator": {"config", "rules", "planner", "trajectory", "weights.relay_tree"},
    "model": set(),
    "weights": {"model"},
    "ledger": {"trajectory", "rules", "weights.version"},
    "data": {"config", "trajectory"},
    "rewards": {"config", "trajectory", "data"},
    "environments": {"trajectory", "rewards"},
    "client": {
        "trajectory",
        "ledger.errors",
        "ledger.records",
        "ledger.workers",
        "rewards.pool",
        *WEIGHTS,
    },
    "coordinator": {"config", "trajectory", "rules", "ledger", "data", "rewards", "client", *WEIGHTS},
    "worker": {"trajectory", "weights", "engines.protocol", "client.protocol", "ledger.errors", "environments"},
    "engines": {
        "config",
        "trajectory",
        "rules.engine_health",
        "rules.restarts",
        "model",
        "weights",
    },
    "trainer": {
        "trajectory",
        "rules.groups",
        "rules.quarantine",
        "model",
        "weights",
        "ledger.records",
        "client.protocol",
    },
    "observability": {"config", "ledger.records"},
    "testing": {"trajectory", "engines.protocol", "engines.cached_prefixes"},
}
"""Our own packages that a package may know, besides itself and the base; `a.b` allows that module alone."""

KNOW_ALL = {"launch", "tools", "cli", "run", "__init__", "__main__"}
"""Where everything is put together."""


def modules() -> list[tuple[str, Path]]:
    return [(".".join(file.relative_to(ROOT).with_suffix("").parts), file) for file in sorted(ROOT.rglob("*.py"))]


def imports(file: Path) -> set[str]:
    """Dotted names that a file imports; `from a import b` counts as a.b, which may be a module."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import; name the module in full"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text()))
    return found


def names(name: str, allowed: set[str]) -> bool:
    """Whether a dotted name is one of `allowed`, or inside one."""
    return any(name == other or name.startswith(f"{other}.") for other in allowed)


@pytest.mark.parametrize("module, file", modules(), ids=[name for name, _ in modules()])
def test_imports_point_downward(module, file):
    package = module.split(".")[0]
    for imported in imports(file):
        heavy = MAY_NOT_IMPORT.get(package, set())
        assert not names(imported, heavy), f"offbeat.{module} may not import {imported}"
        ours = imported.removeprefix("offbeat.")
        if ours == imported or package in KNOW_ALL:
            continue
        assert names(ours, KNOWS[package] | BASE | {package}), f"offbeat.{module} may not know offbeat.{ours}"


def test_every_package_has_its_place():
    packages = {name.split(".")[0] for name, _ in modules()}
    assert packages <= KNOWS.keys() | KNOW_ALL


def test_the_check_itself_sees_hidden_imports(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from torch import nn\nif TYPE_CHECKING:\n    import sqlite3\n")
    assert imports(file) == {"torch.nn"}
