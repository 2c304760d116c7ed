"""What one step computes: new tokens of texts, what these have before them, and which logits are wanted. No torch."""

from dataclasses import dataclass
from functools import cached_property

DECODE, VERIFY, PROMPT = "decode", "verify", "prompt"


@dataclass(frozen=True)
class Span:
    """New tokens of a text in a step, after `past` others; the logits after the last `rows` of them are wanted.

    kind: DECODE: the token that was drawn last; VERIFY: drafts, each with its logits, which tell how many of them hold;
    PROMPT: any other tokens. texts: how many such texts there are, in a step that is expected.
    """

    tokens: int
    past: int = 0
    rows: int = 1
    kind: str = PROMPT
    texts: int = 1


@dataclass(frozen=True)
class Batch:
    """The spans of one step, in the order of their rows."""

    spans: tuple[Span, ...]

    @classmethod
    def even(cls, tokens: int, texts: int, past: int = 0, kind: str = "") -> "Batch":
        """So many tokens of so many texts, each with as many others before; logits as the kind has them: of all tokens,
        or of each text's last one. kind: by default DECODE for one token a text, else PROMPT."""
        kind = kind or (DECODE if tokens == texts else PROMPT)
        each, more = divmod(tokens, texts)
        sizes = ((each + 1, more), (each, texts - more))
        return cls(tuple(Span(n, past, n if kind == VERIFY else 1, kind, among) for n, among in sizes if among))

    @cached_property
    def tokens(self) -> int:
        """New tokens of all texts."""
        return sum(span.tokens * span.texts for span in self.spans)

    @cached_property
    def texts(self) -> int:
        """How many texts have some."""
        return sum(span.texts for span in self.spans)

    @cached_property
    def rows(self) -> int:
        """Rows of logits that are wanted."""
        return sum(span.rows * span.texts for span in self.spans)

    @cached_property
    def cells(self) -> int:
        """Tokens that the texts have before, in all."""
        return sum(span.past * span.texts for span in self.spans)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every text has the one token that it decodes."""
        return all(span.kind == DECODE for span in self.spans)

    @cached_property
    def is_answer(self) -> bool:
        """Whether every text decodes or verifies drafts: no prompts."""
        return all(span.kind != PROMPT for span in self.spans)

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The rows whose logits are wanted, counted over the tokens in order."""
        found, end = list[int](), 0
        for span in self.spans:
            for _ in range(span.texts):
                end += span.tokens
                found += range(end - span.rows, end)
        return tuple(found)

    # --- texts that decode, beside others -------------------------------------------------------------------------

    @cached_property
    def decoding(self) -> "Batch":
        """Of texts that decode, with the drafts that they verify."""
        return Batch(tuple(span for span in self.spans if span.kind != PROMPT))

    @cached_property
    def others(self) -> "Batch":
        """Of all others."""
        return Batch(tuple(span for span in self.spans if span.kind == PROMPT))

    @property
    def mean_past(self) -> int:
        """Tokens that a new token has before it, but for others that are new, in the mean."""
        return sum(span.tokens * span.past * span.texts for span in self.spans) // max(1, self.tokens)

    def with_prompt(self, tokens: int, past: int) -> "Batch":
        """The texts that decode beside a prompt of so many tokens after `past` others."""
        prompt = (Span(tokens, past),) if tokens else ()
        return Batch((*self.decoding.spans, *prompt))
