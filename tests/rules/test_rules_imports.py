from __future__ import annotations

import ast
import sys
from pathlib import Path

import offbeat.rules


def test_decisions_import_nothing_but_the_standard_library_numpy_and_each_other():
    files = list(Path(offbeat.rules.__file__).parent.glob("*.py"))
    assert len(files) > 1
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root in {*sys.stdlib_module_names, "numpy"} or name.startswith("offbeat.rules"), (file, name)
