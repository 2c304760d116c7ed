"""How tokens are written where each is shown on its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer
    from pshard.server.jobs import Likely


@dataclass(frozen=True)
class Entry:
    """A token of an answer that is told with its log-probability, natural, None for the first of a text. token and best
    as ids; offset: letters of the text before it."""

    token: int
    logprob: float | None
    best: tuple[tuple[int, float], ...]
    offset: int


class TokenWords:
    """Texts and bytes of single tokens, of a model with or without a tokenizer."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        self._tokenizer = tokenizer

    def spell_bytes(self, token: int) -> bytes:
        """The token's bytes; a special token's name."""
        if self._tokenizer is None:
            return b""
        name = self._tokenizer.special_name(token)
        return self._tokenizer.token_bytes(token) if name is None else name.encode()

    def spell(self, token: int) -> str:
        """The token's text. One that is no whole character is written "bytes:\\xe2\\x80", so that no two look alike."""
        data = self.spell_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def make_entry(token: int, likely: "Likely", offset: int) -> Entry:
    """A token's entry; the first of a text has no log-probability."""
    known = likely.logprob == likely.logprob
    return Entry(token, likely.logprob if known else None, likely.best if known else (), offset)
