"""What pshard run writes of an answer to stdout: its text as it comes, its token ids, or JSON."""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pshard.server.text.stop_finder import StopFinder

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer
    from pshard.plan import Variant
    from pshard.runtime.engine import MemoryReport


@dataclass(frozen=True)
class Ran:
    """What a run has done. prompt: its tokens; cached: those that a prompt cache had. first and rest: seconds until the
    first token, and from it to the end. full: the context is."""

    prompt: int
    cached: int
    first: float
    rest: float
    full: bool

    def rate(self, made: int) -> float:
        """Tokens per second after the first one; 0 where there are no more."""
        return (made - 1) / self.rest if made > 1 and self.rest else 0.0


class ShownAnswer:
    """Writes an answer while it is made. A text of `-r` ends it, and is no part of it."""

    def __init__(self, args: Namespace, most: int, tokenizer: "Tokenizer | None", write: Callable[[str], None]) -> None:
        """most: tokens that were asked for. write: to stdout, without ending a line."""
        self._stream = None if args.tokens or tokenizer is None else tokenizer.stream()
        self._finder, self._most = StopFinder(tuple(args.reverse_prompt)), most
        self._json, self._each, self._write = args.json, args.stream, write
        self._parts: list[str] = []
        self.ids: list[int] = []

    @property
    def stopped(self) -> bool:
        """Whether a text came that ends the answer."""
        return bool(self._finder.found)

    def push(self, token: int) -> None:
        """A token came."""
        self.ids.append(token)
        piece = self._finder.push(self._stream.push(token)) if self._stream else f"{token} "
        self._tell(piece, token)

    def finish(self) -> None:
        """The answer is over."""
        if self._stream:
            self._tell(self._finder.push(self._stream.finish()) + self._finder.finish(), None)
        if not self._json:
            self._write("\n")

    def _tell(self, piece: str, token: int | None) -> None:
        if self._stream:
            self._parts.append(piece)
        if not self._json:
            self._write(piece)
        elif self._each and (piece or token is not None):
            self._write(write_object({"token": token, "text": piece} if self._stream else {"token": token}))

    def reason(self, ran: Ran) -> str:
        """Why it ended: "stop" (its end, or a text that ends it), or "length" (of `-n`, or of the context)."""
        return "length" if not self.stopped and (len(self.ids) >= self._most or ran.full) else "stop"

    def describe_cut(self, ran: Ran, kind: str) -> str:
        """A line on an answer that follows a "schema" or a "grammar" and may lack its end; "" for one that has it."""
        if self.reason(ran) == "stop":
            return ""
        n, larger = len(self.ids), "-c" if ran.full else "-n"
        if kind == "grammar":
            return f"note: the answer ends after {n} tokens, maybe within its grammar; give a larger {larger}"
        try:
            json.loads("".join(self._parts))
        except ValueError:
            return f"note: the answer was cut after {n} tokens, within its JSON; give a larger {larger}"
        return ""

    def show_end(self, ran: Ran, variant: "Variant", ranks: "list[MemoryReport]") -> None:
        """Write all of it as one object, with --json."""
        if self._json:
            told = self._show(ran) | {"plan": show_plan(variant), "memory": list(map(show_memory, ranks))}
            self._write(write_object(told))

    def _show(self, ran: Ran) -> dict[str, Any]:
        made, computed = len(self.ids), ran.prompt - ran.cached
        return {
            "text": "".join(self._parts) if self._stream else None,
            "ids": self.ids,
            "reason": self.reason(ran),
            "stop": self._finder.found or None,
            "tokens": {"prompt": ran.prompt, "cached": ran.cached, "made": made},
            "seconds": {"first": ran.first, "rest": ran.rest},
            "rates": {"prompt": computed / ran.first if ran.first else 0.0, "answer": ran.rate(made)},
        }


def show_plan(variant: "Variant") -> dict[str, Any]:
    """What was planned: the budgets and the room, how, and the rates that are predicted for the lengths it is for."""
    from pshard.predicted_times import decode_rate, first_token_seconds

    w = variant.workload
    predicted = {"prompt": w.prompt_tokens / first_token_seconds(variant), "answer": decode_rate(variant)}
    return {
        "vram_mib": list(w.vram_mib),
        "context": w.context,
        "sequences": w.sequences,
        "split": w.split_mode,
        "way": variant.way,
        "prompt_math": w.prompt_math,
        "predicted": predicted,
    }


def show_memory(rank: "MemoryReport") -> dict[str, int]:
    """What a rank holds, in bytes."""
    return {"budget": rank.budget, "accelerator": rank.accelerator, "host_weights": rank.host_weights}


def write_object(value: dict[str, Any]) -> str:
    """A JSON object as a line of its own."""
    return json.dumps(value, ensure_ascii=False) + "\n"
