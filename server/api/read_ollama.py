"""Requests to /api/chat and /api/generate, as Ollama's clients write them."""

from dataclasses import dataclass
from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.server.api.asks import Answering, ChatAsk, Generation, Message
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.read_messages_list import number_places, read_messages
from pshard.server.api.read_tools import check_schema, read_choice, read_tools, tool_kind
from pshard.server.api.tables.fields import (
    ByType,
    Field,
    Fields,
    Flag,
    Items,
    Number,
    Object,
    OneOf,
    Refused,
    Table,
    Text,
    Whole,
    read_fields,
)
from pshard.server.api.tables.other_names import refuse_others
from pshard.server.api.tables.sampling_fields import MOST_TOKENS, read_sampling, read_stops, sampling_table

EFFORTS = ("low", "medium", "high", "max")
NO_IMAGES = "are not taken: this model reads text only"
OTHER_OPTIONS = ("n", "logit_bias", "ignore_eos", "return_token_ids", "stream", "stream_options", "response_format",
                 "n_predict", "suffix", "skip_special_tokens", "add_generation_prompt")  # fmt: skip
FOREVER = 1 << 31  # seconds

NAMED = (Field("model", Text(256), ""), Field("name", Text(256), "", "an older name of model"))  # of /api/show


@dataclass(frozen=True)
class OllamaAsk:
    """A request to Ollama's interface. chat: what is asked; without messages and `text` nothing is, but that the model
    be there. text: to be continued as it is, None for a chat. suffix: what comes after the gap that is to be filled.
    context: tokens that the client wants room for, 0 where it does not say. thinks: the answer is to have thoughts."""

    chat: ChatAsk
    text: str | None = None
    suffix: str = ""
    context: int = 0
    thinks: bool = False


def ollama_chat_table(limits: Limits) -> Table:
    """Fields of a request to /api/chat."""
    return (
        Field("messages", Items(Object(), limits.messages), (), "none: the model is to be loaded"),
        Field("tools", Items(tool_kind(), limits.tools), ()),
        *_shared_table(limits),
        *refuse_others("/api/chat"),
    )


def ollama_generate_table(limits: Limits) -> Table:
    """Fields of a request to /api/generate."""
    return (
        Field("prompt", Text(limits.body), "", "a message of the user; with raw a text to be continued"),
        Field("suffix", Text(limits.body), "", "what follows the gap behind the prompt"),
        Field("system", Text(limits.body), ""),
        Field("raw", Flag(), False, "the prompt is taken as it is, without the model's template"),
        Field("images", Refused(NO_IMAGES)),
        Field("template", Refused("is not taken: templates are those of the model")),
        Field("context", Refused("is not taken: send the conversation to /api/chat; equal beginnings are kept")),
        *_shared_table(limits),
        *refuse_others("/api/generate"),
    )


def _shared_table(limits: Limits) -> Table:
    format = ByType((("string", OneOf(("", "json"))), ("object", Object())), '"json" or a JSON schema')
    words = (("boolean", Flag()), ("string", OneOf(EFFORTS)))
    seconds = (("string", Text(64)), ("number", Number(-FOREVER, FOREVER)))
    options = options_table(limits)
    return (
        Field("model", Text(256), ""),
        Field("stream", Flag(), True),
        Field("options", Fields(options), read_fields({}, options)),
        Field("format", format, None),
        Field("think", ByType(words, f"true, false or one of {', '.join(EFFORTS)}"), None),
        Field("logprobs", Flag(), False),
        Field("top_logprobs", Whole(0, limits.top), None),
        Field("keep_alive", ByType(seconds, "a time"), None, "the model stays loaded; --sleep-idle gives it back"),
        Field("truncate", Refused("is not done: prompts are never cut", (False,))),
        Field("shift", Refused("is not done: an answer ends where the context is full", (False,))),
    )


def options_table(limits: Limits) -> Table:
    """`options` of both. Those that say where weights lie or how many threads work are ignored: the plan says it."""
    return (
        *(field for field in sampling_table(limits) if field.name not in OTHER_OPTIONS),
        Field("num_predict", Whole(-2, MOST_TOKENS), None, "0 and below: fills the context"),
        Field("num_ctx", Whole(0, MOST_TOKENS), 0, "no more than the server's -c"),
        *(
            Field(name, Refused("is num_predict here", (-1,)))
            for name in ("n_predict", "max_tokens", "max_completion_tokens")
        ),
    )


def read_ollama(body: Any, table: Table, usual: Sampling, limits: Limits, vocab: int) -> OllamaAsk:
    """What a request to either path asks for. Raises Fault by the field that is wrong."""
    v = read_fields(body, table)
    options = v["options"]
    if v["top_logprobs"] and not v["logprobs"]:
        raise bad_field("top_logprobs", "is only for logprobs: true")
    most = options["num_predict"]
    generation = Generation(
        most if most and most > 0 else None,
        read_sampling(options, usual, vocab),
        read_stops(options["stop"] or ()),
        likely=(v["top_logprobs"] or 0) if v["logprobs"] else None,
    )
    tools = read_tools(v.get("tools", ()), limits)
    chats = "messages" in v
    ask = ChatAsk(
        _read_messages(v["messages"]) if chats else _write_messages(v),
        generation,
        Answering(v["stream"]),
        tools,
        read_choice(None, tools),
        schema=_read_format(v["format"], limits),
        arguments=_read_think(v["think"]),
        where="messages" if chats else "prompt",
        format="format",
    )
    if not ask.messages and v["keep_alive"] in (0, "0", "0s"):
        raise bad_field("keep_alive", "is not 0 here: the model stays; --sleep-idle of the server gives it back")
    text = None if chats else v["prompt"] if v["raw"] or v["suffix"] else None
    return OllamaAsk(ask, text, "" if chats else v["suffix"], options["num_ctx"], bool(v["think"]))


def _write_messages(v: dict[str, Any]) -> tuple[Message, ...]:
    """The messages of a prompt; none where there is no prompt."""
    if v["raw"] and (v["system"] or v["suffix"]):
        raise bad_field("raw", f"is a prompt as it is; write {'system' if v['system'] else 'suffix'} into it")
    if v["suffix"] and v["system"]:
        raise bad_field("system", "is not taken where a gap is filled; leave it out")
    told = (("system", v["system"]), ("user", v["prompt"]))
    return tuple({"role": role, "content": text} for role, text in told if text) if v["prompt"] else ()


def _read_messages(given: tuple[dict[str, Any], ...]) -> tuple[Message, ...]:
    """Messages of a chat, whose fields have other names in places."""
    renamed = []
    for i, message in enumerate(given):
        if message.get("images"):
            raise bad_field(f"messages[{i}].images", NO_IMAGES)
        names = {"thinking": "reasoning_content", "tool_name": "name"}
        others = {names[key]: value for key, value in message.items() if key in names and value}
        renamed.append(others | {key: value for key, value in message.items() if key not in names})
    return read_messages(number_places(renamed, "messages"))


def _read_format(given: str | dict[str, Any] | None, limits: Limits) -> dict[str, Any] | None:
    """The JSON schema that an answer follows; None: any text."""
    if not given:
        return None
    if isinstance(given, str):
        return {"type": "object"}
    check_schema(given, "format", limits)
    return given


def _read_think(given: bool | str | None) -> dict[str, Any]:
    """`think` as arguments of the template, by the names that templates have for it."""
    if given is None:
        return {}
    return {"enable_thinking": bool(given), "thinking": bool(given)} | (
        {"reasoning_effort": given} if isinstance(given, str) else {}
    )
