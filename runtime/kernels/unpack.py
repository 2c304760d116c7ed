"""Packed weights to float32 in plain torch, on any device: the slow twin of every kernel (docs/packed-layout.md)."""

from collections.abc import Callable
from functools import partial

import torch

from pshard.quant import QUANT_TYPES, ROW_BLOCK, packed_nbytes, plane_offsets, record_nbytes
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.layout import e4m3_halves, e4m3_values
from pshard.runtime.kernels.unpack_books import unpack_book

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BY_ROWS = (*PLAIN, "FP8")  # types whose rows lie one by one, and meet float activations
# value x 2 of each 4-bit code (OCP MX specification: E2M1), doubled so that all are whole numbers
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's kvalues_iq4nl


def plain_rows(weight: Packed) -> torch.Tensor | None:
    """A [rows, cols] view of weights that are stored as plain rows; None for block types."""
    dtype = PLAIN.get(weight.qtype)
    if dtype is None:
        return None
    nbytes = weight.rows * weight.cols * dtype.itemsize
    return weight.data[:nbytes].view(dtype).view(weight.rows, weight.cols)


def unpack(weight: Packed) -> torch.Tensor:
    """Decode to float32 [rows, cols]; every value equals GGUF's own definition of the block in float32."""
    rows = plain_rows(weight)
    if rows is not None:
        return rows.float()
    if weight.qtype == "FP8":
        lines = weight.data[: packed_nbytes("FP8", weight.rows, weight.cols)].view(weight.rows, -1)
        values = torch.from_numpy(e4m3_values()).to(lines.device)[lines[:, : weight.cols].long()]
        return values * lines[:, weight.cols :].contiguous().view(torch.float32).repeat_interleave(128, 1)
    stride = record_nbytes(weight.qtype, weight.cols)
    records = -(-weight.rows // ROW_BLOCK)
    raw = weight.data[: records * stride].view(records, stride)
    planes = {name: raw[:, at : at + size] for name, (at, size) in plane_offsets(weight.qtype, weight.cols).items()}
    values = _DECODE[weight.qtype](planes, weight.cols)  # [records, 16, cols]
    return values.reshape(records * ROW_BLOCK, weight.cols)[: weight.rows].contiguous()


def _bits(planes: dict, name: str, cols: int, width: int) -> torch.Tensor:
    """Codes of one plane as int32 [records, 16, cols]."""
    words = _words(planes[name], cols)  # [record, chunk, c, row] of four bytes each, t
    mask = 0x01010101 * ((1 << width) - 1)
    codes = torch.stack([(words >> shift) & mask for shift in range(0, 8, width)], -1)  # [record, chunk, c, row, j]
    # column inside the 32: 4 bits keep the low nibble at 4c+t and the high one at 16+4c+t; 2 bits 16c+4j+t, 1 bit 4j+t
    codes = codes.permute(*((0, 3, 1, 4, 2) if width == 4 else (0, 3, 1, 2, 4)))
    return codes.contiguous().view(torch.uint8).reshape(-1, 16, cols).int()


def _codes8(planes: dict, cols: int) -> torch.Tensor:
    words = _words(planes["codes8"], cols).permute(0, 3, 1, 2)
    return words.contiguous().view(torch.int8).reshape(-1, 16, cols).int()


def _words(plane: torch.Tensor, cols: int) -> torch.Tensor:
    """A plane's bytes by four, which move together: int32 [records, chunks of 32 columns, vectors, 16 rows]."""
    return plane.contiguous().view(torch.int32).reshape(plane.shape[0], cols // 32, -1, 16)


def _per_block(plane: torch.Tensor, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """[records, blocks x 16 rows] values -> [records, 16, blocks] (of float32 when the values are float16)."""
    values = plane.contiguous().view(dtype).reshape(plane.shape[0], blocks, 16).permute(0, 2, 1)
    return values.float() if dtype == torch.float16 else values


def _spread(scale: torch.Tensor, cols: int) -> torch.Tensor:
    return scale.repeat_interleave(cols // scale.shape[-1], dim=-1)


def _half(planes: dict, name: str, cols: int, block: int) -> torch.Tensor:
    return _per_block(planes[name], cols // block, torch.float16)


def _q4_0(p: dict, n: int) -> torch.Tensor:
    return (_bits(p, "codes4", n, 4) - 8).float() * _spread(_half(p, "d", n, 32), n)


def _q4_1(p: dict, n: int) -> torch.Tensor:
    return _bits(p, "codes4", n, 4).float() * _spread(_half(p, "d", n, 32), n) + _spread(_half(p, "m", n, 32), n)


def _five(p: dict, n: int) -> torch.Tensor:
    return _bits(p, "codes4", n, 4) | (_bits(p, "codes1", n, 1) << 4)


def _q5_0(p: dict, n: int) -> torch.Tensor:
    return (_five(p, n) - 16).float() * _spread(_half(p, "d", n, 32), n)


def _q5_1(p: dict, n: int) -> torch.Tensor:
    return _five(p, n).float() * _spread(_half(p, "d", n, 32), n) + _spread(_half(p, "m", n, 32), n)


def _q8_0(p: dict, n: int) -> torch.Tensor:
    return _codes8(p, n).float() * _spread(_half(p, "d", n, 32), n)


def _mxfp4(p: dict, n: int) -> torch.Tensor:
    table = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32, device=p["codes4"].device)
    exponent = _per_block(p["e8m0"], n // 32, torch.uint8).int()
    # half of 2^(e-127), to undo the doubled table; e of 0 and 1 give subnormals, which ldexp makes exactly
    scale = torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent - 128)
    return table[_bits(p, "codes4", n, 4).long()] * _spread(scale, n)


def _nvfp4(p: dict, n: int) -> torch.Tensor:
    table = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32, device=p["codes4"].device)
    scale = torch.from_numpy(e4m3_halves()).to(table.device)[_per_block(p["scales"], n // 16, torch.uint8).long()]
    scale = scale * p["factor"].contiguous().view(torch.float32)[:, :, None]
    return table[_bits(p, "codes4", n, 4).long()] * _spread(scale, n)


def _trits(p: dict, n: int) -> torch.Tensor:
    """Digits 0 to 2, int32 [records, 16, n]: see `layout._merge_trits`."""
    vectors = p["trits"].reshape(len(p["trits"]), n // 256, 13, 1, 16, 4).int()
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=vectors.device)[:, None, None]
    digits = ((vectors * powers & 255) * 3) >> 8
    own, rest = digits[:, :, :8], digits[:, :, 8:].flatten(2, 3)[:, :, :24].unflatten(2, (8, 3))
    words = torch.cat((own, rest), 3)  # [records, blocks, 8 chunks, 8, 16, 4]
    return words.permute(0, 4, 1, 2, 3, 5).reshape(-1, 16, n)


def _sub_scales(p: dict, n: int, per_256: int) -> torch.Tensor:
    """K-quant sub-scale bytes [records, 16, cols / 256 * per_256] as int32, from [256-block][sub-block][row]."""
    plane = p["scales"]
    return plane.reshape(plane.shape[0], n // 256 * per_256, 16).permute(0, 2, 1).int()


def _k_affine(p: dict, n: int, codes: torch.Tensor) -> torch.Tensor:
    """Q4_K and Q5_K: d * scale * code - dmin * min, per 32 columns."""
    mins = p["mins"].reshape(p["mins"].shape[0], n // 32, 16).permute(0, 2, 1)
    d = _half(p, "d", n, 256).repeat_interleave(8, -1) * _sub_scales(p, n, 8).float()
    m = _half(p, "dmin", n, 256).repeat_interleave(8, -1) * mins.float()
    return codes.float() * _spread(d, n) - _spread(m, n)


def _q2_k(p: dict, n: int) -> torch.Tensor:
    packed = _sub_scales(p, n, 16)
    d = _half(p, "d", n, 256).repeat_interleave(16, -1) * (packed & 15).float()
    m = _half(p, "dmin", n, 256).repeat_interleave(16, -1) * (packed >> 4).float()
    return _bits(p, "codes2", n, 2).float() * _spread(d, n) - _spread(m, n)


def _q3_k(p: dict, n: int) -> torch.Tensor:
    low = _sub_scales(p, n, 12).unflatten(-1, (n // 256, 12))  # [rec, 16, blocks, 12]
    # 16 six-bit scales in 12 bytes: low 4 bits in the nibbles of bytes 0..7, high 2 bits in bytes 8..11 (GGUF Q3_K)
    four = torch.cat((low[..., :8] & 15, low[..., :8] >> 4), -1)
    two = torch.cat([(low[..., 8:12] >> s) & 3 for s in (0, 2, 4, 6)], -1)
    scales = ((four | (two << 4)) - 32).flatten(-2)
    d = _half(p, "d", n, 256).repeat_interleave(16, -1) * scales.float()
    codes = _bits(p, "codes2", n, 2) - 4 * (1 - _bits(p, "codes1", n, 1))
    return codes.float() * _spread(d, n)


def _q6_k(p: dict, n: int) -> torch.Tensor:
    scales = p["scales"].contiguous().view(torch.int8).reshape(p["scales"].shape[0], n // 16, 16).permute(0, 2, 1)
    d = _half(p, "d", n, 256).repeat_interleave(16, -1) * scales.float()
    return ((_bits(p, "codes4", n, 4) | (_bits(p, "codes2", n, 2) << 4)) - 32).float() * _spread(d, n)


def _iq4(p: dict, n: int) -> torch.Tensor:
    table = torch.tensor(_IQ4, dtype=torch.float32, device=p["codes4"].device)
    return table[_bits(p, "codes4", n, 4).long()]


def _iq4_xs(p: dict, n: int) -> torch.Tensor:
    scales = (_sub_scales(p, n, 8) - 32).float()
    return _iq4(p, n) * _spread(_half(p, "d", n, 256).repeat_interleave(8, -1) * scales, n)


_DECODE: dict[str, Callable[[dict, int], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda p, n: _k_affine(p, n, _bits(p, "codes4", n, 4)),
    "Q5_K": lambda p, n: _k_affine(p, n, _five(p, n)),
    "Q6_K": _q6_k,
    "IQ4_NL": lambda p, n: _iq4(p, n) * _spread(_half(p, "d", n, 32), n),
    "IQ4_XS": _iq4_xs,
    "NVFP4": _nvfp4,
    "Q1_0": lambda p, n: (2 * _bits(p, "codes1", n, 1) - 1).float() * _spread(_half(p, "d", n, 128), n),
    "Q2_0": lambda p, n: (_bits(p, "codes2", n, 2) - 1).float() * _spread(_half(p, "d", n, 64), n),
    "TQ1_0": lambda p, n: (_trits(p, n) - 1).float() * _spread(_half(p, "d", n, 256), n),
    "TQ2_0": lambda p, n: (_bits(p, "codes2", n, 2) - 1).float() * _spread(_half(p, "d", n, 256), n),
    **{qtype: partial(unpack_book, qtype) for qtype in BOOK_TYPES},
}
assert set(_DECODE) | set(BY_ROWS) == set(QUANT_TYPES)
