"""Opens a model: a GGUF file (whole or split) or a Hugging Face folder, as one ModelFile. Only headers are read."""

import hashlib
import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pshard.errors import UserError
from pshard.jsonio import to_json
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture, find_gguf_architecture, find_hf_architecture
from pshard.models.arrange_tensors import (
    arrange_gguf,
    flatten_row,
    part_drafters,
    rename_role,
    stack_experts,
)
from pshard.models.build_units import HEAD, build_units
from pshard.models.families.by_layer import arrange_layers, rename_scales
from pshard.models.families.layer_sorts import arrange_sorts, rename_choice
from pshard.models.families.made_norms import make_vectors, stack_head_norms
from pshard.models.families.stored_rows import add_one_to_norms, split_fused
from pshard.models.families.text_part import take_gguf_text, take_text_settings, take_text_tensors
from pshard.models.families.turned_experts import arrange_turned
from pshard.models.gguf_config import gguf_config, part_gguf_drafters
from pshard.models.gguf_header import read_gguf
from pshard.models.hf_config import count_hf_drafters, hf_config
from pshard.models.hybrid.arrange_delta import name_folder, name_gguf, split_hybrid
from pshard.models.hybrid.many_streams import flatten_streams
from pshard.models.hybrid.short_convs import rename_experts
from pshard.models.hybrid.stream_folders import check_folder_table, name_streams, take_words
from pshard.models.keys import Keys
from pshard.models.latent.split_keys import split_keys
from pshard.models.mxfp4 import arrange_mxfp4
from pshard.models.quantised.join_tensors import join_quantised
from pshard.models.quantised.order_columns import order_columns
from pshard.models.quantised.scheme import read_scheme
from pshard.models.read_head import find_head_file, may_have_head, read_head, refuse_lone_head, take_folder_head
from pshard.models.safetensors_header import read_json, read_safetensors
from pshard.models.stored import FETCH_AGAIN, MappedFile, StoredTensor, allow_many_files
from pshard.models.tensor_factors import attach_factors
from pshard.on_disk import RowRun
from pshard.packed_file import PackedFile
from pshard.paths import name_in_hub_cache

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer

NAMED_AS = {"hy_v3": "dots1", "laguna": "step35", "qwen4exp": "qwen35moe"}
# gguf 0.19 lacks the former, whose tensors have the latter's names; of qwen4exp those that both have
_FOLDER_HEAD = "lm_head.weight"
_SAID_BIASES = (  # what says that there are some, and one of them here and in folders
    ("attention_bias", "attn_q.bias", "self_attn.q_proj.bias"),
    ("mlp_bias", "ffn_up.bias", "mlp.up_proj.bias"),
)


class ModelFile:
    """An open model: its spec, its raw weights (not read), its metadata, tokenizer and chat template.

    `metadata` holds the keys of a GGUF file, or the config.json of a folder; `notes` what of the file is not used.
    `packed`: what is read from disk for every step is read from there, where it is.
    """

    packed: PackedFile | None = None

    def __init__(
        self,
        spec: ModelSpec,
        metadata: dict[str, Any],
        files: tuple[MappedFile, ...],
        tensors: dict[str, StoredTensor],
        load_tokenizer: Callable[[], "Tokenizer"],
        load_chat_template: Callable[[], str | None],
        notes: tuple[str, ...] = (),
        beside: tuple[MappedFile, ...] = (),
    ) -> None:
        """beside: files that have the head alone."""
        self.spec, self.metadata, self.notes = spec, metadata, notes
        self._files, self._tensors, self._sizes = (*files, *beside), tensors, [file.nbytes for file in files]
        units = (*spec.units, *(spec.head.units if spec.head else ()))
        self._shapes = {t.name: t.shape for u in units for t in u.tensors}
        self._load_tokenizer, self._load_chat_template = load_tokenizer, load_chat_template
        self._draft: ModelFile | None = None

    def with_draft(self, draft: "ModelFile") -> "ModelFile":
        """The same file, for which another model drafts; plans of it are others than of this one alone."""
        view = copy(self)
        view.spec, view._draft = replace(self.spec, head=draft.spec), draft
        return view

    @property
    def draft_path(self) -> str:
        """The file or folder of the other model that drafts for this one; "" without one."""
        return self._draft.spec.path if self._draft else ""

    def of_head(self) -> "ModelFile":
        """The same file as that of its head, the program that drafts, or the one that drafts for it. Raises UserError
        where there is none."""
        if self._draft is not None:
            return self._draft
        if self.spec.head is None:
            why = next((note for note in self.notes if "multi-token head" in note), "the file has none")
            raise UserError(f"{self.spec.path}: there is no multi-token head to draft with: {why}; give --spec lookup")
        view = copy(self)
        view.spec = self.spec.head
        return view

    def tensor_bytes(self, name: str) -> np.ndarray:
        """Raw bytes of a tensor by GGUF name: read-only u8 [rows, bytes of a row] ([bytes] for a vector).

        Copied until `map_files`; then only where experts lie in pieces all over the file: `part_bytes` reads these one
        by one. Raises KeyError for a tensor that the model does not have, UserError for a file that was cut short.
        """
        raw, shape = self._tensors[name].read(), self._shapes[name]
        return raw if len(shape) == 1 else raw.reshape(shape[0], -1)

    def part_bytes(self, name: str, part: int) -> np.ndarray:
        """Raw bytes of one part of a tensor that has some: read-only u8 [rows, bytes of a row], or [bytes]."""
        tensor = self._tensors[name].slab(part)
        raw = tensor.read()
        return raw if len(tensor.shape) == 1 else raw.reshape(tensor.shape[0], -1)

    def run_bytes(self, name: str, first: int, end: int) -> np.ndarray:
        """The same of parts from `first` on, below each other: as many of those before `end` as lie in one piece."""
        tensor = self._tensors[name].run(first, end)
        return tensor.read().reshape(tensor.shape[0], -1)

    def factor(self, name: str, part: int = 0) -> float:
        """What all weights of a tensor, or of one of its parts, are multiplied by: see `StoredTensor.factor`."""
        return self._tensors[name].factor(part)

    def locate(self, name: str, part: int | None = None) -> tuple[Path, int] | None:
        """The file that holds a tensor, or one of its parts, and its first byte there; None where it does not lie there
        in one piece as it is used."""
        tensor = self._tensors[name] if part is None else self._tensors[name].slab(part)
        return None if tensor.slabs or type(tensor) is not StoredTensor else (tensor.file.path, tensor.offset)

    def locate_rows(self, name: str) -> tuple[RowRun, ...]:
        """Where the rows of a matrix lie in files as they are used; nothing where they do not."""
        runs = self._tensors[name].runs()
        return tuple(RowRun(run.file.path, run.offset, run.shape[0]) for run in runs)

    def expect_tensor(self, name: str) -> None:
        """Have the system read a tensor's bytes from disk while something else is done."""
        self._tensors[name].expect()

    def forget_tensor(self, name: str) -> None:
        """Give back the memory that reading a tensor's bytes took; they can be read again. Raises UserError when its
        file is no longer what was opened: then what was read may be wrong."""
        self._tensors[name].forget()

    def leave_no_cache(self) -> None:
        """From here on what is forgotten of the files leaves the system's cache too; before `map_files`."""
        for file in self._files:
            file.leaves_no_cache = True

    def map_files(self, guard: Callable[[int, int], None], unguard: Callable[[int], None]) -> None:
        """Read from the files' own pages from here on, without copies; see `MappedFile.map`."""
        for file in self._files:
            file.map(guard, unguard)

    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer. Raises UserError when it has none or one that is not supported."""
        return self._load_tokenizer()

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, or None."""
        return self._load_chat_template()

    def fingerprint_inputs(self) -> tuple[tuple[str, str], ...]:
        """What a plan depends on, as (name, value): architecture, configuration, tensors, file sizes. Reads no data."""
        tensors = [(t.name, t.qtype, t.shape) for u in self.spec.units for t in u.tensors]
        draft = (("draft model", _digest(self._draft.fingerprint_inputs())),) if self._draft else ()
        return (
            ("architecture", self.spec.config.architecture),
            ("model configuration", _digest(to_json(self.spec.config))),
            ("tensor shapes and quant types", _digest(tensors)),
            ("model file sizes", ",".join(map(str, self._sizes))),
            *draft,
        )

    def close(self) -> None:
        """Unmap the files; arrays from tensor_bytes that are still held stay valid."""
        for file in self._files:
            file.close()
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> "ModelFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def open_model(path: str | Path) -> ModelFile:
    """Open a GGUF file (any part of a split one) or a Hugging Face safetensors folder.

    Raises UserError in one line: missing or truncated file, unsupported architecture, quant type or setting, missing
    or misshapen tensor.
    """
    allow_many_files()
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: give the folder that holds this file and its config.json")
    return _open_gguf(path)


def _open_gguf(path: Path) -> ModelFile:
    header = read_gguf(path)
    metadata, where = header.metadata, str(path)
    name = metadata.get("general.architecture")
    arch = find_gguf_architecture(name, where, has_experts=bool(metadata.get(f"{name}.expert_count")))
    stored, unseen = take_gguf_text(attach_factors(header.tensors))
    stored, undrafted = name_gguf(arch, stored)
    refuse_lone_head(stored, where)
    config = gguf_config(arch, metadata, stored, where)
    tensors, drafting = part_gguf_drafters(arch, config.n_layers, metadata, stored, where)
    tensors, more = _arrange_file(arch, config, tensors)
    tensors = make_vectors(arch, config, metadata, tensors, where)
    name = metadata.get("general.name")
    spec = _build_spec(name if isinstance(name, str) and name else path.stem, path, arch, config, tensors)
    alone, unread = (None, ()) if drafting else find_head_file(path, arch, config.n_layers)
    if alone:
        drafting = {n: t for n, t in alone.tensors.items() if n.startswith(f"blk.{config.n_layers}.")}
    head, of_head, notes = read_head(
        arch, spec, drafting, where, lambda one, stored: _arrange_file(arch, one, stored)[0], config.n_layers
    )

    def load_tokenizer() -> "Tokenizer":
        from pshard.models.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(metadata, where)

    def load_chat_template() -> str | None:
        template = metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    return ModelFile(
        replace(spec, head=head), metadata, header.files, tensors | of_head, load_tokenizer, load_chat_template,
        notes + unread + more + undrafted + unseen, alone.files if alone else (),
    )  # fmt: skip


def _open_folder(folder: Path) -> ModelFile:
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if not (folder / "config.json").exists():
        if names:
            raise UserError(f"{folder}: a folder of GGUF files; give one of them: {', '.join(names[:8])}")
        if not any(folder.glob("*.safetensors*")):
            raise UserError(f"{folder}: no model is in this folder; give a GGUF file, or a folder with a config.json")
    metadata, where = take_text_settings(read_json(folder / "config.json")), str(folder / "config.json")
    mixes = metadata.get("enable_moe_block") is True
    arch = find_hf_architecture(metadata.get("model_type"), where, has_experts=mixes).of_settings(metadata)
    scheme = read_scheme(metadata, arch.sinks, where)
    config = hf_config(arch, metadata, where)
    files, by_hf_name = read_safetensors(folder)
    by_hf_name, unseen = take_text_tensors(by_hf_name)
    config, by_hf_name = take_words(config, by_hf_name)
    by_hf_name = by_hf_name if arch.sinks else join_quantised(scheme, by_hf_name)
    drafters = range(config.n_layers, config.n_layers + count_hf_drafters(metadata, where))
    by_hf_name, drafting = part_drafters(by_hf_name, "model.layers.", drafters)
    if may_have_head(arch):
        by_hf_name, drafting = take_folder_head(by_hf_name, drafting, config.n_layers)
    settings = {**arch.defaults, **metadata}
    tied = settings.get("tie_word_embeddings")
    tensors, more = _arrange_folder(arch, config, by_hf_name, tied is True and _copies_table(by_hf_name))
    tensors = make_vectors(arch, config, {}, tensors, where)
    check_folder_table(config, tensors, Keys(metadata, where))
    if HEAD not in tensors and not tied:
        raise UserError(f"{folder}: tensor lm_head.weight is missing and tie_word_embeddings is not set; {FETCH_AGAIN}")
    for key, role, stored in _SAID_BIASES:
        if role in arch.optional_biases and settings.get(key) is True and f"blk.0.{role}" not in tensors:
            what = f"tensor model.layers.0.{stored} is missing, though {key} is true"
            raise UserError(f"{folder}: {what}: the files are incomplete; {FETCH_AGAIN}")
    name = (name_in_hub_cache(folder) or folder.resolve().name).rpartition("/")[2]
    spec = _build_spec(name, folder, arch, config, tensors)
    head, of_head, notes = read_head(
        arch, spec, drafting, where, lambda one, stored: _arrange_folder(arch, one, stored, False)[0], 0
    )

    def load_tokenizer() -> "Tokenizer":
        from pshard.models.text.hf_tokenizer import hf_tokenizer

        return hf_tokenizer(folder)

    def load_chat_template() -> str | None:
        from pshard.models.text.hf_tokenizer import hf_chat_template

        return hf_chat_template(folder)

    return ModelFile(
        replace(spec, head=head), metadata, files, tensors | of_head, load_tokenizer, load_chat_template,
        notes + more + unseen,
    )  # fmt: skip


def _arrange_file(
    arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """A GGUF file's tensors as units want them, and notes on what is rounded."""
    tensors, notes = split_keys(
        config, split_hybrid(config, split_fused(arch, config, arrange_gguf(arch, config, stored)))
    )
    tensors = arrange_sorts(config, tensors) if arch.sorted else flatten_streams(config, tensors)
    return arrange_layers(config, tensors) if arch.by_layer else tensors, notes


def _arrange_folder(
    arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor], tied: bool
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """A folder's tensors by GGUF name as units want them, and notes on what is left out or rounded."""
    stored, notes = name_folder(arch, stack_head_norms(stored))
    stored = name_streams(config, stored)
    stored = arrange_mxfp4(config, stored) if arch.sinks else stack_experts(config, stored)
    stored = stored if arch.sinks else arrange_turned(config, stored)
    renamed = split_hybrid(config, _rename(arch, config, stored, tied))
    tensors, more = split_keys(config, renamed)
    tensors = order_columns(config, split_fused(arch, config, tensors))
    tensors = add_one_to_norms(tensors) if arch.norms_less_one else tensors
    tensors = arrange_sorts(config, tensors) if arch.sorted else flatten_streams(config, tensors)
    return arrange_layers(config, tensors) if arch.by_layer else tensors, notes + more


def _build_spec(
    name: str, path: Path, arch: Architecture, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> ModelSpec:
    return ModelSpec(name, str(path), config, build_units(arch, config, tensors, str(path)))


def _copies_table(stored: dict[str, StoredTensor]) -> bool:
    """Whether the head that a folder has beside its embedding is the same, as far as a few of its pieces tell. As in
    transformers, another one is a head of its own, whatever config.json says."""
    head, table = stored.get(_FOLDER_HEAD), stored.get("model.embed_tokens.weight")
    if head is None or table is None:
        return True
    if {type(head), type(table)} != {StoredTensor} or (head.qtype, head.shape) != (table.qtype, table.shape):
        return False
    head.check_type()
    size = min(head.nbytes, 4096)
    places = {(head.nbytes - size) * i // 15 for i in range(16)}
    return all(head.file.copy(head.offset + at, size) == table.file.copy(table.offset + at, size) for at in places)


def _rename(
    arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor], tied: bool
) -> dict[str, StoredTensor]:
    """Tensors by GGUF name. Drops what is computed anyway: RoPE buffers, and the head of a tied model."""
    import gguf

    called = NAMED_AS.get(arch.gguf, arch.gguf)
    known = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == called)
    # an architecture's own names, then those of what its published models lack: a head, or an FFN beside experts'
    maps = [gguf.get_tensor_name_map(one, min(config.n_layers, len(stored))) for one in (known, gguf.MODEL_ARCH.LLAMA)]
    renamed = {}
    for key, tensor in stored.items():
        if key.endswith(".rotary_emb.inv_freq") or (tied and key == _FOLDER_HEAD):
            continue
        key = rename_choice(rename_experts(rename_scales(key)))
        key = key.replace(".self_attn.sinks", ".self_attn.sinks.weight")
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        found = (names.get_name(key, (".weight", ".bias")) for names in maps)
        name = next(filter(None, found), key)
        renamed[rename_role(arch, name)] = flatten_row(name, tensor)
    return renamed
