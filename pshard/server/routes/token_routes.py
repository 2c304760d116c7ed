"""POST /tokenize and /detokenize, GET /tokenizer_info: in the forms of vLLM and of llama.cpp, both at once."""

from typing import Any

from pshard.server.api.asks import Answering, ChatAsk, Drawing
from pshard.server.api.faults import bad_field
from pshard.server.api.read_messages_list import number_places, read_messages
from pshard.server.api.read_tools import read_choice, read_tool
from pshard.server.api.tables.fields import read_fields
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Reply, reply_json


async def tokenize(desk: Desk, call: Call) -> Reply:
    """Tokens of a text or a chat. Raises Fault without either."""
    return reply_json(await desk.off_loop(_tokenize, desk, read_fields(call.body, desk.tables["/tokenize"])))


def _tokenize(desk: Desk, v: dict[str, Any]) -> dict[str, Any]:
    tokenizer = desk.prompts.find_tokenizer("prompt")
    if v["messages"] is not None:
        messages = read_messages(number_places(v["messages"], "messages"))
        tools = tuple(read_tool(tool, f"tools[{i}].function", desk.limits) for i, tool in enumerate(v["tools"]))
        ask = ChatAsk(messages, Drawing(None, desk.usual), Answering(), tools, read_choice(None, tools))
        ids = list(desk.prompts.of_chat(ask).ids)
    elif v["prompt"] is not None:  # as vLLM has it
        ids = tokenizer.encode(v["prompt"], v["add_special_tokens"])
    elif v["content"] is not None:  # as llama.cpp has it
        ids = tokenizer.encode(v["content"], v["add_special"], v["parse_special"])
    else:
        raise bad_field("prompt", "is missing; give prompt, content or messages")
    told: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": desk.model.context}
    if v["return_token_strs"]:
        told["token_strs"] = [desk.words.spell(token) for token in ids]
    if v["with_pieces"]:
        told["tokens"] = [{"id": token, "piece": _show_piece(desk, token)} for token in ids]
    return told


def _show_piece(desk: Desk, token: int) -> str | list[int]:
    """A token's text; its bytes where they are no text, as llama.cpp has it."""
    data = desk.words.spell_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(desk: Desk, call: Call) -> Reply:
    """The text of tokens, special ones spelled out."""
    ids = read_fields(call.body, desk.tables["/detokenize"])["tokens"]
    desk.prompts.find_tokenizer("tokens")
    text = b"".join(desk.words.spell_bytes(token) for token in ids).decode("utf-8", "replace")
    return reply_json({"prompt": text, "content": text})


async def tell_tokenizer(desk: Desk, call: Call) -> Reply:
    """What harnesses ask of the tokenizer: its begin and end, the template, the context."""
    tokenizer, model = desk.prompts.find_tokenizer("tokenizer"), desk.model
    ends = sorted(tokenizer.eos_ids)
    return reply_json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos_text or None,
            "bos_token_id": tokenizer.bos_id,
            "eos_token": tokenizer.eos_text or None,
            "eos_token_id": ends[0] if ends else None,
            "eos_token_ids": ends,
            "chat_template": model.template,
            "vocab_size": model.vocab,
            "model_max_length": model.context,
        }
    )
