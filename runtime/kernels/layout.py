"""The packed weight layout in numpy: the readable twin of the C++ and GPU kernels (docs/packed-layout.md).

A matrix [rows, cols] of a quantised type becomes records of 16 rows; a record holds its planes one after the other,
each k-major with the 16 rows side by side. Packing is lossless: `unpack_reference(pack_reference(raw))` equals
`gguf.quants.dequantize(raw)` bit for bit. Types without planes (F32, F16, BF16) stay plain rows.
"""

from functools import lru_cache

import numpy as np

from pshard.quant import QUANT_TYPES, ROW_BLOCK, packed_nbytes, plane_offsets, record_nbytes
from pshard.runtime.kernels.book_layout import pack_book, unpack_book
from pshard.runtime.kernels.codebooks import BOOK_TYPES

__all__ = ["pack_reference", "packed_nbytes", "unpack_reference"]

# Doubled FP4 E2M1 values (OCP Microscaling Formats 1.0); the e8m0 scale is halved in return.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

# What the 16 codes of IQ4_NL and IQ4_XS stand for (ggml's kvalues_iq4nl).
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)

# Where a block's fields lie in the file: (field, bytes), in order.
_FIELDS: dict[str, tuple[tuple[str, int], ...]] = {
    "Q4_0": (("d", 2), ("qs", 16)),
    "Q4_1": (("d", 2), ("m", 2), ("qs", 16)),
    "Q5_0": (("d", 2), ("qh", 4), ("qs", 16)),
    "Q5_1": (("d", 2), ("m", 2), ("qh", 4), ("qs", 16)),
    "Q8_0": (("d", 2), ("qs", 32)),
    "MXFP4": (("e8m0", 1), ("qs", 16)),
    "Q2_K": (("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)),
    "Q3_K": (("qh", 32), ("qs", 64), ("scales", 12), ("d", 2)),
    "Q4_K": (("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)),
    "Q5_K": (("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
    "Q6_K": (("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
    "IQ4_NL": (("d", 2), ("qs", 16)),
    "IQ4_XS": (("d", 2), ("high", 2), ("low", 4), ("qs", 128)),
    "IQ3_S": (("d", 2), ("qs", 64), ("qh", 8), ("signs", 32), ("scales", 4)),
    "IQ3_XXS": (("d", 2), ("qs", 64), ("scales", 32)),
    "IQ2_S": (("d", 2), ("qs", 32), ("signs", 32), ("qh", 8), ("scales", 8)),
    "IQ2_XS": (("d", 2), ("qs", 64), ("scales", 8)),
    "IQ2_XXS": (("d", 2), ("qs", 64)),
    "IQ1_S": (("d", 2), ("qs", 32), ("qh", 16)),
    "IQ1_M": (("qs", 32), ("qh", 16), ("scales", 8)),
    "NVFP4": (("scales", 4), ("qs", 32)),
    "Q1_0": (("d", 2), ("qs", 16)),
    "Q2_0": (("d", 2), ("qs", 16)),
    "TQ1_0": (("qs", 32), ("qt", 16), ("qh", 4), ("d", 2)),
    "TQ2_0": (("qs", 64), ("d", 2)),
}
_TWO_BITS = ("Q2_K", "Q3_K", "Q2_0", "TQ2_0")


def pack_reference(raw: np.ndarray, qtype: str, rows: int, cols: int) -> np.ndarray:
    """Pack GGUF rows: u8 array of file_nbytes(qtype, rows, cols) -> u8 array of packed_nbytes(qtype, rows, cols)."""
    q = QUANT_TYPES[qtype]
    raw = np.ascontiguousarray(raw).view(np.uint8).reshape(rows, cols // q.block * q.nbytes)
    if qtype == "FP8":  # codes of a row, then its scales
        whole = raw.reshape(rows, -1, q.nbytes)
        return np.concatenate([whole[..., 4:].reshape(rows, -1), whole[..., :4].reshape(rows, -1)], 1).reshape(-1)
    if not q.planes:
        return raw.reshape(-1).copy()
    groups = -(-rows // ROW_BLOCK)
    padded = np.zeros((groups * ROW_BLOCK, raw.shape[1]), np.uint8)
    padded[:rows] = raw
    # [groups, blocks, 16 rows, bytes of one block]: from here on rows are the lanes
    blocks = padded.reshape(groups, ROW_BLOCK, -1, q.nbytes).swapaxes(1, 2)
    fields, at = {}, 0
    for name, nbytes in _FIELDS[qtype]:
        fields[name] = blocks[..., at : at + nbytes]
        at += nbytes
    if qtype in BOOK_TYPES:
        planes = pack_book(qtype, fields)
    else:
        planes = _side_planes(qtype, fields) | _code_planes(qtype, _codes_of(qtype, fields))
    out = np.zeros((groups, record_nbytes(qtype, cols)), np.uint8)
    for name, (offset, size) in plane_offsets(qtype, cols).items():
        out[:, offset : offset + size] = np.ascontiguousarray(planes[name]).view(np.uint8).reshape(groups, size)
    return out.reshape(-1)


def unpack_reference(packed: np.ndarray, qtype: str, rows: int, cols: int) -> np.ndarray:
    """Dequantise a packed matrix: u8 array -> f32 [rows, cols], equal to gguf.quants.dequantize of the same rows."""
    q = QUANT_TYPES[qtype]
    packed = np.ascontiguousarray(packed).view(np.uint8).reshape(-1)
    if qtype == "BF16":
        return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, cols)
    if qtype == "FP8":
        row = packed.reshape(rows, -1)
        scales = np.ascontiguousarray(row[:, cols:]).view(np.float32)
        return e4m3_values()[row[:, :cols]] * np.repeat(scales, q.block, axis=1)
    if not q.planes:
        return packed.view(np.float32 if qtype == "F32" else np.float16).astype(np.float32).reshape(rows, cols)
    groups = -(-rows // ROW_BLOCK)
    records = packed.reshape(groups, record_nbytes(qtype, cols))
    places = plane_offsets(qtype, cols).items()
    planes = {name: np.ascontiguousarray(records[:, at : at + size]) for name, (at, size) in places}
    minimum = None
    if qtype in BOOK_TYPES:
        values, scale = unpack_book(qtype, planes, groups, cols // 32)
    else:
        scale, minimum = _scales_from_planes(qtype, planes, groups)  # f32 [groups, n, 16 rows]
        values = _code_values(qtype, _codes_from_planes(planes, groups, cols // 32))
    each = cols // scale.shape[1]  # columns that share one scale
    weights = scale[:, :, None] * values.reshape(groups, -1, each, ROW_BLOCK)
    if minimum is not None:
        weights = weights + minimum[:, :, None]
    return np.ascontiguousarray(weights.reshape(groups, cols, ROW_BLOCK).swapaxes(1, 2)).reshape(-1, cols)[:rows]


def _code_values(qtype: str, codes: np.ndarray) -> np.ndarray:
    """The f32 value that a code stands for, before scale and minimum."""
    if qtype in ("MXFP4", "NVFP4"):
        return MXFP4_VALUES[codes]
    if qtype == "Q1_0":
        return np.float32(2) * codes.astype(np.float32) - np.float32(1)
    if qtype in ("IQ4_NL", "IQ4_XS"):
        return IQ4_VALUES[codes]
    if qtype == "Q8_0":
        return codes.view(np.int8).astype(np.float32)
    offset = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32, "Q2_0": 1, "TQ1_0": 1, "TQ2_0": 1}.get(qtype, 0)
    return codes.astype(np.float32) - np.float32(offset)


# --- file fields -> codes, u8 [groups, blocks, 16 rows, weights of a block] in natural column order -----------------


def _codes_of(qtype: str, f: dict[str, np.ndarray]) -> np.ndarray:
    def spread(values: np.ndarray, run: int, bits: int) -> np.ndarray:
        """[..., n] bytes -> runs of `run` bytes, each run repeated for every `bits`-wide field, lowest field first."""
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        fields = (values.reshape(*values.shape[:-1], -1, 1, run) >> shifts) & np.uint8(2**bits - 1)
        return fields.reshape(*values.shape[:-1], -1)

    if qtype == "Q8_0":
        return f["qs"]
    if qtype == "Q1_0":
        return np.unpackbits(f["qs"], axis=-1, bitorder="little")
    if qtype == "Q2_0":
        return spread(f["qs"], 1, 2)
    if qtype == "NVFP4":
        return spread(f["qs"], 8, 4)
    if qtype == "TQ1_0":
        return np.concatenate([_trits_of(f[name], n) for name, n in (("qs", 5), ("qt", 5), ("qh", 4))], axis=-1)
    if qtype == "Q6_K":
        return spread(f["ql"], 64, 4) | (spread(f["qh"], 32, 2) << 4)
    if qtype in _TWO_BITS:
        low = spread(f["qs"], 32, 2)
        return low | (spread(f["qh"], 32, 1) << 2) if qtype == "Q3_K" else low
    low = spread(f["qs"], 32 if qtype.endswith("_K") else 16, 4)
    if qtype == "Q5_K":
        return low | (spread(f["qh"], 32, 1) << 4)
    if qtype in ("Q5_0", "Q5_1"):
        return low | (np.unpackbits(f["qh"], axis=-1, bitorder="little") << 4)
    return low


def _trits_of(values: np.ndarray, count: int) -> np.ndarray:
    """Digits 0 to 2 of bytes [..., n], the first of each byte before the second of any: u8 [..., count * n]."""
    powers = np.array([3**i for i in range(count)], np.uint8)[:, None]
    digits = ((values[..., None, :] * powers).astype(np.uint16) * 3) >> 8
    return digits.astype(np.uint8).reshape(*values.shape[:-1], -1)


# --- codes <-> planes. A chunk is 32 columns; a lane byte holds column k of row r at byte r * 4 + k % 4 -------------


def _lanes_of(codes: np.ndarray) -> np.ndarray:
    """Codes -> [groups, chunks, 8 vectors, 16 rows, 4]: vector c holds columns 4c..4c+3 of the chunk."""
    groups, _, rows, _ = codes.shape
    flat = codes.swapaxes(2, 3).reshape(groups, -1, 8, 4, rows)
    return flat.swapaxes(3, 4)


def _code_planes(qtype: str, codes: np.ndarray) -> dict[str, np.ndarray]:
    lanes = _lanes_of(codes)
    if qtype == "Q8_0":
        return {"codes8": np.ascontiguousarray(lanes)}
    if qtype == "Q1_0":
        return {"codes1": _merge_fields(lanes, 1)}
    if qtype == "TQ1_0":
        return {"trits": _merge_trits(lanes)}
    low_bits = 2 if qtype in _TWO_BITS else 4
    high = lanes >> low_bits
    planes = {}
    if low_bits == 2:
        planes["codes2"] = _merge_fields(lanes & np.uint8(3), 2)
    else:
        nibbles = lanes & np.uint8(15)
        planes["codes4"] = nibbles[:, :, :4] | (nibbles[:, :, 4:] << np.uint8(4))
    if qtype == "Q6_K":
        planes["codes2"] = _merge_fields(high, 2)
    elif qtype in ("Q3_K", "Q5_0", "Q5_1", "Q5_K"):
        planes["codes1"] = _merge_fields(high, 1)
    return planes


def _merge_fields(values: np.ndarray, bits: int) -> np.ndarray:
    """[groups, chunks, 8, 16, 4] small values -> [groups, chunks, bits, 16, 4].

    With n = 8 // bits fields in a byte, field j of vector v is value v * n + j.
    """
    n = 8 // bits
    parts = values.reshape(*values.shape[:2], bits, n, 16, 4)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    return np.bitwise_or.reduce(parts << shifts, axis=3)


def _split_fields(plane: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of `_merge_fields`: [groups, chunks, bits, 16, 4] -> [groups, chunks, 8, 16, 4]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    parts = (plane[:, :, :, None] >> shifts) & np.uint8(2**bits - 1)
    return parts.reshape(*plane.shape[:2], 8, 16, 4)


def _merge_trits(lanes: np.ndarray) -> np.ndarray:
    """[groups, chunks, 8, 16, 4] digits 0 to 2 -> [groups, blocks, 13 vectors, 16, 4]: vector c < 8 of a block of 8
    chunks holds words 0..4 of chunk c, the others words 5..7 of all chunks in turn; five digits are a byte."""
    groups = lanes.shape[0]
    blocks = lanes.reshape(groups, -1, 8, 8, 16, 4)
    rest = np.zeros((*blocks.shape[:2], 25, 16, 4), np.uint8)
    rest[:, :, :24] = blocks[:, :, :, 5:].reshape(*blocks.shape[:2], 24, 16, 4)
    fives = np.concatenate([blocks[:, :, :, :5], rest.reshape(*blocks.shape[:2], 5, 5, 16, 4)], axis=2)
    weights = np.array([81, 27, 9, 3, 1], np.uint16)[:, None, None]
    number = (fives.astype(np.uint16) * weights).sum(axis=3)
    return ((number.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8)


def _split_trits(plane: np.ndarray, groups: int) -> np.ndarray:
    """Inverse of `_merge_trits`: [groups, chunks, 8, 16, 4]."""
    vectors = plane.reshape(groups, -1, 13, 1, 16, 4)
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None, None]
    digits = (((vectors * powers).astype(np.uint16) * 3) >> 8).astype(np.uint8)
    own, rest = digits[:, :, :8], digits[:, :, 8:].reshape(*digits.shape[:2], 25, 16, 4)[:, :, :24]
    return np.concatenate([own, rest.reshape(*digits.shape[:2], 8, 3, 16, 4)], axis=3).reshape(groups, -1, 8, 16, 4)


def _codes_from_planes(planes: dict[str, np.ndarray], groups: int, chunks: int) -> np.ndarray:
    """Codes u8 [groups, chunks, 32 columns, 16 rows]."""
    if "codes8" in planes:
        lanes = planes["codes8"].reshape(groups, chunks, 8, 16, 4)
    elif "trits" in planes:
        lanes = _split_trits(planes["trits"], groups)
    else:
        fields = {
            name: _split_fields(planes[name].reshape(groups, chunks, bits, 16, 4), bits)
            for name, bits in (("codes2", 2), ("codes1", 1))
            if name in planes
        }
        if "codes4" in planes:
            nibbles = planes["codes4"].reshape(groups, chunks, 4, 16, 4)
            lanes, shift = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=2), 4
        else:
            lanes, shift = fields.pop("codes2" if "codes2" in fields else "codes1"), 2
        for high in fields.values():
            lanes = lanes | (high << np.uint8(shift))
    return np.ascontiguousarray(lanes.swapaxes(3, 4)).reshape(groups, chunks, 32, 16)


# --- scales: file fields -> planes -> f32 --------------------------------------------------------------------------


def _side_planes(qtype: str, f: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every plane that is not codes, as bytes [groups, blocks, ...] with the rows side by side."""
    planes: dict[str, np.ndarray] = {
        name: np.ascontiguousarray(f[name]) for name in ("d", "m", "dmin", "e8m0") if name in f
    }
    if qtype in ("Q4_K", "Q5_K"):
        low, mid, high = np.split(f["scales"], 3, axis=-1)  # 6-bit fields over 12 bytes, four at a time
        scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
        mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=-1)
        planes |= {"scales": scales.swapaxes(2, 3), "mins": mins.swapaxes(2, 3)}
    elif qtype == "IQ4_XS":  # 6-bit scales: nibbles in `low`, pairs of bits above them in `high`
        four = np.stack([f["low"] & 15, f["low"] >> 4], -1).reshape(*f["low"].shape[:-1], 8)
        two = np.stack([(f["high"] >> np.uint8(shift)) & 3 for shift in (0, 2, 4, 6)], -1).reshape(four.shape)
        planes["scales"] = (four | two << np.uint8(4)).swapaxes(2, 3)
    elif "scales" in f:
        planes["scales"] = f["scales"].swapaxes(2, 3)
    if qtype == "NVFP4":  # each row is multiplied by what the file may have beside the tensor
        planes["factor"] = np.ones((len(f["scales"]), 16), np.float32)
    return {name: np.ascontiguousarray(plane) for name, plane in planes.items()}


@lru_cache
def e4m3_values() -> np.ndarray:
    """float32 [256]: what each byte stands for as a weight of FP8, E4M3 with a sign and without infinities or NaN."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(byte < 128, value, -value).astype(np.float32)


@lru_cache
def e4m3_halves() -> np.ndarray:
    """float32 [256]: half of what each byte stands for as a scale of NVFP4, E4M3 without a sign; 0x7F and 0 are 0."""
    halves = np.abs(e4m3_values()) / 2
    halves[0x7F] = 0
    return halves


def _scales_from_planes(qtype: str, planes: dict[str, np.ndarray], groups: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(scale, addend or None), f32 [groups, columns / 16 or / 32, 16 rows]: weight = scale * value + addend."""

    def halves(name: str) -> np.ndarray:
        return planes[name].view(np.float16).reshape(groups, -1, 16).astype(np.float32)

    if qtype == "MXFP4":
        e = planes["e8m0"].reshape(groups, -1, 16).astype(np.uint32)
        bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23))
        return bits.astype(np.uint32).view(np.float32), None
    if qtype == "NVFP4":
        scales = e4m3_halves()[planes["scales"]].reshape(groups, -1, 16)
        return planes["factor"].view(np.float32)[:, None] * scales, None
    d = halves("d")
    if "m" in planes:
        return d, halves("m")
    if "scales" not in planes:
        return d, None
    d = d[:, :, None]
    scales = planes["scales"].reshape(groups, d.shape[1], -1, 16)

    def scaled(factor: np.ndarray, small: np.ndarray) -> np.ndarray:
        return (factor * small.astype(np.float32)).reshape(groups, -1, 16)

    if qtype == "Q6_K":
        return scaled(d, scales.view(np.int8)), None
    if qtype == "IQ4_XS":
        return scaled(d, scales.view(np.int8) - np.int8(32)), None
    if qtype == "Q3_K":
        low, mid, high = np.split(scales, 3, axis=2)
        fields = [low & 15, mid & 15, low >> 4, mid >> 4]
        six = [x | (((high >> (2 * i)) & 3) << 4) for i, x in enumerate(fields)]
        return scaled(d, np.concatenate(six, axis=2).view(np.int8) - np.int8(32)), None
    dmin = halves("dmin")[:, :, None]
    if qtype == "Q2_K":
        return scaled(d, scales & 15), -scaled(dmin, scales >> 4)
    return scaled(d, scales), -scaled(dmin, planes["mins"].reshape(scales.shape))
