"""The CPU kernels: a ctypes front to the C++ library built from csrc/ (packed weights, docs/packed-layout.md).

Buffers are addresses (int), numpy arrays or anything with `data_ptr()` (torch tensors), in host memory and in C order
except for row strides. A weight is an `api.Packed` whose data is such a buffer. Strides count elements, not bytes.
Sizes are the caller's promise: C++ cannot see them. Every call releases the GIL and returns when the result is written;
calls from several threads run one after the other.

Results do not depend on the number of threads, and one sequence's do not depend on what is computed with it; nor do a
token's, but for attention, whose cells are shared out by how many new tokens their sequence has.
"""

import ctypes
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pshard.model_config import limit_of
from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.codebooks import BOOK_TYPES, load_book
from pshard.runtime.kernels.cpu.sources import digest_sources
from pshard.units.kv_cells import kv_nbytes

if TYPE_CHECKING:
    from pshard.model_config import Experts
    from pshard.runtime.kernels.api import DeltaWeights, OpenNet, Packed

Buffer = Any  # int address, numpy array or torch tensor

ABI = 36  # as csrc/api.cpp has it
BUILD = "pip install -e . --no-build-isolation --no-deps in the folder of pshard"

_TYPES = {
    "v": None, "i": ctypes.c_int, "u": ctypes.c_uint32, "l": ctypes.c_int64, "z": ctypes.c_size_t,
    "f": ctypes.c_float, "d": ctypes.c_double, "p": ctypes.c_void_p, "s": ctypes.c_char_p,
}  # fmt: skip
_SIGNATURES = {  # result and arguments, a letter of _TYPES each
    "sources": ("u", ""),
    "type": ("i", "s"),
    "record_nbytes": ("l", "il"),
    "isa": ("s", ""),
    "set_isa": ("i", "s"),
    "threads": ("i", ""),
    "set_threads": ("v", "ipi"),
    "expect": ("v", ""),
    "sleeping": ("i", ""),
    "recalls": ("l", ""),
    "stop_helpers": ("i", "i"),
    "guard_map": ("v", "pz"),
    "unguard_map": ("v", "p"),
    "pack": ("v", "plillllp"),
    "set_book": ("v", "ipl"),
    "linear": ("v", "plpillplli"),
    "linear_group": ("v", "plpppilpll"),
    "ffn": ("v", "plpipipillpllii"),
    "tiles": ("s", ""),
    "set_tiles": ("i", "s"),
    "linear_tiled": ("v", "plpillplli"),
    "gate_up_tiled": ("v", "plpipillplli"),
    "dequantize": ("v", "pillllpli"),
    "get_rows": ("v", "pillplp"),
    "attention": ("v", "plpplliiplpliiifpllpfpiplll"),
    "rms_norm": ("v", "plpfllplip"),
    "add_bias": ("v", "plllp"),
    "warm_rows": ("v", "plllpp"),
    "centre_rows": ("v", "plll"),
    "bend_rows": ("v", "pllliplf"),
    "norm_heads": ("v", "plllplfi"),
    "sum_squares": ("v", "pllllp"),
    "norm_wide": ("v", "pllllpppllf"),
    "gate_rows": ("v", "plplllli"),
    "gate_mul": ("v", "plplllipl"),
    "resize_heads": ("v", "plllllfpl"),
    "times_rows": ("v", "plplll"),
    "add_rows": ("v", "plplll"),
    "copy_rows": ("v", "plplll"),
    "weigh_rows": ("v", "plplll"),
    "scale_rows": ("v", "plllplpl"),
    "rope_store": ("v", "plliiippfpplippplpplliii"),
    "head_products": ("v", "pllpilllplll"),
    "store_latent": ("v", "plpllpllliipfpplippplpli"),
    "route": ("v", "plpiilppplliiiiifpp"),
    "choose_chunks": ("v", "pplliiffpp"),
    "experts": ("v", "plpplipiiiillpppiiipppplip"),
    "experts_on_demand": ("v", "plpplipiiiillpppiiipppplipl"),
    "demand_open": ("p", "plllppplpppp"),
    "demand_layer": ("v", "plpp"),
    "demand_table": ("v", "pp"),
    "demand_close": ("v", "p"),
    "delta_net": ("v", "plplplplppppfiiiiipppplplpl"),
    "settle_states": ("v", "iiiipplliplll"),
    "short_conv": ("v", "plpllppplplpl"),
    "enter_streams": ("v", "plipllllpfpl"),
    "mix_streams": ("v", "plpllllplpl"),
    "gate_grams": ("v", "plplplpplllfpl"),
    "add_grams": ("v", "plppllllfplppplpl"),
    "store_index": ("v", "plpllllpplfpplippplp"),
    "choose_cells": ("v", "plplllllplppll"),
    "callable": ("i", "s"),
    "replay": ("v", "pl"),
    "memcpy": ("v", "ppz"),
    "crc32c": ("u", "pli"),
    "touch": ("v", "pz"),
    "read": ("d", "pzp"),
    "read_seconds": ("d", ""),
    "exchange_nbytes": ("l", "ill"),
    "exchange_open": ("p", "piill"),
    "exchange_close": ("v", "p"),
    "exchange_sum": ("i", "ppld"),
    "exchange_gather": ("i", "pplppd"),
    "exchange_put": ("i", "pplid"),
    "exchange_take": ("i", "pplid"),
    "copiers_open": ("p", "i"),
    "copiers_close": ("v", "p"),
    "copiers_job": ("p", "pppz"),
    "copiers_run": ("v", "p"),
    "reader_open": ("p", "iildddild"),
    "reader_file": ("i", "piils"),
    "reader_submit": ("p", "pplp"),
    "reader_run": ("v", "p"),
    "reader_ask": ("l", "pplp"),
    "reader_wait": ("v", "pl"),
    "reader_cancel": ("v", "p"),
    "reader_bytes": ("l", "p"),
    "reader_waited": ("l", "pp"),
    "reader_failure": ("i", "ppl"),
    "reader_close": ("v", "pd"),
    "relay_open": ("p", ""),
    "relay_close": ("v", "p"),
    "relay_start": ("v", "ppl"),
    "relay_finish": ("i", "pd"),
    "relay_give_up": ("v", "p"),
}


@dataclass(frozen=True)
class ExpertMatrices:
    """What `experts` computes with. addresses: i64 [3, count], where each gate, up and down begins; 0: not here.

    qtypes: those of gate and up [inner, hidden] and of down [hidden, inner]. biases: f32 [count, inner] twice and
    [count, hidden] or None. tiles_from: experts with so many tokens take gate and up, and down, to the matrix unit.
    """

    addresses: Buffer
    qtypes: tuple[str, str, str]
    hidden: int
    inner: int
    biases: tuple[Buffer, Buffer, Buffer | None] | None
    tiles_from: tuple[int, int]


def open_library(path: Path) -> tuple[dict[str, Any], str | None]:
    """The functions of the library at `path` by short name, or why there are none and what to do."""
    if not path.exists():
        if not sys.platform.startswith("linux"):
            return {}, f"the C++ kernels are for Linux, and this is {sys.platform}"
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
        function.restype, function.argtypes = _TYPES[result], [_TYPES[letter] for letter in arguments]
        functions[name] = function
    return functions, None


# what a gate's numbers pass before they multiply an up's: as csrc/kernels.h numbers them; "gelu16" is that of a table
# of half-precision numbers by such numbers, as llama.cpp has it
GATES = ("silu", "gelu", "gelu16", "clamped", "relu")


def _gate_number(activation: str) -> int:
    """As csrc/kernels.h numbers gates; the bits of a limit for one that has one."""
    limit = limit_of(activation)
    return struct.unpack("<i", struct.pack("<f", limit))[0] if limit else GATES.index(activation)


_SCORES = ("softmax", "sigmoid", "chosen")  # as csrc/experts/route.cpp numbers them
_RECORDED: dict[int, list[tuple[str, tuple]]] = {}  # by thread, where its calls are written down
_PATH = Path(__file__).with_name("_native.so")
_C, _WHY_MISSING = open_library(_PATH)
_TYPE_NUMBERS = {name: _C["type"](name.encode()) for name in QUANT_TYPES} if _WHY_MISSING is None else {}


def library_path() -> Path:
    """Where the C++ library is, or belongs."""
    return _PATH


def is_available() -> bool:
    """True when the C++ library was built and loads."""
    return _WHY_MISSING is None


def why_missing() -> str | None:
    """Why the library is not there, in one clause; None when it is."""
    return _WHY_MISSING


@cache
def _digest_once(folder: Path) -> int:
    """Of sources at hand, for every engine of this process: its library is loaded once too."""
    return digest_sources(folder)


def why_stale() -> str | None:
    """What to say of a library that works but was built from other sources than are at hand; None of any other."""
    here = _digest_once(_PATH.with_name("csrc"))
    if not is_available() or here in (0, _function("sources")()):
        return None
    return f"{_PATH.name} was built from other sources than those beside it: run {BUILD}"


def functions_of(group: str) -> dict[str, Any]:
    """The C functions whose names begin with `group` and an underscore, by what follows; who calls them says what they
    do: "exchange" (ranks/shared_memory.py), "copiers" (devices/copiers.py), "reader" (memory/disk/reader.py),
    "demand" (memory/demand_slots.py)."""
    return {name.removeprefix(f"{group}_"): _C[name] for name in _SIGNATURES if name.startswith(f"{group}_")}


def type_number(qtype: str) -> int:
    """How the library calls a quant type."""
    return _TYPE_NUMBERS[qtype]


def crc32c(address: int, nbytes: int, plain: bool = False) -> int:
    """The CRC32C (Castagnoli) of so many bytes at an address. plain: by tables, for tests."""
    return _function("crc32c")(address, nbytes, int(plain))


def guard_map(address: int, nbytes: int) -> None:
    """From now on pages of that mapped file which are gone read as zeros, instead of ending the process (SIGBUS)."""
    _question("guard_map")(address, nbytes)


def unguard_map(address: int) -> None:
    """The mapping there is gone, and something else may come there. Python's collector calls this whenever it finds a
    mapping, also amid work that is written down, of which it is no part."""
    _question("unguard_map")(address)


def isa() -> str:
    """The instruction set in use: "avx512_vnni", "avx2" or "portable"."""
    return _function("isa")().decode()


def set_isa(name: str) -> None:
    """Use another instruction set than the best one (for tests). Raises ValueError where this machine lacks it."""
    if _function("set_isa")(name.encode()) != 0:
        raise ValueError(f"this machine cannot run the {name!r} kernels")


def tiles() -> str:
    """The matrix unit that `linear_tiled` uses: "amx", or "" where there is none."""
    return _question("tiles")().decode()


def set_tiles(name: str) -> None:
    """Use "amx", "emulated" (loops, for tests) or "" (none). Raises ValueError where this machine lacks it."""
    if _function("set_tiles")(name.encode()) != 0:
        raise ValueError(f"this machine cannot run {name!r} tiles")


def threads() -> int:
    """Threads of the pool, the caller included; at first as many as this process may use processors."""
    return _function("threads")()


def set_threads(n: int, cpus: Sequence[int] | None = None) -> None:
    """Rebuild the pool with n threads, the caller included.

    Workers keep to `cpus`, at least n of them. The caller does not, as threads that it starts inherit where it may run;
    nor is a worker bound to one of them, as another program may need just that one.
    """
    if n < 1 or (cpus is not None and len(cpus) < n):
        raise ValueError(f"set_threads({n}, {cpus}): needs n >= 1 and a processor for each thread")
    array = (ctypes.c_int * len(cpus))(*cpus) if cpus else None
    _function("set_threads")(n, array, len(cpus) if cpus else 0)


def expect_work() -> None:
    """Say that this thread waits for something else now and calls kernels after that. The pool's threads wake meanwhile
    and stay awake for a millisecond at most. Nothing happens where the last such call came later or never, or without
    the library."""
    if _WHY_MISSING is None:
        _C["expect"]()


def sleeping() -> int:
    """How many threads of the pool sleep: work has to wake them."""
    return _function("sleeping")()


def recalls() -> int:
    """How often threads of the pool were made to leave work because the system had put them aside."""
    return _function("recalls")()


def stop_helpers(point: int) -> int:
    """For tests: threads of the pool but the caller stop when they come to that Point of csrc/threads/pool.h, as if the
    system had put them aside there; 0: they go on. Returns how many stand still."""
    return _function("stop_helpers")(point)


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
    part = (row_start, row_stop, col_start, col_stop)
    _function("pack")(_at(raw), row_bytes, _type(qtype), *part, _at(out))


def linear(
    x: Buffer,
    weight: "Packed",
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
    accumulate: bool = False,
) -> None:
    """out = x @ W.T: x f32 [tokens, cols] -> out f32 [tokens, rows]. Any number of tokens. With `accumulate` the
    product is added to `out`.

    Quantised weights meet activations rounded to int8 with one scale per 32 columns; that adds a relative error (RMS of
    the difference over RMS of the exact result, normal activations) of 0.51 to 0.54%, whatever the type. Plain weights
    (F32, F16, BF16) meet f32 activations in f32 sums; beyond 16 tokens torch's bf16 linear is faster for those.
    """
    rows, cols = weight.rows, weight.cols
    result = (_at(out), out_stride or rows, tokens, accumulate)
    _function("linear")(_at(x), x_stride or cols, *_packed(weight), rows, cols, *result)


def linear_group(
    x: Buffer, weights: Sequence["Packed"], out: Buffer, tokens: int, *, x_stride: int, out_stride: int
) -> None:
    """`linear` with several matrices of as many columns, whose outputs lie side by side in rows of `out`."""
    n = len(weights)
    addresses, types = zip(*map(_packed, weights))
    rows = (ctypes.c_int64 * n)(*[weight.rows for weight in weights])
    matrices = ((ctypes.c_void_p * n)(*addresses), (ctypes.c_int * n)(*types), rows, n, weights[0].cols)
    _function("linear_group")(_at(x), x_stride, *matrices, _at(out), out_stride, tokens)


def ffn(
    x: Buffer,
    gate: "Packed",
    up: "Packed",
    down: "Packed",
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
    accumulate: bool = False,
    gate_kind: str = "silu",
) -> None:
    """SwiGLU in one call: out = (silu(x Wg^T) * (x Wu^T)) Wd^T, x and out f32 [tokens, hidden].

    With `accumulate` the result is added to `out`; gate_kind: see `GATES`. gate and
    up are [inner, hidden], down is [hidden, inner]. Precision as in `linear`.
    """
    hidden, inner = down.rows, down.cols
    result = (_at(out), out_stride or hidden, tokens, accumulate, _gate_number(gate_kind))
    weights = (*_packed(gate), *_packed(up), *_packed(down))
    _function("ffn")(_at(x), x_stride or hidden, *weights, hidden, inner, *result)


def gate_up(
    x: Buffer,
    gate: "Packed",
    up: "Packed",
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
    gate_kind: str = "silu",
) -> None:
    """The first half of `ffn`: out = silu(x Wg^T) * (x Wu^T), x f32 [tokens, hidden], out f32 [tokens, inner]."""
    inner, hidden = gate.rows, gate.cols
    weights = (*_packed(gate), *_packed(up), None, -1)  # no down
    result = (_at(out), out_stride or inner, tokens, False, _gate_number(gate_kind))
    _function("ffn")(_at(x), x_stride or hidden, *weights, hidden, inner, *result)


def linear_tiled(
    x: Buffer,
    weight: "Packed",
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
    _check_tiles()
    rows, cols = weight.rows, weight.cols
    result = (_at(out), out_stride or rows, tokens, accumulate)
    _function("linear_tiled")(_at(x), x_stride or cols, *_packed(weight), rows, cols, *result)


def gate_up_tiled(
    x: Buffer,
    gate: "Packed",
    up: "Packed",
    out: Buffer,
    tokens: int,
    *,
    x_stride: int | None = None,
    out_stride: int | None = None,
    gate_kind: str = "silu",
) -> None:
    """As `gate_up`, with the precision of `linear_tiled`; silu is applied to the f32 sums."""
    _check_tiles()
    inner, hidden = gate.rows, gate.cols
    weights, kind = (*_packed(gate), *_packed(up), inner, hidden), _gate_number(gate_kind)
    _function("gate_up_tiled")(_at(x), x_stride or hidden, *weights, _at(out), out_stride or inner, tokens, kind)


def dequantize(
    weight: "Packed",
    row_start: int,
    row_stop: int,
    out: Buffer,
    out_dtype: str = "f32",
    *,
    out_stride: int | None = None,
) -> None:
    """Rows [row_start, row_stop) of a packed matrix to "f32" (exactly the GGUF values) or "bf16" (those, rounded)."""
    rows, cols = weight.rows, weight.cols
    _check_range("row", row_start, row_stop, rows)
    if out_dtype not in ("f32", "bf16"):
        raise ValueError(f"out_dtype is {out_dtype!r}, not 'f32' or 'bf16'")
    result = (_at(out), out_stride or cols, out_dtype == "bf16")
    _function("dequantize")(*_packed(weight), rows, cols, row_start, row_stop, *result)


def get_rows(weight: "Packed", ids: Buffer, n: int, out: Buffer) -> None:
    """Look up n rows (i64 ids, each in [0, rows)) of a packed matrix: out f32 [n, cols], exactly the GGUF values."""
    address = _at(ids)
    asked = np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(address)) if n else np.zeros(1, np.int64)
    for i in (asked.min(), asked.max()):
        if not 0 <= i < weight.rows:
            raise IndexError(f"row {i} of a matrix of {weight.rows} rows")
    _function("get_rows")(*_packed(weight), weight.rows, weight.cols, address, n, _at(out))


def make_spans(segments: Sequence[tuple[int, int, int, int]]) -> "ctypes.Array[ctypes.c_int64]":
    """The `segments` of `attention` as the library reads them."""
    return (ctypes.c_int64 * (4 * len(segments)))(*(n for segment in segments for n in segment))


def attention(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    kv_types: tuple[str, str],
    segments: "Sequence[tuple[int, int, int, int]] | ctypes.Array[ctypes.c_int64]",
    heads: tuple[int, int, int],
    scale: float,
    out: Buffer,
    *,
    strides: tuple[int, int] | None = None,
    cell_strides: tuple[int, int] | None = None,
    blocks: tuple[Buffer, int] | None = None,
    seen: tuple[int, Buffer | None] = (0, None),
    bent: tuple[float, Buffer | None, bool] = (0.0, None, False),
    chosen: tuple[Buffer | None, int, int, int] = (None, 0, 1, 0),
) -> None:
    """Causal attention of new tokens of several sequences: q and out f32 [tokens, heads, head_dim].

    k and v are cells of kv_heads * head_dim numbers of a KV type each ("f32", "f16", "bf16", "q8_0", "q4_0": see
    kv_codec); one cell begins `cell_strides` bytes after the other (default: no gaps). The new tokens' cells are
    already written: token i of a sequence sees cells 0..before+i. Head h reads kv head h // (heads // kv_heads).
    Softmax in f32.

    Args:
        segments: of each sequence (its first row in q, its rows, cells before them, its first item in `blocks`), or
            these as `make_spans` has them.
        heads: (heads, kv heads, head_dim).
        strides: elements from row to row of q and of out; default: no gaps.
        blocks: numbers (i32) of the blocks that the cells lie in, and the cells of a block, a multiple of 64; without
            them cells follow each other.
        seen: a token sees so many cells at most, the last of which is its own (0: all), and sinks: f32 [heads], a logit
            of each head that takes part in the softmax and has no value (None: there are none).
        bent: cap, slopes (f32 [heads]) and whether windows are chunks, as in api.Scoring.
        chosen: words as `choose_cells` leaves them, elements from row to row of these, and its rule; without words all
            cells are seen. No slopes and no window beside them.
    """
    n_heads, kv_heads, dim = heads
    if not len(segments) or n_heads == 0:
        return  # a rank may hold no head at all
    if n_heads % kv_heads:
        raise ValueError(f"{n_heads} heads do not share {kv_heads} kv heads evenly")
    q_stride, out_stride = strides or (n_heads * dim, n_heads * dim)
    cell_nbytes = cell_strides or _cell_nbytes(kv_types, kv_heads * dim)
    cells = (_at(k), _at(v), *cell_nbytes, *_cell_types(kv_types))
    table = (_at(blocks[0]), blocks[1]) if blocks else (None, 0)
    spans = segments if isinstance(segments, ctypes.Array) else make_spans(segments)
    queries = (spans, len(spans) // 4, *heads, scale)
    window, sinks = seen
    cap, slopes, chunked = bent
    result = (_at(out), out_stride, window, None if sinks is None else _at(sinks))
    words, *rule = chosen
    more = cap, None if slopes is None else _at(slopes), chunked, None if words is None else _at(words), *rule
    _function("attention")(_at(q), q_stride, *cells, *table, *queries, *result, *more)


def rms_norm(
    x: Buffer,
    weight: Buffer,
    eps: float,
    tokens: int,
    width: int,
    out: Buffer,
    *,
    strides: tuple[int, int],
    accumulate: bool = False,
    scale: Buffer | None = None,
) -> None:
    """out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, f32, rows of `width`, `strides` apart in x and in out,
    which are not the same. With `accumulate` it is added to `out`, which is then multiplied by `scale`, f32 [1]."""
    lengths, factor = (tokens, width), None if scale is None else _at(scale)
    result = _at(out), strides[1], accumulate, factor
    _function("rms_norm")(_at(x), strides[0], _at(weight), eps, *lengths, *result)


def add_bias(x: Buffer, shape: tuple[int, int], stride: int, bias: Buffer) -> None:
    """x += bias, f32 [tokens, width] and [width]; shape: of x, whose rows begin `stride` elements apart."""
    _function("add_bias")(_at(x), stride, *shape, _at(bias))


def centre_rows(x: Buffer, shape: tuple[int, int], stride: int) -> None:
    """x[t] -= the mean of x[t], f32 of `shape`, rows `stride` apart."""
    _function("centre_rows")(_at(x), stride, *shape)


def warm_rows(x: Buffer, shape: tuple[int, int], stride: int, table: Buffer, position: Buffer) -> None:
    """x[t] *= table[position[t]], f32 [tokens, width] as in `add_bias`, f32 and i32 [tokens]; positions are read when
    the call is made, also when it is replayed."""
    _function("warm_rows")(_at(x), stride, *shape, _at(table), _at(position))


def bend_rows(x: Buffer, shape: tuple[int, int], stride: int, how: int, numbers: Buffer | None, limit: float) -> None:
    """x as `Kernels.bend_rows` bends it, f32 of `shape`, rows `stride` apart; how: its place among `BENDS`."""
    given = (None, 0) if numbers is None else (_at(numbers), numbers.shape[0])
    _function("bend_rows")(_at(x), stride, *shape, how, *given, limit)


def sum_squares(x: Buffer, shape: tuple[int, int], stride: int, first: int, out: Buffer) -> None:
    """out as `Kernels.sum_squares` has it, f32 [tokens, 2]; x f32 of `shape`, rows `stride` apart."""
    _function("sum_squares")(_at(x), stride, *shape, first, _at(out))


def norm_wide(
    x: Buffer,
    tokens: int,
    stride: int,
    widths: tuple[int, int],
    weights: tuple[Buffer, Buffer],
    sums: Buffer,
    of: tuple[int, int],
    eps: float,
) -> None:
    """x as `Kernels.norm_wide` has it, f32, rows `stride` apart; weights f32 of `widths`; sums f32 [tokens, 2]."""
    _function("norm_wide")(_at(x), stride, tokens, *widths, *map(_at, weights), _at(sums), *of, eps)


def norm_heads(
    x: Buffer, shape: tuple[int, int], stride: int, weight: Buffer, head: int, eps: float, centred: bool
) -> None:
    """x as `Kernels.norm_heads` has it, f32 of `shape`, rows `stride` apart; weight: f32 [shape[1]]."""
    _function("norm_heads")(_at(x), stride, *shape, _at(weight), head, eps, centred)


def gate_rows(
    x: Buffer, shape: tuple[int, int], strides: tuple[int, int], gate: Buffer, each: int = 1, curve: str = "sigmoid"
) -> None:
    """x *= curve(gate), f32 [tokens, width] and [tokens, width / each], rows `strides` apart: `Kernels.gate_rows`;
    relative error below 1e-6."""
    _function("gate_rows")(_at(x), strides[0], _at(gate), strides[1], *shape, each, curve == "softplus")


def gate_mul(
    x: Buffer, up: Buffer, shape: tuple[int, int], strides: tuple[int, int, int], out: Buffer, gate_kind: str = "silu"
) -> None:
    """out = act(x) * up, f32 of `shape`, as `ffn` makes it of two products; strides: from row to row of x, up, out,
    which may be x."""
    kind = _gate_number(gate_kind)
    _function("gate_mul")(_at(x), strides[0], _at(up), strides[1], *shape, kind, _at(out), strides[2])


def copy_rows(x: Buffer, shape: tuple[int, int], strides: tuple[int, int], out: Buffer) -> None:
    """out[t] = x[t], f32 [tokens, width]; strides: from row to row of x and of out."""
    _function("copy_rows")(_at(x), strides[0], _at(out), strides[1], *shape)


def resize_heads(
    x: Buffer, tokens: int, heads: tuple[int, int, int], by: float, out: Buffer, strides: tuple[int, int]
) -> None:
    """out as `Kernels.resize_heads` has it, f32, rows `strides` apart. heads: so many, numbers of each in x, in out."""
    _function("resize_heads")(_at(x), strides[0], tokens, *heads, by, _at(out), strides[1])


def weigh_rows(x: Buffer, shape: tuple[int, int], strides: tuple[int, int], weights: Buffer) -> None:
    """x[t] *= weights[t], f32 [tokens, width] and [tokens], which become 1; strides: from row to row of both."""
    _function("weigh_rows")(_at(x), strides[0], _at(weights), strides[1], *shape)


def times_rows(x: Buffer, shape: tuple[int, int], strides: tuple[int, int], by: Buffer) -> None:
    """x *= by, f32 [tokens, width] both, rows `strides` apart."""
    _function("times_rows")(_at(x), strides[0], _at(by), strides[1], *shape)


def add_rows(x: Buffer, shape: tuple[int, int], strides: tuple[int, int], rows: Buffer) -> None:
    """x += rows, f32 [tokens, width] both, rows `strides` apart."""
    _function("add_rows")(_at(x), strides[0], _at(rows), strides[1], *shape)


def scale_rows(
    x: Buffer, shape: tuple[int, int], strides: tuple[int, int], hidden: Buffer, weight: Buffer, depth: int
) -> None:
    """x[t] *= sigmoid(hidden[t] . weight), f32 [tokens, width], [tokens, depth] and [depth]; rows of x and hidden are
    `strides` apart."""
    _function("scale_rows")(_at(x), strides[0], *shape, _at(hidden), strides[1], _at(weight), depth)


def rope_store(
    qkv: Buffer,
    stride: int,
    tokens: int,
    heads: tuple[int, int, int],
    norms: tuple[Buffer | None, Buffer | None, float],
    rope: tuple[Buffer, Buffer, int, str],
    rows: tuple[Buffer, Buffer, Buffer],
    cache: tuple[Buffer, Buffer, tuple[str, str], int],
    *,
    values: bool = False,
) -> None:
    """Normalise and rotate q and k heads in place, and write k and v into their cells.

    Args:
        qkv: f32 [tokens, (heads + 2 kv heads) head_dim], rows `stride` apart.
        heads: (heads, kv heads, head_dim).
        norms: weights f32 [head_dim] of an RMS norm of each q and each k head, or None, and the norms' eps.
        rope: cos and sin f32 [context, half], half, and the pairing as in pshard.model.Rope.
        rows: begin, position and blocks, i32, as in api.RowIndex.
        cache: k and v, their KV types, and the cells of a block as in `attention`; without gaps.
        values: each v head is normalised too, without weights.
    """
    q_norm, k_norm, eps = norms
    weights = (None if q_norm is None else _at(q_norm), None if k_norm is None else _at(k_norm), eps)
    cos, sin, half, pairing = rope
    turn = (_at(cos), _at(sin), half, pairing == "halves")
    begin, position, blocks = rows
    k, v, kv_types, block_cells = cache
    cell_nbytes = _cell_nbytes(kv_types, heads[1] * heads[2])
    index = (_at(begin), _at(position), _at(blocks), block_cells)
    cells = (*index, _at(k), _at(v), *cell_nbytes, *_cell_types(kv_types))
    _function("rope_store")(_at(qkv), stride, tokens, *heads, *weights, *turn, *cells, values)


def head_products(
    x: Buffer,
    stack: "Packed",
    heads: int,
    out: Buffer,
    tokens: int,
    *,
    x_strides: tuple[int, int],
    out_strides: tuple[int, int],
) -> None:
    """out[t, h] = x[t, h] @ W_h.T of the `heads` matrices in the stack, one below the other: `linear`. x and out f32,
    strides from token to token and from head to head."""
    matrix = (*_packed(stack), heads, stack.rows // heads, stack.cols)
    _function("head_products")(_at(x), *x_strides, *matrix, _at(out), *out_strides, tokens)


def store_latent(
    kv: tuple[Buffer, int],
    q: tuple[Buffer, int, int],
    out: tuple[Buffer, int, int],
    sizes: tuple[int, int, int],
    norm: tuple[Buffer, float],
    rope: tuple[Buffer, Buffer, int, str],
    rows: tuple[Buffer, Buffer, Buffer],
    cache: tuple[Buffer, str, int],
) -> None:
    """See `api.Kernels.store_latent`.

    Args:
        kv: f32, and elements from row to row; q and out: f32, elements from row to row and from head to head.
        sizes: (tokens, heads, rank). norm: weights f32 [rank], eps. rope, rows: as in `rope_store`.
        cache: the cells, their type, and the cells of a block; without gaps.
    """
    cos, sin, half, pairing = rope
    begin, position, blocks = rows
    cells, kind, block_cells = cache
    nbytes = kv_nbytes(kind, sizes[2] + 2 * half)
    turn = (_at(cos), _at(sin), half, pairing == "halves", _at(begin), _at(position), _at(blocks), block_cells)
    ends = (_at(kv[0]), kv[1], _at(q[0]), *q[1:], _at(out[0]), *out[1:])
    _function("store_latent")(*ends, *sizes, _at(norm[0]), norm[1], *turn, _at(cells), nbytes, _type(kind.upper()))


def route(
    x: Buffer,
    router: "Packed",
    rule: "Experts",
    routes: tuple[Buffer, Buffer],
    tokens: int,
    *,
    x_stride: int,
    biases: tuple[Buffer | None, Buffer | None, Buffer | None],
    rows: int | None = None,
) -> None:
    """Which experts tokens take: ids i32 and weights f32 [tokens, used] by the rule, from scores x @ router.T + bias.

    x f32 [tokens, cols]; router is F32, F16 or BF16 [count, cols]; biases f32 [count] are of the scores, and of the
    choice alone; the third is what weights are multiplied by at last. A token with a NaN among its scores
    takes the first experts, with weights that are NaN. rows: of ids, where they are more than the tokens: the rest
    becomes -1.
    """
    matrix = (*_packed(router), rule.count, router.cols, *(None if b is None else _at(b) for b in biases))
    choice = (_SCORES.index(rule.scores), rule.normed, rule.groups, rule.groups_used, rule.scale)
    more = tokens if rows is None else rows
    _function("route")(_at(x), x_stride, *matrix, tokens, more, rule.used, *choice, *map(_at, routes))


def choose_chunks(
    scored: tuple[Buffer, Buffer],
    sizes: tuple[int, int, int, int],
    scale: float,
    least: float,
    routes: tuple[Buffer, Buffer],
) -> None:
    """Routes as `Kernels.choose_chunks` has them. scored: ids i32 and scores f32 [tokens, experts]; sizes: tokens,
    experts, how many chunks a token takes, and how many experts share one; scale: of weights; least: of their sum."""
    _function("choose_chunks")(*map(_at, scored), *sizes, scale, least, *map(_at, routes))


def experts(
    x: Buffer,
    routes: tuple[Buffer, Buffer],
    matrices: ExpertMatrices,
    rule: "Experts",
    out: Buffer,
    scratch: tuple[Buffer, Buffer, Buffer],
    tokens: int,
    *,
    x_stride: int,
    out_stride: int,
    accumulate: bool = False,
    added: Buffer | None = None,
    demand: tuple[int, int] | None = None,
) -> None:
    """The sum of weight * (down . act(gate . x, up . x)) over the experts of each token that are here, in the order of
    its ids; x and out f32 [tokens, hidden].

    added: instead the sum over these, some of which earlier calls may have computed with the same scratch: like the
    addresses of `matrices`; 0: no sum yet.
    demand: a pool of slots (memory/demand_slots.py) and which of its layers this is: what is missed is read first.

    Which experts are chosen and where they lie is read when the call is made, also when it is replayed. Each expert's
    products have the bits of `gate_up` and `linear`, or on the matrix unit of their tiled twins.

    Args:
        routes: ids i32 and weights f32 [tokens, used], as `route` writes them.
        scratch: f32 [tokens * used * inner], f32 [tokens * used * hidden], i32 [4 * (tokens * used + count) + 64], or
            more.
    """
    m = matrices
    biases = (None if bias is None else _at(bias) for bias in m.biases or (None, None, None))
    weights = (_at(m.addresses), rule.count, *map(_type, m.qtypes), m.hidden, m.inner, *biases)
    last = demand or (_at(m.addresses if added is None else added),)
    result = (*map(_at, scratch), _at(out), out_stride, accumulate, *last)
    least, call = (_gate_number(rule.activation), *m.tiles_from), "experts_on_demand" if demand else "experts"
    _function(call)(_at(x), x_stride, *map(_at, routes), tokens, rule.used, *weights, *least, *result)


def delta_net(
    rows: Sequence[tuple[Buffer, int]],
    weights: "DeltaWeights",
    kept: tuple[Buffer, Buffer],
    index: tuple[Buffer, Buffer, int],
    out: tuple[Buffer, int],
    opened: tuple[Buffer | None, int],
) -> None:
    """See `api.Kernels.delta_net`; slots and offsets are read when the call is made, also when it is replayed.

    Args:
        rows: qkv, z, beta and alpha, f32, each with the elements from row to row; out, opened: the same. Without
            opened no row may be open.
        weights: heads of a multiple of 16 elements.
        kept: states and tails, all slots of each without gaps. index: slots, offsets and how many sequences.
    """
    w = weights
    vectors = (_at(w.conv), _at(w.dt_bias), _at(w.decay), _at(w.norm), w.eps)
    heads = (w.key_heads, w.value_heads, w.head, w.tiled, w.gate == "sigmoid")
    ends = [part for buffer, stride in rows for part in (_at(buffer), stride)]
    places = (*map(_at, kept), _at(index[0]), _at(index[1]), index[2])
    ends += (_at(out[0]), out[1])
    left = 0 if opened[0] is None else _at(opened[0]), opened[1]
    _function("delta_net")(*ends[:8], *vectors, *heads, *places, *ends[8:], *left)


def settle_states(net: "OpenNet", slot: int, rows: slice) -> None:
    """See `api.Kernels.settle_states`, of one net, f32."""
    kept = 0 if net.states is None else _at(net.states), _at(net.tails)
    opened = _at(net.opened), net.opened.stride(0)
    _function("settle_states")(*net.heads, net.tiled, *kept, *net.tails.shape[1:], slot, *opened, rows.start, rows.stop)


def short_conv(
    x: tuple[Buffer, int],
    taps: Buffer,
    shape: tuple[int, int],
    tails: Buffer,
    index: tuple[Buffer, Buffer, int],
    out: tuple[Buffer, int],
    opened: tuple[Buffer | None, int],
) -> None:
    """See `api.Kernels.short_conv`; slots and offsets are read when the call is made, also when it is replayed.

    Args:
        x and out: f32, with the elements from row to row. taps: f32 of this shape. tails: f32, all slots without gaps.
        index: slots, offsets and how many sequences. opened: as in `delta_net`.
    """
    places = (_at(tails), _at(index[0]), _at(index[1]), index[2])
    left = 0 if opened[0] is None else _at(opened[0]), opened[1]
    _function("short_conv")(_at(x[0]), x[1], _at(taps), *shape, *places, _at(out[0]), out[1], *left)


def enter_streams(
    given: tuple[Buffer, int] | None,
    streams: tuple[Buffer, int],
    shape: tuple[int, int, int],
    *,
    spreads: bool = False,
    norm: tuple[Buffer, float, Buffer, int] | None = None,
) -> None:
    """`spread_stream` of `given` or `inject_stream`, then `norm_streams`: see `api.StreamKernels`.

    Args:
        given and streams: f32, with the elements from row to row; given None: streams stay. shape: rows, streams and
            elements of each. norm: weights, eps, and where the result goes, f32, with the elements from row to row.
    """
    x, (weight, eps, out, stride) = given or (None, 0), norm or (None, 0.0, None, 0)
    ends = None if weight is None else _at(weight), eps, None if out is None else _at(out), stride
    _function("enter_streams")(
        None if x[0] is None else _at(x[0]), x[1], spreads, _at(streams[0]), streams[1], *shape, *ends
    )


def mix_streams(
    x: tuple[Buffer, int],
    gates: tuple[Buffer, int],
    shape: tuple[int, int, int],
    out: tuple[Buffer, int],
    cleared: tuple[Buffer | None, int],
) -> None:
    """See `api.StreamKernels.mix_streams`; f32, each with the elements from row to row. shape as in `enter_streams`."""
    ends = _at(out[0]), out[1], None if cleared[0] is None else _at(cleared[0]), cleared[1]
    _function("mix_streams")(_at(x[0]), x[1], _at(gates[0]), gates[1], *shape, *ends)


def gate_grams(
    rows: Sequence[tuple[Buffer, int]],
    norms: tuple[Buffer, Buffer],
    shape: tuple[int, int, int],
    eps: float,
    out: tuple[Buffer, int],
) -> None:
    """See `api.StreamKernels.gate_grams`. rows: keys, values and streams; f32, each with the elements from row to row.
    shape as in `enter_streams`."""
    ends = [part for buffer, stride in rows for part in (_at(buffer), stride)]
    _function("gate_grams")(*ends, *map(_at, norms), *shape, eps, _at(out[0]), out[1])


def add_grams(
    x: tuple[Buffer, int],
    norm: tuple[Buffer, float],
    taps: Buffer,
    sizes: tuple[int, int, int, int],
    streams: tuple[Buffer, int],
    tails: Buffer,
    index: tuple[Buffer, Buffer, int],
    opened: tuple[Buffer | None, int],
) -> None:
    """See `api.StreamKernels.add_grams`; slots and offsets are read when the call is made, also when it is replayed.

    Args:
        x and streams: f32, with the elements from row to row. norm: weights and eps. sizes: streams, elements of each,
            taps, and how many tokens these lie apart. tails: f32, all slots without gaps. index, opened: as in
            `short_conv`.
    """
    places = (_at(tails), _at(index[0]), _at(index[1]), index[2])
    left = None if opened[0] is None else _at(opened[0]), opened[1]
    given = (_at(x[0]), x[1], _at(norm[0]), _at(taps), *sizes, norm[1])
    _function("add_grams")(*given, _at(streams[0]), streams[1], *places, *left)


def store_index(
    q: tuple[Buffer, int],
    key: tuple[Buffer, int],
    shape: tuple[int, int, int],
    norms: tuple[Buffer, Buffer, float],
    each: int,
    rope: tuple[Buffer, Buffer, int, str],
    rows: tuple[Buffer, Buffer, Buffer],
    index: tuple[Buffer, int],
) -> None:
    """See `api.IndexKernels.store_index`.

    Args:
        q and key: f32, with the elements from row to row. shape: rows, heads, elements of each. norms: of q and of
            keys, and eps. rope, rows: as in `rope_store`. index: f32, and cells of a block.
    """
    turn = _at(rope[0]), _at(rope[1]), rope[2], rope[3] == "halves"
    given = (_at(q[0]), q[1], _at(key[0]), key[1], *shape, _at(norms[0]), _at(norms[1]), each, norms[2])
    _function("store_index")(*given, *turn, *map(_at, rows), index[1], _at(index[0]))


def choose_cells(
    q: tuple[Buffer, int],
    index: tuple[Buffer, int],
    heads: tuple[int, int],
    rule: tuple[int, int],
    segments: "ctypes.Array[ctypes.c_int64]",
    blocks: Buffer,
    seen: tuple[Buffer, int, int],
) -> None:
    """See `api.IndexKernels.choose_cells`.

    Args:
        q: f32, with the elements from row to row. index: f32, and cells of a block. heads: how many, and elements of
            each. segments, blocks: as in `attention`. seen: i32, elements from row to row, and words of a row.
    """
    given, words = (_at(q[0]), q[1], _at(index[0]), index[1]), (_at(seen[0]), *seen[1:])
    spans = (segments, len(segments) // 4, _at(blocks))
    _function("choose_cells")(*given, *heads, *rule, *spans, *words)


def _cell_nbytes(kv_types: tuple[str, str], width: int) -> tuple[int, int]:
    return kv_nbytes(kv_types[0], width), kv_nbytes(kv_types[1], width)


def _cell_types(kv_types: tuple[str, str]) -> tuple[int, int]:
    return _type(kv_types[0].upper()), _type(kv_types[1].upper())


def memcpy(to: Buffer, source: Buffer, nbytes: int) -> None:
    """Copy nbytes with all threads."""
    _function("memcpy")(_at(to), _at(source), nbytes)


def touch(memory: Buffer, nbytes: int) -> None:
    """Have the system give memory its pages, whatever other threads write there meanwhile. The calling thread does it,
    beside whatever runs."""
    _function("touch")(_at(memory), nbytes)


def read_bandwidth(data: Buffer, nbytes: int) -> float:
    """GB/s (1e9 bytes) at which all threads read nbytes once: the ceiling of every kernel whose weights are in DRAM."""
    total = (ctypes.c_uint64 * 1)()
    return nbytes / _function("read")(_at(data), nbytes, total) / 1e9


def read_seconds() -> float:
    """What all calls of `read_bandwidth` have taken, replayed ones too."""
    return _question("read_seconds")()


@contextmanager
def recording() -> Iterator[list[tuple[str, tuple]]]:
    """The calls of the library that this thread makes within, as name and arguments, in their order."""
    calls: list[tuple[str, tuple]] = []
    _RECORDED[threading.get_ident()] = calls
    try:
        yield calls
    finally:
        del _RECORDED[threading.get_ident()]


def callable_number(name: str) -> int:
    """What stands for a function in a list for `replay`; -1: it may not be in one."""
    return _C["callable"](name.encode())


def letters(name: str) -> str:
    """The types of a function's arguments, a letter of _TYPES each."""
    return _SIGNATURES[name][1]


def replay(words: "ctypes.Array[ctypes.c_int64]") -> None:
    """Make the calls of a list (recording.py), one after the other."""
    _C["replay"](words, len(words))


def arrange_turn(
    parts: Sequence[tuple[int, int, "ctypes.Array[ctypes.c_int64]"]],
) -> "ctypes.Array[ctypes.c_int64]":
    """A turn for `Relay`. parts: the addresses of two int32, of which one becomes 1 to ask for the part, the other when
    it is done, and the list (recording.py). The first number is taken back to 0."""
    words = [word for asked, done, calls in parts for word in (asked, done, ctypes.addressof(calls), len(calls))]
    return (ctypes.c_int64 * len(words))(*words)


class Relay:
    """A thread that makes lists of calls as they are asked for, each in its turn: see csrc/threads/relay.cpp. Raises
    RuntimeError without the library."""

    def __init__(self) -> None:
        self._relay: int | None = _question("relay_open")()
        self._turn: ctypes.Array[ctypes.c_int64] | None = None  # under way

    def start(self, turn: "ctypes.Array[ctypes.c_int64]") -> None:
        """Begin a turn, as `arrange_turn` makes it, whose lists must live until it is over."""
        _C["relay_start"](self._relay, turn, len(turn) // 4)
        self._turn = turn  # the turn before is over: the library has waited for it

    def finish(self, seconds: float = inf) -> bool:
        """Return when all parts are done, or after so many seconds; whether they are done."""
        return bool(_C["relay_finish"](self._relay, seconds))

    def give_up(self) -> None:
        """Return when the part under way is done; the others are left."""
        _C["relay_give_up"](self._relay)

    def close(self) -> None:
        """End the thread; all parts must be done or given up."""
        if self._relay is not None:
            _C["relay_close"](self._relay)
            self._relay = None


def record_nbytes(qtype: str, cols: int) -> int:
    """Bytes of 16 rows as the C++ library counts them; a test compares with pshard.quant."""
    return _function("record_nbytes")(_type(qtype), cols)


def _function(name: str) -> Any:
    plain = _question(name)
    calls = _RECORDED.get(threading.get_ident()) if _RECORDED else None
    if calls is not None:

        def written_down(*arguments: Any) -> Any:
            calls.append((name, arguments))
            return plain(*arguments)

        return written_down
    return plain


def _question(name: str) -> Any:
    """A function that computes nothing: where calls are written down, it is not."""
    if _WHY_MISSING is not None:
        raise RuntimeError(f"no CPU kernels: {_WHY_MISSING}")
    return _C[name]


def _at(buffer: Buffer) -> int:
    if isinstance(buffer, int):
        return buffer
    if hasattr(buffer, "data_ptr"):
        return buffer.data_ptr()
    return buffer.ctypes.data


def _type(qtype: str) -> int:
    if qtype in BOOK_TYPES:
        _give_book(qtype)
    if _WHY_MISSING is None and _TYPE_NUMBERS[qtype] < 0:
        raise ValueError(f"no CPU kernel for quant type {qtype}")
    return _TYPE_NUMBERS.get(qtype, -1)


@lru_cache
def _give_book(qtype: str) -> None:
    """Bring a type's codebook into the library, before its first use."""
    if _WHY_MISSING is None:
        book = load_book(qtype)
        _C["set_book"](_TYPE_NUMBERS[qtype], book.ctypes.data, book.size)


def _packed(weight: "Packed") -> tuple[int, int]:
    """Where a matrix is and the number of its type. Raises ValueError when its columns are no whole blocks."""
    qtype = weight.qtype
    if weight.cols % QUANT_TYPES[qtype].block:
        block = QUANT_TYPES[qtype].block
        raise ValueError(f"{weight.cols} columns are not a multiple of the {qtype} block, {block}")
    return _at(weight.data), _type(qtype)


def _check_tiles() -> None:
    if not tiles():
        raise RuntimeError("this machine has no matrix unit for tiles; use linear or gate_up")


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{what}s {start}:{stop} of {size}")
