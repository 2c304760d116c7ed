"""Multi-token heads: the layer behind a model's last one that drafts further tokens, as a program of its own.

It shares the model's table and output where the file has no others for it. Its formulas are in docs/speculation.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.models.architectures import Architecture
from pshard.models.arrange_tensors import arrange_gguf
from pshard.models.build_units import HEAD, TABLE, Expected, UnitMaker, refuse_others
from pshard.models.families.stored_rows import split_fused
from pshard.models.gguf_header import GgufHeader, read_gguf
from pshard.models.hybrid.arrange_delta import split_hybrid
from pshard.models.latent.split_keys import split_keys
from pshard.models.stored import StoredTensor
from pshard.tensor import TensorSpec
from pshard.units.embedding import EMBEDDING
from pshard.units.join import JOIN, MATRIX, OF_STATE, OF_TOKEN
from pshard.units.output import HEADS, NORM, OUTPUT
from pshard.units.unit import Unit

HEADED = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")  # whose heads are known, by GGUF's name
_OWN = {
    "nextn.shared_head_norm.weight": NORM,
    "nextn.embed_tokens.weight": TABLE,
    "nextn.shared_head_head.weight": HEAD,
}
LEFT_OUT = "the model's multi-token head, which drafts further tokens, is left out"


def read_head(
    arch: Architecture, trunk: ModelSpec, drafting: dict[str, StoredTensor], where: str
) -> tuple[ModelSpec | None, dict[str, StoredTensor], tuple[str, ...]]:
    """The head of a model, its tensors by the names that its units have, and a note where it is left out.

    drafting: the tensors of layers that draft, by GGUF name; none: there is no head.
    """
    if not drafting:
        return None, {}, ()
    if arch.gguf not in HEADED:
        return None, {}, (f"{LEFT_OUT}; of architecture {arch.gguf} it is not supported yet",)
    if not all(name.startswith(f"blk.{trunk.config.n_layers}.") for name in drafting):
        return None, {}, (f"{LEFT_OUT}: there are several, of which none is supported yet",)
    try:
        arranged = _arrange(arch, trunk, drafting)
        head = _build(arch, trunk, arranged, where)
    except UserError as error:
        return None, {}, (f"{LEFT_OUT}: {error}",)
    return head, arranged, ()


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


def _arrange(arch: Architecture, trunk: ModelSpec, drafting: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    layer, config = trunk.config.n_layers, trunk.config
    block = f"blk.{layer}."
    if config.delta:
        config = replace(config, delta=replace(config.delta, full=(*config.delta.full, layer)))
    split = split_hybrid(config, split_fused(arch, config, arrange_gguf(arch, config, drafting)))
    tensors, _ = split_keys(config, split)
    return {block + _OWN.get(name.removeprefix(block), name.removeprefix(block)): t for name, t in tensors.items()}


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
