"""A tokenizer that finds special tokens by names which nobody can write, and reads their own texts as text."""

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class HiddenSpecials:
    """`names` has for the text of each special token its name in `backend`; ids are those of the original."""

    backend: "tokenizers.Tokenizer"
    names: dict[str, str]


def hide_specials(backend: "tokenizers.Tokenizer") -> HiddenSpecials:
    """The same tokenizer with other names for its special tokens.

    All that the library does around a special token (whitespace that it takes in, the space that SentencePiece puts
    behind it) happens as before, and other text is encoded as before. Takes a second for a large vocabulary.
    """
    from tokenizers import Tokenizer

    data = json.loads(backend.to_str())
    nonce = secrets.token_hex(16)
    added, model = data["added_tokens"], data["model"]
    names = {t["content"]: f"\ue000{nonce}:{t['id']}\ue001" for t in added if t["special"]}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    # in the vocabulary too: BPE may take a word whole, or find it as one character
    model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])]
    model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return HiddenSpecials(Tokenizer.from_str(json.dumps(data)), names)
