"""The cores that pack what is read from disk, which whoever computes on the CPU lacks meanwhile."""

from pshard.homes import READ
from pshard.planner.price.profile_tables import Tables
from pshard.times.curves import curve_through, interpolate_evenly


def packing_share(tables: Tables, nbytes: int) -> float:
    """Share of the host's cores that bringing so many bytes from disk keeps busy; 0 where it was not timed."""
    timed = [(row.nbytes, row.cpu_seconds) for row in tables.profile.unit_reads if row.cpu_seconds]
    if not timed or not nbytes:
        return 0.0
    host = tables.profile.host
    seconds = max(host.cores, host.threads) * tables.copy(READ.timed, nbytes)
    return min(1.0, interpolate_evenly(curve_through(timed), nbytes) / seconds)
