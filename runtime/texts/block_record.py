"""A KV block as bytes that outlive a process: what it stands for, and what every layer keeps of it. No torch.

A file of it (memory/kv_file.py) has as fields: key (hex), parent (hex, the key before), ids (of its tokens), and the
names of its parts: "cells" (of layers without a window), and where they were known "window" (of layers with one) and
"states" (what does not grow, at the block's end). The key says of which model, type of cells and prefix a block is;
token ids are checked all the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from pshard.runtime.memory.kv_file import DAMAGED, KVFile, Outline, WrongFile, encode_file

PARTS = ("cells", "window", "states")
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
        return sum(map(len, self.parts.values())) + 16 * len(self.ids)

    def is_of(self, parent: bytes, ids: Sequence[int]) -> bool:
        """Whether it stands for these tokens after that block."""
        return self.parent == parent and self.ids == tuple(ids)


def encode_record(record: BlockRecord) -> bytes:
    """As a file has it."""
    names = [name for name in PARTS if name in record.parts]
    told = {"key": record.key.hex(), "parent": record.parent.hex(), "ids": list(record.ids), "names": names}
    parts = [record.parts[name] for name in names]
    return encode_file(Outline("block", told, tuple(map(len, parts))), parts)


def read_names(file: BinaryIO, key: bytes) -> frozenset[str]:
    """Which parts the file of a block has; empty for one that is damaged as far as its header tells."""
    try:
        return frozenset(_open_block(file, key).outline.fields["names"])
    except WrongFile:
        return frozenset()


def read_record(file: BinaryIO, key: bytes) -> BlockRecord | None:
    """The block of a file; None for one that is damaged, cut off, or of another key."""
    try:
        opened = _open_block(file, key)
        told = opened.outline.fields
        parts = {name: bytes(opened.read_part(number, name)) for number, name in enumerate(told["names"])}
    except WrongFile:
        return None
    return BlockRecord(key, bytes.fromhex(told["parent"]), tuple(told["ids"]), parts)


def _open_block(file: BinaryIO, key: bytes) -> KVFile:
    """Raises WrongFile for one whose header is not what `encode_record` writes of that key."""
    opened = KVFile(file, "block")
    told, names = opened.outline.fields, opened.outline.fields.get("names")
    if not isinstance(names, list) or names != [name for name in PARTS if name in names]:
        raise WrongFile(DAMAGED)
    if len(names) != len(opened.outline.sizes) or told.get("key") != key.hex():
        raise WrongFile(DAMAGED)
    ids, parent = told.get("ids"), told.get("parent")
    if not isinstance(ids, list) or not all(type(n) is int and n >= 0 for n in ids):
        raise WrongFile(DAMAGED)
    if not isinstance(parent, str) or not _HEX.fullmatch(parent):
        raise WrongFile(DAMAGED)
    return opened
