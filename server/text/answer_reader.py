"""Reads one answer as it is made: tokens in, what the client is told out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pshard.server.jobs import Made
from pshard.server.text.call_reader import CLOSES, CallPart, CallReader
from pshard.server.text.formats import ChatFormat
from pshard.server.text.stop_finder import StopFinder
from pshard.server.text.token_words import Entry, make_entry
from pshard.session.chat.thoughts import Piece, Sorter

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer

SPELLED = ("[ARGS]", "[CALL_ID]", *CLOSES.values())  # special tokens within a call


@dataclass(frozen=True)
class Delta:
    """What is new of an answer: reasoning, then text, then parts of calls of tools; and the tokens of what was given
    out so far."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallPart, ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether it is text and nothing else."""
        return bool(self.text) and not (self.thought or self.calls or self.entries)

    def __bool__(self) -> bool:
        return bool(self.text or self.thought or self.calls or self.entries)

    def may_precede(self, other: "Delta") -> bool:
        """Whether both are in order as one: no text after a call, no reasoning after either."""
        return not (self.calls and (other.text or other.thought)) and not (self.text and other.thought)


def join_deltas(parts: Sequence[Delta]) -> list[Delta]:
    """The parts in their order, in as few as say it; one at least."""
    if len(parts) == 1:  # the usual case
        return [*parts]
    groups: list[list[Delta]] = [[]]
    last = Delta()  # kinds of the group's parts
    for part in parts:
        if not last.may_precede(part):
            groups.append([])
            last = Delta()
        groups[-1].append(part)
        last = Delta(last.text or part.text, last.thought or part.thought, last.calls or part.calls)
    return [_join_all(group) for group in groups]


def _join_all(parts: Sequence[Delta]) -> Delta:
    return Delta(
        "".join(part.text for part in parts),
        "".join(part.thought for part in parts),
        tuple(call for part in parts for call in part.calls),
        tuple(entry for part in parts for entry in part.entries),
    )


class AnswerReader:
    """One answer. A stop string ends it: `stopped` is then it, and what comes later is not read; so does the first
    call where one is all that is wanted. `ended`: whether either came.

    `count`: tokens up to that end; `ids`: these tokens; `called`: whether a tool was called; `cut`: whether the answer
    ended within a call, the last one, which nobody may run.
    """

    def __init__(self, tokenizer: "Tokenizer | None", stops: tuple[str, ...], format: ChatFormat | None = None) -> None:
        """format: what a chat's model means by its tags; None: all is text."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream() if tokenizer else None
        self._stops, self._finder = stops, StopFinder(stops)
        self._shape = _Shape(format) if format else None
        self._decoded = self._given = 0  # letters
        self._waiting: list[Entry] = []
        self.stopped = ""
        self.ids: list[int] = []

    @property
    def ended(self) -> bool:
        return bool(self.stopped) or (self._shape is not None and self._shape.ended)

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def called(self) -> bool:
        return self._shape is not None and self._shape.calls.count > self._shape.calls.cut

    @property
    def cut(self) -> bool:
        return self._shape is not None and self._shape.calls.cut

    def push(self, made: Made) -> list[Delta]:
        """What is certain after new tokens, in order. They are read one by one: how many come at once changes
        nothing."""
        parts: list[Delta] = []
        for i, token in enumerate(made.tokens):
            if self.ended:
                break
            self.ids.append(token)
            if made.likely:
                self._waiting.append(make_entry(token, made.likely[i], self._decoded))
            parts += self._add_entries(self._read(token))
        return join_deltas(parts)

    def finish(self) -> list[Delta]:
        """The rest, at the end of the answer."""
        parts: list[Delta] = []
        if not self.stopped:
            rest = self._stream.finish() if self._stream else ""
            parts += self._sort(self._finder.push(rest) + self._finder.finish(), None)
            self._given = self._decoded + len(rest)
            self.stopped = self._finder.found
        if self._shape:
            parts += self._shape.finish()
        if self.stopped:  # tokens of the stop string are no part of the answer
            self._waiting = [entry for entry in self._waiting if entry.offset < self._given]
        else:
            self._given += 1
        return join_deltas(self._add_entries(parts))

    def _read(self, token: int) -> list[Delta]:
        special = self._tokenizer.special_name(token) if self._tokenizer else None
        if special is not None and special in self._stops:
            self.stopped = special
            ready = self._finder.finish()
            self._given += len(ready)
            return self._sort(ready, None)
        text = self._stream.push(token) if self._stream else ""
        self._decoded += len(text)
        if special is not None and self._shape:  # it stands between what was held back and what comes
            held = self._finder.finish()
            self._given += len(held)
            return self._sort(held, None) + self._sort("", special)
        ready = self._finder.push(text)
        self._given += len(ready)
        self.stopped = self._finder.found
        return self._sort(ready, None)

    def _sort(self, text: str, special: str | None) -> list[Delta]:
        if self._shape:
            return self._shape.push(text, special)
        return [Delta(text)]

    def _add_entries(self, parts: list[Delta]) -> list[Delta]:
        """The parts with the tokens of what was given out, beside the last of them."""
        if not self._waiting:  # the usual case: no log-probabilities
            return parts
        at = next((i for i, entry in enumerate(self._waiting) if entry.offset >= self._given), len(self._waiting))
        entries, self._waiting = tuple(self._waiting[:at]), self._waiting[at:]
        *before, last = parts or [Delta()]
        return [*before, replace(last, entries=entries)]


class _Shape:
    """Sorts text into what is meant for the reader, reasoning, and calls, without the whitespace between them."""

    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self._sorter = Sorter(format.begun, format.tags)
        self.calls = CallReader(format.tools, format.make_id)
        self._kind = "call" if format.forced else ""
        self._space = ""  # whitespace that nobody may need
        self._begun = not format.trims  # whether text of this stretch was given out
        self._lead = "" if format.bare and not format.forced else None  # text that may turn out to be a bare call
        self.ended = False

    def push(self, text: str, special: str | None) -> list[Delta]:
        if self._format.forced:
            return self._end([Delta(calls=tuple(self.calls.push(text)))])
        if special in SPELLED and self._format.tools:
            text, special = text + special, None
        return self._end(self._collect(self._sorter.push(text, special)))

    def _end(self, parts: list[Delta]) -> list[Delta]:
        """What is new, without what follows the first call where that is the last one."""
        if not self._format.single or not self.calls.count:
            return parts
        self.ended = self.ended or self.calls.count > 1 or not (self.calls.open or self.calls.cut)
        return [replace(part, calls=tuple(call for call in part.calls if call.index == 0)) for part in parts]

    def finish(self) -> list[Delta]:
        parts = [] if self._format.forced else self._collect(self._sorter.finish())
        if self._lead:
            lead, self._lead = self._lead, None
            parts.append(self._give("text", lead))
        calls, rest = self.calls.finish()
        parts.append(Delta(calls=tuple(calls)))
        if rest and not (self._format.forced and self.calls.count):  # there it is a call of which little came
            parts.append(self._give("text", rest))
        if self._space and not self.calls.count and self._kind == "text":
            parts.append(Delta(self._space))
        return self._end(parts)

    def _collect(self, pieces: Iterator[Piece]) -> list[Delta]:
        return [delta for piece in pieces for delta in self._take(piece)]

    def _take(self, piece: Piece) -> list[Delta]:
        kind = self._format.kind_of(piece.within)
        if piece.mark:
            told: list[Delta] = []
            if kind == "call":
                calls, text = self.calls.begin(piece.text, piece.within)
                self._lead = None
                told = [replace(self._give("text", text) if text else Delta(), calls=tuple(calls))]
            self._start_stretch()
            return told
        if kind == "call":
            return self._take_call(piece.text)
        if kind == "text" and self._lead is not None:
            return self._take_lead(piece.text)
        return [self._give(kind, piece.text)]

    def _start_stretch(self) -> None:
        self._kind, self._space, self._begun = "", "", False

    def _take_call(self, text: str) -> list[Delta]:
        """Text of a stretch that may hold calls, which says itself where it ends."""
        told = [Delta(calls=tuple(self.calls.push(text)))]
        if (left := self.calls.leave()) is not None:
            none, after = left
            if none:
                told.append(self._give("text", none))
            else:
                self._start_stretch()
            self._sorter.leave()
            told += self._collect(self._sorter.push(after))
        return told

    def _take_lead(self, text: str) -> list[Delta]:
        """Text that may be a call without any tag."""
        assert self._lead is not None
        self._lead += text
        if self.calls.open or self.calls.count or self._lead.lstrip():
            told = [Delta(calls=tuple(self.calls.push(self._lead)))]
            self._lead = ""
            if (left := self.calls.leave()) is None:
                return told
            self._lead = None
            return [*told, self._give("text", "".join(left))]
        return []

    def _give(self, kind: str, text: str) -> Delta:
        if kind != self._kind:
            self._kind, self._space = kind, ""
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        ready = text.rstrip() if self._format.trims else text
        self._space = text[len(ready) :]
        self._begun = self._begun or bool(ready)
        return Delta(thought=ready) if kind == "thought" else Delta(ready)
