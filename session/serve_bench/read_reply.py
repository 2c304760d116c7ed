"""What a streamed answer says, and when: texts, usage, errors, out of the pieces of a reply."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pshard.session.serve_bench.timed_exchange import Reply


@dataclass(frozen=True)
class Answer:
    """A request's end. Times are perf_counter_ns. texts: when each piece of text was there. prompt, cached, made:
    tokens, as the server counts them; None where it does not say. failure: "", "left" (as planned), an HTTP status, or
    "connect", "cut", "timeout", "error event", "no stream"; said: what an error says."""

    began: int
    ended: int
    texts: tuple[int, ...]
    prompt: int | None = None
    cached: int | None = None
    made: int | None = None
    failure: str = ""
    said: str = ""


def read_reply(reply: Reply) -> Answer:
    """Take an exchange's reply apart. Never raises: what cannot be read is a failure."""
    from pshard.session.serve_bench.target import describe_error

    if reply.status != 200:
        failure = reply.failure or str(reply.status)
        return Answer(reply.began, reply.ended, (), failure=failure, said=describe_error(reply.body))
    texts: list[int] = []
    usage: dict[str, int] = {}
    finished, failure, said = False, reply.failure, ""
    for at, data in read_events(reply.pieces):
        if data == "[DONE]":
            finished = True
            continue
        event = _parse(data)
        if event is None or event.get("error"):
            failure, said = "error event" if event else "no stream", describe_error(data.encode())
            break
        usage |= _read_usage(event)
        choices = event.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if _has_text(first):
            texts.append(at)
        finished |= bool(first.get("finish_reason"))
    if not failure and not finished:
        failure = "cut" if texts else "no stream"
    return Answer(reply.began, reply.ended, tuple(texts), **usage, failure=failure, said=said)


def read_events(pieces: list[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """The data of every server-sent event, with the time of the piece that completed it; comments are none."""
    rest = b""
    for at, piece in pieces:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield at, b"\n".join(lines).decode("utf-8", "replace")


def _parse(data: str) -> dict[str, Any] | None:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event brings something of the answer, in the form of completions or of chats."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    parts = (choice.get("text"), *(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")))
    return any(parts)


def _read_usage(event: dict[str, Any]) -> dict[str, int]:
    """Tokens as OpenAI counts them, or as llama.cpp times them where it sends no usage."""
    usage, timings = event.get("usage"), event.get("timings")
    found: dict[str, Any] = {}
    if isinstance(timings, dict):
        cached, computed = timings.get("cache_n", 0), timings.get("prompt_n")
        whole = computed + cached if type(computed) is int and type(cached) is int else None
        found = {"prompt": whole, "cached": cached, "made": timings.get("predicted_n")}
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details")
        found |= {"prompt": usage.get("prompt_tokens"), "made": usage.get("completion_tokens")}
        found |= {"cached": details.get("cached_tokens")} if isinstance(details, dict) else {}
    return {name: n for name, n in found.items() if type(n) is int}
