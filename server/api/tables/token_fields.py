"""Fields of /tokenize, /detokenize and /budget, in the forms of vLLM and of llama.cpp."""

from pshard.server.api.limits import Limits
from pshard.server.api.read_tools import tool_kind
from pshard.server.api.tables.fields import Field, Flag, Items, Object, Refused, Table, Text, Whole


def tokenize_table(limits: Limits) -> Table:
    """Text as `prompt` (vLLM) or `content` (llama.cpp), or `messages`."""
    return (
        Field("prompt", Text(limits.body), None, "text, as vLLM names it"),
        Field("content", Text(limits.body), None, "text, as llama.cpp names it"),
        Field("messages", Items(Object(), limits.messages, 1), None, "a chat, as the template writes it"),
        Field("tools", Items(tool_kind(), limits.tools), (), "of the chat"),
        Field("chat_template_kwargs", Refused("is not taken; max_tokens: 1 of a chat tells its count as usage")),
        Field("add_generation_prompt", Refused("is always true here", (True,))),
        Field("continue_final_message", Refused("is not taken: the template ends a message")),
        Field("add_special_tokens", Flag(), True),
        Field("add_special", Flag(), False),
        Field("parse_special", Flag(), True),
        Field("with_pieces", Flag(), False),
        Field("return_token_strs", Flag(), False),
    )


def detokenize_table(vocab: int) -> Table:
    """Token ids."""
    return (Field("tokens", Items(Whole(0, vocab - 1), 1 << 22), needed=True),)


def budget_table() -> Table:
    """A budget of VRAM."""
    return (
        Field("vram_mib", Whole(1, 1 << 30), needed=True, about="MiB, of all ranks together"),
        Field("plan", Flag(), False, "plan that budget where that was not done: takes seconds to minutes"),
    )
