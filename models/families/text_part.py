"""The text part of models that see: its settings and tensors. Nothing else is used."""

from typing import Any

from pshard.models.stored import StoredTensor

_TIED = "tie_word_embeddings"
_SHARED = (_TIED, "quantization_config")  # that stand beside the text part
_TEXT = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
_SIGHT = (
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "mlp_AR.",
    "projector.",
    "vit_large_projector.",
)
_GGUF_SIGHT = ("v.", "mm.")  # as in the file of a vision part of its own, which llama.cpp calls mmproj
_NOTE = "the model's vision part is left out; it is not supported yet"


def take_gguf_text(stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors of the text part of a GGUF file that holds a whole model, and a note when there were others."""
    found = {name: tensor for name, tensor in stored.items() if not name.startswith(_GGUF_SIGHT)}
    return found, (_NOTE,) if len(found) < len(stored) else ()


def take_text_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the text part, or all where a config.json has no other."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    own = {key: value for key, value in text.items() if value is not None or key not in _SHARED}
    found = {key: config[key] for key in _SHARED if config.get(key) is not None} | own
    return found | ({_TIED: True} if config.get(_TIED) is True else {})


def take_text_tensors(stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors of the text part, as a model of text alone names them, and a note when there were others.

    Raises UserError for one that is there under two names.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if name.removeprefix("model.").startswith(_SIGHT):
            continue
        prefix, new = next(((old, new) for old, new in _TEXT if name.startswith(old)), ("", ""))
        plain = new + name.removeprefix(prefix)
        if plain in found:
            tensor.fail("is there twice, under different names")
        found[plain] = tensor
    return found, (_NOTE,) if len(found) < len(stored) else ()
