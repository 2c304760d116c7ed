"""What a profile timed of gated delta nets, for look-up by interpolation: token by token and in chunks."""

from collections import defaultdict
from math import log

from pshard.machine import MachineProfile
from pshard.times.curves import Curve, curve_through, interpolate
from pshard.units.operations import DeltaNet

Shape = tuple[int, int, int]  # key heads, value heads, elements of each


class DeltaTables:
    """A profile's rows. A look-up gives None for a device of which there are none."""

    def __init__(self, profile: MachineProfile) -> None:
        alone: dict[tuple[str, Shape], list[tuple[float, float]]] = defaultdict(list)
        together: dict[tuple[str, Shape], list[tuple[float, float]]] = defaultdict(list)
        for d in profile.deltas:
            shape = (d.key_heads, d.value_heads, d.head)
            if d.sequences == 1:
                alone[d.device, shape].append((d.tokens, d.seconds))
            if d.tokens == 1:
                together[d.device, shape].append((d.sequences, d.seconds))
        self._alone: dict[tuple[str, Shape], Curve] = {key: curve_through(points) for key, points in alone.items()}
        self._together: dict[tuple[str, Shape], Curve] = {k: curve_through(points) for k, points in together.items()}

    def seconds(self, device: str, net: DeltaNet, tokens: int, sequences: int) -> float | None:
        """Seconds of `tokens` tokens in all of so many sequences. One token of each: what so many states take. Else
        what as many tokens of one sequence take, and no less than the states. Heads that were not timed take what the
        nearest ones do, in proportion to the numbers of a state."""
        timed = [shape for side, shape in self._alone if side == device and (device, shape) in self._together]
        if not timed:
            return None
        near = min(timed, key=lambda shape: (abs(log(_size(shape) / _size(net.shape))), shape))
        scale = _size(net.shape) / _size(near)
        states = interpolate(self._together[device, near], sequences)
        if tokens <= sequences:
            return scale * states
        return scale * max(states, interpolate(self._alone[device, near], tokens))


def _size(shape: Shape) -> int:
    """Numbers of a state, which arithmetic grows with too."""
    return shape[1] * shape[2] ** 2
