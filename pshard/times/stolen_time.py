"""Core time that measurements did not get: a virtual machine's that went to other machines, as the system counts it
("steal"), and this machine's that other programs used. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

DISTURBED = 0.05  # share of its time that a measurement may lose before nothing is learnt from it
SHORT = 0.2  # seconds: the system counts core time in steps of 0.01
MOST_NAMED = 4  # tests that a line names where it could say "all"
TOO_LOW = "rates may be too low by that share of the time; measure again when nothing else runs"


@dataclass(frozen=True)
class CoreTime:
    """Seconds of all `cores` since the start of the system: in all, of these stolen, and used by other processes (less
    a constant: only differences mean something)."""

    total: float
    stolen: float
    others: float = 0.0
    cores: int = 1


def read_core_time() -> CoreTime:
    """Now; nothing is stolen where the system does not count it. Interrupts count as nobody's."""
    import psutil

    own = psutil.Process().cpu_times()
    times = psutil.cpu_times()
    guests = sum(getattr(times, name, 0.0) for name in ("guest", "guest_nice"))  # counted in user and nice as well
    used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system"))
    others = used - own.user - own.system
    return CoreTime(sum(times) - guests, getattr(times, "steal", 0.0), others, count_all_cores())


def count_all_cores() -> int:
    """Cores that the system counts the time of, whether this process may use them or not."""
    import psutil

    return psutil.cpu_count() or 1


def stolen_share(before: CoreTime, after: CoreTime) -> float:
    """Share of the cores' time between two readings that was stolen, 0 to 1."""
    return _share(after.stolen - before.stolen, before, after)


def disturbed_share(before: CoreTime, after: CoreTime) -> float:
    """Share of its time that a measurement between two readings may have lost, 0 to 1.

    All threads of a kernel wait for one whose core is stolen, so that every stolen second counts whole; other processes
    are given cores that idle where there are some, so that theirs count by their share of all cores.
    """
    stolen = stolen_share(before, after) * after.cores
    return min(1.0, stolen + _share(after.others - before.others, before, after))


def _share(seconds: float, before: CoreTime, after: CoreTime) -> float:
    return min(1.0, max(0.0, seconds) / max(after.total - before.total, 1e-9))


@dataclass(frozen=True)
class Lost:
    """Shares of a measurement's time: `stolen` by other machines, of all cores' time; `disturbed`: see
    `disturbed_share`."""

    stolen: float
    disturbed: float


def lost_since(before: CoreTime, processes: int = 1) -> Lost:
    """What a measurement that began at a reading may have lost until now.

    Other programs are not counted where they cannot be told: beside several processes that measure together, each of
    which is another program to the others, and in less time than the system's counters need for a few steps.
    """
    after = read_core_time()
    if processes > 1 or after.total - before.total < SHORT * after.cores:
        counted = replace(after, others=before.others)
    else:
        counted = after
    return Lost(round(stolen_share(before, after), 4), round(disturbed_share(before, counted), 4))


def describe_disturbed(shares: Mapping[str, float]) -> str | None:
    """A line on the measurements (name -> share of its time that others may have cost) that suffered; None when none
    did."""
    worst = {name: share for name, share in shares.items() if share >= DISTURBED}
    if not worst:
        return None
    which = ", ".join(f"{name} ({share:.0%})" for name, share in worst.items())
    if len(worst) == len(shares) > MOST_NAMED:
        which = f"all {len(worst)} tests ({min(worst.values()):.0%} to {max(worst.values()):.0%})"
    return f"other programs or machines had cores during {which}: {TOO_LOW}"
