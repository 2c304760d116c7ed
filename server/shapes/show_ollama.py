"""Answers of /api/chat and /api/generate: objects of Ollama's interface, one a line in a stream."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pshard.server.api.read_messages_list import read_call_arguments
from pshard.server.shapes.show_chat import show_chat_logprobs
from pshard.server.shapes.usage import Usage
from pshard.server.snapshot import ServedModel
from pshard.server.text.answer_reader import Delta
from pshard.server.text.call_reader import CallPart
from pshard.server.text.token_words import TokenWords

NEVER = "9999-12-31T23:59:59Z"  # when the model is given back


class Calls:
    """Calls from their parts: each is told once, when it is whole."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments, self._index = "", 0

    def take(self, parts: Sequence[CallPart]) -> list[dict[str, Any]]:
        """Those that are whole by now."""
        told: list[dict[str, Any]] = []
        for part in parts:
            if part.id:
                told += self.close()
                self._name, self._arguments, self._index = part.name, "", part.index
            self._arguments += part.arguments
        return told

    def close(self, cut: bool = False) -> list[dict[str, Any]]:
        """The last one; cut: the answer ended within it, and nobody may run it."""
        name, self._name = self._name, None
        if name is None or cut:
            return []
        read = read_call_arguments(self._arguments)
        arguments = read if isinstance(read, dict) else {"partial_json": read}  # the model spoiled it
        return [{"function": {"index": self._index, "name": name, "arguments": arguments}}]


@dataclass(frozen=True)
class Times:
    """Seconds of an answer on one clock: when it was asked for, its first token and its end."""

    begun: float
    first: float
    ended: float


@dataclass(frozen=True)
class Shape:
    """What is told of an answer. chats: as messages, else as a response. words: to spell tokens by, where they are
    told with their log-probabilities."""

    model: str
    chats: bool
    words: TokenWords | None = None

    def show(self, delta: Delta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """What is new of an answer."""
        told: dict[str, Any] = {"content": delta.text} | ({"thinking": delta.thought} if delta.thought else {})
        if calls:
            told["tool_calls"] = calls
        if self.chats:
            told = {"message": {"role": "assistant", **told}}
        else:
            told["response"] = told.pop("content")
        if self.words is not None:
            told["logprobs"] = show_chat_logprobs(delta.entries, self.words)["content"]
        return {"model": self.model, "created_at": show_time(datetime.now(UTC)), **told, "done": False}

    def show_end(self, reason: str, usage: Usage, times: Times) -> dict[str, Any]:
        """The fields of an object that is the last one. Times are whole nanoseconds."""
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": round(1e9 * (times.ended - times.begun)),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": round(1e9 * (times.first - times.begun)),
            "eval_count": usage.made,
            "eval_duration": round(1e9 * (times.ended - times.first)),
        }


def show_entry(model: ServedModel, name: str) -> dict[str, Any]:
    """The model in a list. Its digest is made of its file's name and size, as nobody reads all weights for it."""
    digest = hashlib.sha256(f"{model.file} {model.nbytes}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": show_time(datetime.fromtimestamp(model.created, UTC)),
        "size": model.nbytes,
        "digest": digest,
        "details": show_details(model),
    }


def show_details(model: ServedModel) -> dict[str, Any]:
    """What kind of model it is."""
    return {
        "parent_model": "",
        "format": "gguf" if model.file.endswith(".gguf") else "safetensors",
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": show_count(model.weights),
        "quantization_level": model.quant,
    }


def show_count(weights: int) -> str:
    """A number of weights in three figures: 32.8B, 135M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if weights >= 0.9995 * size:  # which three figures say as 1
            return f"{weights / size:.3g}{letter}"
    return str(weights)


def show_time(when: datetime) -> str:
    """A moment of UTC as Ollama's clients read it."""
    return when.isoformat().replace("+00:00", "Z")
