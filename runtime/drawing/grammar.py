"""Answers that follow a grammar or a JSON schema: llguidance says which tokens may come next.

The package is an extra, imported when a grammar is given.
"""

import json
from typing import Any, Protocol

import numpy as np

from pshard.errors import StepFailed, UserError


class Tokenizer(Protocol):
    """What is asked of a tokenizer; `pshard.models.text.tokenizer` has one."""

    eos_ids: frozenset[int]
    bos_id: int | None

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Grammar:
    """Tokens that may come next, as llguidance follows what came: a `Constraint` of pshard.runtime.sampling."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """The logits, float32 [vocabulary], with -inf for tokens that may not come. Raises StepFailed where llguidance
        gives up."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise StepFailed(f"the grammar cannot be followed: {self._matcher.get_error()}")
        may = np.unpackbits(words, bitorder="little")[: self._vocab]
        may = np.pad(may, (0, len(logits) - len(may))).astype(bool)
        return np.where(may, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """That token came."""
        self._matcher.consume_token(token)


def follow_grammar(kind: str, text: str, tokenizer: Tokenizer | None, vocab: int) -> Grammar:
    """A grammar for one answer. kind: "grammar" (GBNF or Lark) or "schema" (JSON schema); vocab: of the logits.

    Raises UserError: llguidance is not installed, a text that is neither, a model that cannot say when it ends.
    """
    try:
        import llguidance
        from llguidance import gbnf_to_lark
    except ImportError:
        raise UserError(
            "grammars and schemas need llguidance, which is not installed; run: pip install llguidance"
        ) from None
    if tokenizer is None or not tokenizer.eos_ids:
        raise UserError("grammars and schemas need a model file with a tokenizer and an end token")
    flag = "--json-schema" if kind == "schema" else "--grammar"
    try:
        if kind == "schema":
            schema = json.loads(text)
            if isinstance(schema, dict):  # else a model may go on with empty lines for ever
                schema.setdefault("x-guidance", {"whitespace_pattern": r"[ \n]{0,4}"})
            made = llguidance.LLMatcher.grammar_from_json_schema(schema)
        else:
            made = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # what its converters raise is not said anywhere
        raise UserError(f"{flag} cannot be read: {str(error).splitlines()[0]}") from None
    words = llguidance.TokenizerWrapper(_Words(tokenizer, vocab))
    known = llguidance.LLTokenizer(words, n_vocab=vocab, eos_token=sorted(tokenizer.eos_ids))
    if wrong := llguidance.LLMatcher.validate_grammar(made, known):
        raise UserError(f"{flag} cannot be read: {' '.join(wrong.split())}")
    return Grammar(llguidance.LLMatcher(known, made), vocab)


class _Words:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        self.special_token_ids = [token for token, word in enumerate(self.tokens) if not word]

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special=False, parse_special=False)
