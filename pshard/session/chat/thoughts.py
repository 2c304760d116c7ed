"""What of an answer is meant for the reader, and what is thought aloud or said to tools."""

from collections.abc import Iterator
from dataclasses import dataclass

OPEN = {"<think>": "</think>", "<tool_call>": "</tool_call>", "<reasoning>": "</reasoning>"}
CHANNELS = ("<|channel|>", "<|message|>", "<|start|>")  # of gpt-oss: a channel's name stands between the first two


@dataclass(frozen=True)
class Piece:
    """Text of an answer; `aside`: reasoning, or words for tools."""

    text: str
    aside: bool = False


class Sorter:
    """Sorts a stream of text. `prompt`: what the answer continues, in which thinking may have begun."""

    def __init__(self, prompt: str = "") -> None:
        self._held = ""
        self._end = next((end for begin, end in OPEN.items() if prompt.rstrip().endswith(begin)), None)
        self._name: str | None = None  # of a channel, while it is spelled
        self._channel = ""
        self._hidden = False

    def push(self, text: str, special: str | None = None) -> Iterator[Piece]:
        """What is certain after some more text, or after a special token."""
        if special in CHANNELS:
            yield from self._flush()
            if special == "<|message|>":
                self._channel, self._name = (self._name or "").strip(), None
                if self._channel and self._channel != "final":
                    yield Piece("\n", True)
            self._hidden = special == "<|start|>"
            if special == "<|channel|>":
                self._name = ""
            return
        if self._name is not None:
            self._name += text
        elif not self._hidden:
            self._held += text
            yield from self._sort()

    def finish(self, text: str = "") -> Iterator[Piece]:
        """The rest."""
        self._held += text
        yield from self._flush()

    def _sort(self) -> Iterator[Piece]:
        while self._held:
            tags = [self._end] if self._end else list(OPEN)
            found = min(((self._held.find(tag), tag) for tag in tags if tag in self._held), default=None)
            if found is None:
                keep = max(_begun(self._held, tag) for tag in tags)
                ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if ready:
                    yield self._piece(ready)
                return
            at, tag = found
            at += len(tag) if self._end else 0  # tags are shown with what they enclose
            if at:
                yield self._piece(self._held[:at])
            self._held = self._held[at:]
            if self._end:
                self._end = None
            else:
                self._end, self._held = OPEN[tag], self._held[len(tag) :]
                yield Piece(tag, True)

    def _flush(self) -> Iterator[Piece]:
        if self._held:
            yield self._piece(self._held)
        self._held = ""

    def _piece(self, text: str) -> Piece:
        return Piece(text, self._end is not None or self._channel not in ("", "final"))


def _begun(text: str, tag: str) -> int:
    """How many letters at the end of the text may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
