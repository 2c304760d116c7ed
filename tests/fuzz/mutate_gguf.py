"""Mutants of GGUF files by field: another number, name, type or offset in a header that is whole otherwise."""

import random
import struct
from dataclasses import dataclass

from fuzz.mutate_bytes import ODD_NUMBERS, Mutant, mutate_bytes

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of value types, in bytes
_STRING, _ARRAY = 8, 9
_TEXTS = (b"", b"\0", b"\xff\xfe", b"x" * 5000, b"blk.0.ffn_up.weight", b"llama.rope.freq_base", b"a\nb")


@dataclass(frozen=True)
class Field:
    """Bytes start..end of a header. `role`: "number" (little-endian) or "text" (a length of 8 bytes and its text)."""

    what: str
    role: str
    start: int
    end: int


class GgufFields:
    """The fields of a GGUF file's header, read without the package's reader; tensor data begins behind `end`."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.fields: list[Field] = []
        self._number("magic", 4)
        self._number("version", 4)
        tensors, keys = self._number("count of tensors", 8), self._number("count of keys", 8)
        for _ in range(keys):
            name = self._text("key")
            self._value(name, self._number(f"value type of {name}", 4))
        for _ in range(tensors):
            name = self._text("tensor name")
            for i in range(self._number(f"dimensions of {name}", 4)):
                self._number(f"dimension {i} of {name}", 8)
            self._number(f"type of {name}", 4)
            self._number(f"offset of {name}", 8)
        self.end = self._at

    def _number(self, what: str, size: int) -> int:
        value = int.from_bytes(self._data[self._at : self._at + size], "little")
        self.fields.append(Field(what, "number", self._at, self._at + size))
        self._at += size
        return value

    def _text(self, what: str) -> str:
        length = int.from_bytes(self._data[self._at : self._at + 8], "little")
        text = self._data[self._at + 8 : self._at + 8 + length].decode()
        self.fields.append(Field(f"{what} {text[:40]}", "text", self._at, self._at + 8 + length))
        self._at += 8 + length
        return text

    def _value(self, key: str, kind: int) -> None:
        if kind == _STRING:
            self._text(f"value of {key}:")
        elif kind == _ARRAY:
            item, count = self._number(f"item type of {key}", 4), self._number(f"length of {key}", 8)
            for _ in range(count):
                self._value(f"an item of {key}", item)
        else:
            self._number(f"value of {key}", _WIDTHS[kind])


def mutate_gguf(rng: random.Random, data: bytes, header: GgufFields) -> Mutant:
    """One or two changes of fields, or of bytes of the header wherever they are.

    Names of tensors are never exchanged: a file in which they were differs in nothing from another model's.
    """
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, header.end)
    count = rng.choice((1, 1, 1, 2))
    fields = sorted(rng.sample(_pick_pool(rng, header), count), key=lambda field: -field.start)
    what = []
    for field in fields:  # from the end: what stands before it stays where it is
        new = _other_number(rng, data, field, header) if field.role == "number" else _other_text(rng, data, field)
        what.append(f"{field.what}: {data[field.start : field.end][:40]!r} -> {new[:40]!r}")
        data = data[: field.start] + new + data[field.end :]
    return Mutant("; ".join(what), data)


def _pick_pool(rng: random.Random, header: GgufFields) -> list[Field]:
    """Fields to choose from: a vocabulary's items, of which there are hundreds, count for little."""
    rare = rng.random() < 0.1
    return [field for field in header.fields if field.what.startswith(("an item", "value of an item")) == rare]


def _other_number(rng: random.Random, data: bytes, field: Field, header: GgufFields) -> bytes:
    size = field.end - field.start
    old = int.from_bytes(data[field.start : field.end], "little")
    alike = [f for f in header.fields if f.what.split(" of ")[0] == field.what.split(" of ")[0]]
    other = rng.choice(alike)
    values = (
        old + rng.choice((-64, -32, -4, -2, -1, 1, 2, 4, 32, 64)),
        rng.choice((old // 2, 2 * old)),
        rng.choice(ODD_NUMBERS),
        int.from_bytes(data[other.start : other.end], "little"),  # another tensor's offset, type or size
        rng.randrange(48),  # types of values and tensors
        rng.getrandbits(8 * size),
    )
    return struct.pack("<Q", rng.choice(values) % (1 << 64))[:size]


def _other_text(rng: random.Random, data: bytes, field: Field) -> bytes:
    text = data[field.start + 8 : field.end]
    changed = bytearray(text)
    if changed:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    new = rng.choice((bytes(changed), bytes(changed), text + b"x", text[:-1], rng.choice(_TEXTS)))
    length = len(new) if rng.random() < 0.8 else rng.choice(ODD_NUMBERS)
    return struct.pack("<Q", length) + new
