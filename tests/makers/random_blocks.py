"""Blocks of every quant type as GGUF files have them, with random codes and scales of ordinary size."""

from collections.abc import Callable

import numpy as np

from pshard.quant import QUANT_TYPES

# where a block's float16 scales lie, if not in its first two bytes
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2),
             "Q5_1": (0, 2), "TQ1_0": (52,), "TQ2_0": (64,)}  # fmt: skip


LATER = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "NVFP4", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0")


def random_encoded(qtype: str, rows: int, cols: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """u8 [rows, bytes of a row] of a type in LATER: weights of about that deviation, mean near 0."""
    q = QUANT_TYPES[qtype]
    blocks = rng.integers(0, 256, (rows, cols // q.block, q.nbytes), dtype=np.uint8)
    if qtype in ("Q2_0", "TQ2_0"):  # codes 0 to 2: a 3 would shift the mean
        at = slice(2, None) if qtype == "Q2_0" else slice(0, 64)
        pairs = rng.choice(np.uint8([0, 1, 1, 2]), (*blocks[..., at].shape, 4))
        blocks[..., at] = np.bitwise_or.reduce(pairs << np.array([0, 2, 4, 6], np.uint8), axis=-1)
    if qtype == "NVFP4":  # a half of 2^-6 and more, times 6.4
        blocks[..., :4] = rng.integers(0, 5, (*blocks.shape[:2], 4)) + 8 * round(np.log2(std) + 6)
        return blocks.reshape(rows, -1)
    put_scales(qtype, blocks, lambda: np.ones(blocks.shape[:2], np.float16), rng)
    spread = dequantise_rows(blocks[:1].reshape(1, -1), qtype, 1, cols).std()
    put_scales(qtype, blocks, lambda: (std / spread * rng.uniform(0.8, 1.2, blocks.shape[:2])).astype(np.float16), rng)
    return blocks.reshape(rows, -1)


def random_rows(qtype: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """u8 [rows, bytes of a row] as in a GGUF file."""
    rng = np.random.default_rng(seed)
    if qtype == "F32":
        return rng.standard_normal((rows, cols), np.float32).view(np.uint8)
    if qtype == "F16":
        return rng.standard_normal((rows, cols), np.float32).astype(np.float16).view(np.uint8)
    if qtype == "BF16":
        bits = rng.standard_normal((rows, cols), np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    q = QUANT_TYPES[qtype]
    blocks = rng.integers(0, 256, (rows, cols // q.block, q.nbytes), dtype=np.uint8)
    shape = blocks.shape[:2]
    if qtype == "FP8":
        blocks[..., 4:] ^= np.where(blocks[..., 4:] & 127 == 127, 1, 0).astype(np.uint8)  # no NaN
        blocks[..., :4] = (1e-3 * rng.uniform(0.5, 1.5, (*shape, 1))).astype(np.float32).view(np.uint8)
        return blocks.reshape(rows, -1)

    def draw() -> np.ndarray:
        """As in files, a later type's scales are of one size, so that no row stands out in a test of few blocks."""
        size = rng.uniform(0.5, 1.5, shape) if qtype in LATER else rng.standard_normal(shape)
        return (size * 0.01).astype(np.float16)

    put_scales(qtype, blocks, draw, rng)
    return blocks.reshape(rows, -1)


def put_scales(qtype: str, blocks: np.ndarray, draw: Callable[[], np.ndarray], rng: np.random.Generator) -> None:
    """Give blocks u8 [rows, blocks, bytes] their scales. draw: float16 [rows, blocks], called for each scale."""
    if qtype == "MXFP4":
        blocks[..., 0] = rng.integers(120, 128, blocks.shape[:2])
    elif qtype == "NVFP4":
        blocks[..., :4] = rng.integers(0, 0x30, (*blocks.shape[:2], 4))
    elif qtype == "IQ1_M":  # the scale lies in the top four bits of four words
        scale, words = draw(), np.ascontiguousarray(blocks[..., 48:]).view("<u2")
        for i in range(4):
            words[..., i] = words[..., i] & 0x0FFF | (scale.view(np.uint16) >> 4 * i & 0xF) << 12
        blocks[..., 48:] = words.view(np.uint8)
    else:
        for at in SCALES_AT.get(qtype, (0,)):
            blocks[..., at : at + 2] = draw()[..., None].view(np.uint8)


def dequantise_rows(raw: np.ndarray, qtype: str, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols] by gguf's decoders, or written out for types that its version has none of."""
    import gguf
    import torch

    if qtype == "FP8":
        blocks = raw.reshape(-1, 132)
        codes = torch.from_numpy(blocks[:, 4:].copy()).view(torch.float8_e4m3fn).float().numpy()
        return (codes * np.ascontiguousarray(blocks[:, :4]).view(np.float32)).reshape(rows, cols)
    if qtype not in ("Q1_0", "Q2_0"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype]).reshape(rows, cols)
    block, bits = QUANT_TYPES[qtype].block, int(qtype[1])
    blocks = raw.reshape(-1, 18)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    codes = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(-1, block, bits)
    number = codes @ np.array([1, 2][:bits])
    return (d * (2 * number - 1 if bits == 1 else number - 1).astype(np.float32)).reshape(rows, cols)
