"""Multi-token heads: the layer behind a model's last one that drafts further tokens, as a program of its own.

It shares the model's table and output where the file has no others for it. Its formulas are in docs/speculation.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.arrange_tensors import DRAFTS_LEFT_OUT
from pshard.models.build_units import HEAD, TABLE, Expected, UnitMaker, refuse_others
from pshard.models.gguf_header import GgufHeader, read_gguf
from pshard.models.stored import StoredTensor
from pshard.tensor import TensorSpec
from pshard.units.embedding import EMBEDDING
from pshard.units.join import JOIN, MATRIX, OF_STATE, OF_TOKEN
from pshard.units.output import HEADS, NORM, OUTPUT
from pshard.units.unit import Unit

_HEADED = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")  # trained with heads, by GGUF's name
_OWN = {
    "nextn.shared_head_norm.weight": NORM,
    "nextn.embed_tokens.weight": TABLE,
    "nextn.shared_head_head.weight": HEAD,
}
_QWEN = {  # of folders
    "mtp.fc.weight": MATRIX, "mtp.pre_fc_norm_embedding.weight": OF_TOKEN, "mtp.pre_fc_norm_hidden.weight": OF_STATE,
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}  # fmt: skip
_BESIDE = {  # of other folders, within the layer
    "eh_proj.weight": MATRIX, "enorm.weight": OF_TOKEN, "hnorm.weight": OF_STATE,
    "embed_tokens.weight": "nextn.embed_tokens.weight", "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    "shared_head.head.weight": "nextn.shared_head_head.weight",
}  # fmt: skip
Arrange = Callable[[ModelConfig, dict[str, StoredTensor]], dict[str, StoredTensor]]
LEFT_OUT = "the model's multi-token head, which drafts further tokens, is left out"


def may_have_head(arch: Architecture) -> bool:
    """Whether its head would be known: those of models that were trained with one, and of dense ones, whose head is a
    layer like all others."""
    return arch.gguf in _HEADED or not (arch.routing or arch.latent or arch.by_layer)


def read_head(
    arch: Architecture,
    trunk: ModelSpec,
    drafting: dict[str, StoredTensor],
    where: str,
    arrange: Arrange,
    layer: int,
) -> tuple[ModelSpec | None, dict[str, StoredTensor], tuple[str, ...]]:
    """The head of a model, its tensors by the names that its units have, and a note where it is left out.

    drafting: the tensors of layers that draft, `blk.N` or, of a folder, `model.layers.N`, the first of which is number
    `layer`; none: there is no head. arrange: by GGUF name, as units want them, in a model that ends with that layer.
    """
    if not drafting:
        return None, {}, ()
    if not may_have_head(arch) or not all(name.startswith(("blk.", "model.layers.")) for name in drafting):
        return None, {}, (DRAFTS_LEFT_OUT,)
    if trunk.config.window:
        return None, {}, (f"{LEFT_OUT}: layers of this model have a window, and heads must not as yet",)
    first = f"blk.{layer}.", f"model.layers.{layer}."
    if not all(name.startswith(first) for name in drafting):
        return None, {}, (f"{LEFT_OUT}: there are several, of which none is supported yet",)
    try:
        arranged = _arrange(trunk.config, drafting, arrange, layer)
        head = _build(arch, trunk, arranged, where)
    except UserError as error:
        return None, {}, (f"{LEFT_OUT}: {error}",)
    return head, arranged, ()


def refuse_lone_head(stored: dict[str, StoredTensor], where: str) -> None:
    """Raise UserError for a file that has a model's head and none of its layers."""
    if any(name.endswith("." + MATRIX) for name in stored) and not any(name.startswith("blk.0.") for name in stored):
        raise UserError(f"{where}: has the multi-token head of a model alone; give the model, which finds it beside it")


def find_head_file(path: Path, arch: Architecture, layers: int) -> tuple[GgufHeader | None, tuple[str, ...]]:
    """The header of the file beside a model that has its head alone, `mtp-` before the model's name or the only such
    file there; and a note where there is one that is not the model's. layers: of the model."""
    beside = sorted(path.parent.glob("mtp-*.gguf"))
    named = [file for file in beside if file.name == f"mtp-{path.name}"] or beside
    if len(named) != 1 or named[0] == path:
        return None, ()
    try:
        header = read_gguf(named[0])
    except UserError as error:
        return None, (f"{LEFT_OUT}: {error}",)
    name, keys = header.metadata.get("general.architecture"), header.metadata
    if name != arch.gguf or keys.get(f"{name}.block_count") != layers + 1:
        for file in header.files:
            file.close()
        is_own = named[0].name == f"mtp-{path.name}"
        return None, (f"{named[0]} is left out: it is no multi-token head of this model",) if is_own else ()
    return header, ()


def take_folder_head(
    stored: dict[str, StoredTensor], drafting: dict[str, StoredTensor], layers: int
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """A folder's tensors without Qwen's `mtp.*`, and those of the head by the names of layers that count from 0, what
    joins token and state by GGUF's. drafting: those of layers behind the model's `layers`."""
    rest, found = dict[str, StoredTensor](), dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if name in _QWEN:
            found[f"blk.0.{_QWEN[name]}"] = tensor
        elif name.startswith("mtp."):
            found[name.replace("mtp.", "model.", 1)] = tensor
        else:
            rest[name] = tensor
    for name, tensor in drafting.items():
        if not name.startswith("model.layers."):
            found[name] = tensor
            continue
        _, _, layer, role = name.split(".", 3)
        at = int(layer) - layers
        found[f"blk.{at}.{_BESIDE[role]}" if role in _BESIDE else f"model.layers.{at}.{role}"] = tensor
    return rest, found


def _arrange(
    trunk: ModelConfig, drafting: dict[str, StoredTensor], arrange: Arrange, layer: int
) -> dict[str, StoredTensor]:
    """By the names that units have, those of the model's layer behind the last. layer: which it is in `drafting`."""
    delta = trunk.delta and replace(trunk.delta, full=(layer,))
    tensors = arrange(replace(trunk, n_layers=layer + 1, delta=delta), drafting)
    roles = {name.removeprefix(f"blk.{layer}."): tensor for name, tensor in tensors.items()}
    return {f"blk.{trunk.n_layers}.{_OWN.get(role, role)}": tensor for role, tensor in roles.items()}


def _build(arch: Architecture, trunk: ModelSpec, stored: dict[str, StoredTensor], where: str) -> ModelSpec:
    """Raises UserError for a tensor that is missing, misshapen, or of no use."""
    layer, d = trunk.config.n_layers, trunk.config.d_model
    block, vocab = f"blk.{layer}.", trunk.config.vocab
    config = replace(trunk.config, n_layers=layer + 1, delta=None)
    make = UnitMaker(arch, config, stored, where)

    def own_or_lent(unit: Unit, role: str, roles: tuple[str, ...]) -> tuple[Iterator[Expected], tuple[TensorSpec, ...]]:
        if block + role in stored:
            return iter([Expected(block + role, (vocab, d))]), ()
        return iter(()), tuple(t for t in unit.tensors if t.role in roles)

    table, lent_table = own_or_lent(trunk.embedding, TABLE, (TABLE,))
    head, lent_head = own_or_lent(trunk.output, HEAD, HEADS)
    norms = tuple(t for t in trunk.output.tensors if t.role == NORM and block + NORM not in stored)
    shapes = ((OF_TOKEN, (d,)), (OF_STATE, (d,)), (MATRIX, (d, 2 * d)))
    units = [
        replace(make.unit("embedding", EMBEDDING, -1, table), lent=lent_table),
        make.unit(block + "join", JOIN, layer, (Expected(block + role, shape) for role, shape in shapes)),
        *make.layer(layer),
    ]
    own = [*head, *([] if norms else [Expected(block + NORM, (d,))])]
    output = make.unit("output", OUTPUT, -1, iter(own))
    units.append(replace(output, tensors=(*output.tensors, *norms), lent=lent_head))
    refuse_others(arch, units, stored)
    return ModelSpec(f"{trunk.name} head", trunk.path, config, tuple(units), keeps_states=True)
