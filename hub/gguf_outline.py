"""Where the parts of a GGUF header lie, from the first bytes of a file: as much as tells which bytes to ask for next.

What the values mean is read by models/gguf_header.py, from the same bytes.
"""

import struct
from dataclasses import dataclass

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _F32 = 8, 9, 0
LONG_ARRAY = 1 << 14  # bytes: vocabularies, which all quantisations of a model have in common


class NotEnough(Exception):
    """The bytes at hand end inside the header."""


@dataclass(frozen=True)
class Outline:
    """Offsets in a GGUF file. shared: from the first long array's key to the end of the last long array; empty without
    one. end: of the header. tables: (offset from the data's beginning, bytes) of vectors that are read when a model is
    opened: factors of RoPE. data: where the tensors' bytes begin."""

    shared: tuple[int, int]
    end: int
    data: int
    tables: tuple[tuple[int, int], ...]


def outline_gguf(data: bytes) -> Outline:
    """Raises NotEnough, and ValueError for what is no GGUF header."""
    reader = _Reader(data, 0)
    if reader.take(4) != b"GGUF":
        raise ValueError("the file does not begin with 'GGUF'")
    reader.number("<I")
    n_tensors, n_keys = reader.number("<Q"), reader.number("<Q")
    return _outline_rest(reader, n_tensors, n_keys)


def outline_spliced(head: bytes, other: bytes, shared: tuple[int, int]) -> int:
    """Where the long arrays of another quantisation of the same model begin, if they lie as in `other`.

    head: the file's first bytes; other: a whole header, whose long arrays are at `shared`. Raises NotEnough when the
    head ends before, ValueError when it has no such key.
    """
    reader = _Reader(head, 0)
    if reader.take(4) != b"GGUF":
        raise ValueError("the file does not begin with 'GGUF'")
    reader.number("<I")
    _, n_keys = reader.number("<Q"), reader.number("<Q")
    first_key = _Reader(other, shared[0]).string()
    for _ in range(n_keys):
        start = reader.at
        if reader.string() == first_key:
            return start
        reader.skip_value(reader.number("<I"))
    raise ValueError("the keys differ")


def _outline_rest(reader: "_Reader", n_tensors: int, n_keys: int) -> Outline:
    first, last, alignment = 0, 0, 32
    for _ in range(n_keys):
        start = reader.at
        key = reader.string()
        kind = reader.number("<I")
        value = reader.at
        reader.skip_value(kind)
        if key == b"general.alignment" and kind == 4:
            (alignment,) = struct.unpack_from("<I", reader.data, value)
        if kind == _ARRAY and reader.at - value >= LONG_ARRAY:
            first, last = first or start, reader.at
    tables = [table for table in (_tensor_entry(reader) for _ in range(n_tensors)) if table]
    data = -(-reader.at // max(1, alignment)) * alignment
    return Outline((first, last), reader.at, data, tuple(tables))


def _tensor_entry(reader: "_Reader") -> tuple[int, int] | None:
    name, n_dims = reader.string(), reader.number("<I")
    if n_dims > 4:
        raise ValueError(f"a tensor has {n_dims} dimensions")
    dims = [reader.number("<Q") for _ in range(n_dims)]
    kind, offset = reader.number("<I"), reader.number("<Q")
    is_table = name.startswith(b"rope") and kind == _F32 and n_dims == 1
    return (offset, 4 * dims[0]) if is_table else None


class _Reader:
    """Walks over values without keeping them."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, nbytes: int) -> bytes:
        self._step(nbytes)
        return self.data[self.at - nbytes : self.at]

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return value

    def string(self) -> bytes:
        return self.take(self.number("<Q"))

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._step(self.number("<Q"))
        elif kind in _SCALAR_BYTES:
            self._step(_SCALAR_BYTES[kind])
        elif kind == _ARRAY:
            item, count = self.number("<I"), self.number("<Q")
            if item in _SCALAR_BYTES:
                self._step(count * _SCALAR_BYTES[item])
            elif item == _STRING:
                self._skip_strings(count)
            else:
                raise ValueError(f"an array has values of type {item}")
        else:
            raise ValueError(f"a value has type {kind}")

    def _skip_strings(self, count: int) -> None:
        at, end, length = self.at, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise NotEnough
            at += 8 + length(self.data, at)[0]
        self.at = at
        self._step(0)

    def _step(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at > len(self.data):
            raise NotEnough
