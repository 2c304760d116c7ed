"""Requests to /v1/responses, which keeps nothing: all of a conversation comes with each request."""

from base64 import b64decode, b64encode
from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.server.api.asks import Answering, ChatAsk, Generation, Message, Tool
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.read_chat import EFFORTS, check_chat, read_arguments
from pshard.server.api.read_messages_list import read_messages
from pshard.server.api.read_tools import check_tools, read_choice, read_response_tools
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
    Whole,
    read_fields,
)
from pshard.server.api.tables.other_names import refuse_others
from pshard.server.api.tables.rule_fields import read_format
from pshard.server.api.tables.sampling_fields import Most, read_sampling, read_stops, sampling_table

STATELESS = "is not taken: nothing is stored here; send the whole conversation as input"
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
SEAL = "pshard:"  # clients that keep no reasoning as text bring it back in this form, so that the model sees it again


def responses_table(limits: Limits) -> Table:
    """Fields of a request to /v1/responses."""
    skipped = ("n", "response_format", "stream_options", "logprobs", "return_token_ids")
    shared = tuple(field for field in sampling_table(limits) if field.name not in skipped)
    words = OneOf(("none", "auto", "required"))
    named = Fields(
        (Field("type", OneOf(("function", "custom")), needed=True), Field("name", Text(128, 1), needed=True))
    )
    told = "none, auto, required, or an object with a function's name"
    effort = Fields((Field("effort", OneOf(EFFORTS), None), Field("summary", Text(64), None)))
    return (
        Field("model", Text(256), ""),
        Field(
            "input",
            ByType((("string", Text(limits.body)), ("array", Items(Object(), limits.messages, 1))), "a text or a list"),
            needed=True,
        ),
        Field("instructions", Text(limits.body), None),
        Field("max_output_tokens", Most(), None),
        Field("tools", Items(Object(), limits.tools), ()),
        Field("tool_choice", ByType((("string", words), ("object", named)), told), None),
        Field("parallel_tool_calls", Flag(), True, "false: an answer ends with its first call"),
        Field("text", Fields((Field("format", _format_kind(), None),)), None),
        Field("reasoning", effort, None),
        Field("top_logprobs", Whole(0, limits.top), None),
        Field("include", Items(OneOf((LOGPROBS, SEALED)), 8), ()),
        Field("truncation", OneOf(("disabled",)), None, "prompts are never cut"),
        Field("previous_response_id", Refused(STATELESS)),
        Field("conversation", Refused(STATELESS)),
        Field("prompt", Refused("is not taken: there are no stored prompts")),
        Field("background", Refused("is not taken: answers are made while the client is there")),
        *shared,
        *refuse_others("/v1/responses"),
    )


def _format_kind() -> Fields:
    """`text.format`: what response_format is elsewhere, with its fields one level higher."""
    return Fields(
        (
            Field("type", OneOf(("text", "json_object", "json_schema")), needed=True),
            Field("name", Text(256), ""),
            Field("description", Text(1 << 16), ""),
            Field("strict", Flag(), False),
            Field("schema", Object(), None),
        )
    )


def read_responses(body: Any, table: Table, usual: Sampling, limits: Limits, vocab: int) -> ChatAsk:
    """What a request to /v1/responses asks for. Raises Fault by the field that is wrong."""
    v = read_fields(body, table)
    likely = v["top_logprobs"] or 0 if LOGPROBS in v["include"] or v["top_logprobs"] else None
    generation = Generation(
        v["max_output_tokens"],
        read_sampling(v, usual, vocab),
        read_stops(v["stop"]),
        likely=likely,
        ignore_end=v["ignore_eos"],
    )
    tools = check_tools(read_response_tools(v["tools"], "tools", limits), limits)
    messages: list[Message] = [{"role": "system", "content": v["instructions"]}] if v["instructions"] else []
    given = v["input"]
    items = [("input", {"role": "user", "content": given})] if isinstance(given, str) else _to_messages(given)
    messages += read_messages(items)
    ask = ChatAsk(
        join_systems(messages),
        generation,
        Answering(v["stream"]),
        tools,
        read_choice(v["tool_choice"], tools),
        v["parallel_tool_calls"],
        _read_format((v["text"] or {}).get("format"), limits),
        arguments=read_arguments({}, (v["reasoning"] or {}).get("effort")),
        where="input",
        format="text.format",
    )
    return check_chat(ask)


def _read_format(given: dict[str, Any] | None, limits: Limits) -> dict[str, Any] | None:
    if given is None or given["type"] != "json_schema":
        return read_format(given, limits, "text.format")
    if given["schema"] is None:
        raise bad_field("text.format.schema", "is missing")
    return read_format({"type": "json_schema", "json_schema": given}, limits, "text.format")


def _to_messages(items: tuple[dict[str, Any], ...]) -> list[tuple[str, dict[str, Any]]]:
    """Items of `input` as messages of a chat: what the assistant thought, said and called in a row is one message.
    Raises Fault for items that are none of a conversation."""
    messages: list[tuple[str, dict[str, Any]]] = []

    def go_on(where: str, whole: bool = True) -> dict[str, Any]:
        """The assistant's message that may go on, or a new one. whole: also after it has said something."""
        last = messages[-1][1] if messages else {}
        if last.get("role") != "assistant" or not (whole or last.get("content") is None):
            messages.append((where, {"role": "assistant", "content": None}))
        return messages[-1][1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                go_on(where, False)["content"] = item.get("content")
            case "message":
                messages.append((where, item))
            case "function_call" | "custom_tool_call":
                go_on(where).setdefault("tool_calls", []).append(_read_call(item))
            case "function_call_output" | "custom_tool_call_output":
                answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
                messages.append((where, answer))
            case "reasoning":
                messages.append((where, {"role": "assistant", "content": None}))
                messages[-1][1]["reasoning_content"] = _read_reasoning(item)
            case other:
                raise bad_field(f"{where}.type", f"is {str(other)[:40]!r}, which is not taken")
    return messages


def _read_call(item: dict[str, Any]) -> dict[str, Any]:
    """An item's call as a chat has it."""
    name, space, given = item.get("name"), item.get("namespace"), item.get("arguments")
    if isinstance(name, str) and isinstance(space, str):
        name = Tool.name_in(space, name)
    if item.get("type") == "custom_tool_call":
        given = {"input": item.get("input")}
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": given}}


def _read_reasoning(item: dict[str, Any]) -> str:
    if thought := unseal(item.get("encrypted_content")):
        return thought
    parts = item.get("content") or item.get("summary")
    if not isinstance(parts, list):  # of which there is nothing to read
        return ""
    return "\n".join(
        str(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def seal(thought: str) -> str:
    """Reasoning as the text of `encrypted_content`. It is no secret of the client's, and nothing is encrypted."""
    return SEAL + b64encode(thought.encode()).decode()


def unseal(given: Any) -> str:
    """The reasoning of such a text; "" for what another server made."""
    if not isinstance(given, str) or not given.startswith(SEAL):
        return ""
    try:
        return b64decode(given[len(SEAL) :], validate=True).decode()
    except ValueError:
        return ""


def join_systems(messages: list[Message]) -> tuple[Message, ...]:
    """The messages with one of the system at most where they begin with several: templates take no more."""
    n = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if n < 2:
        return tuple(messages)
    return ({"role": "system", "content": "\n\n".join(m["content"] for m in messages[:n])}, *messages[n:])
