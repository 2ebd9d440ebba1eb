"""The page for those who come from TRL compares like with like, and names keys that exist."""

from __future__ import annotations

import ast
import re

from doc_reader import ROOT, blocks

from offbeat.config.keys import known_keys

PAGE = ROOT / "docs" / "from-trl.md"


def statements(text: str) -> dict[str, str]:
    """The statements of a script, by what they define."""
    found = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign):
            found[ast.unparse(statement.targets[0])] = ast.unparse(statement)
        elif isinstance(statement, ast.FunctionDef):
            found[statement.name] = ast.unparse(statement)
    return found


def test_both_scripts_have_the_same_rows_and_the_same_reward():
    (trl,), (ours,) = blocks(PAGE, "py"), blocks(PAGE, "python")
    for name in ("rows", "right"):
        assert statements(trl)[name] == statements(ours)[name]


def test_every_key_on_the_page_exists():
    text = PAGE.read_text()
    ours = re.findall(r"^\| .*? \| (.*) \|$", text, re.MULTILINE)
    named = {key for cell in ours for key in re.findall(r"`(?:\[\[)?([a-z]+\.[a-z_]+)(?: =[^`]*)?`", cell)}
    assert named <= set(known_keys())
    assert len(named) > 25
