"""PSHARD_DISK: a disk that is made up, for profiles and runs alike. Reads come from the page cache and take as long as
the disk would."""

import os
import re
from dataclasses import dataclass

from pshard.errors import UserError
from pshard.machine import DiskTiming

VARIABLE = "PSHARD_DISK"
FAULTS = ("", "eio", "dead", "short", "hang")  # as csrc/threads/reader.cpp numbers them
UNIT_BYTES = (1 << 16, 1 << 20, 1 << 28)  # for which a profile has timings of it
SMALL_BYTES, DEPTH = (4 << 10, 64 << 10), 16  # the same of small reads, alone and so many at once
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class FakeDisk:
    """Bytes a second of all reads, seconds that each takes at least, and up to so many more at random.

    fault: what happens to read number `fault_at` (from 1): "eio" (once), "dead" (from then on), "short", "hang".
    """

    rate: float
    latency: float = 0.0
    jitter: float = 0.0
    fault: str = ""
    fault_at: int = 0

    @property
    def name(self) -> str:
        """As profiles call it: another disk has other timings."""
        late = {"latency": self.latency, "jitter": self.jitter}
        more = "".join(f", {what} {1e3 * seconds:g} ms" for what, seconds in late.items() if seconds)
        return f"fake disk of {self.rate / 1e6:g} MB/s{more}"

    @property
    def timings(self) -> tuple[DiskTiming, ...]:
        """As a profile has them, without a measurement: of bringing units, and of small reads."""
        units = [DiskTiming(self.name, True, 0, 0, n, self.latency + n / self.rate) for n in UNIT_BYTES]
        small = (
            DiskTiming(self.name, True, n, depth, n, max(n / self.rate, (self.latency + n / self.rate) / depth))
            for n in SMALL_BYTES
            for depth in (1, DEPTH)
        )
        return (*units, *small)


def read_fake_disk() -> FakeDisk | None:
    """The disk that the environment makes up; None where it does not. Raises UserError for what is no disk."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        kind, _, rest = text.partition(":")
        given = dict(part.split("=", 1) for part in rest.split(",") if part)
        fault, _, at = given.pop("fault", "").partition("@")
        numbers = {name: _number(value) for name, value in given.items()}
        fake = FakeDisk(**numbers, fault=fault, fault_at=int(at or bool(fault)))  # type: ignore[arg-type]
        if kind != "fake" or fault not in FAULTS or not fake.rate > 0 or min(fake.latency, fake.jitter) < 0:
            raise ValueError
    except (ValueError, TypeError):
        example = "fake:rate=200M,latency=1ms,fault=eio@3"
        raise UserError(f"environment variable {VARIABLE}: {text!r} is no disk; give one such as {example}") from None
    return fake


def _number(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(text)
    return float(match[1]) * _UNITS[match[2]]
