"""A KV block as bytes that outlive a process: what it stands for, and what every layer keeps of it. No torch.

    "pshardpc", u32 version, u32 length of the header, u32 its CRC-32, u32 CRC-32 of what follows it
    header, JSON: key (hex), parent (hex, the key before), ids (of its tokens), parts: bytes of "cells" (layers without
        a window), and where they were known of "window" (layers with one) and "states" (what does not grow, at the
        block's end)
    the parts, one behind the other

Little-endian. The key says of which model, type of cells and prefix a block is; token ids are checked all the same.
"""

import json
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from pshard.jsonio import parse_json

MAGIC, VERSION = b"pshardpc", 1
PARTS = ("cells", "window", "states")
_FIXED = struct.Struct("<8sIIII")
_MOST_HEADER = 1 << 16
_HEX = re.compile("([0-9a-f]{2})*")


@dataclass(frozen=True)
class BlockRecord:
    """key: of a block after the one with the key `parent`; ids: of its tokens; parts: bytes by name, of PARTS."""

    key: bytes
    parent: bytes
    ids: tuple[int, ...]
    parts: dict[str, bytes]

    @property
    def nbytes(self) -> int:
        """Of host memory, about."""
        return sum(map(len, self.parts.values())) + _FIXED.size + 16 * len(self.ids)

    def is_of(self, parent: bytes, ids: Sequence[int]) -> bool:
        """Whether it stands for these tokens after that block."""
        return self.parent == parent and self.ids == tuple(ids)


def encode_record(record: BlockRecord) -> bytes:
    """As a file has it."""
    sizes = {name: len(record.parts[name]) for name in PARTS if name in record.parts}
    body = b"".join(record.parts[name] for name in sizes)
    told = {"key": record.key.hex(), "parent": record.parent.hex(), "ids": list(record.ids), "parts": sizes}
    header = json.dumps(told).encode()
    return _FIXED.pack(MAGIC, VERSION, len(header), zlib.crc32(header), zlib.crc32(body)) + header + body


def read_names(file: BinaryIO, key: bytes) -> frozenset[str]:
    """Which parts the file of a block has; empty for one that is damaged as far as its header tells."""
    found = _read_header(file, key)
    return frozenset(found[0]["parts"]) if found else frozenset()


def read_record(file: BinaryIO, key: bytes) -> BlockRecord | None:
    """The block of a file; None for one that is damaged, cut off, or of another key."""
    found = _read_header(file, key)
    if found is None:
        return None
    told, crc = found
    body = file.read()
    if len(body) != sum(told["parts"].values()) or zlib.crc32(body) != crc:
        return None
    parts, at = {}, 0
    for name, nbytes in told["parts"].items():
        parts[name] = body[at : at + nbytes]
        at += nbytes
    return BlockRecord(key, bytes.fromhex(told["parent"]), tuple(told["ids"]), parts)


def _read_header(file: BinaryIO, key: bytes) -> tuple[dict, int] | None:
    """A header that is whole and of that key, and the CRC of what follows."""
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        return None
    magic, version, length, checksum, crc = _FIXED.unpack(fixed)
    if magic != MAGIC or version != VERSION or length > _MOST_HEADER:
        return None
    header = file.read(length)
    if len(header) != length or zlib.crc32(header) != checksum:
        return None
    try:
        told = parse_json(header)
    except ValueError:
        return None
    return (told, crc) if _is_right(told) and told["key"] == key.hex() else None


def _is_right(told: Any) -> bool:
    """Whether a header's fields are what `encode_record` writes."""
    if not isinstance(told, dict) or not all(isinstance(told.get(name), str) for name in ("key", "parent")):
        return False
    ids, parts = told.get("ids"), told.get("parts")
    if not isinstance(ids, list) or not isinstance(parts, dict) or not parts.keys() <= set(PARTS):
        return False
    return bool(_HEX.fullmatch(told["parent"])) and all(type(n) is int and n >= 0 for n in (*ids, *parts.values()))
