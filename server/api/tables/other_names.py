"""Fields that another interface here has and this one has not: refused with what is to be given instead, as an answer
without them would be another one than was asked for."""

from pshard.server.api.tables.fields import NOTHING, Field, Refused, Table

CHATS = "is not read here; /v1/chat/completions takes it"
LENGTH = "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"
OPTIONS = "temperature", "top_p", "top_k", "min_p", "seed", "stop", "num_predict", "num_ctx"
INSTEAD: dict[str, tuple[tuple[str, str], ...]] = {  # path -> fields, and why they are refused
    "/v1/completions": (
        *((name, "is max_tokens here") for name in LENGTH[1:]),
        ("top_logprobs", "is logprobs here"), ("stop_sequences", "is stop here"), ("messages", CHATS),
        ("tools", CHATS), ("tool_choice", CHATS), ("reasoning_effort", CHATS), ("chat_template_kwargs", CHATS),
        ("input", "is prompt here"), ("instructions", "is not read here; write it into prompt"),
        ("system", "is not read here; write it into prompt"), ("text", "is response_format here"),
    ),
    "/v1/chat/completions": (
        *((name, "is max_completion_tokens here") for name in LENGTH[2:]),
        ("stop_sequences", "is stop here"), ("text", "is response_format here"), ("input", "is messages here"),
        ("instructions", "is a message of the system here"), ("system", "is a message of the system here"),
        ("output_config", "is response_format and reasoning_effort here"), ("output_format", "is response_format here"),
        ("best_of", "is not taken: all answers are given, none is chosen"),
    ),
    "/v1/responses": (
        *((name, "is max_output_tokens here") for name in LENGTH if name != "max_output_tokens"),
        ("n", "is 1 here: a response has one answer"), ("response_format", "is text.format here"),
        ("messages", "is input here"), ("system", "is instructions here"), ("stop_sequences", "is stop here"),
        ("logprobs", "is top_logprobs here"), ("reasoning_effort", "is reasoning.effort here"),
        ("chat_template_kwargs", CHATS), ("functions", "is tools here"), ("return_token_ids", CHATS),
        ("speculative", CHATS),
    ),
    "/v1/messages": (
        *((name, "is max_tokens here") for name in LENGTH[1:]),
        ("n", "is 1 here: a message is one answer"), ("stop", "is stop_sequences here"),
        ("response_format", "is output_config.format here"), ("input", "is messages here"),
        ("instructions", "is system here"), ("reasoning_effort", "is output_config.effort here"),
        ("chat_template_kwargs", CHATS), ("logprobs", CHATS), ("top_logprobs", CHATS), ("functions", "is tools here"),
        ("return_token_ids", CHATS), ("speculative", CHATS),
    ),
    **dict.fromkeys(("/api/chat", "/api/generate"), (
        *((name, f"is options.{name} here") for name in OPTIONS),
        *((name, "is options.num_predict here") for name in LENGTH), ("response_format", "is format here"),
        ("reasoning_effort", "is think here"), ("tool_choice", CHATS),
    )),
}  # fmt: skip
HARMLESS = {"n": (1,), "best_of": (1,), "tool_choice": ("none", "auto")}  # values beside `NOTHING` that ask for nothing


def refuse_others(path: str) -> Table:
    """Fields of other interfaces, for the table of this path."""
    return tuple(Field(name, Refused(why, (*NOTHING, *HARMLESS.get(name, ())))) for name, why in INSTEAD[path])
