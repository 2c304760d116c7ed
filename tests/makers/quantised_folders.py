"""Tiny folders whose matrices are quantised as the Hub has them, with random codes; and what the codes stand for.

The decoders are written from the formats' descriptions, weight by weight, and share nothing with the package.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from model_files import write_hf_folder
from safetensors.numpy import load_file

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight columns, which is in nibble 0, 1...
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "gptq asymmetric": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False},
    "gptq v2": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq order": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": True},
    "gptq order v2": {"quant_method": "gptq", "bits": 4, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq 8": {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "w4a16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "w4a16 asymmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "w4a16 order": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "w8a16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 rows": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fp8 tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "nvfp4 modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nvfp4 ct": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}
GROUPS = {  # columns; of the others 128
    **dict.fromkeys(("gptq asymmetric", "gptq order", "w4a16 asymmetric"), 64),
    **dict.fromkeys(("gptq v2", "gptq order v2"), 32),
}


def write_quantised(folder: Path, kind: str, arch: str = "llama", seed: int = 0, **shape: int) -> dict[str, np.ndarray]:
    """Write a random folder of one of CONFIGS; returns its matrices by Hugging Face name, float32."""
    write_hf_folder(folder, arch, shape=shape)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIGS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(seed)
    decoded = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, cols = tensors.pop(name).shape
        made, values = quantise(kind, rows, cols, rng, seed_of_input(name))
        decoded[name] = values.astype(np.float32)
        tensors |= {f"{name.removesuffix('weight')}{key}": array for key, array in made.items()}
    save_tensors(tensors, folder)
    return decoded


def write_decoded(folder: Path, quantised: Path, decoded: dict[str, np.ndarray]) -> None:
    """The same model with the matrices as float32."""
    folder.mkdir()
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_plain(quantised)
    kept = {n: t for n, t in stored.items() if n.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight"))}
    kept |= {n: t for n, t in stored.items() if n.endswith((".gate.weight", ".bias"))}
    save_tensors(kept | decoded, folder)


def load_plain(folder: Path) -> dict[str, np.ndarray]:
    """The folder's tensors but those that NumPy has no type for."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        return {name: file.get_tensor(name) for name, kind in kinds.items() if not kind.startswith("F8")}


def save_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Write arrays, or tensors of torch where NumPy has no such type."""
    import torch
    from safetensors.torch import save_file

    made = {
        n: torch.from_numpy(np.ascontiguousarray(t)) if isinstance(t, np.ndarray) else t for n, t in tensors.items()
    }
    save_file(made, folder / "model.safetensors")


def seed_of_input(name: str) -> int:
    """The same for matrices that take the same input: GPTQ orders the columns of these alike."""
    shared = {"q_proj": "", "k_proj": "", "v_proj": "", "gate_proj": "", "up_proj": ""}
    place, _, matrix = name.removesuffix(".weight").rpartition(".")
    return zlib.crc32(f"{place}.{shared.get(matrix, matrix)}".encode())


def quantise(
    kind: str, rows: int, cols: int, rng: np.random.Generator, order: int = 0
) -> tuple[dict[str, Any], np.ndarray]:
    """(tensors by what their names end with, the weights): a deviation near 1/sqrt(cols). order: the seed of that of
    the columns, of kinds that have one."""
    if kind.startswith("nvfp4"):
        return _nvfp4(kind, rows, cols, rng)
    if kind.startswith("fp8"):
        return _fp8(kind, rows, cols, rng)
    bits, group = (8 if "8" in kind else 4), GROUPS.get(kind, 128)
    codes = rng.integers(0, 1 << bits, (rows, cols))
    of = np.arange(cols) // group
    of = np.random.default_rng(order).permutation(of) if "order" in kind else of
    symmetric = kind in ("gptq", "gptq order", "gptq 8", "w4a16", "w4a16 order", "w8a16")
    half = 1 << (bits - 1)
    zeros = np.full((rows, cols // group), half) if symmetric else rng.integers(1, 16, (rows, cols // group))
    scales = (cols**-0.5 / (1 << bits) * rng.uniform(2, 4, zeros.shape)).astype(np.float16)
    values = (codes - zeros[:, of]) * scales[:, of].astype(np.float64)
    if kind.startswith("w"):
        made = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": np.array([rows, cols])}
        made |= {"weight_g_idx": of.astype(np.int32)} if "order" in kind else {}
        return made | ({} if symmetric else {"weight_zero_point": words(zeros.T, bits).T}), values
    if kind == "awq":
        turned = [array.T.reshape(array.shape[1], -1, 8)[..., AWQ_ORDER] for array in (codes, zeros)]
        q, z = (words(array.reshape(len(array), -1), 4) for array in turned)
        return {"qweight": q, "qzeros": z, "scales": scales.T}, values
    stored = zeros if "v2" in kind else zeros - 1
    made = {"qweight": words(codes, bits).T, "qzeros": words(stored.T, bits), "scales": scales.T}
    return made | {"g_idx": of.astype(np.int32)}, values


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [.., n / codes of a word], the first code in the lowest bits."""
    each = 32 // bits
    split = codes.reshape(*codes.shape[:-1], -1, each).astype(np.uint64)
    return (split << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(-1).astype(np.uint32).view(np.int32)


def _nvfp4(kind: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    codes, scales = rng.integers(0, 16, (rows, cols)), rng.integers(40, 60, (rows, cols // 16)).astype(np.uint8)
    factor = np.float32(cols**-0.5 / 3 * rng.uniform(0.8, 1.2))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    values = FP4[codes] * np.repeat(e4m3(scales), 16, 1)
    if kind == "nvfp4 ct":
        factor = np.float32(1) / factor
        made = {"weight_packed": packed, "weight_global_scale": np.array([factor])}
        return made | {"weight_scale": _as_e4m3(scales)}, values / factor
    made = {"weight": packed, "weight_scale_2": np.array(factor), "input_scale": np.array(factor)}
    return made | {"weight_scale": _as_e4m3(scales)}, values * factor


def _fp8(kind: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    codes = rng.integers(0, 127, (rows, cols), dtype=np.uint8) | rng.choice(np.uint8([0, 128]), (rows, cols))
    shape = {"fp8 blocks": (-(-rows // 128), -(-cols // 128)), "fp8 rows": (rows, 1), "fp8 tensor": (1, 1)}[kind]
    scales = (cols**-0.5 / 120 * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
    each = 128 if kind == "fp8 blocks" else 1
    spread = np.repeat(np.repeat(scales, each, 0), 128, 1) if kind == "fp8 blocks" else scales
    values = e4m3(codes) * np.broadcast_to(spread[:rows], (rows, cols)).astype(np.float64)
    if kind == "fp8 blocks":
        return {"weight": _as_e4m3(codes), "weight_scale_inv": scales}, values
    stored = scales if kind == "fp8 rows" else scales.reshape(())
    return {"weight": _as_e4m3(codes), "weight_scale": stored, "input_scale": np.ones(1, np.float32)}, values


def e4m3(byte: np.ndarray) -> np.ndarray:
    """What bytes stand for as numbers of 4 bits of exponent and 3 of mantissa, float64."""
    exponent, fraction = (byte >> 3 & 15).astype(int), (byte & 7) / 8
    value = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    return np.where(byte & 128, -value, value)


def _as_e4m3(byte: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(byte).view(torch.float8_e4m3fn)
