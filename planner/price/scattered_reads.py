"""How long small reads from all over a file take, by what a profile timed of a disk."""

from collections import defaultdict

from pshard.machine import MachineProfile
from pshard.on_disk import BLOCK
from pshard.times.curves import Curve, curve_through, interpolate


class ScatteredReads:
    """Seconds of a read by its bytes, alone and beside as many others as were timed. None where nothing was."""

    def __init__(self, profile: MachineProfile) -> None:
        by_depth = defaultdict(list)
        for row in profile.disks:
            if row.block:
                by_depth[row.depth].append((row.block, row.seconds * row.block / row.nbytes))
        curves = {depth: curve_through(points) for depth, points in by_depth.items()}
        self._curves: tuple[Curve, Curve] | None = (curves[min(curves)], curves[max(curves)]) if curves else None

    def seconds(self, count: int, nbytes: int) -> float:
        """Of so many reads of `nbytes` each, all asked for at once: as long as one takes alone, or as all of them take
        side by side. Files are read in whole blocks, of which a read needs up to one more than its bytes fill. Raises
        ValueError where none were timed."""
        if self._curves is None:
            raise ValueError("the machine profile has no small reads from disk")
        alone, together = (interpolate(curve, nbytes + BLOCK) for curve in self._curves)
        return max(alone, count * together)

    def latency(self, nbytes: int) -> float:
        """Seconds by which a read of `nbytes`, or the largest that was timed, takes longer alone than among others; 0
        where none were timed."""
        if self._curves is None:
            return 0.0
        alone, together = (interpolate(curve, min(nbytes, curve[-1][0])) for curve in self._curves)
        return max(0.0, alone - together)
