"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from pshard.server.shapes.show_completion import Heading
from pshard.server.shapes.usage import Usage
from pshard.server.text.answer_reader import Delta
from pshard.server.text.call_reader import CallPart
from pshard.server.text.token_words import Entry, TokenWords


def show_chat(heading: Heading, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A whole answer."""
    return heading.show("chat.completion") | {"choices": choices, "usage": usage.show()}


def show_message(whole: Delta) -> dict[str, Any]:
    """A whole message: content is null where it is calls alone."""
    calls = show_calls(whole.calls)
    told: dict[str, Any] = {"role": "assistant", "content": whole.text if whole.text or not calls else None}
    if whole.thought:
        told["reasoning_content"] = whole.thought
    return told | ({"tool_calls": calls} if calls else {})


def show_chat_choice(
    index: int,
    message: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str,
    ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """One choice of a whole answer."""
    told = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
    return told if ids is None else told | {"token_ids": list(ids)}


def show_chunk(heading: Heading, choices: list[dict[str, Any]], tells_usage: bool) -> dict[str, Any]:
    """A chunk of a stream. Where usage comes at its end, all chunks before have it as null."""
    told = heading.show("chat.completion.chunk") | {"choices": choices}
    return told | ({"usage": None} if tells_usage else {})


def show_delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None = None
) -> dict[str, Any]:
    """What is new of a choice."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def show_new(delta: Delta) -> list[dict[str, Any]]:
    """What is new as fields of deltas, each for a chunk of its own: clients add up parts of a call between chunks, and
    some not within one."""
    told: dict[str, Any] = {}
    if delta.thought:
        told["reasoning_content"] = delta.thought
    if delta.text or (delta.entries and not delta.calls and not delta.thought):
        told["content"] = delta.text
    return [*([told] if told else []), *({"tool_calls": [_show_part(call)]} for call in delta.calls)]


def show_calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    """Whole calls from their parts."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.id:
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls


def show_chat_logprobs(entries: Sequence[Entry], words: TokenWords) -> dict[str, Any]:
    """Log-probabilities of tokens with their bytes and the likeliest others."""

    def show(token: int, logprob: float | None) -> dict[str, Any]:
        data = words.spell_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        show(entry.token, entry.logprob) | {"top_logprobs": [show(*best) for best in entry.best]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def _show_part(part: CallPart) -> dict[str, Any]:
    if part.id:
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    return {"index": part.index, "function": {"arguments": part.arguments}}
