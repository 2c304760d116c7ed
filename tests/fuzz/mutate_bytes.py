"""Mutants of bytes that know nothing of a format: flipped bits, other bytes, cuts, repeats."""

import random
import struct
from dataclasses import dataclass

# Lengths, counts and offsets that break readers: nothing, one too many, signed and unsigned ends, more than any memory.
ODD_NUMBERS = (0, 1, 2, 7, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Mutant:
    """A file that was changed: `what` says where and how, for whoever must find out what went wrong."""

    what: str
    data: bytes


def mutate_bytes(rng: random.Random, data: bytes, end: int) -> Mutant:
    """Change something in the first `end` bytes, or the file's length."""
    how = rng.choice((_flip_bits, _flip_bits, _set_bytes, _cut_off, _append, _remove, _insert, _repeat, _set_number))
    return how(rng, data, end)


def _flip_bits(rng: random.Random, data: bytes, end: int) -> Mutant:
    changed, places = bytearray(data), sorted(rng.sample(range(8 * end), min(8 * end, rng.choice((1, 1, 1, 2, 4)))))
    for place in places:
        changed[place // 8] ^= 1 << place % 8
    return Mutant(f"flipped bits {places}", bytes(changed))


def _set_bytes(rng: random.Random, data: bytes, end: int) -> Mutant:
    changed, at = bytearray(data), rng.randrange(end)
    new = rng.choice((b"\0", b"\xff", b"\x80", b'"', b"{", b"\n", rng.randbytes(1), rng.randbytes(8)))
    changed[at : at + len(new)] = new[: len(data) - at]
    return Mutant(f"bytes {new!r} at {at}", bytes(changed))


def _cut_off(rng: random.Random, data: bytes, end: int) -> Mutant:
    at = rng.choice((rng.randrange(end), rng.randrange(len(data)), len(data) - 1))
    return Mutant(f"cut off at {at} of {len(data)}", data[:at])


def _append(rng: random.Random, data: bytes, end: int) -> Mutant:
    more = rng.choice((b"\0", b"\0" * 32, b"\0" * 4096, data[:32], data, rng.randbytes(rng.randrange(1, 100))))
    return Mutant(f"{len(more)} bytes appended", data + more)


def _remove(rng: random.Random, data: bytes, end: int) -> Mutant:
    at, count = rng.randrange(end), rng.choice((1, 2, 4, 8, 32, rng.randrange(1, 200)))
    return Mutant(f"{count} bytes removed at {at}", data[:at] + data[at + count :])


def _insert(rng: random.Random, data: bytes, end: int) -> Mutant:
    at, new = rng.randrange(end), rng.choice((b"\0", b"\0" * 32, rng.randbytes(rng.choice((1, 4, 8, 32)))))
    return Mutant(f"{new!r} inserted at {at}", data[:at] + new + data[at:])


def _repeat(rng: random.Random, data: bytes, end: int) -> Mutant:
    at, count, target = rng.randrange(end), rng.randrange(1, 100), rng.randrange(end)
    what = f"{count} bytes of {at} over those at {target}"
    return Mutant(what, data[:target] + data[at : at + count] + data[target + count :])


def _set_number(rng: random.Random, data: bytes, end: int) -> Mutant:
    changed, layout = bytearray(data), rng.choice(("<I", "<Q"))
    size = struct.calcsize(layout)
    at, value = rng.randrange(max(1, end - size)), rng.choice(ODD_NUMBERS) % (1 << 8 * size)
    changed[at : at + size] = struct.pack(layout, value)[: len(data) - at]
    return Mutant(f"{value} as {size} bytes at {at}", bytes(changed))
