"""A prompt as part of its answer: its text, and its tokens with their log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pshard.server.text.token_words import Entry, make_entry

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer
    from pshard.server.jobs import Likely


@dataclass(frozen=True)
class Echo:
    """The prompt's text, and for each token how many letters stand before it."""

    text: str
    offsets: tuple[int, ...]

    def score(self, scored: "Sequence[Likely]") -> tuple[Entry, ...]:
        """The prompt's tokens with what the model thought of each."""
        return tuple(make_entry(likely.token, likely, offset) for likely, offset in zip(scored, self.offsets))


def echo_prompt(ids: Sequence[int], text: str | None, tokenizer: "Tokenizer | None") -> Echo:
    """A prompt from its tokens. Special tokens are spelled out, except those that the tokenizer put around a `text`."""
    if tokenizer is None:
        return Echo("", (0,) * len(ids))
    stream, parts, offsets, at = tokenizer.stream(), list[str](), [], 0
    for token in ids:
        offsets.append(at)
        name = tokenizer.special_name(token)
        if name is not None and text is not None and not text.startswith(name, at):
            name = ""
        parts.append(stream.push(token) if name is None else name)
        at += len(parts[-1])
    parts.append(stream.finish())
    return Echo("".join(parts), tuple(offsets))
