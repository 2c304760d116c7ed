"""Conversations written another way, for templates that refuse them as they are: what this server made, and what other
servers made before, can be sent back."""

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import combinations

from pshard.server.api.asks import Message

Way = Callable[[list[Message]], list[Message]]
SHORT_IDS = "[TOOL_CALLS]"  # in templates that take ids of nine letters and digits alone
SHORT = re.compile(r"[A-Za-z0-9]{9}")
UNDERSTOOD = "Understood."  # an empty turn would teach the model to say nothing


def rewrite_turns(messages: list[Message], ways: Sequence[Way]) -> Iterator[list[Message]]:
    """The conversation in other words: each way alone, then two of them together, and so on; each result once."""
    told = [messages]
    for size in range(1, len(ways) + 1):
        for chosen in combinations(ways, size):
            turns = messages
            for way in chosen:
                turns = way(turns)
            if turns not in told:
                told.append(turns)
                yield turns


def give_objects(messages: list[Message]) -> list[Message]:
    """Calls whose arguments are no object, as they were cut or spoiled, without any: templates go through them."""
    return [
        message | {"tool_calls": [_give_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _give_object(call: Message) -> Message:
    if isinstance(call["function"]["arguments"], dict):
        return call
    return call | {"function": call["function"] | {"arguments": {}}}


def split_calls(messages: list[Message]) -> list[Message]:
    """Turns of several calls as turns of one, each before its result."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            turns.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            first = message if i == 0 else {"role": "assistant", "content": ""}
            turns.append(first | {"tool_calls": [call]})
            own = next((result for result in results if result["tool_call_id"] == call["id"]), None)
            if own is not None:
                results.remove(own)
                turns.append(own)
        turns += results
    return turns


def answer_results(messages: list[Message]) -> list[Message]:
    """What the user says right after a tool's result follows a turn of the assistant: turns alternate."""
    turns: list[Message] = []
    for message in messages:
        if turns and turns[-1]["role"] == "tool" and message["role"] == "user":
            turns.append({"role": "assistant", "content": UNDERSTOOD})
        turns.append(message)
    return turns


def shorten_ids(messages: list[Message]) -> list[Message]:
    """The conversation with ids of calls as nine letters and digits. A result without an id is that of the first call
    that has none yet."""
    turns: list[Message] = []
    waiting: list[str] = []
    for n, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            ids = [_shorten(call["id"] or f"{n} {i}") for i, call in enumerate(calls)]
            waiting = [id for id, call in zip(ids, calls) if not call["id"]]
            message = message | {"tool_calls": [call | {"id": id} for id, call in zip(ids, calls)]}
        elif message["role"] == "tool":
            given = message["tool_call_id"]
            id = _shorten(given) if given or not waiting else waiting.pop(0)
            message = message | {"tool_call_id": id}
        turns.append(message)
    return turns


def _shorten(id: str) -> str:
    return id if SHORT.fullmatch(id) else sha256(id.encode()).hexdigest()[:9]
