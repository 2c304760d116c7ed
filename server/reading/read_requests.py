"""What each path's body asks for: prompts are tokens then, and texts that nobody needs any more are left out."""

from dataclasses import replace
from typing import Any

from pshard.server.api.asks import Answering, ChatAsk, CompletionAsk, Gap, Generation
from pshard.server.api.faults import bad_field
from pshard.server.api.read_chat import read_chat
from pshard.server.api.read_completion import read_completion
from pshard.server.api.read_gap import read_gap
from pshard.server.api.read_message_request import read_message_request
from pshard.server.api.read_messages_list import number_places, read_messages
from pshard.server.api.read_ollama import OllamaAsk, read_ollama
from pshard.server.api.read_responses import SEALED, read_responses
from pshard.server.api.read_tools import read_choice, read_tools
from pshard.server.api.tables.fields import read_fields
from pshard.server.reading.reader import Reader
from pshard.server.shapes.write_json import write_json
from pshard.server.text.echoed import Echo, echo_prompt
from pshard.server.text.prompts import Prompt

Body = dict[str, Any]
ReadChat = tuple[ChatAsk, Prompt]
TOLD: Body = {  # of a request for a response, with what is told where it does not say
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip


def read_chat_request(reader: Reader, body: Body) -> ReadChat:
    """Of /v1/chat/completions. Raises Fault, as all of these do."""
    table = reader.tables["/v1/chat/completions"]
    return _make_prompt(reader, body, read_chat(body, table, reader.usual, reader.limits, reader.model.vocab))


def read_response_request(reader: Reader, body: Body) -> tuple[ReadChat, Body, bool]:
    """Of /v1/responses: also what the answer repeats of it, and whether reasoning is to be sealed."""
    table = reader.tables["/v1/responses"]
    ask = read_responses(body, table, reader.usual, reader.limits, reader.model.vocab)
    repeated = {name: usual if body.get(name) is None else body[name] for name, usual in TOLD.items()}
    most = 2 * reader.limits.tools_bytes  # the server writes it several times
    if len(write_json(repeated | {"instructions": None})) > most:
        raise bad_field("metadata", f"and tools are more than {most >> 20} MiB, and come back with the response")
    return _make_prompt(reader, body, ask), repeated, SEALED in (body.get("include") or ())


def read_message(reader: Reader, body: Body) -> ReadChat:
    """Of /v1/messages."""
    return _make_prompt(reader, body, _read_message_ask(reader, body, "/v1/messages"))


def count_response_tokens(reader: Reader, body: Body) -> int:
    """Of /v1/responses/input_tokens: how many the prompt has, also where it is too long to be answered."""
    table = reader.tables["/v1/responses/input_tokens"]
    ask = read_responses(body, table, reader.usual, reader.limits, reader.model.vocab)
    reader.check_model(body.get("model") or "")
    return len(reader.prompts.count_chat(ask))


def write_template(reader: Reader, body: Body) -> str:
    """Of /apply-template, whose body is that of a chat: the prompt as text."""
    ask = read_chat(body, reader.tables["/apply-template"], reader.usual, reader.limits, reader.model.vocab)
    reader.check_model(body.get("model") or "")
    return reader.prompts.write_chat(ask)


def read_gap_request(reader: Reader, body: Body) -> tuple[Generation, Answering, Prompt]:
    """Of /infill."""
    v = read_fields(body, reader.tables["/infill"])
    reader.check_model(body.get("model") or "")
    gap, generation = read_gap(v, reader.usual, reader.model.vocab)
    return generation, Answering(v["stream"]), reader.prompts.of_gap(gap, "input_suffix")


def count_message_tokens(reader: Reader, body: Body) -> int:
    """Of /v1/messages/count_tokens: how many the prompt has, also where it is too long to be answered."""
    ask = _read_message_ask(reader, body, "/v1/messages/count_tokens")
    reader.check_model(body.get("model") or "")
    return len(reader.prompts.count_chat(ask))


def _read_message_ask(reader: Reader, body: Body, path: str) -> ChatAsk:
    return read_message_request(body, reader.tables[path], reader.usual, reader.limits, reader.model.vocab)


def read_ollama_chat(reader: Reader, body: Body) -> tuple[OllamaAsk, Prompt | None]:
    """Of /api/chat: also its prompt, None where nothing is asked."""
    return _read_ollama(reader, body, "/api/chat")


def read_ollama_prompt(reader: Reader, body: Body) -> tuple[OllamaAsk, Prompt | None]:
    """The same of /api/generate."""
    return _read_ollama(reader, body, "/api/generate")


def _read_ollama(reader: Reader, body: Body, path: str) -> tuple[OllamaAsk, Prompt | None]:
    ask = read_ollama(body, reader.tables[path], reader.usual, reader.limits, reader.model.vocab)
    _check_ollama_name(reader, body.get("model") or "")
    if ask.context > reader.model.context:
        raise bad_field(
            "options.num_ctx", f"is at most {reader.model.context}, as the server was started; raise its -c"
        )
    prompts, chat = reader.prompts, ask.chat
    left = replace(ask, chat=replace(chat, messages=()), text=None, suffix="")
    if ask.suffix:
        return left, prompts.of_gap(Gap(ask.text or "", ask.suffix), "suffix")
    if ask.text is not None or (path == "/api/generate" and chat.messages and not reader.model.template):
        text = ask.text if ask.text is not None else "\n\n".join(m["content"] for m in chat.messages)
        return left, prompts.of_text(text, "prompt") if text else None
    return left, prompts.of_chat(chat) if chat.messages else None


def read_ollama_name(reader: Reader, body: Body) -> None:
    """Of /api/show: it names the model."""
    named = read_fields(body, reader.tables["/api/show"])
    _check_ollama_name(reader, named["model"] or named["name"])


def _check_ollama_name(reader: Reader, name: str) -> None:
    """Raises Fault 404 for another model. The tag that Ollama's clients add to a name means nothing here."""
    reader.check_model(name if name in reader.names else name.removesuffix(":latest"))


def _make_prompt(reader: Reader, body: Body, ask: ChatAsk) -> ReadChat:
    reader.check_model(body.get("model") or "")
    return replace(ask, messages=()), reader.prompts.of_chat(ask)


def read_completion_request(reader: Reader, body: Body) -> tuple[CompletionAsk, list[Prompt], tuple[Echo, ...]]:
    """Of /v1/completions; with echo also the prompts as parts of their answers."""
    table = reader.tables["/v1/completions"]
    ask = read_completion(body, table, reader.usual, reader.limits, reader.model.vocab)
    reader.check_model(body.get("model") or "")
    prompts = []
    if ask.suffix:  # of one prompt, which is text
        gap = Gap(str(ask.prompts[0]), ask.suffix)
        return replace(ask, prompts=(), suffix=""), [reader.prompts.of_gap(gap, "suffix")], ()
    for i, given in enumerate(ask.prompts):
        where = "prompt" if len(ask.prompts) == 1 else f"prompt[{i}]"
        made = reader.prompts.of_text(given, where) if isinstance(given, str) else reader.prompts.of_ids(given, where)
        prompts.append(made)
    texts = [given if isinstance(given, str) else None for given in ask.prompts] if ask.echo else []
    echoes = tuple(echo_prompt(made.ids, text, reader.model.tokenizer) for made, text in zip(prompts, texts))
    return replace(ask, prompts=()), prompts, echoes


def tokenize(reader: Reader, body: Body) -> bytes:
    """The answer of /tokenize: all tokens of a text or a chat, also of one that is too long to be answered."""
    v, prompts = read_fields(body, reader.tables["/tokenize"]), reader.prompts
    tokenizer = prompts.find_tokenizer("prompt")
    if v["messages"] is not None:
        messages = read_messages(number_places(v["messages"], "messages"))
        tools = read_tools(v["tools"], reader.limits)
        ask = ChatAsk(messages, Generation(None, reader.usual), Answering(), tools, read_choice(None, tools))
        ids = prompts.count_chat(ask)
    elif v["prompt"] is not None:  # as vLLM has it
        ids = tokenizer.encode(v["prompt"], v["add_special_tokens"])
    elif v["content"] is not None:  # as llama.cpp has it
        ids = tokenizer.encode(v["content"], v["add_special"], v["parse_special"])
    else:
        raise bad_field("prompt", "is missing; give prompt, content or messages")
    told: Body = {"tokens": ids, "count": len(ids), "max_model_len": reader.model.context}
    if v["return_token_strs"]:
        told["token_strs"] = [reader.words.spell(token) for token in ids]
    if v["with_pieces"]:
        told["tokens"] = [{"id": token, "piece": _show_piece(reader, token)} for token in ids]
    return write_json(told)


def _show_piece(reader: Reader, token: int) -> str | list[int]:
    """A token's text; its bytes where they are no text, as llama.cpp has it."""
    data = reader.words.spell_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize(reader: Reader, body: Body) -> bytes:
    """The answer of /detokenize: the text of tokens, special ones spelled out."""
    ids = read_fields(body, reader.tables["/detokenize"])["tokens"]
    reader.prompts.find_tokenizer("tokens")
    text = b"".join(reader.words.spell_bytes(token) for token in ids).decode("utf-8", "replace")
    return write_json({"prompt": text, "content": text})


def read_budget(reader: Reader, body: Body) -> Body:
    """Of /budget: its fields."""
    return read_fields(body, reader.tables["/budget"])
