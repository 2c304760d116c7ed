"""Answers of /v1/messages: blocks of content, and the events of a stream."""

import json
from typing import Any

from pshard.server.shapes.usage import Usage
from pshard.server.text.answer_reader import Delta
from pshard.server.text.call_reader import CallPart

Block = dict[str, Any]
Events = list[tuple[str, dict[str, Any]]]
STARTS: dict[str, Block] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def show_whole_message(
    id: str, model: str, content: list[Block], ending: tuple[str | None, str | None], usage: Usage
) -> dict[str, Any]:
    """A message. ending: why it ended, and the stop string that ended it."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": ending[0],
        "stop_sequence": ending[1],
        "usage": show_message_usage(usage),
    }


def show_message_usage(usage: Usage) -> dict[str, Any]:
    """Counts as /v1/messages tells them: what was adopted is counted apart."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.made,
    }


class Blocks:
    """Blocks of content while they are made, each change as events."""

    def __init__(self) -> None:
        self.done: list[Block] = []
        self._block: Block | None = None
        self._input = ""  # JSON of a call's arguments

    def take(self, delta: Delta) -> Events:
        """Events for what is new."""
        events: Events = []
        if delta.thought:
            events += self._add_text("thinking", delta.thought)
        if delta.text:
            events += self._add_text("text", delta.text)
        for call in delta.calls:
            events += self._add_call(call)
        return events

    def close(self, cut: bool = False) -> Events:
        """Events at the end of the block that is made. cut: the answer ended within it: a call is then left out, and no
        event says that it is whole, as clients run one that is."""
        block, self._block = self._block, None
        if block is None or (cut and block["type"] == "tool_use"):
            return []
        if block["type"] == "tool_use":
            block["input"] = _read_input(self._input)
        self.done.append(block)
        return [("content_block_stop", {"index": len(self.done) - 1})]

    def _add_text(self, kind: str, text: str) -> Events:
        events = [] if self._block and self._block["type"] == kind else self._open(STARTS[kind])
        assert self._block is not None
        self._block[kind] += text
        return [*events, self._tell({"type": f"{kind}_delta", kind: text})]

    def _add_call(self, call: CallPart) -> Events:
        events: Events = []
        if call.id:
            self._input = ""
            events += self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._input += call.arguments
        if call.arguments:
            events.append(self._tell({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _open(self, block: Block) -> Events:
        events = self.close()
        self._block = dict(block)
        return [*events, ("content_block_start", {"index": len(self.done), "content_block": block})]

    def _tell(self, delta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": len(self.done), "delta": delta}


def _read_input(text: str) -> Any:
    """A call's arguments; those that the model spoiled are told as text, as there is no such object."""
    try:
        return json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        return {"partial_json": text}
