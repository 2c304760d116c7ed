"""Requests to /v1/chat/completions."""

from dataclasses import replace
from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.server.api.asks import ChatAsk, Generation
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.read_completion import check_jobs, read_answering
from pshard.server.api.read_messages_list import number_places, read_messages
from pshard.server.api.read_tools import choice_kind, read_choice, read_tools, tool_kind
from pshard.server.api.tables.fields import (
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
from pshard.server.api.tables.rule_fields import read_rules
from pshard.server.api.tables.sampling_fields import Most, read_sampling, read_stops, sampling_table, speculative_field

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ARGUMENTS = (  # of a template: no others, as a template may do anything with what it is given
    Field("enable_thinking", Flag(), None),
    Field("thinking", Flag(), None),
    Field("reasoning_effort", OneOf(EFFORTS), None),
)


class _Arguments:
    """`chat_template_kwargs`: keys that are known, and no others."""

    def read(self, value: Any, where: str) -> dict[str, Any]:
        known = Fields(ARGUMENTS).read(value, where)
        for key in value:
            if key not in known:
                names = ", ".join(field.name for field in ARGUMENTS)
                raise bad_field(f"{where}.{str(key)[:40]}", f"is no argument of templates here; there are {names}")
        return {key: read for key, read in known.items() if read is not None}

    def schema(self) -> dict[str, Any]:
        return Fields(ARGUMENTS).schema() | {"additionalProperties": False}


def chat_table(limits: Limits) -> Table:
    """Fields of a request to /v1/chat/completions."""
    return (
        Field("model", Text(256), ""),
        Field("messages", Items(Object(), limits.messages, 1), needed=True),
        Field("max_completion_tokens", Most(), None, "-1: fills the context"),
        Field("max_tokens", Most(), None, "an older name of max_completion_tokens"),
        Field("logprobs", Flag(), False),
        Field("top_logprobs", Whole(0, limits.top), None),
        Field("tools", Items(tool_kind(), limits.tools), ()),
        Field("tool_choice", choice_kind(), None),
        Field("parallel_tool_calls", Flag(), True, "false: an answer ends with its first call"),
        Field("reasoning_effort", OneOf(EFFORTS), None),
        Field("reasoning", Fields((Field("effort", OneOf(EFFORTS), None),)), {}, "as some front ends name the effort"),
        Field("chat_template_kwargs", _Arguments(), {}),
        Field("functions", Refused("is not taken any more; give tools")),
        Field("function_call", Refused("is not taken any more; give tool_choice", ("none", "auto"))),
        Field("echo", Refused("is not done: an answer is a message of its own")),
        Field("modalities", Items(OneOf(("text",)), 1), None),
        Field("audio", Refused("is not taken: this model makes text")),
        Field("web_search_options", Refused("is not taken: this server reaches no network", ())),
        speculative_field(),
        *sampling_table(limits, rules=True),
        *refuse_others("/v1/chat/completions"),
    )


def read_chat(body: Any, table: Table, usual: Sampling, limits: Limits, vocab: int) -> ChatAsk:
    """What a request to /v1/chat/completions asks for. Raises Fault by the field that is wrong."""
    v = read_fields(body, table)
    if v["top_logprobs"] is not None and not v["logprobs"]:
        raise bad_field("top_logprobs", "is only for logprobs: true")
    check_jobs(1, v["n"], limits)
    generation = Generation(
        v["max_completion_tokens"] or v["max_tokens"],
        read_sampling(v, usual, vocab),
        read_stops(v["stop"]),
        v["n"],
        (v["top_logprobs"] or 0) if v["logprobs"] else None,
        v["ignore_eos"],
        v["speculative"]["n_max"],
    )
    tools = read_tools(v["tools"], limits)
    schema, rule, where = read_rules(v, limits)
    ask = ChatAsk(
        read_messages(number_places(v["messages"], "messages")),
        generation,
        read_answering(v),
        tools,
        read_choice(v["tool_choice"], tools),
        v["parallel_tool_calls"],
        schema,
        rule=rule,
        arguments=read_arguments(v["chat_template_kwargs"], v["reasoning_effort"] or v["reasoning"].get("effort")),
        format=where,
    )
    return check_chat(ask)


def read_arguments(given: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """Arguments of the template; the effort is one of them, and "none" turns thinking off."""
    effort = given.get("reasoning_effort", effort)
    told: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        told["enable_thinking"] = False
    return told | given


def check_chat(ask: ChatAsk) -> ChatAsk:
    """The ask; without tools where none may be called, and without a schema where a call is forced: it is of answers
    that are none."""
    if ask.choice == "none":
        return replace(ask, tools=())
    return replace(ask, schema=None) if ask.forced else ask
