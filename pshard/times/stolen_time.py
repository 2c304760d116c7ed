"""Core time that measurements did not get: a virtual machine's that went to other machines, as the system counts it
("steal"), and this machine's that other programs used. No torch."""

from dataclasses import dataclass

NOTABLE = 0.05  # cores from which measurements are called too low
DISTURBED = 0.05  # share of its time that a measurement may lose before nothing is learnt from it


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


def describe_stolen(shares: dict[str, float]) -> str | None:
    """A line on the measurements (name -> share of all cores' time) that suffered; None when none did."""
    cores = count_all_cores()
    worst = {name: share * cores for name, share in shares.items() if share * cores >= NOTABLE}
    if not worst:
        return None
    which = ", ".join(f"{name} ({stolen:.2g} of {cores} cores)" for name, stolen in worst.items())
    return (
        f"this host gave core time to other machines during {which}: all threads wait for one that does not run, so "
        "what the CPU takes part in may be slower there by that share of a core's time, or more"
    )
