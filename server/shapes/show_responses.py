"""Answers of /v1/responses: items of output, and the events of a stream."""

import json
from secrets import token_hex
from typing import Any

from pshard.server.api.asks import ChatAsk, Tool
from pshard.server.api.read_responses import seal
from pshard.server.shapes.show_completion import Heading
from pshard.server.shapes.usage import Usage
from pshard.server.text.answer_reader import Delta
from pshard.server.text.call_reader import CallPart
from pshard.server.text.token_words import Entry, TokenWords

Item = dict[str, Any]
Events = list[tuple[str, dict[str, Any]]]


def show_response(
    heading: Heading, echo: dict[str, Any], status: str, output: list[Item], usage: Usage | None
) -> dict[str, Any]:
    """A response. echo: fields of the request that are told again. status: "in_progress", "completed", "incomplete" or
    "failed"."""
    told = {
        "id": heading.id,
        "object": "response",
        "created_at": heading.created,
        "model": heading.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": show_usage(usage) if usage else None,
        "store": False,
        "previous_response_id": None,
    }
    return echo | told


def show_usage(usage: Usage) -> dict[str, Any]:
    """Counts as /v1/responses tells them."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.made,
    }


class OutputItems:
    """Items of output while they are made: reasoning, a message, calls; each change as events."""

    def __init__(self, words: TokenWords, ask: ChatAsk, seals: bool = False) -> None:
        """seals: reasoning comes as `encrypted_content` too."""
        self._words, self._tells, self._seals = words, ask.generation.likely is not None, seals
        self._tools = {tool.name: tool for tool in ask.tools}
        self.done: list[Item] = []
        self._item: Item | None = None  # the one that is made

    def take(self, delta: Delta) -> Events:
        """Events for what is new."""
        events: Events = []
        if delta.thought:
            events += self._add_text("reasoning", delta.thought, ())
        if delta.text or (delta.entries and self._item is not None and self._item["type"] == "message"):
            events += self._add_text("message", delta.text, delta.entries)
        for call in delta.calls:
            events += self._add_call(call)
        return events

    def close(self, complete: bool, cut: bool = False) -> Events:
        """Events at the end of the item that is made. complete: the answer came to its end; cut: it ended within a
        call, which is then left out, and no event says that it is done: clients run one that is."""
        calls = self._item is not None and "call_id" in self._item
        if self._item is None or (cut and calls):
            self._item = None
            return []
        item = self._end(complete or calls)
        at = {"item_id": item["id"], "output_index": len(self.done) - 1}
        events: Events = []
        if item["type"] == "function_call":
            given = {"arguments": item["arguments"], "name": item["name"]}
            events.append(("response.function_call_arguments.done", {**at, **given}))
        elif item["type"] == "custom_tool_call":
            events.append(("response.custom_tool_call_input.delta", {**at, "delta": item["input"]}))
            events.append(("response.custom_tool_call_input.done", {**at, "input": item["input"]}))
        else:
            part, at_part = item["content"][0], {**at, "content_index": 0}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append((f"response.{kind}.done", {**at_part, "text": part["text"], **logprobs}))
            events.append(("response.content_part.done", {**at_part, "part": part}))
        events.append(("response.output_item.done", {"output_index": at["output_index"], "item": item}))
        return events

    def cut(self) -> list[Item]:
        """All items of an answer that failed. No event says that the last one is done: clients run a call that is."""
        if self._item is not None:
            self._end(False)
        return self.done

    def _end(self, complete: bool) -> Item:
        """The item that is made, as it stands in the response."""
        item, self._item = self._new(), None
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "custom_tool_call":
            item["input"] = _read_input(item["input"])
        elif item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = seal(item["content"][0]["text"])
        self.done.append(item)
        return item

    def _add_text(self, kind: str, text: str, entries: tuple[Entry, ...]) -> Events:
        events: Events = []
        if self._item is None or self._item["type"] != kind:
            events += self._open(_new_text_item(kind))
            part = {"item_id": self._new()["id"], "output_index": len(self.done), "content_index": 0}
            events.append(("response.content_part.added", {**part, "part": _emptied(self._new()["content"][0])}))
        item = self._new()
        part = item["content"][0]
        part["text"] += text
        told = {"item_id": item["id"], "output_index": len(self.done), "content_index": 0, "delta": text}
        if kind == "message":
            logprobs = [self._show(entry) for entry in entries] if self._tells else []
            part["logprobs"] += logprobs
            told["logprobs"] = logprobs
        name = "output_text" if kind == "message" else "reasoning_text"
        events.append((f"response.{name}.delta", told))
        return events

    def _add_call(self, call: CallPart) -> Events:
        events: Events = []
        if call.id:
            events += self._open(_new_call_item(call, self._tools.get(call.name)))
        item = self._new()
        if item["type"] == "custom_tool_call":  # its text is known when its JSON is whole
            item["input"] += call.arguments
            return events
        item["arguments"] += call.arguments
        if call.arguments:
            told = {"item_id": item["id"], "output_index": len(self.done), "delta": call.arguments}
            events.append(("response.function_call_arguments.delta", told))
        return events

    def _open(self, item: Item) -> Events:
        events = self.close(True)
        self._item = {**item, "status": "in_progress"}
        shown = self._item | ({"content": []} if "content" in item else {})
        return [*events, ("response.output_item.added", {"output_index": len(self.done), "item": shown})]

    def _new(self) -> Item:
        assert self._item is not None
        return self._item

    def _show(self, entry: Entry) -> dict[str, Any]:
        def show(token: int, logprob: float | None) -> dict[str, Any]:
            data = self._words.spell_bytes(token)
            return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob or 0.0}

        return show(entry.token, entry.logprob) | {"top_logprobs": [show(*best) for best in entry.best]}


def _emptied(part: dict[str, Any]) -> dict[str, Any]:
    """A part as it is before anything is in it: lists are its own."""
    return {key: [] if isinstance(value, list) else value for key, value in part.items()}


def _new_call_item(call: CallPart, tool: Tool | None) -> Item:
    """An item of a call, as the client knows the tool."""
    name = tool.own_name if tool else call.name
    told = {"call_id": call.id, "name": name} | ({"namespace": tool.space} if tool and tool.space else {})
    if tool and tool.custom:
        return {"id": f"ctc_{token_hex(12)}", "type": "custom_tool_call", **told, "input": ""}
    return {"id": f"fc_{token_hex(12)}", "type": "function_call", **told, "arguments": ""}


def _read_input(arguments: str) -> str:
    """The text that a custom tool is given; arguments that do not hold it are given as they are."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    given = found.get("input") if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


def _new_text_item(kind: str) -> Item:
    if kind == "message":
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {"id": f"msg_{token_hex(12)}", "type": "message", "role": "assistant", "content": [part]}
    part = {"type": "reasoning_text", "text": ""}
    return {"id": f"rs_{token_hex(12)}", "type": "reasoning", "summary": [], "content": [part]}
