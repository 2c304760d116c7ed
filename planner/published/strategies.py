"""Published strategies as placements in the same nouns, for the same simulator and the same executor.

Each fills the VRAM in a fixed order and places what is left by a fixed rule, tier by tier.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier
from pshard.units.moe.in_place import ways_to_read
from pshard.units.unit import Unit, places_of

SLOTS = 2  # double buffering, as published


@dataclass(frozen=True)
class Strategy:
    """Groups are taken into VRAM in order, each whole, until one does not fit; then `rest` places what is left.

    A group lists ("pin" or "kv", unit name). `rest` gives "streamed" or "cpu" for the i-th unit of its kind.
    """

    groups: tuple[tuple[tuple[str, str], ...], ...]
    rest: Callable[[Unit], str]


def _treated_as(spec: ModelSpec, how: str) -> list[Unit]:
    return [u for u in spec.units if u.kind.strategy == how]


def _head(spec: ModelSpec) -> tuple:
    return tuple((("pin", u.name),) for u in _treated_as(spec, "head"))


def _whole_layers(spec: ModelSpec, kv_first: bool) -> tuple:
    """One group per layer, last layers first; KV with its layer, or all of it before any weights."""
    groups: list[tuple] = []
    attention = {u.layer: u.name for u in spec.units if u.kind.state}
    if kv_first:
        groups += [(("kv", name),) for name in attention.values()]
    for layer in sorted({u.layer for u in spec.units if u.layer >= 0}, reverse=True):
        group = tuple(("pin", u.name) for u in spec.units if u.layer == layer)
        groups.append(group if kv_first else (*group, ("kv", attention[layer])))
    return tuple(groups)


def _attention_then_ffn(spec: ModelSpec, pin_attention: bool = True) -> tuple:
    """KV, then attention, then the head, then FFNs, layer by layer."""
    groups: list[tuple] = [(("kv", u.name),) for u in spec.units if u.kind.state]
    if pin_attention:
        groups += [(("pin", u.name),) for u in _treated_as(spec, "first")]
    return (*groups, *_head(spec), *((("pin", u.name),) for u in _treated_as(spec, "bulk")))


def whole_layer_fit(spec: ModelSpec) -> Strategy:
    """The head and the last layers in VRAM with their KV, the other layers on the CPU."""
    return Strategy((*_head(spec), *_whole_layers(spec, False)), lambda u: "cpu")


def attention_first(spec: ModelSpec) -> Strategy:
    """KV and attention in VRAM, then FFNs as they fit; the rest on the CPU."""
    return Strategy(_attention_then_ffn(spec), lambda u: "cpu")


def layer_stream(spec: ModelSpec) -> Strategy:
    """KV and some layers in VRAM; the other layers streamed whole."""
    return Strategy((*_head(spec), *_whole_layers(spec, True)), lambda u: "streamed")


def ffn_stream(spec: ModelSpec) -> Strategy:
    """KV and attention in VRAM, then FFNs as they fit; the other FFNs streamed."""
    return Strategy(_attention_then_ffn(spec), lambda u: "streamed")


def ffn_cpu_attention_stream(spec: ModelSpec) -> Strategy:
    """KV in VRAM and FFNs as they fit, the others on the CPU; attention streamed."""
    return Strategy(
        _attention_then_ffn(spec, pin_attention=False), lambda u: "streamed" if u.kind.strategy == "first" else "cpu"
    )


def alternate_ffn(spec: ModelSpec) -> Strategy:
    """KV and attention in VRAM, then FFNs as they fit; the others by turns on the CPU and streamed."""
    return Strategy(
        _attention_then_ffn(spec), lambda u: "cpu" if u.kind.strategy == "bulk" and u.layer % 2 else "streamed"
    )


STRATEGIES: dict[str, Callable[[ModelSpec], Strategy]] = {
    "fit": whole_layer_fit,
    "attention-first": attention_first,
    "layer-stream": layer_stream,
    "ffn-stream": ffn_stream,
    "ffn-cpu": ffn_cpu_attention_stream,
    "alternate-ffn": alternate_ffn,
}


PER_TIER = "per-tier"  # the best of the published planner's own four in each tier, see per_tier.py
NAMES = (*STRATEGIES, PER_TIER)


@dataclass(frozen=True)
class Baseline:
    """A strategy's tiers with the orders that all of them share."""

    pin_order: tuple[str, ...]
    kv_order: tuple[str, ...]
    tiers: tuple[TierPlan, ...]


def place_strategy(name: str, room: Room, tiers: tuple[int, ...]) -> Baseline | None:
    """All tiers under a strategy; None when its staging does not fit beside the scratch of some tier."""
    strategy = STRATEGIES[name](room.spec)
    held = cache(lambda n, like: _take(strategy, room, like, n).buffers.total - room.scratch(like))
    plans, taken = [], len(strategy.groups)
    for tokens in tiers:
        in_place = ways_to_read(room.spec.config, tokens)[0]
        like = tokens if in_place else tiers[-1]  # slots are as large in all tiers that have some
        taken = _fill(partial(held, like=like), room.arena - room.scratch(tokens), taken)
        if taken < 0:
            return None
        plans.append(_take(strategy, room, tokens, taken))
    items = [item for group in strategy.groups for item in group]
    return Baseline(
        tuple(n for what, n in items if what == "pin"), tuple(n for what, n in items if what == "kv"), tuple(plans)
    )


def _fill(held: Callable[[int], int], left: int, most: int) -> int:
    """Length of the longest prefix of at most `most` groups that fits; -1 when none does.

    held: bytes beside the scratch by length of the prefix; `left`: how many there may be.
    """

    def is_over(n: int) -> bool:
        return held(n) > left

    low, over, step = most, most + 1, 1
    while low >= 0 and is_over(low):  # ever longer steps down: larger tiers mostly fit a little less
        low, over, step = low - step, low, 2 * step
    low = max(low, -1)
    return low + bisect_left(range(low + 1, over), True, key=is_over)


def _take(strategy: Strategy, room: Room, tokens: int, n: int) -> TierPlan:
    items = [item for group in strategy.groups[:n] for item in group]
    pinned = {name for what, name in items if what == "pin"}
    where = {u.name: _place_rest(strategy, room, u) for u in room.spec.units}
    where |= dict.fromkeys(pinned, "pinned")
    kv = frozenset(name for what, name in items if what == "kv" and where[name] != "cpu")
    return draft_tier(room, tokens, where, kv, SLOTS)


def _place_rest(strategy: Strategy, room: Room, unit: Unit) -> str:
    """Where a unit is that is not in VRAM: as the strategy says, if it may be there."""
    wanted = "cpu" if unit.kind.is_looked_up else strategy.rest(unit)
    legal = {where for where, _ in places_of(unit.kind, room.sums)}
    return wanted if wanted in legal else "streamed"
