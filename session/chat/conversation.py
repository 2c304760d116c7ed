"""Turns of a chat over one engine, of which no token is computed twice while the template leaves earlier turns as they
were."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError
from pshard.session.chat.thoughts import Piece, Sorter

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer
    from pshard.models.text.traced_text import TracedText
    from pshard.runtime.engine import Engine
    from pshard.runtime.sampling import Constraint, Sampling
    from pshard.runtime.speculation.speculator import DraftSettings
    from pshard.session.lead_ranks import LedEngine

PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"  # of models without a template: they continue text
LEAST_ANSWER = 8  # of the context, one part that a prompt leaves free

Message = dict[str, Any]


@dataclass(frozen=True)
class TurnStats:
    """Counts of tokens and seconds. `reused`: tokens of the prompt that were in the cache; `dropped`: turns that the
    context had no room for."""

    prompt: int = 0
    reused: int = 0
    prompt_seconds: float = 0.0
    generated: int = 0
    seconds: float = 0.0
    dropped: int = 0
    full: bool = False  # the answer ended as the context was full

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt that were computed, per second."""
        return (self.prompt - self.reused) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens of the answer per second."""
        return self.generated / self.seconds if self.seconds else 0.0


class Conversation:
    """What was said, and the tokens that stand for it.

    Attributes: `messages`, `sampling` (changes hold from the next answer on), `last` and `total` stats.
    """

    def __init__(
        self,
        engine: "Engine | LedEngine",
        template: str | None,
        sampling: "Sampling",
        system: str | None = None,
        most: int = sys.maxsize,
        constrain: "Callable[[], Constraint | None]" = lambda: None,
        drafts: "DraftSettings | None" = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """most: tokens of an answer; constrain: gives what each answer is to follow; drafts: who drafts; variables: of
        the template. Raises UserError without a tokenizer."""
        if engine.tokenizer is None:
            raise UserError("the model file has no tokenizer, which a chat needs; run token ids with --tokens")
        self.engine, self.sampling, self.most = engine, sampling, most
        self._tokenizer: Tokenizer = engine.tokenizer
        self._template, self._constrain, self._drafts = template or PLAIN, constrain, drafts
        self._variables = variables or {}
        self.messages: list[Message] = []
        self.set_system(system)
        self.last = self.total = TurnStats()
        self._text: str = ""  # what the ids stand for: the last prompt with its answer
        self._ids: list[int] = []

    @property
    def context_used(self) -> int:
        """Tokens that the engine holds."""
        return self.engine.lengths[0]

    def set_system(self, text: str | None) -> None:
        """Begin with these words of the system, or with none."""
        others = [m for m in self.messages if m["role"] != "system"]
        self.messages = ([{"role": "system", "content": text}] if text else []) + others

    def reset(self) -> None:
        """Forget all turns; the system's words stay."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def undo(self) -> str | None:
        """Forget the last turn; returns what the user said in it, None when there is none."""
        places = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not places:
            return None
        said = self.messages[places[-1]]["content"]
        del self.messages[places[-1] :]
        return said

    def replace(self, messages: list[Message]) -> None:
        """Go on from these messages instead. Raises UserError for what are none."""
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
                raise UserError(
                    "messages are objects with a role of system, user or assistant, and a content; correct them"
                )
            if not isinstance(message.get("content"), str):
                raise UserError("the content of a message is a text; correct it")
        self.messages = [dict(m) for m in messages]

    def answer(self, said: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Say something and yield the answer as it comes; `stopped` ends it, and what has come of it is kept.

        Raises UserError, and leaves the conversation as it was, for a message that the template refuses, or that does
        not fit the context.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": said})
        try:
            text, ids, dropped = self._fit()
        except UserError:
            self.messages = before
            raise
        new = self._cut_back(ids)
        stats = TurnStats(prompt=len(ids), reused=len(ids) - len(new), dropped=dropped)
        started = time.perf_counter()
        step = self.engine.rank_plan.tiers[-1].tokens
        while len(new) > step and not stopped():
            self.engine.forward(new[:step], best_only=True)
            new = new[step:]
        if stopped():
            self.messages = before
            return
        sorter, stream, made = Sorter(text), self._tokenizer.stream(), list[int]()
        words: list[str] = []
        try:
            for token in self.engine.generate(new, self.most, self.sampling, False, self._constrain(), self._drafts):
                now = time.perf_counter()
                if not made:
                    stats, started = replace(stats, prompt_seconds=now - started), now
                made.append(token)
                words.append(stream.push(token))
                yield from sorter.push(words[-1], self._tokenizer.special_name(token))
                if stopped():
                    break
            else:
                full = self.context_used + 1 > self.engine.longest
                stats = replace(stats, full=full and len(made) < self.most)
        finally:
            words.append(stream.finish())
            stats = replace(stats, generated=len(made), seconds=time.perf_counter() - started)
            self._keep(text, ids, made, "".join(words), stats)
        yield from sorter.finish(words[-1])

    def _keep(self, text: str, ids: list[int], made: list[int], words: str, stats: TurnStats) -> None:
        """The answer becomes a message, and its tokens those of the text."""
        self.messages.append({"role": "assistant", "content": words})
        self._text, self._ids = f"{text}{words}", [*ids, *made]
        self.last, t = stats, self.total
        self.total = TurnStats(
            t.prompt + stats.prompt, t.reused + stats.reused, t.prompt_seconds + stats.prompt_seconds,
            t.generated + stats.generated, t.seconds + stats.seconds, t.dropped + stats.dropped,
        )  # fmt: skip

    def _fit(self) -> tuple[str, list[int], int]:
        """The rendered turns and their ids, and how many of the oldest turns had to be dropped for them to fit. Raises
        UserError where the last one alone does not."""
        longest, dropped = self.engine.longest, 0
        while True:
            text, ids = self._encode()
            if len(ids) + min(self.most, max(1, longest // LEAST_ANSWER)) <= longest:
                return text, ids, dropped
            if not self._drop_oldest():
                if len(ids) < longest:
                    return text, ids, dropped
                raise UserError(
                    f"the message makes {len(ids)} tokens, the context has {longest}; say less, or give a larger -c"
                )
            dropped += 1

    def _drop_oldest(self) -> bool:
        """Forget the oldest turn whole, what is said in it and its answer; whether there was one beside the last."""
        places = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if len(places) < 2:
            return False
        del self.messages[places[0] : places[1]]
        return True

    def _encode(self) -> tuple[str, list[int]]:
        """The turns as the template writes them, and their ids: those of the last prompt and answer, where they begin
        so, and of what is new."""
        from pshard.models.text.chat import render_chat

        begin, end = self._tokenizer.bos_text, self._tokenizer.eos_text
        text = render_chat(self._template, self.messages, begin, end, variables=self._variables)
        ids = self._tokenizer.encode_chat(text)
        if self._ids and text.startswith(self._text):
            rest: TracedText = text[len(self._text) :]
            more = self._tokenizer.encode_chat(rest) if rest else []
            if more == ids[len(ids) - len(more) :]:  # else the border is no border of tokens
                ids = [*self._ids, *more]
        return text.forget(), ids

    def _cut_back(self, ids: list[int]) -> list[int]:
        """Let the engine keep what its tokens and these have in common; returns those that it lacks, at least one."""
        cached = self.engine.tokens()
        same = next((i for i, (a, b) in enumerate(zip(cached, ids)) if a != b), min(len(cached), len(ids)))
        same = min(same, len(ids) - 1)
        if same < len(cached):
            try:
                self.engine.reset(0, same)
            except UserError:  # a state that cannot be cut back
                self.engine.reset(0)
        return ids[self.engine.lengths[0] :]
