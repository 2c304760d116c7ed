"""Packed weights of types with a codebook to float32 in plain torch, on any device: see unpack.py."""

import torch

from pshard.runtime.kernels.codebooks import BOOK_TYPES, load_book

Planes = dict[str, torch.Tensor]
_COLUMN_OF_EXTRA = 7  # of eight columns, the one whose sign the others say


def unpack_book(qtype: str, planes: Planes, cols: int) -> torch.Tensor:
    """float32 [records, 16, cols]."""
    kind, chunks = BOOK_TYPES[qtype], cols // 32
    book = torch.from_numpy(load_book(qtype)).to(planes["index"].device)
    index = _rows(planes["index"], chunks * 32 // kind.width).int()
    bits = _sign_bits(planes["signs"], cols) if "signs" in planes else None  # [records, 16, eights, 8]
    if "more" in planes:
        index = index | _high_bits(qtype, planes["more"], chunks) << 8
    elif qtype == "IQ2_XS" and bits is not None:
        index = index | bits[..., _COLUMN_OF_EXTRA] << 8
    values = book[index.long()].float().flatten(-2)
    if bits is not None:
        signs = bits
        if kind.parity:
            own = bits[..., :_COLUMN_OF_EXTRA]
            signs = torch.cat((own, own.sum(-1, keepdim=True) & 1), -1)
        values = values * (1 - 2 * signs.flatten(-2))
    if kind.step > 1:
        minus = _delta_bits(qtype, planes["more"])
        values = values + (1 - 2 * minus.repeat_interleave(cols // minus.shape[-1], -1))
    n = _inner_scales(qtype, planes, bits, chunks)
    d = _rows(planes["d"].contiguous().view(torch.float16), cols // 256).float()
    scale = d.repeat_interleave(n.shape[-1] // d.shape[-1], -1) * (2 * n + 1).float() / kind.eighths
    return values * scale.repeat_interleave(cols // scale.shape[-1], -1)


def _rows(plane: torch.Tensor, count: int) -> torch.Tensor:
    """[records, count x 16 rows] -> [records, 16, count]."""
    return plane.reshape(len(plane), count, 16).permute(0, 2, 1)


def _fields(values: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Fields of `width` bits, the lowest first: int32 [..., count]."""
    shifts = torch.arange(0, width * count, width, dtype=torch.int32, device=values.device)
    return (values[..., None].int() >> shifts) & ((1 << width) - 1)


def _words16(plane: torch.Tensor) -> torch.Tensor:
    return _rows(plane.contiguous().view(torch.int16), plane.shape[1] // 32).int() & 0xFFFF


def _sign_bits(plane: torch.Tensor, cols: int) -> torch.Tensor:
    """int32 [records, 16, cols / 8, 8] from bytes [record, chunk, row, t], whose bit j is of column 4j + t."""
    bits = _fields(plane.reshape(len(plane), cols // 32, 16, 4), 1, 8)
    return bits.permute(0, 2, 1, 4, 3).reshape(len(plane), 16, cols // 8, 8)


def _high_bits(qtype: str, plane: torch.Tensor, chunks: int) -> torch.Tensor:
    if qtype in ("IQ3_S", "IQ2_S"):
        return _fields(_rows(plane, chunks), *((1, 8) if qtype == "IQ3_S" else (2, 4))).flatten(-2)
    return (_fields(_words16(plane), 3 if qtype == "IQ1_S" else 4, 4) & 7).flatten(-2)


def _delta_bits(qtype: str, plane: torch.Tensor) -> torch.Tensor:
    words = _words16(plane)
    return words >> 15 if qtype == "IQ1_S" else (_fields(words, 4, 4) >> 3).flatten(-2)


def _inner_scales(qtype: str, planes: Planes, bits: torch.Tensor | None, chunks: int) -> torch.Tensor:
    """n of the scales d (2n + 1): int32 [records, 16, chunks or twice as many]."""
    if qtype in ("IQ3_S", "IQ2_S", "IQ2_XS"):
        return _fields(_rows(planes["scales"], planes["scales"].shape[1] // 16), 4, 2).flatten(-2)
    if qtype == "IQ1_S":
        return (_words16(planes["more"]) >> 12) & 7
    if qtype == "IQ1_M":
        packed = _rows(planes["scales"], chunks // 8 * 6).unflatten(-1, (-1, 6))
        low, high = _fields(packed[..., :4], 4, 2).flatten(-2), _fields(packed[..., 4:], 2, 4).flatten(-2)
        return _fields(low | high << 4, 3, 2).flatten(-3)
    assert bits is not None
    hidden = bits[..., _COLUMN_OF_EXTRA].unflatten(-1, (-1, 4))
    return (hidden << torch.arange(4, dtype=torch.int32, device=hidden.device)).sum(-1)
