"""Answers that follow a grammar or a JSON schema: llguidance says which tokens may come next.

The package is an extra, imported when a grammar is given.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from pshard.errors import UserError
from pshard.runtime.sampling.close_objects import close_objects
from pshard.runtime.sampling.show_rule import describe_error, describe_regex

COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}}


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
        """The logits, float32 [vocabulary], with -inf for tokens that may not come. Raises UserError where llguidance
        gives up."""
        may = np.unpackbits(self.words().view(np.uint8), bitorder="little")[: self._vocab]
        may = np.pad(may, (0, len(logits) - len(may))).astype(bool)
        return np.where(may, logits, np.float32(-np.inf))

    def words(self) -> np.ndarray:
        """Tokens that may come as bits: uint32 [ceil(vocabulary / 32)]. Raises UserError where llguidance gives up."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("<state>")[0].strip()  # then follows what it was at
            raise UserError(f"the grammar or schema cannot be followed: {why}; give a simpler one")
        return words[: -(-self._vocab // 32)]  # it may have one more

    def accept(self, token: int) -> None:
        """That token came."""
        self._matcher.consume_token(token)

    def copy(self) -> "Grammar":
        """One of its own, that has seen the same."""
        return Grammar(self._matcher.deep_copy(), self._vocab)


class GrammarWords:
    """A vocabulary as llguidance knows it, of which any number of grammars can be made: making it takes a second for a
    large one."""

    def __init__(self, library: Any, tokenizer: Tokenizer, vocab: int) -> None:
        self._library, self._vocab = library, vocab
        words = library.TokenizerWrapper(_Words(tokenizer, vocab))
        self._known = library.LLTokenizer(words, n_vocab=vocab, eos_token=sorted(tokenizer.eos_ids))

    def compile_schema(self, text: str, flag: str = "schema") -> Callable[[], Grammar]:
        """What makes a grammar for one answer after another, of a JSON schema as text: compact JSON, as whitespace lets
        a small model go on for ever. Objects take other keys than they name only where the schema says so. Raises
        UserError, which begins with `flag`."""
        with _name_error(flag):
            schema = json.loads(text)
            if isinstance(schema, dict):
                schema = close_objects(schema) | COMPACT
            made = self._library.LLMatcher.grammar_from_json_schema(schema)
        return self._compile(made, flag)

    def compile_grammar(self, text: str, flag: str) -> Callable[[], Grammar]:
        """The same of a grammar in GBNF or Lark."""
        from llguidance import gbnf_to_lark

        try:
            lark = gbnf_to_lark.any_to_lark(text)
        except Exception as error:
            raise _refuse(flag, describe_error(error, text, "")) from None
        made = self._library.LLMatcher.grammar_from_lark(lark)
        return self._compile(made, flag, lambda error: describe_error(error, text, lark))

    def compile_regex(self, text: str, flag: str) -> Callable[[], Grammar]:
        """The same of a regular expression that the whole answer matches."""
        return self._compile(self._library.LLMatcher.grammar_from_regex(text), flag, describe_regex)

    def compile_choice(self, texts: Sequence[str], flag: str) -> Callable[[], Grammar]:
        """The same of some texts, of which the answer is one."""
        return self.compile_grammar(f"start: {' | '.join(map(json.dumps, texts))}\n", flag)

    def _compile(self, made: str, flag: str, describe: Callable[[str], str] | None = None) -> Callable[[], Grammar]:
        matcher = self._library.LLMatcher(self._known, made, log_level=0)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # some that are too complex show it with the first token only
        if first.is_error():
            error = first.get_error()
            raise _refuse(flag, describe(error) if describe else " ".join(error.partition("<state>")[0].split()))
        return lambda: Grammar(matcher.deep_copy(), self._vocab)


def spell_schema(schema: dict[str, Any]) -> str:
    """Compact JSON of a schema, as a word of a Lark grammar. Raises UserError for one that is too deep."""
    with _name_error("schema"):
        return f"%json {json.dumps(close_objects(schema) | COMPACT)}"


def check_installed() -> None:
    """Raise UserError where llguidance is not installed: before anything is loaded that it is to guide."""
    if find_spec("llguidance") is None:
        raise UserError("grammars and schemas need llguidance, which is not installed; run: pip install llguidance")


def open_words(tokenizer: Tokenizer | None, vocab: int) -> GrammarWords:
    """A tokenizer's words for grammars; vocab: of the logits. Raises UserError: llguidance is not installed, or a model
    that cannot say when it ends."""
    check_installed()
    import llguidance

    if tokenizer is None or not tokenizer.eos_ids:
        raise UserError("grammars and schemas need a model file with a tokenizer and an end token; leave them out")
    return GrammarWords(llguidance, tokenizer, vocab)


def follow_grammar(kind: str, text: str, tokenizer: Tokenizer | None, vocab: int) -> Grammar:
    """A grammar for one answer. kind: "grammar" (GBNF or Lark) or "schema" (JSON schema); vocab: of the logits.

    Raises UserError: llguidance is not installed, a text that is neither, a model that cannot say when it ends.
    """
    words = open_words(tokenizer, vocab)
    if kind == "schema":
        return words.compile_schema(text, "--json-schema")()
    return words.compile_grammar(text, "--grammar")()


@contextmanager
def _name_error(flag: str) -> Iterator[None]:
    """What llguidance's converters raise, of which nothing is said anywhere, as UserError."""
    try:
        yield
    except Exception as error:
        raise _refuse(flag, (str(error).splitlines() or [""])[0]) from None


def _refuse(flag: str, why: str) -> UserError:
    return UserError(f"{flag} cannot be read: {why}; correct it")


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
