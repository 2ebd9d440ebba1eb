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

BASE = {"crash", "errors", "extras", "files", "locate", "redact", "spelling", "threads"}
"""Small things of the standard library alone, which everyone may use."""

MAY_NOT_IMPORT = {
    **dict.fromkeys(BASE, TORCH | HTTP | SQL | {"numpy"}),
    "trajectory": TORCH | HTTP | SQL,
    "control": TORCH | HTTP | SQL,
    "plan": TORCH | HTTP | SQL,
    "config": TORCH | HTTP | SQL | {"numpy", "asyncio", "rich"},
    "ledger": TORCH | HTTP,
    "serve": TORCH,
    "tasks": TORCH,
    "reward": TORCH,
    "learn": HTTP | SQL,
    "rollout": SQL,
    "watch": TORCH | SQL,
}
"""Modules from outside, by our own package or module."""

WITHOUT_TORCH = (
    "version",
    "folder",
    "verify",
    "manifest",
    "pieces",
    "signing",
    "sources",
    "receive",
    "collect",
    "ranges",
)
"""What of the weights a coordinator may touch."""

KNOWS: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "trajectory": set(),
    "config": set(),
    "control": {"trajectory"},
    "plan": {"config", "control"},
    "simulate": {"config", "control", "plan", "trajectory"},
    "model": set(),
    "weights": {"model", "control.chain"},
    "ledger": {"trajectory", "control", "weights.version"},
    "tasks": {"config", "trajectory"},
    "reward": {"config", "trajectory", "tasks"},
    "serve": {"config", "trajectory", "control", "ledger", "tasks", "reward", *(f"weights.{m}" for m in WITHOUT_TORCH)},
    "rollout": {
        "trajectory",
        "control.health",
        "control.reading",
        "control.step_time",
        "model",
        "weights",
        "serve.client",
        "ledger.errors",
    },
    "learn": {"trajectory", "control.settle", "control.trust", "model", "weights", "ledger.records", "serve.client"},
    "watch": {"config"},
}
"""Our own packages that a package may know, besides itself and the base; `a.b` allows that module alone."""

KNOW_ALL = {"launch", "cli", "__init__", "__main__"}
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
