"""The tokenizer and chat template of a Hugging Face folder."""

from contextlib import closing
from pathlib import Path
from typing import Any

from pshard.errors import UserError
from pshard.models.safetensors_header import read_json
from pshard.models.stored import MappedFile
from pshard.models.text.gguf_tokenizer import surround
from pshard.models.text.library_calls import name_failures
from pshard.models.text.tokenizer import Tokenizer


def hf_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json; begin and end tokens as tokenizer_config.json and generation_config.json say.

    Raises UserError when there is no tokenizer.json or it cannot be read.
    """
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.exists() and (folder / "tiktoken.model").exists():
        what = "has a tiktoken.model and no tokenizer.json, which is not supported yet"
        raise UserError(f"{folder}: {what}; give tokens only, as ids, or use a GGUF file of the model")
    if not path.exists():
        raise UserError(f"{folder}: has no tokenizer.json; give tokens only, as ids, or save the fast tokenizer there")
    with closing(MappedFile(path, "give tokens only, as ids")) as file:
        file.check_pointer()
    with name_failures(f"{path}: cannot be read"):
        backend = Backend.from_file(str(path))
        backend.no_padding()  # neither changes what a text is
        backend.no_truncation()
    config = _read_optional(folder / "tokenizer_config.json")
    with name_failures(f"{folder / 'tokenizer_config.json'}: bos_token or eos_token is no token"):
        bos, eos = (_special_id(backend, config.get(f"{name}_token")) for name in ("bos", "eos"))
    if "add_bos_token" in config or "add_eos_token" in config:  # these win over tokenizer.json
        before = [bos] if config.get("add_bos_token") and bos is not None else []
        after = [eos] if config.get("add_eos_token") and eos is not None else []
        surround(backend, before, after)
    ends = [eos]
    for name in ("generation_config.json", "config.json"):
        ends += _end_ids(folder / name, max(backend.get_vocab_size(), _vocabulary(folder)))
    known = [i for i in ends if i is not None and backend.id_to_token(i) is not None]
    return Tokenizer(backend, bos, tuple(dict.fromkeys(known)))


def _vocabulary(folder: Path) -> int:
    """Rows of the model's embedding, some of which may be no token; 0 when config.json does not say."""
    size = _read_optional(folder / "config.json").get("vocab_size")
    return size if type(size) is int else 0


def _end_ids(path: Path, count: int) -> list[int]:
    """The end tokens that a file names. Raises UserError for one that is no id of a vocabulary of `count`."""
    given = _read_optional(path).get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for token in ids:
        if type(token) is not int or not 0 <= token < count:
            raise UserError(f"{path}: eos_token_id is {token!r}, not one of the {count} tokens; correct it")
    return ids


def hf_chat_template(folder: Path) -> str | None:
    """The chat template: chat_template.jinja, else that of tokenizer_config.json ("default" where it names several)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read ({error}); run without --chat, or correct it") from None
    template = _read_optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_id(backend: Any, token: Any) -> int | None:
    """Id of a special token given by its text, or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
