"""Core time that measurements did not get: a virtual machine's that went to other machines, as the system counts it
("steal"), and this machine's that other programs used. No torch."""

from dataclasses import dataclass

NOTABLE = 0.02  # share from which measurements are called too low
DISTURBED = 0.05  # share from which nothing is learnt from a measurement: a tenth of one core of two


@dataclass(frozen=True)
class CoreTime:
    """Seconds of all cores since the start of the system: in all, of these stolen, and used by other processes (less a
    constant: only differences mean something)."""

    total: float
    stolen: float
    others: float = 0.0


def read_core_time() -> CoreTime:
    """Now; nothing is stolen where the system does not count it. Interrupts count as nobody's."""
    import psutil

    own = psutil.Process().cpu_times()
    times = psutil.cpu_times()
    guests = sum(getattr(times, name, 0.0) for name in ("guest", "guest_nice"))  # counted in user and nice as well
    used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system"))
    return CoreTime(sum(times) - guests, getattr(times, "steal", 0.0), used - own.user - own.system)


def stolen_share(before: CoreTime, after: CoreTime) -> float:
    """Share of the cores' time between two readings that was stolen, 0 to 1."""
    return _share(after.stolen - before.stolen, before, after)


def disturbed_share(before: CoreTime, after: CoreTime) -> float:
    """Share of the cores' time between two readings that was stolen or used by other processes, 0 to 1."""
    return _share(max(0.0, after.stolen - before.stolen) + max(0.0, after.others - before.others), before, after)


def _share(seconds: float, before: CoreTime, after: CoreTime) -> float:
    return min(1.0, max(0.0, seconds) / max(after.total - before.total, 1e-9))


def describe_stolen(shares: dict[str, float]) -> str | None:
    """A line on the measurements (name -> share) that suffered; None when none did."""
    worst = {name: share for name, share in shares.items() if share >= NOTABLE}
    if not worst:
        return None
    which = ", ".join(f"{name} ({share:.0%})" for name, share in worst.items())
    return f"this host gave core time to other machines during {which}: what the CPU takes part in is too slow there"
