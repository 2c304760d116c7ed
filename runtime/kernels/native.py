"""The CPU kernels: a ctypes front to the C++ library built from csrc/ (packed weights, docs/packed-layout.md).

Buffers are addresses (int), numpy arrays or anything with `data_ptr()` (torch tensors), in host memory and in C order
except for row strides. Strides count elements, not bytes. Sizes are the caller's promise: C++ cannot see them. Every
call releases the GIL and returns when the result is written; calls from several threads run one after the other.

Results do not depend on the number of threads, and one token's result does not depend on how many are computed with it.
"""

import ctypes
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pshard.model import kv_nbytes
from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.sources import digest_sources

Buffer = Any  # int address, numpy array or torch tensor

ABI = 1  # as csrc/api.cpp has it
BUILD = "pip install -e . --no-build-isolation --no-deps in the folder of pshard"

_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sources": (ctypes.c_uint32, ()),
    "type": (_INT, (ctypes.c_char_p,)),
    "record_nbytes": (_LONG, (_INT, _LONG)),
    "isa": (ctypes.c_char_p, ()),
    "set_isa": (_INT, (ctypes.c_char_p,)),
    "threads": (_INT, ()),
    "set_threads": (None, (_INT, _POINTER, _INT)),
    "pack": (None, (_POINTER, _LONG, _INT, _LONG, _LONG, _LONG, _LONG, _POINTER)),
    "linear": (None, (_POINTER, _LONG, _POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _LONG)),
    "ffn": (
        None,
        (_POINTER, _LONG, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _LONG),
    ),
    "tiles": (ctypes.c_char_p, ()),
    "set_tiles": (_INT, (ctypes.c_char_p,)),
    "linear_tiled": (None, (_POINTER, _LONG, _POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _LONG, _INT)),
    "gate_up_tiled": (
        None,
        (_POINTER, _LONG, _POINTER, _INT, _POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _LONG),
    ),
    "dequantize": (None, (_POINTER, _INT, _LONG, _LONG, _LONG, _LONG, _POINTER, _LONG, _INT)),
    "get_rows": (None, (_POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _POINTER)),
    "attention": (
        None,
        (
            _POINTER,
            _POINTER,
            _POINTER,
            _LONG,
            _LONG,
            _INT,
            _INT,
            _POINTER,
            _LONG,
            _LONG,
            _LONG,
            _INT,
            _INT,
            _INT,
            ctypes.c_float,
            _POINTER,
        ),
    ),
    "memcpy": (None, (_POINTER, _POINTER, ctypes.c_size_t)),
    "read": (_DOUBLE, (_POINTER, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64))),
    "exchange_nbytes": (_LONG, (_INT, _LONG, _LONG)),
    "exchange_open": (_POINTER, (_POINTER, _INT, _INT, _LONG, _LONG)),
    "exchange_close": (None, (_POINTER,)),
    "exchange_sum": (_INT, (_POINTER, _POINTER, _LONG, _DOUBLE)),
    "exchange_gather": (_INT, (_POINTER, _POINTER, _LONG, _POINTER, ctypes.POINTER(_LONG), _DOUBLE)),
    "exchange_put": (_INT, (_POINTER, _POINTER, _LONG, _INT, _DOUBLE)),
    "exchange_take": (_INT, (_POINTER, _POINTER, _LONG, _INT, _DOUBLE)),
}


def open_library(path: Path) -> tuple[dict[str, Any], str | None]:
    """The functions of the library at `path` by short name, or why there are none and what to do."""
    if not path.exists():
        return {}, f"{path.name} was not built: with a C++20 compiler at hand, run {BUILD}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return {}, f"{path} cannot be loaded: {error}"
    number = library.pshard_abi() if hasattr(library, "pshard_abi") else 0
    if number != ABI:
        return {}, f"{path.name} is of interface {number} and this version calls {ABI}: run {BUILD}"
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"pshard_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions, None


_PATH = Path(__file__).with_name("_native" + str(sysconfig.get_config_var("EXT_SUFFIX")))
_C, _WHY_MISSING = open_library(_PATH)
_TYPE_NUMBERS = {name: _C["type"](name.encode()) for name in QUANT_TYPES} if _WHY_MISSING is None else {}


def is_available() -> bool:
    """True when the C++ library was built and loads."""
    return _WHY_MISSING is None


def why_missing() -> str | None:
    """Why the library is not there, in one clause; None when it is."""
    return _WHY_MISSING


def why_stale() -> str | None:
    """What to say of a library that works but was built from other sources than are at hand; None of any other."""
    here = digest_sources(_PATH.with_name("csrc"))
    if not is_available() or here in (0, _call("sources")):
        return None
    return f"{_PATH.name} was built from other sources than those beside it: run {BUILD}"


def exchange_functions() -> dict[str, Any]:
    """The C functions of csrc/allreduce.cpp by the name after `exchange_`; shared_memory.py says what they do."""
    return {name.removeprefix("exchange_"): _C[name] for name in _SIGNATURES if name.startswith("exchange_")}


def isa() -> str:
    """The instruction set in use: "avx512_vnni", "avx2" or "portable"."""
    return _call("isa").decode()


def set_isa(name: str) -> None:
    """Use another instruction set than the best one (for tests). Raises ValueError where this machine lacks it."""
    if _call("set_isa", name.encode()) != 0:
        raise ValueError(f"this machine cannot run the {name!r} kernels")


def tiles() -> str:
    """The matrix unit that `linear_tiled` uses: "amx", or "" where there is none."""
    return _call("tiles").decode()


def set_tiles(name: str) -> None:
    """Use "amx", "emulated" (loops, for tests) or "" (none). Raises ValueError where this machine lacks it."""
    if _call("set_tiles", name.encode()) != 0:
        raise ValueError(f"this machine cannot run {name!r} tiles")


def threads() -> int:
    """Threads of the pool, the caller included; at first as many as this process may use processors."""
    return _call("threads")


def set_threads(n: int, cpus: Sequence[int] | None = None) -> None:
    """Rebuild the pool with n threads, the caller included.

    cpus[i] is the processor that worker i is bound to (i = 1..n-1); cpus[0] is the place left to the caller, who is
    not bound, because threads that it starts later would inherit that.
    """
    if n < 1 or (cpus is not None and len(cpus) < n):
        raise ValueError(f"set_threads({n}, {cpus}): needs n >= 1 and a processor for each thread")
    array = (ctypes.c_int * len(cpus))(*cpus) if cpus else None
    _call("set_threads", n, array, len(cpus) if cpus else 0)


def pack(
    raw: Buffer,
    qtype: str,
    rows: int,
    cols: int,
    out: Buffer,
    *,
    row_start: int = 0,
    row_stop: int | None = None,
    col_start: int = 0,
    col_stop: int | None = None,
) -> None:
    """Pack the given rows and columns of a GGUF matrix [rows, cols] into `out`, byte for byte as `pack_reference`.

    `out` holds packed_nbytes(qtype, row_stop - row_start, col_stop - col_start) bytes. Columns are cut at multiples of
    the type's block.
    """
    row_stop, col_stop = rows if row_stop is None else row_stop, cols if col_stop is None else col_stop
    q = QUANT_TYPES[qtype]
    _check_range("row", row_start, row_stop, rows)
    _check_range("col", col_start, col_stop, cols)
    if cols % q.block or col_start % q.block or col_stop % q.block:
        raise ValueError(f"{qtype} columns {col_start}:{col_stop} of {cols} are not multiples of the block, {q.block}")
    row_bytes = cols // q.block * q.nbytes
    _call("pack", _at(raw), row_bytes, _type(qtype), row_start, row_stop, col_start, col_stop, _at(out))


def linear(
    x: Buffer,
    w: Buffer,
    qtype: str,
    rows: int,
    cols: int,
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
) -> None:
    """out = x @ W.T with W [rows, cols] packed: x f32 [tokens, cols] -> out f32 [tokens, rows]. Any number of tokens.

    Quantised weights meet activations rounded to int8 with one scale per 32 columns; that adds a relative error (RMS of
    the difference over RMS of the exact result, normal activations) of 0.51 to 0.54%, whatever the type. Plain weights
    (F32, F16, BF16) meet f32 activations in f32 sums; beyond 16 tokens torch's bf16 linear is faster for those.
    """
    _check_cols(qtype, cols)
    _call("linear", _at(x), x_stride or cols, _at(w), _type(qtype), rows, cols, _at(out), out_stride or rows, tokens)


def ffn(
    x: Buffer,
    gate: Buffer,
    gate_qtype: str,
    up: Buffer,
    up_qtype: str,
    down: Buffer,
    down_qtype: str,
    hidden: int,
    inner: int,
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
) -> None:
    """SwiGLU in one call: out = (silu(x Wg^T) * (x Wu^T)) Wd^T, x and out f32 [tokens, hidden].

    gate and up are packed [inner, hidden], down is packed [hidden, inner]. Precision as in `linear`.
    """
    for qtype, cols in ((gate_qtype, hidden), (up_qtype, hidden), (down_qtype, inner)):
        _check_cols(qtype, cols)
    weights = (_at(gate), _type(gate_qtype), _at(up), _type(up_qtype), _at(down), _type(down_qtype))
    _call("ffn", _at(x), x_stride or hidden, *weights, hidden, inner, _at(out), out_stride or hidden, tokens)


def gate_up(
    x: Buffer,
    gate: Buffer,
    gate_qtype: str,
    up: Buffer,
    up_qtype: str,
    inner: int,
    hidden: int,
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
) -> None:
    """The first half of `ffn`: out = silu(x Wg^T) * (x Wu^T), x f32 [tokens, hidden], out f32 [tokens, inner]."""
    for qtype in (gate_qtype, up_qtype):
        _check_cols(qtype, hidden)
    weights = (_at(gate), _type(gate_qtype), _at(up), _type(up_qtype), None, -1)
    _call("ffn", _at(x), x_stride or hidden, *weights, hidden, inner, _at(out), out_stride or inner, tokens)


def linear_tiled(
    x: Buffer,
    w: Buffer,
    qtype: str,
    rows: int,
    cols: int,
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
    accumulate: bool = False,
) -> None:
    """As `linear` on the matrix unit that tiles() names: weights and activations rounded to bf16, sums in f32.

    Rounding adds a relative error of about 0.2%. With `accumulate` the product is added to `out`.
    """
    _check_cols(qtype, cols)
    _check_tiles()
    shape = (_at(out), out_stride or rows, tokens, accumulate)
    _call("linear_tiled", _at(x), x_stride or cols, _at(w), _type(qtype), rows, cols, *shape)


def gate_up_tiled(
    x: Buffer,
    gate: Buffer,
    gate_qtype: str,
    up: Buffer,
    up_qtype: str,
    inner: int,
    hidden: int,
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
) -> None:
    """As `gate_up`, with the precision of `linear_tiled`; silu is applied to the f32 sums."""
    for qtype in (gate_qtype, up_qtype):
        _check_cols(qtype, hidden)
    _check_tiles()
    weights = (_at(gate), _type(gate_qtype), _at(up), _type(up_qtype), inner, hidden)
    _call("gate_up_tiled", _at(x), x_stride or hidden, *weights, _at(out), out_stride or inner, tokens)


def dequantize(
    w: Buffer,
    qtype: str,
    rows: int,
    cols: int,
    row_start: int,
    row_stop: int,
    out: Buffer,
    out_dtype: str = "f32",
    *,
    out_stride: int | None = None,
) -> None:
    """Rows [row_start, row_stop) of a packed matrix to "f32" (exactly the GGUF values) or "bf16" (those, rounded)."""
    _check_cols(qtype, cols)
    _check_range("row", row_start, row_stop, rows)
    if out_dtype not in ("f32", "bf16"):
        raise ValueError(f"out_dtype is {out_dtype!r}, not 'f32' or 'bf16'")
    bf16 = out_dtype == "bf16"
    _call("dequantize", _at(w), _type(qtype), rows, cols, row_start, row_stop, _at(out), out_stride or cols, bf16)


def get_rows(w: Buffer, qtype: str, rows: int, cols: int, ids: Buffer, n: int, out: Buffer) -> None:
    """Look up n rows (i64 ids, each in [0, rows)) of a packed matrix: out f32 [n, cols], exactly the GGUF values."""
    _check_cols(qtype, cols)
    address = _at(ids)
    for i in (ctypes.c_int64 * n).from_address(address) if n else ():
        if not 0 <= i < rows:
            raise IndexError(f"row {i} of a matrix of {rows} rows")
    _call("get_rows", _at(w), _type(qtype), rows, cols, address, n, _at(out))


def attention(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    kv_types: tuple[str, str],
    n_cells_before: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    out: Buffer,
    *,
    cell_strides: tuple[int, int] | None = None,
    blocks: tuple[Buffer, int] | None = None,
) -> None:
    """Causal attention of new tokens: q and out f32 [tokens, heads, head_dim].

    k and v are cells of kv_heads * head_dim numbers of a KV type each ("f32", "f16", "bf16", "q8_0": see kv_codec); one
    cell begins `cell_strides` bytes after the other (default: no gaps). The new tokens' cells are already written:
    token i sees cells 0..n_cells_before+i. Head h reads kv head h // (heads // kv_heads). Softmax and sums in f32.
    blocks: numbers (i32) of the blocks that the cells lie in, and the cells of a block, a multiple of 64; without them
    cells follow each other.
    """
    if tokens == 0 or heads == 0:
        return  # a rank may hold no head at all
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not share {kv_heads} kv heads evenly")
    strides = cell_strides or tuple(kv_nbytes(kind, kv_heads * head_dim) for kind in kv_types)
    types = tuple(_type(kind.upper()) for kind in kv_types)
    shape = (n_cells_before, tokens, heads, kv_heads, head_dim)
    table, block_cells = (_at(blocks[0]), blocks[1]) if blocks else (None, 0)
    _call("attention", _at(q), _at(k), _at(v), *strides, *types, table, block_cells, *shape, scale, _at(out))


def memcpy(to: Buffer, source: Buffer, nbytes: int) -> None:
    """Copy nbytes with all threads."""
    _call("memcpy", _at(to), _at(source), nbytes)


def read_bandwidth(data: Buffer, nbytes: int) -> float:
    """GB/s (1e9 bytes) at which all threads read nbytes once: the ceiling of every kernel whose weights are in DRAM."""
    total = ctypes.c_uint64()
    return nbytes / _call("read", _at(data), nbytes, ctypes.byref(total)) / 1e9


def record_nbytes(qtype: str, cols: int) -> int:
    """Bytes of 16 rows as the C++ library counts them; a test compares with pshard.quant."""
    return _call("record_nbytes", _type(qtype), cols)


def _call(name: str, *arguments: Any) -> Any:
    if _WHY_MISSING is not None:
        raise RuntimeError(f"no CPU kernels: {_WHY_MISSING}")
    return _C[name](*arguments)


def _at(buffer: Buffer) -> int:
    if isinstance(buffer, int):
        return buffer
    if hasattr(buffer, "data_ptr"):
        return buffer.data_ptr()
    return buffer.ctypes.data


def _type(qtype: str) -> int:
    if _WHY_MISSING is None and _TYPE_NUMBERS[qtype] < 0:
        raise ValueError(f"no CPU kernel for quant type {qtype}")
    return _TYPE_NUMBERS.get(qtype, -1)


def _check_cols(qtype: str, cols: int) -> None:
    if cols % QUANT_TYPES[qtype].block:
        raise ValueError(f"{cols} columns are not a multiple of the {qtype} block, {QUANT_TYPES[qtype].block}")


def _check_tiles() -> None:
    if not tiles():
        raise RuntimeError("this machine has no matrix unit for tiles; use linear or gate_up")


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{what}s {start}:{stop} of {size}")
