"""The chat templates that TRL ships: each is used for episodes, or refused in one line."""

import importlib.util
import os
from pathlib import Path

import pytest
from chat_tokenizers import chat_tokenizer

from offbeat.environments.calls import FORMATS
from offbeat.environments.protocol import Call
from offbeat.environments.turns import TemplateProblem, TurnTokens

pytestmark = pytest.mark.full


def folder() -> Path | None:
    """Templates of the installed package, or of the one in the folder OFFBEAT_TRL."""
    if named := os.environ.get("OFFBEAT_TRL"):
        return Path(named) / "chat_templates"
    found = importlib.util.find_spec("trl")
    return Path(found.origin).parent / "chat_templates" if found and found.origin else None


FOLDER = folder()
if FOLDER is None or not FOLDER.is_dir():
    pytest.skip("TRL is not installed; set OFFBEAT_TRL to the folder of its package", allow_module_level=True)
TEMPLATES = {path.stem: path for path in sorted(FOLDER.glob("*.jinja")) if not path.stem.endswith("_training")}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "What."}},
                "required": ["key"],
            },
        },
    }
]


def made(name, **how):
    template = TEMPLATES[name].read_text()
    return TurnTokens(chat_tokenizer(template), template, **how)


def refusals(names, **how):
    found = {}
    for name in names:
        try:
            made(name, **how)
        except TemplateProblem as problem:
            found[name] = str(problem)
    assert not any("\n" in why for why in found.values())
    return found


def test_messages_can_be_added_in_all_but_one_template():
    assert len(TEMPLATES) >= 41
    assert len(refusals(TEMPLATES)) <= 1


def test_results_can_be_added_wherever_a_template_writes_them():
    refused = refusals(TEMPLATES, tools=TOOLS, call_format=FORMATS["hermes"])
    assert len(TEMPLATES) - len(refused) >= 31
    assert all("has no place for results of tools" in why for why in refused.values()), refused


def test_formats_are_recognised_in_every_template_with_a_section_for_tools():
    refused = refusals(TEMPLATES, tools=TOOLS)
    assert len(TEMPLATES) - len(refused) >= 27
    unknown = {name for name, why in refused.items() if "format that is not known" in why}
    assert unknown <= {"lfm2"}, "whose template leaves the calls of the past out"


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_hold_what_the_tools_said_in_their_order(name):
    try:
        turns = made(name, tools=TOOLS)
    except TemplateProblem:
        return
    text = turns.tokenizer.decode(turns.results([Call("look_up"), Call("look_up")], ["one thing", "another"]))
    assert text.index("one thing") < text.index("another")
    assert turns.stop_ids
