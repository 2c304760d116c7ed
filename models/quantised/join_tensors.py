"""Finds the matrices that a folder has as several tensors, and puts each in the place of its `weight`."""

from collections import defaultdict

from pshard.models.quantised.fp8 import join_fp8
from pshard.models.quantised.int_codes import join_awq, join_gptq, join_packed
from pshard.models.quantised.joined import Module
from pshard.models.quantised.nvfp4 import join_nvfp4
from pshard.models.quantised.scheme import Scheme
from pshard.models.stored import StoredTensor

_WHOLE = ("qweight", "weight_packed", "weight")  # what holds the codes
_BESIDE = (
    *("scales", "qzeros", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_scale_2", "weight_global_scale", "weight_scale_inv"),
)
_SCALES = {"weight_scale", "weight_scale_inv"}
_UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")  # of activations and KV cells
_UNBIASED = ("o_proj", "gate_proj", "up_proj", "down_proj")  # to which AutoGPTQ adds biases of zeros


def join_quantised(scheme: Scheme, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, quantised ones joined to one `weight` each; what is for quantised activations and
    KV cells is left out. Raises UserError for tensors that do not fit each other."""
    modules: dict[str, Module] = defaultdict(dict)
    for name, tensor in stored.items():
        place, _, key = name.rpartition(".")
        if key in (*_WHOLE, *_BESIDE):
            modules[place][key] = tensor
    found = {}
    for name, tensor in stored.items():
        place, _, key = name.rpartition(".")
        quantised = _is_quantised(modules.get(place, {}))
        if quantised and key in _WHOLE:
            found[f"{place}.weight"] = _join(scheme, f"{place}.weight", modules[place], tensor)
        elif key in _UNUSED and scheme.method:
            continue
        elif not (quantised and (key in _BESIDE or (key == "bias" and _is_void(scheme, place, tensor)))):
            found[name] = tensor
    return found


def _is_quantised(module: Module) -> bool:
    return "qweight" in module or "weight_packed" in module or ("weight" in module and not _SCALES.isdisjoint(module))


def _is_void(scheme: Scheme, place: str, bias: StoredTensor) -> bool:
    return scheme.method == "gptq" and place.endswith(_UNBIASED) and not bias.read().any()


def _join(scheme: Scheme, name: str, module: Module, codes: StoredTensor) -> StoredTensor:
    if "qweight" in module:
        if scheme.method not in ("gptq", "awq"):
            codes.fail("is quantised, and config.json has no quantization_config that says how", "fetch it again")
        return join_awq(name, module) if scheme.method == "awq" else join_gptq(name, module, scheme)
    if codes.qtype == "U8":
        return join_nvfp4(name, module)
    if "weight_packed" in module:
        return join_packed(name, module)
    if codes.qtype == "F8_E4M3":
        return join_fp8(name, module)
    codes.fail(f"has type {codes.qtype} and scales beside it, which is not supported")
