"""A second model beside one, which drafts for it: they must have the same vocabulary."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.models.model_file import ModelFile, open_model
from pshard.units.state import StateShape

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer

NEAR, FIRST = 128, 5  # vocabularies' sizes may differ by so many; ids from which on words must be equal (as llama.cpp)
_SHAPE = StateShape(64, 1, "f32", "f32", 64)


def open_drafted(model: Path, draft: Path | None) -> ModelFile:
    """Open a model, and another one that is to draft for it. Raises UserError as `open_model`, and for a draft model of
    another vocabulary, or with layers that cannot draft."""
    with ExitStack() as opened:  # closed where something is wrong
        file = opened.enter_context(open_model(model))
        if draft is not None:
            other = opened.enter_context(open_model(draft))
            _check_draft(file, other)
            file = file.with_draft(other)
        opened.pop_all()
    return file


def _check_draft(file: ModelFile, draft: ModelFile) -> None:
    """Raise UserError for a model that cannot draft for another one."""
    spec, where = draft.spec, f"-md {draft.spec.path}"
    config = spec.config
    laws = (unit.state(config, _SHAPE) for unit in spec.units)
    if config.window or any(law and not law.can_be_cut for law in laws):
        raise UserError(
            f"{where}: a draft model has full attention in all layers as yet, and this one has layers with a window or "
            "with states of a fixed size; give another one"
        )
    if why := _compare_words(_words_of(file), _words_of(draft), file.spec.config.vocab, config.vocab):
        raise UserError(f"{where}: its vocabulary is not the model's: {why}; give a model of the same family")


def _words_of(file: ModelFile) -> "Tokenizer | None":
    try:
        return file.tokenizer()
    except UserError:
        return None


def _compare_words(words: "Tokenizer | None", others: "Tokenizer | None", size: int, other: int) -> str:
    """How vocabularies differ; "" where they do not. Of files without a tokenizer equal sizes count."""
    if words is None or others is None:
        return "" if size == other else f"{other} tokens for {size}"
    if abs(size - other) > NEAR:
        return f"{other} tokens for {size}, and {NEAR} more or less may be"
    if words.is_byte_level != others.is_byte_level:
        return "the tokenizers are of different types"
    if words.bos_id != others.bos_id or words.eos_ids != others.eos_ids:
        return "texts begin or end with other tokens"
    for token in range(FIRST, min(size, other)):
        if words.token_bytes(token) != others.token_bytes(token):
            return f"token {token} is {others.token_bytes(token)!r} for {words.token_bytes(token)!r}"
    return ""
