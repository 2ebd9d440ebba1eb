import asyncio
import dataclasses
import enum
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.protocol import Call, CallStatus
from offbeat.environments.tools import as_text, bind_calls, by_name, make_tool, read_docstring, tools_of
from offbeat.errors import UserError


class Unit(enum.Enum):
    METRES = "m"
    FEET = "ft"


@dataclasses.dataclass
class Place:
    """Where something is."""

    x: float
    title: str = "here"


def measure(
    place: Place,
    names: list[str],
    unit: Unit = Unit.METRES,
    mode: Literal["fast", "exact"] = "fast",
    limit: Optional[int] = None,  # noqa: UP045 - as users write it
    weights: dict[str, float] | None = None,
    is_round: bool = False,
) -> str:
    """Measures a place.

    It takes a while.

    Args:
        place: Where to measure,
            and how it is called.
        names (list[str]): Whom to ask.
        limit: Longest way: in metres.

    Returns:
        The length.
    """
    return f"{place.x} {place.title} {names} {unit} {mode} {limit} {weights} {is_round}"


def parameters(tool):
    return tool.schema["function"]["parameters"]


def test_schema_tells_what_hints_and_docstring_say():
    tool = make_tool(measure, "task.tools")
    function = tool.schema["function"]
    assert (tool.schema["type"], function["name"]) == ("function", "measure")
    assert function["description"] == "Measures a place.\n\nIt takes a while."
    assert parameters(tool)["required"] == ["place", "names"]
    assert parameters(tool)["properties"] == {
        "place": {
            "type": "object",
            "description": "Where to measure, and how it is called.",
            "properties": {"x": {"type": "number"}, "title": {"type": "string", "default": "here"}},
            "required": ["x"],
        },
        "names": {"type": "array", "items": {"type": "string"}, "description": "Whom to ask."},
        "unit": {"enum": ["m", "ft"], "type": "string"},
        "mode": {"enum": ["fast", "exact"], "type": "string", "default": "fast"},
        "limit": {
            "anyOf": [{"type": "integer"}, {"type": "null"}],
            "default": None,
            "description": "Longest way: in metres.",
        },
        "weights": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
            "default": None,
        },
        "is_round": {"type": "boolean", "default": False},
    }
    json.dumps(tool.schema)


def test_arguments_become_what_the_hints_say():
    tool = make_tool(measure, "task.tools")
    arguments, problem = tool.check({"place": {"x": 1}, "names": ["a"], "unit": "ft", "limit": 3})
    assert problem == ""
    assert arguments == {"place": Place(1.0), "names": ["a"], "unit": Unit.FEET, "limit": 3}
    written, problem = tool.check(
        {"place": '{"x": 1}', "names": '["a"]', "unit": "ft", "limit": "3", "is_round": "True"}
    )
    assert problem == ""
    assert written == {**arguments, "is_round": True}, "formats without types write everything as text"
    assert tool.check({"place": {"x": 1}, "names": [], "limit": "null"})[0]["limit"] is None


def echo(text: str) -> str:
    """Echoes."""
    return text


@given(st.text())
def test_text_for_a_text_is_never_converted(text):
    assert make_tool(echo, "x").check({"text": text}) == ({"text": text}, "")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"names": []}, "measure needs place"),
        ({}, "measure needs place and names"),
        ({"place": {"x": 1}, "names": [], "unti": "m"}, "measure has no parameter 'unti'; did you mean 'unit'?"),
        ({"place": {"x": "a"}, "names": []}, "place of measure: ['x']: input should be a valid number"),
        ({"place": 3, "names": []}, "place of measure"),
        (
            {"place": {"x": 1}, "names": [], "mode": "slow"},
            "mode of measure: input should be 'fast' or 'exact', not 'slow'",
        ),
        ({"place": {"x": 1}, "names": "a, b"}, "names of measure: input should be a valid list"),
        ({"place": {"x": 1}, "names": [], "limit": 1.5}, "limit of measure"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(arguments, told):
    call = make_tool(measure, "x").bind(Call("measure", arguments))
    assert call.status is CallStatus.MALFORMED
    assert call.problem.startswith(told)
    assert "\n" not in call.problem


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_no_argument_raises(value):
    tool = make_tool(measure, "x")
    for name in parameters(tool)["properties"]:
        arguments, problem = tool.check({"place": {"x": 1}, "names": [], name: value})
        assert (arguments == {}) == bool(problem)
    tool.check({str(value): value})


def test_nesting_without_end_is_told():
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert make_tool(measure, "x").check({"place": deep, "names": []})[1].startswith("place of measure")


def test_calls_find_their_tool_or_are_told_of_it():
    tools = by_name([("a", make_tool(measure, "a")), ("b", make_tool(echo, "b"))])
    broken = Call("", status=CallStatus.INVALID_JSON, problem="no JSON")
    good, unknown, same = bind_calls([Call("echo", {"text": "hi"}), Call("ecko", {}), broken], tools)
    assert (good.status, good.arguments) == (CallStatus.OK, {"text": "hi"})
    assert (unknown.status, unknown.problem) == (
        CallStatus.UNKNOWN_TOOL,
        "there is no tool 'ecko'; did you mean 'echo'?",
    )
    assert same is broken


class Notes:
    """Takes notes."""

    kept: list[str]

    def __init__(self):
        self.kept = []

    def add(self, text: str) -> int:
        """Adds a note.

        :param text: What to note,
            on one line.
        :returns: How many there are.
        """
        self.kept.append(text)
        return len(self.kept)

    async def search(self, word: Annotated[str, "ignored"], most: int = 3) -> list[str]:
        """Searches the notes.

        Parameters
        ----------
        word : str
            What to look for.
        most : int, optional
            How many.
        """
        return [note for note in self.kept if word in note][:most]

    def close(self): ...

    def _hidden(self): ...


def test_public_methods_of_a_class_are_tools_each_object_with_its_own_state():
    one, other = Notes(), Notes()
    tools = {tool.name: tool for tool in tools_of(one, "x")}
    assert sorted(tools) == ["add", "search"]
    assert tools["add"].schema["function"]["description"] == "Adds a note."
    assert parameters(tools["add"])["properties"] == {
        "text": {"type": "string", "description": "What to note, on one line."}
    }
    assert parameters(tools["search"])["properties"] == {
        "word": {"type": "string", "description": "What to look for."},
        "most": {"type": "integer", "default": 3, "description": "How many."},
    }
    tools["add"].function(text="a word")
    assert asyncio.run(tools["search"].function(word="word")) == ["a word"]
    assert other.kept == []


def undescribed(text: str): ...


def unhinted(text):
    """Takes something."""


def many(*texts: str):
    """Takes many."""


def keyed(**texts: str):
    """Takes many."""


def positional(text: str, /):
    """Takes one."""


class Thing: ...


def unknown(thing: Thing):
    """Takes a thing."""


def dangling(thing: "Nowhere"):  # noqa: F821
    """Takes what nobody defined."""


def called(f: Callable[[int], int]):
    """Takes a function."""


@dataclasses.dataclass
class Tree:
    branches: list["Tree"]


def climbs(tree: Tree):
    """Takes a tree."""


@pytest.mark.parametrize(
    "function, told",
    [
        (undescribed, "undescribed has no docstring"),
        (unhinted, "parameter 'text' of unhinted has no type hint; give it one of str, int"),
        (many, "parameter '*texts: str' of many cannot be passed by name"),
        (keyed, "parameter '**texts: str' of keyed cannot be passed by name"),
        (positional, "parameter 'text: str' of positional cannot be passed by name"),
        (unknown, "no JSON schema can be made for parameter 'thing' of unknown, a Thing; use str, int"),
        (dangling, "the parameters of dangling cannot be read: NameError"),
        (called, "no JSON schema can be made for parameter 'f' of called"),
        (climbs, "no JSON schema can be made for parameter 'tree' of climbs, a Tree"),
        (lambda text: text, "'<lambda>' is no name for a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_says_why(function, told):
    with pytest.raises(UserError) as caught:
        make_tool(function, "task.tools = 'x.py:f'")
    assert str(caught.value).startswith(f"task.tools = 'x.py:f': {told}")
    assert "\n" not in str(caught.value)


def test_names_that_clash_name_both_entries():
    with pytest.raises(UserError, match=r"'a.py:echo' and 'b.py:echo' both have a tool named 'echo'; rename one"):
        by_name([("a.py:echo", make_tool(echo, "x")), ("b.py:echo", make_tool(echo, "x"))])


def test_a_class_without_public_methods_is_refused():
    with pytest.raises(UserError, match="the class Thing has no public method to be a tool"):
        tools_of(Thing(), "x")


def test_results_become_text():
    assert [as_text(value) for value in ("a", None, 3, {"é": [1]}, {1}, float("nan"))] == [
        *("a", "", "3", '{"é": [1]}', "{1}", "NaN")
    ]


@given(st.text())
def test_any_docstring_can_be_read(text):
    read_docstring(text)
