"""The format of files of what units keep of texts: whole texts, and blocks of prefixes. No torch.

Version 3, little-endian:

    "pshardkv", u32 version, u32 length of the header, u32 its CRC-32
    header, JSON: holds ("text" or "block"), what else stands in it, and sizes (bytes of every part)
    u32 CRC-32 of every part
    the parts, one behind the other

What the parts are, kv_store.py says of texts, and texts/block_record.py of blocks. A file is there whole or not at all:
it is made under another name.
"""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from pshard.jsonio import check_regular, parse_json, remove_leftovers, resolve_place

MAGIC, VERSION = b"pshardkv", 3
_FIXED = struct.Struct("<8sIII")
DAMAGED = "is cut off or damaged: remove it"


class WrongFile(ValueError):
    """What is wrong with a file, and what to do: what follows its name in an error."""


@dataclass(frozen=True)
class Outline:
    """What a file holds ("text" or "block"), the other fields of its header, and bytes of its parts."""

    holds: str
    fields: Mapping[str, Any]
    sizes: tuple[int, ...]

    @cached_property
    def header(self) -> bytes:
        """As the file has it."""
        return json.dumps({"holds": self.holds, **self.fields, "sizes": self.sizes}).encode()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where every part begins, and at last the file's bytes."""
        return _find_offsets(len(self.header), self.sizes)

    def encode_start(self, sums: Sequence[int]) -> bytes:
        """What stands before the parts, which have these CRC-32."""
        fixed = _FIXED.pack(MAGIC, VERSION, len(self.header), zlib.crc32(self.header))
        return fixed + self.header + struct.pack(f"<{len(sums)}I", *sums)


@dataclass(frozen=True)
class Beside:
    """What a file of a text has of who drafts beside it: the name, cells of how many tokens, and bytes of its parts."""

    name: str
    cells: int
    sizes: tuple[int, ...]


def _find_offsets(header: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=_FIXED.size + header + 4 * len(sizes)))


# --- writing ------------------------------------------------------------------------------------------------------


def encode_file(outline: Outline, parts: Sequence[bytes]) -> bytes:
    """A whole file."""
    return outline.encode_start([zlib.crc32(part) for part in parts]) + b"".join(parts)


def begin_file(path: Path, outline: Outline) -> Path:
    """Make a file of full size beside the wanted one, for its parts to be written at their offsets. Raises OSError."""
    check_regular(path)
    remove_leftovers(path)
    handle, temporary = tempfile.mkstemp(dir=resolve_place(path).parent, prefix=f".{path.name}.", suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.truncate(outline.offsets[-1])
    return Path(temporary)


def finish_file(temporary: Path, path: Path, outline: Outline, sums: Sequence[int]) -> None:
    """Write what stands before the parts, and give the file its name. Raises OSError."""
    with open(temporary, "r+b") as file:
        file.write(outline.encode_start(sums))
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, resolve_place(path))


# --- reading ------------------------------------------------------------------------------------------------------


class KVFile:
    """A file that is open for reading: its outline is checked, and every part as it is read."""

    def __init__(self, file: BinaryIO, holds: str) -> None:
        """Raises WrongFile for one that does not hold that, is of another version, cut off or damaged; OSError."""
        self._file, nbytes = file, os.fstat(file.fileno()).st_size
        fixed = file.read(_FIXED.size)
        if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
            raise WrongFile("is no KV cache of pshard; give another file")
        _, version, length, checksum = _FIXED.unpack(fixed)
        if version != VERSION:
            age = "an older" if version < VERSION else "a newer"
            raise WrongFile(f"is of {age} version, {version}; this pshard reads {VERSION}: remove it")
        header = file.read(length) if length <= nbytes else b""
        if len(header) < length or zlib.crc32(header) != checksum:
            raise WrongFile(DAMAGED)
        fields = _parse_header(header)
        if fields.pop("holds") != holds:
            raise WrongFile(f"holds no {holds}, as it should: remove it")
        self.outline = Outline(holds, fields, tuple(fields.pop("sizes")))
        self._offsets = _find_offsets(length, self.outline.sizes)
        if nbytes != self._offsets[-1]:
            raise WrongFile(DAMAGED)
        self._sums = struct.unpack(f"<{len(self.outline.sizes)}I", file.read(4 * len(self.outline.sizes)))

    def read_part(self, number: int, what: str) -> bytearray:
        """A part's bytes; what: they are, for errors. Raises WrongFile for a part that is damaged; OSError."""
        self._file.seek(self._offsets[number])
        raw = bytearray(self._file.read(self.outline.sizes[number]))
        if zlib.crc32(raw) != self._sums[number]:
            raise WrongFile(f"is damaged ({what}): remove it")
        return raw


def _parse_header(header: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(header)
    except ValueError:
        fields = None
    sizes = fields.get("sizes") if isinstance(fields, dict) else None
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes) or "holds" not in fields:
        raise WrongFile("has a header that says nothing of what it holds: remove it")
    return fields
