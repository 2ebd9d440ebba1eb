"""The page about trust names the flags, files and keys that there are, and is found from where one would look."""

from __future__ import annotations

import re

from doc_reader import ROOT

from offbeat.cli import node, worker
from offbeat.cli.parser import Parser
from offbeat.config.keys import known_keys
from offbeat.config.local_keys import LOCAL_KEYS
from offbeat.config.secrets import SECRETS

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_the_keys_of_a_machine_are_those_that_are_held_back():
    table = PAGE.partition("## What a machine decides for itself")[2].partition("\n\nWhat the role needs")[0]
    assert set(re.findall(r"`([a-z_]+\.[a-z_]+)`", table)) == {local.key for local in LOCAL_KEYS}


def test_every_flag_and_key_on_the_page_exists():
    parser = Parser(prog="offbeat worker")
    worker.add_arguments(parser)
    of_nodes = Parser(prog="offbeat node")
    node.add_arguments(of_nodes)
    actions = [*parser._actions, *of_nodes._actions]
    known = {word for action in actions for word in action.option_strings} | {"--resume"}
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*(?![\w.-])", PAGE))
    assert flags >= {"--trust-coordinator", "--allow-plain", "--secrets-file"}
    assert flags <= known
    keys = set(re.findall(r"`((?:run|serve|weights|ledger|loss|engine|model)\.[a-z_]+)", PAGE))
    assert len(keys) > 10
    assert keys <= set(known_keys())
    assert SECRETS in PAGE


def test_it_is_linked_from_the_readme_and_from_the_swarm():
    assert "(docs/security.md)" in (ROOT / "README.md").read_text().partition("## Documentation")[2]
    assert "(security.md)" in (ROOT / "docs" / "swarm.md").read_text()
