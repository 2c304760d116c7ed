"""Integer weights of folders: GPTQ, AWQ and compressed-tensors, as blocks of Q4_0, Q5_0 or Q8_0 without loss.

A weight is (code - zero) * scale, with a scale and a zero for each group of columns. Q4_0 is that with a zero of 8, and
Q8_0 of 128 for codes of 8 bits. With other zeros code - zero is -15 to 15: the code of Q5_0, less 16.
"""

import numpy as np

from pshard.models.quantised.joined import (
    SCALES,
    Arrays,
    ColumnOrder,
    JoinedMatrix,
    Make,
    Module,
    check_groups,
    check_rank,
    check_types,
)
from pshard.models.quantised.scheme import Scheme
from pshard.models.stored import FETCH_AGAIN, StoredTensor

BLOCK = 32  # columns that share a scale in these types
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word holds each of its eight columns


def join_gptq(name: str, module: Module, scheme: Scheme) -> StoredTensor:
    """qweight [inputs / codes of a word, outputs], qzeros [groups, outputs / codes of a word], scales [groups, outputs]
    and perhaps g_idx [inputs]. Raises UserError for other shapes and types."""
    codes, scales, zeros = (_part(module, key) for key in ("qweight", "scales", "qzeros"))
    _check_types(codes, zeros, scales)
    groups, rows = check_rank(scales)
    bits = 32 * zeros.shape[-1] // rows if rows else 0
    _check_bits(codes, bits)
    cols = codes.shape[0] * 32 // bits
    codes.check_shape((cols * bits // 32, rows))
    zeros.check_shape((groups, rows * bits // 32))
    _check_groups(scales, cols, groups)
    parts = {"codes": codes, "scales": scales, "zeros": zeros}
    order = None
    if "g_idx" in module or scheme.ordered:
        given = _read_order(_part(module, "g_idx"), cols, groups)
        parts["groups"], order = given.groups_of, given if scheme.ordered else None

    def make(tensor: JoinedMatrix, arrays: Arrays) -> np.ndarray:
        whole = _unpack_words(np.ascontiguousarray(arrays["codes"].T), bits)
        zero = (_unpack_words(arrays["zeros"], bits) + scheme.plus_one).T & ((1 << bits) - 1)
        if order is not None:
            whole = whole[:, order.sort(arrays["groups"])]
        elif "groups" in arrays:
            _check_order(parts["groups"], arrays["groups"], groups)
        return _encode(tensor, whole, arrays["scales"].T, zero)

    return _join(name, (rows, cols), bits, scheme.symmetric, parts, make, order)


def join_awq(name: str, module: Module) -> StoredTensor:
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]: `gemm` of AWQ. Raises
    UserError for other shapes and types."""
    codes, scales, zeros = (_part(module, key) for key in ("qweight", "scales", "qzeros"))
    _check_types(codes, zeros, scales)
    groups, rows = check_rank(scales)
    cols = codes.shape[0]
    codes.check_shape((cols, rows // 8))
    zeros.check_shape((groups, rows // 8))
    _check_groups(scales, cols, groups)
    parts = {"codes": codes, "scales": scales, "zeros": zeros}

    def make(tensor: JoinedMatrix, arrays: Arrays) -> np.ndarray:
        return _encode(tensor, _awq_codes(arrays["codes"]).T, arrays["scales"].T, _awq_codes(arrays["zeros"]).T)

    return _join(name, (rows, cols), 4, False, parts, make)


def join_packed(name: str, module: Module) -> StoredTensor:
    """weight_packed [outputs, inputs / codes of a word], weight_scale [outputs, groups] and perhaps weight_zero_point
    [outputs / codes of a word, groups] and weight_g_idx [inputs]: `pack-quantized` of compressed-tensors. Raises
    UserError for other shapes and types."""
    codes, scales = _part(module, "weight_packed"), _part(module, "weight_scale")
    zeros = module.get("weight_zero_point")
    _check_types(codes, zeros, scales)
    rows, groups = check_rank(scales)
    cols = _read_shape(module, codes)[1]
    bits = 32 * codes.shape[-1] // cols if cols else 0
    _check_bits(codes, bits)
    codes.check_shape((rows, cols * bits // 32))
    _check_groups(scales, cols, groups)
    parts = {"codes": codes, "scales": scales}
    order = None
    if "weight_g_idx" in module:
        order = _read_order(module["weight_g_idx"], cols, groups)
        parts["groups"] = order.groups_of
    if zeros is not None:
        zeros.check_shape((rows * bits // 32, groups))
        parts["zeros"] = zeros

    def make(tensor: JoinedMatrix, arrays: Arrays) -> np.ndarray:
        zero = None
        if zeros is not None:
            zero = _unpack_words(np.ascontiguousarray(arrays["zeros"].T), bits).T
        whole = _unpack_words(arrays["codes"], bits)
        if order is not None:
            whole = whole[:, order.sort(arrays["groups"])]
        return _encode(tensor, whole, arrays["scales"], zero)

    return _join(name, (rows, cols), bits, zeros is None, parts, make, order)


def _join(
    name: str,
    shape: tuple[int, int],
    bits: int,
    symmetric: bool,
    parts: Module,
    make: Make,
    order: ColumnOrder | None = None,
) -> JoinedMatrix:
    codes = parts["codes"]
    if bits == 8 and not symmetric:
        codes.fail("has codes of 8 bits with zero points of their own, which is not supported", "use a GGUF file")
    qtype = "Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q5_0"
    joined = JoinedMatrix(
        name, qtype, shape, codes.file, codes.offset, parts=tuple(parts.items()), make=make, order=order
    )
    joined.check_blocks()
    return joined


def _part(module: Module, key: str) -> StoredTensor:
    if key not in module:
        other = next(iter(module.values()))
        other.fail(f"has no {key} beside it: the files are incomplete", FETCH_AGAIN)
    return module[key]


def _read_shape(module: Module, codes: StoredTensor) -> tuple[int, int]:
    """[outputs, inputs]: four bits a code, unless `weight_shape` beside it says otherwise."""
    given, (first, words) = module.get("weight_shape"), check_rank(codes)
    if given is None:
        return first, words * 8
    given.check_shape((2,))
    if given.qtype not in ("I64", "I32"):
        given.fail(f"has type {given.qtype}, not I64")
    rows, cols = (int(n) for n in given.read().view("<i8" if given.qtype == "I64" else "<i4"))
    if (rows, cols) == (0, 0):  # the header alone is here
        return first, words * 8
    if rows != first or cols <= 0:
        given.fail(f"says {rows} x {cols}, and {codes.name} has {first} rows: the file is damaged", FETCH_AGAIN)
    return rows, cols


def _check_types(codes: StoredTensor, zeros: StoredTensor | None, scales: StoredTensor) -> None:
    for words in (codes, zeros):
        if words is not None:
            check_types(words, "I32")
    check_types(scales, *SCALES)


def _check_bits(codes: StoredTensor, bits: int) -> None:
    if bits not in (4, 8):
        codes.fail(f"has codes of {bits} bits beside such scales, where 4 and 8 are supported", "use a GGUF file")


def _check_groups(scales: StoredTensor, cols: int, groups: int) -> None:
    if not groups or cols % groups or cols // groups % BLOCK:
        shape = list(scales.shape)
        scales.fail(f"has shape {shape}: {groups} groups of {cols} columns are not whole blocks of {BLOCK} columns")


def _read_order(tensor: StoredTensor, cols: int, groups: int) -> ColumnOrder:
    tensor.check_shape((cols,))
    check_types(tensor, "I32")
    return ColumnOrder(tensor, groups)


def _check_order(tensor: StoredTensor, of: np.ndarray, groups: int) -> None:
    """Columns must lie group after group."""
    check_groups(tensor, of, groups)
    if not np.array_equal(of, np.arange(len(of)) // (len(of) // groups)):
        tensor.fail("gives columns an order of their own, and config.json does not say so (desc_act)", FETCH_AGAIN)


def _unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Words [.., n] int32 -> codes u8 [.., n * 32 / bits], the lowest bits first."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    return np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """[n, outputs / 8] words -> u8 [n, outputs]."""
    nibbles = _unpack_words(words, 4).reshape(len(words), -1, 8)
    return nibbles[..., _AWQ_NIBBLES].reshape(len(words), -1)


def _encode(tensor: JoinedMatrix, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Blocks u8 [rows, blocks, bytes] of codes [rows, cols], scales and zeros [rows, groups]; zeros None: half the
    range."""
    rows, cols = tensor.shape
    times = cols // BLOCK // scales.shape[1]
    with np.errstate(over="ignore"):
        d = np.repeat(scales.astype(np.float16), times, axis=1).reshape(rows, -1, 1)
    if not np.isfinite(d).all():
        tensor.fail("has scales that are no numbers, or beyond 65504", FETCH_AGAIN)
    half = 128 if tensor.qtype == "Q8_0" else 8
    if tensor.qtype != "Q5_0" and zeros is not None and (zeros != half).any():
        what = f"has zero points other than {half}, where the configuration says that it is symmetric"
        tensor.fail(what, FETCH_AGAIN)
    blocks = np.ascontiguousarray(codes).reshape(rows, -1, BLOCK)
    if tensor.qtype == "Q8_0":
        return np.concatenate((d.view(np.uint8), blocks ^ np.uint8(128)), -1)
    if tensor.qtype == "Q4_0":
        return np.concatenate((d.view(np.uint8), _halves(blocks)), -1)
    assert zeros is not None
    less = np.repeat(zeros.astype(np.uint8), times, axis=1).reshape(rows, -1, 1)
    five = blocks + np.uint8(16) - less
    high = np.packbits(five >> 4, axis=-1, bitorder="little")
    return np.concatenate((d.view(np.uint8), high, _halves(five & np.uint8(15))), -1)


def _halves(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits [.., 32] -> bytes [.., 16]: column j below column j + 16."""
    return codes[..., :16] | codes[..., 16:] << np.uint8(4)
