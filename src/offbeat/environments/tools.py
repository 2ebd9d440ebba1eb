"""Tools: functions that the model may call, what it is told of them, and the check of its arguments.

A tool is a function with type hints and a docstring, plain or async; the public methods of a class are tools, too. The
docstring's first part describes the tool. Its section `Args:`, or lines `:param NAME: …`, describe the parameters.

Arguments are converted to the hints where nothing is lost by it: formats of calls without types write everything as
text, so `"3"` becomes 3 and `"[1, 2]"` a list. What does not fit is told to the model and does not reach the tool.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pydantic
from pydantic_core import PydanticUndefinedType

from offbeat.environments.protocol import Call, CallStatus
from offbeat.errors import UserError
from offbeat.locate import one_line
from offbeat.spelling import suggest

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Names that every format of calls can write."""
NOT_TOOLS = frozenset({"begin", "step", "close", "save", "load"})
"""Methods of a class that have another meaning."""
HINTS = "str, int, float, bool, list[…], dict[str, …], Literal, Optional, an Enum or a dataclass"
MAX_PROBLEM_CHARS = 300


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """JSON schema as chat templates take it."""
    converters: Mapping[str, pydantic.TypeAdapter[Any]] = field(default_factory=dict, repr=False)
    """By parameter, what checks and converts an argument. A parameter without one takes what its schema allows."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.schema["function"]["parameters"].get("properties", {})

    @property
    def required(self) -> Sequence[str]:
        return self.schema["function"]["parameters"].get("required", ())

    def check(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Returns arguments for the function, and what is wrong with those that the model wrote; "" if nothing is."""
        for name in arguments:
            if name not in self.parameters and not self._takes_any:
                return {}, f"{self.name} has no parameter {name[:64]!r}; {suggest(name, self.parameters, 'it has')}"
        if missing := [name for name in self.required if name not in arguments]:
            return {}, f"{self.name} needs {' and '.join(missing)}"
        converted: dict[str, Any] = {}
        for name, value in arguments.items():
            try:
                converted[name] = self._convert(name, value)
            except ValueError as error:
                return {}, f"{name} of {self.name}: {error}"[:MAX_PROBLEM_CHARS]
            except RecursionError:
                return {}, f"{name} of {self.name}: nested too deeply"
        return converted, ""

    def bind(self, call: Call) -> Call:
        """Returns a call with checked and converted arguments, or with the status MALFORMED."""
        arguments, problem = self.check(call.arguments)
        if problem:
            return replace(call, status=CallStatus.MALFORMED, problem=problem)
        return replace(call, arguments=arguments)

    @property
    def _takes_any(self) -> bool:
        """Whether the tool takes parameters beside those of its schema; only a tool of somebody else's may."""
        if self.converters:
            return False
        return bool(self.schema["function"]["parameters"].get("additionalProperties", False))

    def _convert(self, name: str, value: Any) -> Any:
        adapter = self.converters.get(name)
        if adapter is None:
            return _as_schema_says(self.parameters.get(name, {}), value)
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as error:
            if isinstance(value, str):
                try:
                    return adapter.validate_python(_read(value))
                except (pydantic.ValidationError, ValueError, RecursionError):
                    pass
            raise ValueError(_first(error, value)) from None


def _read(text: str) -> Any:
    """Reads a value that is written as text, as JSON or as Python writes it."""
    return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text), strict=False)


def _first(error: pydantic.ValidationError, value: Any) -> str:
    details = error.errors(include_url=False, include_context=False)[0]
    where = "".join(f"[{part!r}]" for part in details["loc"] if isinstance(part, int | str))
    message = details["msg"][:1].lower() + details["msg"][1:]
    return f"{where + ': ' if where else ''}{message}, not {value!r:.60}"


def _as_schema_says(schema: Mapping[str, Any], value: Any) -> Any:
    """Converts a text to the type that a JSON schema names, where it names one; a server checks its own arguments."""
    wanted = schema.get("type")
    wanted = set(wanted) if isinstance(wanted, list) else {wanted}
    if not isinstance(value, str) or "string" in wanted or wanted == {None}:
        return value
    try:
        return _read(value)
    except (ValueError, RecursionError):
        raise ValueError(f"must be {' or '.join(sorted(map(str, wanted)))}, not {value!r:.60}") from None


def bind_calls(calls: Sequence[Call], tools: Mapping[str, Tool]) -> list[Call]:
    """Returns calls with checked and converted arguments; a call that names no tool gets the status UNKNOWN_TOOL."""
    return [_bind(call, tools) if call.status is CallStatus.OK else call for call in calls]


def _bind(call: Call, tools: Mapping[str, Tool]) -> Call:
    if call.name not in tools:
        problem = f"there is no tool {call.name[:64]!r}; {suggest(call.name, tools, 'there are')}"
        return replace(call, status=CallStatus.UNKNOWN_TOOL, problem=problem[:MAX_PROBLEM_CHARS])
    return tools[call.name].bind(call)


def make_tool(function: Callable[..., Any], label: str, name: str | None = None) -> Tool:
    """Returns the tool that a function is; `label` names it in errors."""
    name = name or str(getattr(function, "__name__", ""))
    if NAME.fullmatch(name) is None:
        raise UserError(f"{label}: {name!r} is no name for a tool; a name has letters, digits and _, at most 64")
    described = inspect.getdoc(function)
    if not described or not described.strip():
        raise UserError(f"{label}: {name} has no docstring, from which the model learns what the tool does; write one")
    text, of_parameters = read_docstring(described)
    properties: dict[str, Any] = {}
    converters: dict[str, pydantic.TypeAdapter[Any]] = {}
    required: list[str] = []
    for parameter, hint in _parameters(function, name, label):
        converters[parameter.name] = adapter = _adapter(hint, parameter.name, name, label)
        schema = _schema(adapter, parameter.name, name, label)
        if parameter.name in of_parameters:
            schema = {**schema, "description": of_parameters[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif _is_json(parameter.default):
            schema = {**schema, "default": parameter.default}
        properties[parameter.name] = schema
    return Tool(name, function, function_schema(name, text, properties, required), converters)


def function_schema(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]
) -> dict[str, Any]:
    """Returns the description of a tool as chat templates take it."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools_of(made: Any, label: str) -> list[Tool]:
    """Returns the tools that an object's public methods are; `label` names its class in errors."""
    if callable(listed := getattr(made, "as_tools", None)):  # they are somebody else's, such as a server's
        return list(listed())
    names = [name for name in dir(type(made)) if not name.startswith("_") and name not in NOT_TOOLS]
    methods = [name for name in names if inspect.isroutine(inspect.getattr_static(type(made), name))]
    if not methods:
        raise UserError(f"{label}: the class {type(made).__name__} has no public method to be a tool")
    return [make_tool(getattr(made, name), label) for name in methods]


def by_name(tools: Sequence[tuple[str, Tool]]) -> dict[str, Tool]:
    """Returns tools by name; each comes with the entry of `task.tools` that it is from. Raises `UserError` if two have
    the same name."""
    found: dict[str, tuple[str, Tool]] = {}
    for entry, tool in tools:
        if tool.name in found:
            raise UserError(
                f"task.tools: {found[tool.name][0]!r} and {entry!r} both have a tool named {tool.name!r}; rename one"
            )
        found[tool.name] = entry, tool
    return {name: tool for name, (_, tool) in found.items()}


def as_text(value: Any) -> str:
    """Returns a tool's result as the model is told of it: a str as it is, None as nothing, anything else as JSON, or as
    Python prints it."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


# Schemas from hints and docstrings

SECTION = re.compile(r"\A(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):?\s*\Z", re.IGNORECASE)
ARGUMENTS = ("args", "arguments", "parameters")
ARGUMENT = re.compile(r"\A\s*\**(?P<name>\w+)\s*(?:\([^)]*\))?\s*(?::\s*(?P<text>.*))?\Z")
FIELD = re.compile(r"\A\s*:(?:param|parameter|arg)\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*)\Z")
OTHER_FIELD = re.compile(r"\A\s*:\w+[^:]*:")
RULE = re.compile(r"\A\s*-{3,}\s*\Z")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns a docstring's description, and what it says of each parameter, in the style of Google, Sphinx or
    numpy."""
    described: list[str] = []
    parameters: dict[str, list[str]] = {}
    section, current, indent, is_ruled = "", None, None, False
    for line in inspect.cleandoc(text).splitlines():
        if found := SECTION.match(line):
            section, current, indent, is_ruled = found.group(1).lower(), None, None, False
        elif RULE.match(line):
            is_ruled = True
        elif found := FIELD.match(line):
            section, current = "fields", found["name"]
            parameters[current] = [found["text"]]
        elif OTHER_FIELD.match(line):
            section, current = "fields", None
        elif section in ARGUMENTS:
            found = ARGUMENT.match(line)
            own = len(line) - len(line.lstrip())
            if line.strip() and found and (indent is None or own <= indent):
                current, indent = found["name"], own
                parameters[current] = [] if is_ruled else [found["text"] or ""]  # numpy: its type
            elif current is not None:
                parameters[current].append(line.strip())
        elif section == "fields":
            if current is not None:
                parameters[current].append(line.strip())
        elif not section:
            described.append(line)
    joined = {name: " ".join(part for part in parts if part) for name, parts in parameters.items()}
    return "\n".join(described).strip(), {name: text for name, text in joined.items() if text}


def _parameters(function: Callable[..., Any], name: str, label: str) -> list[tuple[inspect.Parameter, Any]]:
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(inspect.unwrap(_plain(function)), include_extras=True)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise UserError(f"{label}: the parameters of {name} cannot be read: {one_line(error)}") from error
    found = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(
                f"{label}: parameter {str(parameter)!r} of {name} cannot be passed by name; a tool's parameters have "
                "names of their own"
            )
        if parameter.name not in hints:
            raise UserError(f"{label}: parameter {parameter.name!r} of {name} has no type hint; give it one of {HINTS}")
        found.append((parameter, hints[parameter.name]))
    return found


def _plain(function: Callable[..., Any]) -> Any:
    """Returns what carries the hints: the function itself, or the `__call__` of an object."""
    if isinstance(function, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return function
    return getattr(type(function), "__call__", function)  # noqa: B004 - it is wanted, not tested for


def _adapter(hint: Any, parameter: str, name: str, label: str) -> pydantic.TypeAdapter[Any]:
    try:
        return pydantic.TypeAdapter(hint)
    except (pydantic.errors.PydanticUserError, TypeError, NameError) as error:
        raise _no_schema(hint, parameter, name, label) from error


def _no_schema(hint: Any, parameter: str, name: str, label: str) -> UserError:
    shown = getattr(hint, "__name__", None) or str(hint)
    return UserError(
        f"{label}: no JSON schema can be made for parameter {parameter!r} of {name}, a {shown}; use {HINTS}"
    )


def _schema(adapter: pydantic.TypeAdapter[Any], parameter: str, name: str, label: str) -> dict[str, Any]:
    try:
        made = adapter.json_schema()
        return _tidy(made, made.get("$defs", {}))
    except (pydantic.errors.PydanticInvalidForJsonSchema, RecursionError) as error:
        raise _no_schema(adapter._type, parameter, name, label) from error


def _tidy(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns a schema as models know them from their training: without titles, and with definitions put where they are
    used. A definition that contains itself raises RecursionError."""
    if isinstance(schema, list):
        return [_tidy(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if reference := schema.get("$ref"):
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _tidy({**definitions[reference.rpartition("/")[2]], **rest}, definitions)
    if properties := schema.get("properties"):  # a property may be called title
        tidy = {name: _tidy(part, definitions) for name, part in properties.items()}
        rest = {key: value for key, value in schema.items() if key != "properties"}
        return {**_tidy(rest, definitions), "properties": tidy}
    kept = {key: value for key, value in schema.items() if key not in ("title", "$defs")}
    return {
        key: value if key in ("default", "enum", "const") else _tidy(value, definitions) for key, value in kept.items()
    }


def _is_json(value: Any) -> bool:
    if isinstance(value, PydanticUndefinedType):
        return False
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
