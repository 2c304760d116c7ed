"""The packed layout of types with a codebook, in numpy (docs/packed-layout.md): indices, signs, high bits, scales.

Fields are u8 [groups, blocks, 16 rows, bytes of the field], planes u8 in the order of the record.
"""

import numpy as np

from pshard.runtime.kernels.codebooks import BOOK_TYPES, load_book

Arrays = dict[str, np.ndarray]
EXTRA_SIGN = 7  # of eight signs with a parity, the one whose bit holds something else


def pack_book(qtype: str, fields: Arrays) -> Arrays:
    """Planes of a record from the fields of its blocks: see `_FIELDS` in layout.py."""
    index, more, signs, extra = _split_fields(qtype, fields)
    planes = {"index": _rows_last(index)}
    if signs is not None:
        signs[..., EXTRA_SIGN] = signs[..., EXTRA_SIGN] if extra is None else extra
        planes["signs"] = _sign_plane(signs)
    if more is not None:
        planes["more"] = more
    if qtype == "IQ1_M":
        planes |= _split_scales_iq1_m(fields["scales"])
        return planes
    if "scales" in fields and qtype != "IQ3_XXS":
        planes["scales"] = _rows_last(fields["scales"])
    planes["d"] = np.ascontiguousarray(fields["d"])
    return planes


def unpack_book(qtype: str, planes: Arrays, groups: int, chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """(what weights are before their scale, f32 [groups, chunks, 32 columns, 16 rows]; scales [groups, n, 16])."""
    kind, book = BOOK_TYPES[qtype], load_book(qtype)
    index = planes["index"].reshape(groups, chunks, 32 // kind.width, 16).astype(np.int32)
    signs = _signs_of(planes["signs"], groups, chunks) if "signs" in planes else None  # [.., 4, 8, 16 rows]
    extra = None if signs is None else signs[:, :, :, EXTRA_SIGN].copy()
    delta = None
    if "more" in planes and kind.step == 1:
        each = 8 // (32 // kind.width)  # bits of an index
        shifts = np.arange(0, 8, each, dtype=np.uint8)[:, None]
        more = planes["more"].reshape(groups, chunks, 1, 16)
        index |= ((more >> shifts) & np.uint8(2**each - 1)).astype(np.int32) << 8
    elif "more" in planes:
        words = planes["more"].view(np.uint16).reshape(groups, chunks, 1, 16)
        each = 3 if qtype == "IQ1_S" else 4
        moved = words >> np.arange(0, 4 * each, each, dtype=np.uint16)[:, None]
        index |= (moved & np.uint16(7)).astype(np.int32) << 8
        delta = (words >> 15) if qtype == "IQ1_S" else (moved >> np.uint16(3)) & 1
    elif qtype == "IQ2_XS" and extra is not None:
        index |= extra.astype(np.int32) << 8
    values = np.moveaxis(book[index], -1, 3).reshape(groups, chunks, 32, 16).astype(np.float32)
    if signs is not None:
        if kind.parity:
            signs[:, :, :, EXTRA_SIGN] = np.bitwise_xor.reduce(signs[:, :, :, :EXTRA_SIGN], axis=3)
        values *= 1 - 2 * signs.reshape(groups, chunks, 32, 16).astype(np.float32)
    if delta is not None:
        wide = np.broadcast_to(delta, (groups, chunks, 4, 16)).repeat(8, axis=2)
        values += 1 - 2 * wide.astype(np.float32)
    return values, _book_scales(qtype, planes, extra, groups, chunks)


def _rows_last(values: np.ndarray) -> np.ndarray:
    """[groups, blocks, 16 rows, bytes] -> the rows side by side."""
    return np.ascontiguousarray(values.swapaxes(2, 3))


def _bits(values: np.ndarray, count: int) -> np.ndarray:
    """The lowest bits of each number, u8 [..., count]."""
    return ((values[..., None] >> np.arange(count, dtype=values.dtype)) & values.dtype.type(1)).astype(np.uint8)


def _split_fields(qtype: str, f: Arrays) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """(low bytes of the indices; the plane of their high bits; signs u8 [groups, blocks, rows, 32, 8]; what the
    signs with a parity hold, u8 [groups, blocks, rows, 32])."""
    if qtype in ("IQ3_S", "IQ2_S"):
        return f["qs"], _rows_last(f["qh"]), _bits(f["signs"], 8), None
    if qtype in ("IQ1_S", "IQ1_M"):
        words = np.ascontiguousarray(f["qh"]).view(np.uint16)
        return f["qs"], _rows_last(words), None, None
    if qtype == "IQ2_XS":
        words = np.ascontiguousarray(f["qs"]).view(np.uint16)
        return (words & 255).astype(np.uint8), None, _bits(words >> 9, 8), ((words >> 8) & 1).astype(np.uint8)
    pairs = np.ascontiguousarray(f["scales"] if qtype == "IQ3_XXS" else f["qs"]).view(np.uint32)
    if qtype == "IQ2_XXS":
        low = np.ascontiguousarray(pairs[..., 0::2]).view(np.uint8)
        pairs = pairs[..., 1::2]
    else:
        low = f["qs"]
    seven = (pairs[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    scale = _bits(pairs >> np.uint32(28), 4)
    shape = (*pairs.shape[:-1], 32)
    return low, None, _bits(seven.reshape(shape), 8), scale.reshape(shape)


def _sign_plane(signs: np.ndarray) -> np.ndarray:
    """[groups, blocks, rows, 32, 8] bits -> as codes1: byte 4r + t of a chunk has in bit j the column 4j + t."""
    groups, blocks, rows = signs.shape[:3]
    columns = signs.reshape(groups, blocks, rows, 8, 8, 4)  # of a chunk: j, t
    return np.packbits(columns.transpose(0, 1, 3, 2, 5, 4), axis=-1, bitorder="little")


def _signs_of(plane: np.ndarray, groups: int, chunks: int) -> np.ndarray:
    """Inverse of `_sign_plane`: u8 [groups, chunks, 4, 8, 16 rows]."""
    bits = np.unpackbits(plane.reshape(groups, chunks, 16, 4, 1), axis=-1, bitorder="little")  # r, t, j
    return np.ascontiguousarray(bits.transpose(0, 1, 4, 3, 2)).reshape(groups, chunks, 4, 8, 16)


def _split_scales_iq1_m(field: np.ndarray) -> Arrays:
    """Planes d and scales: of chunk c six bits, four in nibble c % 2 of byte c // 2, two in byte 4 + c // 4."""
    words = np.ascontiguousarray(field).view(np.uint16)  # [groups, blocks, rows, 4]: 12 bits of scales, 4 of d
    tops = words >> np.uint16(12)
    d = tops[..., 0] | tops[..., 1] << np.uint16(4) | tops[..., 2] << np.uint16(8) | tops[..., 3] << np.uint16(12)
    six = np.stack([words & np.uint16(63), (words >> np.uint16(6)) & np.uint16(63)], -1).astype(np.uint8)
    six = six.reshape(*words.shape[:-1], 8)
    low = (six[..., 0::2] & 15) | ((six[..., 1::2] & 15) << np.uint8(4))
    fours = (six >> np.uint8(4)).reshape(*words.shape[:-1], 2, 4) << np.array([0, 2, 4, 6], np.uint8)
    scales = np.concatenate([low, np.bitwise_or.reduce(fours, axis=-1)], axis=-1)
    return {"scales": _rows_last(scales), "d": d.astype(np.uint16)}


def _book_scales(qtype: str, planes: Arrays, extra: np.ndarray | None, groups: int, chunks: int) -> np.ndarray:
    """f32 [groups, chunks or twice as many, 16 rows]: d (2n + 1) over `eighths`."""
    kind = BOOK_TYPES[qtype]
    if qtype == "IQ3_S":
        both = planes["scales"].reshape(groups, chunks // 2, 1, 16)
    elif qtype in ("IQ2_S", "IQ2_XS"):
        both = planes["scales"].reshape(groups, chunks, 1, 16)
    if qtype in ("IQ3_S", "IQ2_S", "IQ2_XS"):
        n = np.concatenate([both & 15, both >> 4], axis=2).reshape(groups, -1, 16)
    elif qtype == "IQ1_S":
        n = (planes["more"].view(np.uint16).reshape(groups, chunks, 16) >> np.uint16(12)) & np.uint16(7)
    elif qtype == "IQ1_M":
        packed = planes["scales"].reshape(groups, chunks // 8, 6, 16)
        low = np.stack([packed[:, :, :4] & 15, packed[:, :, :4] >> 4], axis=3).reshape(groups, -1, 8, 16)
        high = np.concatenate([(packed[:, :, 4:5] >> s) & 3 for s in (0, 2, 4, 6)]
                              + [(packed[:, :, 5:6] >> s) & 3 for s in (0, 2, 4, 6)], axis=2)  # fmt: skip
        six = low | high << np.uint8(4)
        n = np.stack([six & 7, six >> 3], axis=3).reshape(groups, -1, 16)
    else:
        assert extra is not None  # [groups, chunks, 4, 16]: the bits of n
        n = np.bitwise_or.reduce(extra << np.arange(4, dtype=np.uint8)[:, None], axis=2)
    d = planes["d"].view(np.float16).reshape(groups, -1, 16).astype(np.float32)
    odd = 2 * n.astype(np.float32) + 1
    return d.repeat(odd.shape[1] // d.shape[1], axis=1) * odd / np.float32(kind.eighths)
