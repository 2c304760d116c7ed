"""Core time that a virtual machine asked for and did not get, as the system counts it ("steal"). No torch."""

from dataclasses import dataclass

NOTABLE = 0.02  # share from which measurements are called too low


@dataclass(frozen=True)
class CoreTime:
    """Seconds of all cores since the start of the system: in all, and of these stolen."""

    total: float
    stolen: float


def read_core_time() -> CoreTime:
    """Now; nothing is stolen where the system does not count it."""
    import psutil

    times = psutil.cpu_times()
    guests = sum(getattr(times, name, 0.0) for name in ("guest", "guest_nice"))  # counted in user and nice as well
    return CoreTime(sum(times) - guests, getattr(times, "steal", 0.0))


def stolen_share(before: CoreTime, after: CoreTime) -> float:
    """Share of the cores' time between two readings that was stolen, 0 to 1."""
    return max(0.0, after.stolen - before.stolen) / max(after.total - before.total, 1e-9)


def describe_stolen(shares: dict[str, float]) -> str | None:
    """A line on the measurements (name -> share) that suffered; None when none did."""
    worst = {name: share for name, share in shares.items() if share >= NOTABLE}
    if not worst:
        return None
    which = ", ".join(f"{name} ({share:.0%})" for name, share in worst.items())
    return f"this host gave core time to other machines during {which}: what the CPU takes part in is too slow there"
