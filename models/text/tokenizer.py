"""Text to token ids and back, for byte-level BPE and SentencePiece-style BPE vocabularies."""

import codecs
import os
import re
from functools import cached_property
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.models.text.hidden_specials import HiddenSpecials, hide_specials
from pshard.models.text.library_calls import name_failures
from pshard.models.text.traced_text import TEMPLATE, UNKNOWN, TracedText

if TYPE_CHECKING:
    import tokenizers


# one text is encoded at a time: the library's threads for many would only take cores from who computes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Encodes with the `tokenizers` library; decodes bytes itself, so that streaming and decoding agree.

    `bos_id` is None and `bos_text`/`eos_text` are "" when the model has no such token; generation ends at any id of
    `eos_ids`.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", bos_id: int | None, eos_ids: tuple[int, ...]) -> None:
        """`eos_ids`: the model's own end token first. Raises UserError for a vocabulary that is neither kind of BPE."""
        self._backend = backend
        self.bos_id, self.eos_ids = bos_id, frozenset(eos_ids)
        self.vocab_size: int = backend.get_vocab_size()
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()  # its JSON
        self._byte_level = "ByteLevel" in decoder
        if not self._byte_level and ("ByteFallback" not in decoder or "Metaspace" in decoder):
            raise UserError("the tokenizer is neither byte-level BPE nor SentencePiece BPE; pass token ids instead")
        # SentencePiece puts a space before the text, which is no part of it
        self._strips_space = not self._byte_level and '"Strip"' in decoder
        self.bos_text = "" if bos_id is None else backend.id_to_token(bos_id) or ""
        self.eos_text = (backend.id_to_token(eos_ids[0]) or "") if eos_ids else ""

    @property
    def is_byte_level(self) -> bool:
        """Whether words are of bytes; else they are of characters, as SentencePiece has them."""
        return self._byte_level

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of the text.

        `add_special` adds what the model wants around a text (mostly a begin token). With `parse_special` special
        tokens spelled out in the text become their ids; without it they are text like any other. Tokens that the
        vocabulary has for plain text, as "<think>" is in some files, are found in both cases. Raises UserError for
        text that is no Unicode, and where the file's settings break the library.
        """
        return self._encode(self._backend if parse_special else self._hidden.backend, text, add_special)

    def encode_chat(self, text: TracedText) -> list[int]:
        """Token ids of a rendered chat: special tokens are those that the template alone spells out.

        What a message spells is text, and so is what message and template spell together.
        """
        spans = self._template_specials(text)
        if spans == self._specials(text) and not any(t.special and t.normalized for t in self._added.values()):
            return self._encode(self._backend, text.forget(), add_special=False)
        pieces, at = [], 0
        for begin, end in spans:
            pieces += [text[at:begin], self._hidden.names[text[begin:end]]]
            at = end
        return self._encode(self._hidden.backend, "".join([*pieces, text[at:]]), add_special=False)

    def doubtful_specials(self, text: TracedText) -> list[str]:
        """Special tokens that `encode_chat` reads as text though the template may have written them."""
        return sorted({text[begin:end] for begin, end in self._specials(text) if UNKNOWN in text.origins[begin:end]})

    def _encode(self, backend: "tokenizers.Tokenizer", text: str, add_special: bool) -> list[int]:
        try:
            str.encode(text)
        except UnicodeEncodeError:  # as arguments are read that are not UTF-8
            raise UserError("the text is not valid UTF-8; correct it, or give token ids") from None
        with name_failures("the model's tokenizer cannot encode the text"):
            # `encode` keeps Python's lock, and all other threads waiting, as long as it takes: a batch does not
            return backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def _template_specials(self, text: TracedText) -> list[tuple[int, int]]:
        return [span for run in text.runs(TEMPLATE) for span in self._specials(text, *run)]

    def _specials(self, text: str, begin: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """Begin and end of each special token that is spelled out from `begin` to `end`; the longest one counts."""
        return [m.span() for m in self._spellings.finditer(text, begin, len(text) if end is None else end)]

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        texts = sorted((t.content for t in self._added.values() if t.special and t.content), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _hidden(self) -> HiddenSpecials:
        with name_failures("the model's tokenizer cannot be used without its special tokens"):
            return hide_specials(self._backend)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, without special tokens; bytes that are not UTF-8 become U+FFFD. Unknown ids are no text."""
        stream = self.stream()
        return "".join([stream.push(i) for i in ids]) + stream.finish()

    def stream(self) -> "TextStream":
        """A decoder for ids that arrive one by one."""
        return TextStream(self)

    def special_name(self, token: int) -> str | None:
        """How a special token is spelled; None for tokens of text."""
        added = self._added.get(token)
        return added.content if added is not None and added.special else None

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for: b"" for special tokens and for ids outside the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            known = self._spell(token)
            if known:  # of the vocabulary: there are only so many
                self._bytes[token] = known
        return known

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return b"" if self._added[token].special else self._added[token].content.encode()
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[c] for c in text) if all(c in _BYTE_OF for c in text) else text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()


class TextStream:
    """Decodes ids one by one and gives out only whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._strips_space

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" in the middle of a character."""
        data = self._tokenizer.token_bytes(token)
        if data and self._strip:
            data, self._strip = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, else ""."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
