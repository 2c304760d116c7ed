"""Answers of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pshard.server.shapes.usage import Usage
from pshard.server.text.token_words import Entry, TokenWords


@dataclass(frozen=True)
class Heading:
    """What every object of one answer begins with. created: whole seconds since 1970. drafts: of a step at most, where
    the request has said it."""

    id: str
    created: int
    model: str
    drafts: int | None = None

    def show(self, kind: str) -> dict[str, Any]:
        told = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return told | ({} if self.drafts is None else {"speculative": {"n_max": self.drafts}})


def show_completion_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None, ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """One choice, or a piece of it in a stream. reason: None while it goes on."""
    told: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return told if ids is None else told | {"token_ids": list(ids)}


def show_completion(heading: Heading, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
    """A whole answer, or a chunk of a stream."""
    told = heading.show("text_completion") | {"choices": choices}
    return told | ({"usage": usage.show()} if usage else {})


def show_completion_logprobs(entries: Sequence[Entry], words: TokenWords) -> dict[str, Any]:
    """Log-probabilities of tokens: four lists of equal length. The likeliest tokens of each include itself."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in (*entry.best, (entry.token, entry.logprob)):
            top.setdefault(words.spell(token), logprob)
        tops.append(top)
    return {
        "tokens": [words.spell(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }
