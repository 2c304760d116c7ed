"""What a profile timed of routers and routed experts, for look-up by interpolation.

Between timed token counts the seconds of each expert that is used are interpolated log-log: how many are used bends a
curve of whole layers. Above the last count the layer takes longer in proportion, as everything that is timed does.
"""

from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from math import log

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import MachineProfile
from pshard.quant import packed_nbytes
from pshard.routing.expert_uses import Uses, work_share
from pshard.times.curves import Curve, curve_through, interpolate
from pshard.units.operations import ExpertProducts, Route, used_share

GATES = 2 / 3  # of an expert's time are its gate's and up's: two matrices of three


@dataclass(frozen=True)
class LayerShape:
    """All routed experts of a layer, as ExpertTiming has them."""

    gate_qtype: str
    down_qtype: str
    experts: int
    used: int
    d_expert: int
    d_model: int

    @property
    def apart(self) -> tuple["LayerShape", "LayerShape"]:
        """Like layers, one of its gates' type alone, and one of its downs'."""
        return replace(self, down_qtype=self.gate_qtype), replace(self, gate_qtype=self.down_qtype)

    @property
    def of_any_size(self) -> "LayerShape":
        """What layers of like experts have in common with slices of them."""
        return replace(self, d_expert=0)

    def touched(self, tokens: float) -> float:
        """How many experts so many tokens are expected to use."""
        return self.experts * used_share(self.used, self.experts, tokens)

    @property
    def load(self) -> float:
        """Tokens of each expert, of one token of the layer."""
        return self.used / self.experts

    @property
    def elements(self) -> int:
        """Weights of an expert, roughly what its products take of arithmetic."""
        return 3 * self.d_expert * self.d_model

    @property
    def nbytes(self) -> float:
        """Bytes of an expert's weights, by what a large matrix of the types takes."""
        gate, down = (packed_nbytes(q, 256, 2048) / (256 * 2048) for q in (self.gate_qtype, self.down_qtype))
        return self.d_expert * self.d_model * (2 * gate + down)

    def unlikeness(self, other: "LayerShape") -> tuple:
        """How far a layer is from this one in bytes of a weight, tokens and weights of an expert; ties by how many of
        its types are others, as some types have equally many bytes, and by its name."""
        far = abs(log(other.nbytes / self.nbytes * self.elements / other.elements))
        far += abs(log(other.load / self.load)) + abs(log(other.elements / self.elements))
        others = (other.gate_qtype != self.gate_qtype) + (other.down_qtype != self.down_qtype)
        return far, others, astuple(other)


@dataclass(frozen=True)
class RouterShape:
    """A router, as RouteTiming has it."""

    qtype: str
    experts: int
    used: int
    d_model: int

    @property
    def elements(self) -> int:
        """Weights of its matrix."""
        return self.experts * self.d_model

    def unlikeness(self, other: "RouterShape") -> tuple:
        """How far a router is from this one; ties by its name."""
        return abs(log(other.elements / self.elements)), astuple(other)


class ExpertTables:
    """A profile's rows of experts and routers. Look-ups give None for a device of which there are none."""

    def __init__(self, profile: MachineProfile) -> None:
        self._layers: dict[str, dict[LayerShape, Curve]] = defaultdict(dict)
        self._routers: dict[str, dict[RouterShape, Curve]] = defaultdict(dict)
        self._nearest: dict[tuple[str, LayerShape], LayerShape] = {}
        self._parts: dict[tuple[str, LayerShape], tuple[tuple[LayerShape, float], ...]] = {}
        points: dict[tuple[str, LayerShape], list[tuple[float, float]]] = defaultdict(list)
        for e in profile.experts:
            layer = LayerShape(e.gate_qtype, e.down_qtype, e.experts, e.used, e.d_expert, e.d_model)
            points[e.device, layer].append((e.tokens, e.seconds / layer.touched(e.tokens)))
        for (device, layer), series in points.items():
            self._layers[device][layer] = curve_through(series)
        read: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for p in profile.in_place:
            if p.device == "acc":
                read[p.expert_nbytes].append((p.tokens, p.seconds / p.nbytes))
        self._read = {size: curve_through(series) for size, series in read.items()}  # seconds a byte
        routed: dict[tuple[str, RouterShape], list[tuple[float, float]]] = defaultdict(list)
        for r in profile.routes:
            routed[r.device, RouterShape(r.qtype, r.experts, r.used, r.d_model)].append((r.tokens, r.seconds))
        for (device, router), series in routed.items():
            self._routers[device][router] = curve_through(series)

    def experts(self, device: str, products: ExpertProducts, tokens: float, uses: Uses = ()) -> float | None:
        """Seconds of the products of those experts that `products` has, for so many tokens of the layer.

        n of a layer's E experts take n/E of what all take, or what a record says of their `uses`. One whose types were
        timed each with itself takes GATES of what its gates' type takes, and the rest of what that of its downs takes.
        Where ups have another type than gates, it takes the mean of both types.
        Another layer that was not timed takes what the one most like it takes when each of its experts gets as many
        tokens, for each expert that is used, scaled by bytes of weights up to SMALL_BATCH tokens of each, and by
        arithmetic above.
        """
        if not self._layers.get(device):
            return None
        gate, down = products.gate, products.down
        f = gate.rows // gate.parts
        layer = LayerShape(gate.qtype, down.qtype, products.of, products.chosen, f, gate.cols)
        few = tokens * layer.used / layer.touched(tokens) <= SMALL_BATCH  # of each expert
        here = work_share(products, tokens, few, uses)
        layers = dict.fromkeys((layer, replace(layer, gate_qtype=products.up.qtype)))
        parts = [part for each in layers for part in self._take_apart(device, each)]
        return here / len(layers) * sum(share * self._whole(device, part, tokens, few) for part, share in parts)

    def _take_apart(self, device: str, layer: LayerShape) -> tuple[tuple[LayerShape, float], ...]:
        """Layers that this one's time is put together from, with their shares, where its types were timed each with
        itself and not together, in experts of its size or else of any; else itself."""
        if (device, layer) not in self._parts:
            own, timed = layer.apart, set(self._layers[device])
            alike = {each.of_any_size for each in timed}
            here = layer not in timed and timed.issuperset(own)
            elsewhere = layer.of_any_size not in alike and alike.issuperset(each.of_any_size for each in own)
            shares = (GATES, 1 - GATES)
            self._parts[device, layer] = tuple(zip(own, shares)) if here or elsewhere else ((layer, 1.0),)
        return self._parts[device, layer]

    def _whole(self, device: str, layer: LayerShape, tokens: float, few: bool) -> float:
        """Seconds of all of a layer's experts, by it or by the one most like it. few: see `experts`."""
        timed = self._layers[device]
        if (device, layer) not in self._nearest:
            self._nearest[device, layer] = layer if layer in timed else min(timed, key=layer.unlikeness)
        near = self._nearest[device, layer]
        at, curve = max(1.0, tokens * layer.load / near.load), timed[near]
        size = layer.nbytes / near.nbytes if few else layer.elements / near.elements
        seconds = near.touched(min(at, curve[-1][0])) * interpolate(curve, at)
        return size * layer.touched(tokens) / near.touched(at) * seconds

    def read(self, expert_nbytes: int, nbytes: float, tokens: float) -> float | None:
        """Seconds in which an accelerator reads `nbytes` of a layer's experts over the link, by the timed ones that are
        nearest in size; None where none were timed."""
        if not self._read:
            return None
        near = min(self._read, key=lambda size: (abs(log(size / expert_nbytes)), size))
        curve = self._read[near]
        return nbytes * interpolate(curve, min(float(tokens), curve[-1][0]))

    def route(self, device: str, route: Route, tokens: int) -> float | None:
        """Seconds of a router for so many tokens. One that was not timed takes what the nearest in size takes, and
        longer in proportion if it is larger."""
        timed = self._routers.get(device)
        if not timed:
            return None
        router = RouterShape(route.router.qtype, route.router.rows, route.chosen, route.router.cols)
        near = router if router in timed else min(timed, key=router.unlikeness)
        return max(1.0, router.elements / near.elements) * interpolate(timed[near], tokens)
