"""The page about planning shows the files and the answer as they are."""

from __future__ import annotations

import shlex

import pytest
from doc_reader import ROOT, Reader, blocks, commands

PAGE = ROOT / "docs" / "planning.md"
FILES = ("cluster_hex_56.toml", "workload_hex_7b.toml")


@pytest.mark.parametrize("index", range(2), ids=FILES)
def test_a_file_on_the_page_is_the_example(index):
    example = (ROOT / "examples" / "planning" / FILES[index]).read_text()
    assert example.rstrip().endswith(blocks(PAGE, "TOML")[index].rstrip())


def test_the_first_command_gives_the_shown_sentence(reader: Reader):
    (shown,) = blocks(PAGE, "")
    _, *words = shlex.split(commands(PAGE)[0])
    said = reader.succeed(*words)
    assert said.splitlines()[0] == shown.splitlines()[0]
    assert [line.split(":")[0] for line in said.splitlines()] == [line.split(":")[0] for line in shown.splitlines()]
