"""Tools of a request, and which of them may or must be called."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pshard.server.api.asks import Tool
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.tables.fields import ByType, Field, Fields, Flag, Items, Object, OneOf, Text, read_fields

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
CUSTOM = (
    Field("name", Text(128, 1), needed=True),
    Field("description", Text(1 << 20), ""),
    Field(
        "format",
        Fields(
            (
                Field("type", OneOf(("text", "grammar")), needed=True),
                Field("syntax", OneOf(("lark", "regex")), "lark"),
                Field("definition", Text(1 << 20), ""),
            )
        ),
        None,
    ),
)
NAMESPACE = (Field("name", Text(128, 1), needed=True), Field("tools", Items(Object(), 256), needed=True))


def function_kind() -> Fields:
    """A function: name, description, parameters."""
    return Fields(
        (
            Field("name", Text(128, 1), needed=True),
            Field("description", Text(1 << 20), ""),
            Field("parameters", Object(), None, "JSON schema of the arguments"),
            Field("strict", Flag(), False),
        )
    )


def tool_kind() -> Fields:
    """A tool of /v1/chat/completions."""
    return Fields((Field("type", OneOf(("function",)), needed=True), Field("function", function_kind(), needed=True)))


def choice_kind() -> ByType:
    """`tool_choice` of /v1/chat/completions."""
    name = Fields((Field("name", Text(128, 1), needed=True),))
    named = Fields((Field("type", OneOf(("function",)), needed=True), Field("function", name, needed=True)))
    words = OneOf(("none", "auto", "required"))
    return ByType((("string", words), ("object", named)), "none, auto, required, or an object with a function's name")


def read_tool(given: dict[str, Any], where: str, limits: Limits, field: str = "parameters") -> Tool:
    """One tool. field: where the client has its schema. Raises Fault for a name that is none, and for a schema beyond
    the limits."""
    function = given.get("function", given)
    if not NAME.fullmatch(function["name"]):
        raise bad_field(f"{where}.name", "is made of letters, digits and _ . : -")
    parameters = NO_ARGUMENTS if not function["parameters"] else function["parameters"]
    check_schema(parameters, f"{where}.{field}", limits)
    return Tool(function["name"], function["description"], parameters, where=f"{where}.{field}")


def read_tools(given: Iterable[dict[str, Any]], limits: Limits) -> tuple[Tool, ...]:
    """Tools of a chat. Raises Fault as `read_tool` does, and for more than the limits in sum."""
    return check_tools([read_tool(tool, f"tools[{i}].function", limits) for i, tool in enumerate(given)], limits)


def check_tools(tools: Iterable[Tool], limits: Limits) -> tuple[Tool, ...]:
    """The tools. Raises Fault where all of them together are larger than the limits."""
    kept, size = tuple(tools), 0
    for tool in kept:
        size += len(tool.name) + len(tool.description) + measure_schema(tool.parameters, limits)
        if size > limits.tools_bytes:
            raise bad_field("tools", f"are of more than {limits.tools_bytes >> 10} KiB together; give fewer")
    return kept


def read_response_tools(given: Iterable[dict[str, Any]], where: str, limits: Limits, space: str = "") -> list[Tool]:
    """Tools of /v1/responses: functions, custom tools, and namespaces of both. Raises Fault for tools that run
    elsewhere, by their types."""
    tools: list[Tool] = []
    for i, tool in enumerate(given):
        place = f"{where}[{i}]"
        match tool.get("type"):
            case "function":
                read = read_tool(read_fields(tool, function_kind().table, f"{place}."), place, limits)
                tools.append(replace(read, name=Tool.name_in(space, read.name), space=space))
            case "custom":
                tools.append(_read_custom(tool, place, limits, space))
            case "namespace" if not space:
                inner = read_fields(tool, NAMESPACE, f"{place}.")
                tools += read_response_tools(inner["tools"], f"{place}.tools", limits, inner["name"])
            case other:
                told = f"is {str(other)[:40]!r}; only functions and custom tools can be called, which the client runs"
                raise bad_field(f"{place}.type", f"{told}: turn it off there")
    return tools


def _read_custom(given: dict[str, Any], where: str, limits: Limits, space: str) -> Tool:
    """A tool that takes a text; its grammar is told to the model."""
    read = read_fields(given, CUSTOM, f"{where}.")
    told, format = read["description"], read["format"]
    if format and format["type"] == "grammar":
        told += f"\nThe input follows this grammar ({format['syntax']}):\n{format['definition']}"
    tool = read_tool(read | {"description": told, "parameters": INPUT}, where, limits)
    return replace(tool, name=Tool.name_in(space, tool.name), custom=True, space=space)


def read_choice(given: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> str | tuple[str]:
    """Which tools may be called: "none", "auto", "required" or (name,). Raises Fault for a tool that is not there."""
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_field(f"tools[{i}].function.name", f"is {name!r} a second time")
    if given is None:
        return "auto" if tools else "none"
    if isinstance(given, dict):
        name = given.get("function", given)["name"]
        if name not in names:
            raise bad_field("tool_choice", f"names {name!r}, which is not among the tools")
        return (name,)
    if given == "required" and not tools:
        raise bad_field("tool_choice", "is required, and there are no tools")
    return given if tools else "none"


def check_schema(schema: Any, where: str, limits: Limits) -> None:
    """Raises Fault for a schema that is larger or deeper than the limits."""
    size = measure_schema(schema, limits)
    if size > limits.schema_bytes:
        raise bad_field(where, f"is a schema of more than {limits.schema_bytes >> 10} KiB")
    if size < 0:
        raise bad_field(where, f"is a schema nested deeper than {limits.depth} levels")


def measure_schema(schema: Any, limits: Limits) -> int:
    """About how many bytes a schema has as JSON, counted no further than the limit; -1: it is nested too deeply."""
    size, level = 0, [schema]
    for _ in range(limits.depth + 1):
        inner: list[Any] = []
        for value in level:
            size += 4 + len(value) if isinstance(value, str | list | dict) else 8
            if isinstance(value, dict):
                size += sum(map(len, value))
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if size > limits.schema_bytes or not inner:
            return size
        level = inner
    return -1
