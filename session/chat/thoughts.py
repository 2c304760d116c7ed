"""What of an answer is meant for the reader, and what is thought aloud or said to tools."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

OPEN = {"<think>": "</think>", "<tool_call>": "</tool_call>", "<reasoning>": "</reasoning>"}
CHANNELS = ("<|channel|>", "<|message|>", "<|start|>")  # of gpt-oss: a channel's name stands between the first two


@dataclass(frozen=True)
class Piece:
    """Text of an answer. within: the tag or the channel's name that it follows, "" for what is meant for the reader;
    mark: it is such a tag itself."""

    text: str
    within: str = ""
    mark: bool = False

    @property
    def aside(self) -> bool:
        """Whether it is reasoning, or words for tools."""
        return self.within != ""


class Sorter:
    """Sorts a stream of text. `prompt`: what the answer continues, in which thinking may have begun. `tags`: what is
    enclosed by what; one that nothing ends ("") holds to the end of the text."""

    def __init__(self, prompt: str = "", tags: Mapping[str, str] = OPEN) -> None:
        self._held, self._tags = "", tags
        self._tag = next((tag for tag in tags if prompt.rstrip().endswith(tag)), "")
        self._name: str | None = None  # of a channel, while it is spelled
        self._channel = ""
        self._hidden = prompt.endswith("<|start|>assistant")
        self._head = ""  # what a message begins with, before its channel

    def push(self, text: str, special: str | None = None) -> Iterator[Piece]:
        """What is certain after some more text, or after a special token."""
        if special in CHANNELS:
            yield from self._flush()
            if special == "<|message|>":
                to = self._head[self._head.find("to=") :] if "to=" in self._head else ""
                self._channel, self._name = f"{self._name or ''} {to}".strip(), None
                if self._channel and self._channel != "final":
                    yield Piece("\n", self._channel, True)
            if special != "<|channel|>":
                self._head = ""
            self._hidden = special == "<|start|>"
            if special == "<|channel|>":
                self._name = ""
            return
        if special is not None and (special in self._tags or special in self._tags.values()):
            text += special
        if self._name is not None:
            self._name += text
        elif self._hidden:
            self._head += text
        else:
            self._held += text
            yield from self._sort()

    def leave(self) -> None:
        """The tag that is open ends before what is pushed next: who reads what it encloses has found its end."""
        self._tag = ""

    def finish(self, text: str = "") -> Iterator[Piece]:
        """The rest."""
        self._held += text
        if self._hidden and not self._channel:  # no channel ever came: it is all there is
            self._held = self._head + self._held
        yield from self._flush()

    def _sort(self) -> Iterator[Piece]:
        while self._held:
            end = self._tags.get(self._tag, "")
            tags = [end] if end else [] if self._tag else list(self._tags)
            found = min(((self._held.find(tag), tag) for tag in tags if tag in self._held), default=None)
            if found is None:
                keep = max((_begun(self._held, tag) for tag in tags), default=0)
                ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if ready:
                    yield self._piece(ready)
                return
            at, tag = found
            if at:
                yield self._piece(self._held[:at])
            self._held = self._held[at + len(tag) :]
            yield Piece(tag, self._tag or tag, True)  # tags are shown with what they enclose
            self._tag = "" if self._tag else tag

    def _flush(self) -> Iterator[Piece]:
        if self._held:
            yield self._piece(self._held)
        self._held = ""

    def _piece(self, text: str) -> Piece:
        return Piece(text, self._tag or ("" if self._channel == "final" else self._channel))


def _begun(text: str, tag: str) -> int:
    """How many letters at the end of the text may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
