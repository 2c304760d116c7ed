"""What packing adds to reads from disk: cores that the CPU lacks meanwhile, and the end of a burst."""

from pshard.homes import READ
from pshard.on_disk import PIECE
from pshard.planner.price.profile_tables import Tables
from pshard.times.curves import curve_through, interpolate_evenly


def packing_share(tables: Tables, nbytes: int) -> float:
    """Share of the host's cores that bringing so many bytes from disk keeps busy; 0 where it was not timed."""
    timed = _list_timed(tables)
    if not timed or not nbytes:
        return 0.0
    host = tables.profile.host
    seconds = max(host.cores, host.threads) * tables.copy(READ.timed, nbytes)
    return min(1.0, interpolate_evenly(curve_through(timed), nbytes) / seconds)


def end_of_burst(tables: Tables) -> float:
    """Seconds by which reads that somebody waits for take longer than the same bytes among others: the latency of the
    last piece, and one thread packs that when all others are there."""
    nbytes, seconds = max(_list_timed(tables), default=(1, 0.0))
    return tables.scattered.latency(PIECE) + PIECE * seconds / nbytes


def _list_timed(tables: Tables) -> list[tuple[int, float]]:
    """Bytes of units whose packing was timed, and seconds of all cores together."""
    return [(row.nbytes, row.cpu_seconds) for row in tables.profile.unit_reads if row.cpu_seconds]
