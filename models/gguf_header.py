"""Reads the header of GGUF files (versions 2 and 3, little-endian), also split ones. Tensor data is not touched.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader builds several NumPy
objects per array element: 7 s for a vocabulary of 150 000 tokens and its merges, where this one takes 0.3 s.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pshard.errors import UserError
from pshard.models.stored import ANOTHER, FETCH_AGAIN, MISSING, MappedFile, StoredTensor, check_layout
from pshard.quant import QUANT_TYPES, align

# value type in the file -> NumPy dtype; 8 is a string, 9 an array
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
# ggml's numbers of the tensor types that pshard can use
TENSOR_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"},
}
_FIRST_READ = 1 << 20  # bytes of a file that are read at first; then as many again, as long as the header goes on
LONGEST_NAME = 64  # of tensors, as in ggml
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (numbers, strings, lists) and tensors of a GGUF file, or of all parts of a split one."""

    files: tuple[MappedFile, ...]
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Read a GGUF file's header; any part of a split file stands for all. Raises UserError."""
    parts = _read_parts(path)
    metadata = parts[0].metadata
    expected = metadata.get("split.count", 1)
    if isinstance(expected, int) and expected > 1 and expected != len(parts):
        raise UserError(f"{path}: part of a model split in {expected}; name the parts ...-00001-of-{expected:05d}.gguf")
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                tensor.fail("is there twice")
            tensors[tensor.name] = tensor
    wanted = metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise UserError(f"{path}: the parts hold {len(tensors)} tensors, not {wanted}; fetch them again")
    return GgufHeader(tuple(f for part in parts for f in part.files), metadata, tensors)


def _read_parts(path: Path) -> list[GgufHeader]:
    match = _SPLIT_NAME.fullmatch(path.name)
    alone = [_read_part(MappedFile(path, f"give {MISSING}"))] if not match or path.exists() else []
    if not match or (alone and _is_whole(alone[0])):
        return alone
    count = int(match[3])
    paths = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise UserError(
            f"{path}: part {missing[0]} of the split model is missing ({len(missing)} of {count} are); fetch it too"
        )
    return [_read_part(MappedFile(p, f"give {MISSING}")) for p in paths]


def _is_whole(part: GgufHeader) -> bool:
    """Whether a file holds a model by itself, whatever its name says: parts that were merged kept that of the first."""
    layers = part.metadata.get(f"{part.metadata.get('general.architecture')}.block_count")
    ends = ("token_embd.weight", "output_norm.weight")
    if part.metadata.get("split.count", 1) not in (0, 1) or not all(end in part.tensors for end in ends):
        return False
    return type(layers) is int and any(name.startswith(f"blk.{layers - 1}.") for name in part.tensors)


def _read_part(file: MappedFile) -> GgufHeader:
    if file.copy(0, 4) != b"GGUF":
        file.check_pointer()
        raise UserError(f"{file.path}: not a GGUF file (it does not begin with 'GGUF'); {ANOTHER}")
    cursor = _Cursor(file)
    cursor.at = 4
    version = cursor.number("<I")
    if version & 0xFFFF == 0:
        raise UserError(f"{file.path}: a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        raise UserError(f"{file.path}: GGUF version {version}; versions 2 and 3 can be read; convert the model again")
    n_tensors, n_keys = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string()
        if not (key.isascii() and key.isprintable()) or "\\" in key:  # else what it says would count as not said
            what = f"metadata key {key[:80]} is no ASCII text: the file is damaged"
            raise UserError(f"{file.path}: {what}; {FETCH_AGAIN}")
        if key in metadata:
            raise UserError(f"{file.path}: metadata key {key} is there twice: the file is damaged; {FETCH_AGAIN}")
        metadata[key] = cursor.value(cursor.number("<I"), key)
    entries = [_read_tensor_entry(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UserError(
            f"{file.path}: general.alignment is {alignment!r}, not a power of two: the file is damaged; {FETCH_AGAIN}"
        )
    start = align(cursor.at, alignment)
    tensors: dict[str, StoredTensor] = {}
    for name, shape, qtype, offset in entries:
        tensor = StoredTensor(name, qtype, shape, file, start + offset)
        if name in tensors:
            tensor.fail("is there twice")
        tensors[name] = tensor
    if all(tensor.qtype in QUANT_TYPES for tensor in tensors.values()):  # else a unit refuses the type by its name
        _check_data(file, cursor.at, tensors.values(), alignment)
    return GgufHeader((file,), metadata, tensors)


def _check_data(file: MappedFile, header: int, tensors: Iterable[StoredTensor], alignment: int) -> None:
    """Tensors lie in the order of their entries, as ggml's own reader wants them. Raises UserError."""
    for tensor in tensors:
        tensor.check_blocks()
    check_layout(file, header, ((tensor, tensor.nbytes) for tensor in tensors), alignment)


def _read_tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape in NumPy order (the file has it reversed), type name, offset from the start of the data."""
    name = cursor.string()
    if len(name) > LONGEST_NAME:
        raise UserError(
            f"{cursor.file.path}: a tensor's name has {len(name)} letters: the file is damaged; {FETCH_AGAIN}"
        )
    n_dims = cursor.number("<I")
    if not 1 <= n_dims <= 4:
        raise UserError(
            f"{cursor.file.path}: tensor {name} has {n_dims} dimensions: the file is damaged; {FETCH_AGAIN}"
        )
    shape = tuple(cursor.number("<Q") for _ in range(n_dims))[::-1]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    return name, shape, TENSOR_TYPES.get(kind) or _foreign_type_name(kind), offset


def _foreign_type_name(kind: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"


class _Cursor:
    """Reads values one after another; running past the end of the file is a UserError."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.at = file, 0
        self._data = b""  # of the file from its beginning, as far as it was needed, and more

    def number(self, layout: str) -> int:
        size = struct.calcsize(layout)
        self._require(size)
        (value,) = struct.unpack_from(layout, self._data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int, key: str) -> Any:
        """One metadata value: a number, a string, or a list of either."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind == _ARRAY:
            item, count = self.number("<I"), self.number("<Q")
            if item == _STRING:
                return self._strings(count)
            if item in _SCALARS:
                return self._scalars(item, count)
            kind = item
        what = f"metadata key {key} has value type {kind}, which no GGUF file has: the file is damaged"
        raise UserError(f"{self.file.path}: {what}; {FETCH_AGAIN}")

    def _scalars(self, kind: int, count: int) -> list:
        dtype = np.dtype(_SCALARS[kind])
        self._require(count * dtype.itemsize)
        values = np.frombuffer(self._data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values

    def _strings(self, count: int) -> list[str]:
        self._check_left(8 * count)
        data, at, length = self._data, self.at, struct.Struct("<Q").unpack_from
        end, strings = len(data), list[str]()
        for _ in range(count):
            start = at + 8
            if start <= end and (stop := start + length(data, at)[0]) <= end:
                at = stop
            else:
                self.at = at
                start, at = self._find_string()
                data, end = self._data, len(self._data)
            # bytes that are not UTF-8 (seen in author names) must not make a model unreadable
            strings.append(data[start:at].decode("utf-8", "backslashreplace"))
        self.at = at
        return strings

    def _find_string(self) -> tuple[int, int]:
        """Where the string at the cursor begins and ends, all of it at hand."""
        self._require(8)
        (length,) = struct.unpack_from("<Q", self._data, self.at)
        self._require(8 + length)
        return self.at + 8, self.at + 8 + length

    def _require(self, nbytes: int) -> None:
        """Have so many bytes from the cursor on at hand."""
        self._check_left(nbytes)
        missing = self.at + nbytes - len(self._data)
        if missing > 0:
            self._data += self.file.copy(len(self._data), max(missing, len(self._data), _FIRST_READ))

    def _check_left(self, nbytes: int) -> None:
        if self.at + nbytes > self.file.nbytes:
            raise UserError(f"{self.file.path}: ends inside its header: it is truncated or damaged; {FETCH_AGAIN}")
