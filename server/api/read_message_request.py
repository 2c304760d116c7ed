"""Requests to /v1/messages, as Anthropic's clients write them."""

from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.server.api.asks import Answering, ChatAsk, Generation, Message
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.read_chat import EFFORTS, check_chat, read_arguments
from pshard.server.api.read_messages_list import read_messages
from pshard.server.api.read_tools import check_schema, check_tools, read_choice, read_tool
from pshard.server.api.tables.fields import (
    ByType,
    Field,
    Fields,
    Flag,
    Items,
    Object,
    OneOf,
    Refused,
    Table,
    Text,
    read_fields,
)
from pshard.server.api.tables.other_names import refuse_others
from pshard.server.api.tables.sampling_fields import Most, read_sampling, sampling_table

BILLING = "x-anthropic-billing-header:"  # of Claude Code; it differs with every request, and says nothing to a model
CLEARS = "clear_thinking"  # edits that ask for what templates do anyway
THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def messages_table(limits: Limits, counts: bool = False) -> Table:
    """Fields of a request to /v1/messages; `counts`: to /v1/messages/count_tokens, which asks for no answer."""
    blocks = Items(Object(), 1 << 16)
    stop = Items(Text(limits.stop_letters, 1), limits.stops)
    choice = Fields(
        (
            Field("type", OneOf(("auto", "any", "tool", "none")), needed=True),
            Field("name", Text(128), None),
            Field("disable_parallel_tool_use", Flag(), False, "true: an answer ends with its first call"),
        )
    )
    thinking = Fields((Field("type", OneOf(tuple(THINKING)), needed=True),))
    format = Fields((Field("type", OneOf(("json_schema",)), needed=True), Field("schema", Object(), needed=True)))
    output = Fields((Field("effort", OneOf(EFFORTS), None), Field("format", format, None)))
    edits = Fields((Field("edits", Items(Object(), 64), ()),))
    elsewhere = ("n", "stop", "response_format", "stream_options", "return_token_ids", "stream")
    generation = tuple(field for field in sampling_table(limits) if field.name not in elsewhere)
    return (
        Field("model", Text(256), ""),
        Field("messages", Items(Object(), limits.messages, 1), needed=True),
        Field("max_tokens", Most(), None, needed=not counts),
        Field("system", ByType((("string", Text(limits.body)), ("array", blocks)), "a text or a list of blocks"), ()),
        Field("stop_sequences", stop, ()),
        Field("tools", Items(Object(), limits.tools), ()),
        Field("tool_choice", choice, None),
        Field("thinking", thinking, None, "budget_tokens is not kept: thinking ends when the model ends it"),
        Field("output_config", output, {}),
        Field("output_format", format, None, "an older name of output_config.format"),
        Field("context_management", edits, {}, "only that thinking of earlier turns is left out"),
        Field("stream", Flag(), False),
        Field("container", Refused("is not taken: nothing is run here")),
        Field("mcp_servers", Refused("is not taken: this server reaches no others")),
        *generation,
        *refuse_others("/v1/messages"),
    )


def read_message_request(body: Any, table: Table, usual: Sampling, limits: Limits, vocab: int) -> ChatAsk:
    """What a request to /v1/messages asks for. Raises Fault by the field that is wrong."""
    v = read_fields(body, table)
    system = _read_text(_without_billing(v["system"]), "system")
    messages: list[tuple[str, Message]] = [("system", {"role": "system", "content": system})] if system else []
    for i, message in enumerate(v["messages"]):
        messages += _read_turn(message, f"messages[{i}]")
    tools = check_tools((_read_tool(tool, f"tools[{i}]", limits) for i, tool in enumerate(v["tools"])), limits)
    thinking = {} if v["thinking"] is None else {"enable_thinking": THINKING[v["thinking"]["type"]]}
    for i, edit in enumerate(v["context_management"].get("edits", ())):
        if not str(edit.get("type")).startswith(CLEARS):
            raise bad_field(f"context_management.edits[{i}].type", f"is none of {CLEARS}: conversations are kept whole")
    given, where = v["output_config"].get("format"), "output_config.format"
    if given is None:
        given, where = v["output_format"], "output_format"
    if given is not None:
        check_schema(given["schema"], f"{where}.schema", limits)
    return check_chat(
        ChatAsk(
            read_messages(messages),
            Generation(
                v["max_tokens"],
                read_sampling(v, usual, vocab),
                tuple(dict.fromkeys(v["stop_sequences"])),
                ignore_end=v["ignore_eos"],
            ),
            Answering(v["stream"]),
            tools,
            _read_choice(v["tool_choice"], tools),
            not (v["tool_choice"] or {}).get("disable_parallel_tool_use"),
            schema=given and given["schema"],
            arguments=read_arguments(thinking, v["output_config"].get("effort")),
            format=where,
        )
    )


def _read_tool(given: dict[str, Any], where: str, limits: Limits) -> Any:
    if given.get("type") not in (None, "custom"):
        raise bad_field(
            f"{where}.type", f"is {str(given['type'])[:40]!r}; only tools that the client runs can be called"
        )
    table = (
        Field("name", Text(128, 1), needed=True),
        Field("description", Text(1 << 20), ""),
        Field("input_schema", Object(), needed=True),
    )
    read = read_fields(given, table, f"{where}.")
    return read_tool(read | {"parameters": read["input_schema"]}, where, limits, "input_schema")


def _read_choice(given: dict[str, Any] | None, tools: tuple[Any, ...]) -> str | tuple[str]:
    if given is None:
        return read_choice(None, tools)
    if given["type"] == "tool":
        return read_choice({"name": given["name"]}, tools)
    return read_choice({"any": "required"}.get(given["type"], given["type"]), tools)


def _read_turn(message: dict[str, Any], where: str) -> list[tuple[str, Message]]:
    """A message as messages of a chat: results of tools are messages of their own. Raises Fault for blocks that are not
    taken."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_field(f"{where}.role", "is one of user, assistant")
    if isinstance(content, str):
        return [(where, {"role": role, "content": content})]
    if not isinstance(content, list):
        raise bad_field(f"{where}.content", "is a text or a list of blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[tuple[str, Message]] = []
    for i, block in enumerate(content):
        place = f"{where}.content[{i}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(_read_text([block], place))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass  # of another model, which nobody else can read
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            case "tool_result":
                answer = _read_text(block.get("content") or "", f"{place}.content")
                results.append((place, {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": answer}))
            case other:
                raise bad_field(place, f"of type {str(other)[:40]!r} is not taken: this model reads text only")
    told: Message = {"role": role, "content": "\n".join(texts)}
    if calls:
        told["tool_calls"] = calls
    if thoughts:
        told["reasoning_content"] = "\n".join(thoughts)
    return [*results, (where, told)] if texts or calls or thoughts or not results else results


def _without_billing(system: Any) -> Any:
    """The system's blocks without the line that would keep equal prefixes from being found."""
    if isinstance(system, str):
        return system
    return tuple(block for block in system if not str(block.get("text")).startswith(BILLING))


def _read_text(given: Any, where: str) -> str:
    """A text, or the texts of blocks. Raises Fault for other blocks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple):
        raise bad_field(where, "is a text or a list of blocks")
    texts = []
    for i, block in enumerate(given):
        kind = block.get("type") if isinstance(block, dict) else None
        text = block.get({"text": "text", "tool_reference": "tool_name"}.get(str(kind), "")) if kind else None
        if not isinstance(text, str):
            raise bad_field(f"{where}[{i}]", "is no block of text, and this model reads text only")
        texts.append(text)
    return "\n".join(texts)
