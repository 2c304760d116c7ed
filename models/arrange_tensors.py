"""Tensors as units want them, whatever way a file stores them: stacked experts, gate and up apart."""

import re
from collections import defaultdict
from dataclasses import replace

from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.stored import StoredTensor

DRAFTS_LEFT_OUT = "the model's multi-token head, which drafts further tokens, is left out; it is not supported yet"
_BESIDE = ("model.mtp.", "model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")
_FUSED = re.compile(r"(blk\.\d+\.)ffn_gate_up_exps\.weight")
_HF_EXPERT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,5})\.(\w+\.weight)")
_LONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")


def part_drafters(
    stored: dict[str, StoredTensor], prefix: str, layers: range
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors without those of layers that draft further tokens, and these.

    Such a layer has an `eh_proj`: without one it is not left out, whatever the configuration counts. ERNIE's and
    MiMo's folders have theirs beside the layers.
    """
    by_layer: dict[str, list[str]] = defaultdict(list)
    for name in stored:
        if name.startswith(prefix):
            by_layer[name.removeprefix(prefix).split(".", 1)[0]].append(name)
    left_out = {name for name in stored if name.startswith(_BESIDE)}
    for layer, names in by_layer.items():
        drafts = any(name.endswith(".eh_proj.weight") for name in names)
        if drafts and layer.isdecimal() and len(layer) < 10 and int(layer) in layers:
            left_out.update(names)
    return {n: t for n, t in stored.items() if n not in left_out}, {n: stored[n] for n in left_out}


def arrange_gguf(arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file by the names that units have.

    Raises UserError for experts that are stored one by one, as files had them before April 2024, and for a fused gate
    and up of another shape than the configuration says.
    """
    arranged: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if _LONE_EXPERT.fullmatch(name):
            tensor.fail("holds one expert, as old files do", "convert the model again, or fetch a newer file of it")
        fused = _FUSED.fullmatch(name)
        if fused and config.experts:
            shape = config.experts.count, 2 * config.experts.d_expert, config.d_model
            names = (f"{fused[1]}ffn_{role}_exps.weight" for role in ("gate", "up"))
            found = dict(zip(names, _split_rows(tensor, shape)))
        else:
            found = {rename_role(arch, name): flatten_row(name, tensor)}
        if not arranged.keys().isdisjoint(found):
            tensor.fail("is there twice, under different names")
        arranged |= found
    return arranged


def rename_role(arch: Architecture, name: str) -> str:
    """The norm before the FFN and the bias of a choice have one name in units, whatever files of the architecture call
    them."""
    name = f"{name}.bias" if name.endswith(".exp_probs_b") else name
    if arch.routing and arch.routing.beside == "expert":
        name = name.replace("_shexp.", ".")
    return name.replace(arch.ffn_norm, "ffn_norm.weight") if name.endswith(f".{arch.ffn_norm}") else name


def flatten_row(name: str, tensor: StoredTensor) -> StoredTensor:
    """The gate of a shared expert and the bias of a choice are vectors, but some files store a matrix of one row."""
    if (
        name.endswith((".ffn_gate_inp_shexp.weight", ".exp_probs_b.bias"))
        and len(tensor.shape) == 2
        and tensor.shape[0] == 1
    ):
        return replace(tensor, shape=tensor.shape[1:])
    return tensor


def stack_experts(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, those of a layer's experts as one: `experts.7.up_proj` is in `experts.up_proj`.

    Raises UserError when one of the experts is missing or unlike the others.
    """
    if config.experts is None:
        return stored
    arranged, stacks = gather_numbered(stored, _HF_EXPERT, "{}.{}")
    for name, found in stacks.items():
        arranged[name] = _stack(name, [found[number] for number in sorted(found)], set(found), config.experts.count)
    return arranged


def gather_numbered(
    stored: dict[str, StoredTensor], pattern: re.Pattern[str], called: str
) -> tuple[dict[str, StoredTensor], dict[str, dict[int, StoredTensor]]]:
    """The tensors that are none of those that the pattern numbers by its second group, and these by what they are
    together called, of its other groups, and by number."""
    rest: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        if found := pattern.fullmatch(name):
            first, number, *others = found.groups()
            stacks.setdefault(called.format(first, *others), {})[int(number)] = tensor
        else:
            rest[name] = tensor
    return rest, stacks


def _stack(name: str, tensors: list[StoredTensor], numbers: set[int], count: int) -> StoredTensor:
    first, last = tensors[0], tensors[-1]
    missing = next((n for n in range(count) if n not in numbers), None)
    if missing is not None:
        what = f"has its like of other experts, but not of number {missing} of {count}: the files are incomplete"
        first.fail(what, "fetch them again")
    if len(tensors) > count:
        last.fail(f"is of an expert too many: the configuration says {count}")
    return stack_alike(name, tensors)


def stack_alike(name: str, tensors: list[StoredTensor]) -> StoredTensor:
    """One tensor of these, one below the other. Raises UserError for one that is unlike the first."""
    first = tensors[0]
    for tensor in tensors:
        if (tensor.qtype, tensor.shape) != (first.qtype, first.shape):
            tensor.fail(f"is {tensor.qtype} of shape {list(tensor.shape)}, unlike {first.name}")
    return StoredTensor(name, first.qtype, (len(tensors), *first.shape), first.file, first.offset, slabs=tuple(tensors))


def _split_rows(tensor: StoredTensor, shape: tuple[int, int, int]) -> list[StoredTensor]:
    """The upper and the lower half of every matrix in a stack."""
    tensor.check_shape(shape)
    tensor.check_type()
    count, rows, cols = shape[0], shape[1] // 2, shape[2]
    upper = [replace(tensor.slab(i), shape=(rows, cols)) for i in range(count)]
    lower = [replace(slab, offset=slab.offset + slab.nbytes) for slab in upper]
    return [replace(slabs[0], shape=(count, rows, cols), slabs=tuple(slabs)) for slabs in (upper, lower)]
