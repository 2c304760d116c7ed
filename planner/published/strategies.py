"""Published strategies as placements in the same nouns, for the same simulator and the same executor.

Each fills the VRAM in a fixed order and places what is left by a fixed rule, tier by tier. Those of programs that place
weights once, when they are loaded, have the same in VRAM in every tier.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from pshard.errors import UserError
from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier
from pshard.units.divide_unit import count_shares
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Unit, places_of

SLOTS = 2  # double buffering, as published
COPIED_FROM = 32  # tokens: llama.cpp copies what larger batches need of the host's weights, and computes on the GPU


@dataclass(frozen=True)
class Strategy:
    """Groups are taken into VRAM in order, each whole, until one does not fit; then `rest` places what is left.

    A group lists ("pin", "part" or "kv", unit name); "part" is one more part of a unit that has parts. `rest` gives
    the site, STREAMED or ON_CPU, of a unit, or of the parts of one that are left, in tiers of so many tokens. static:
    every tier takes as many groups as the one that takes fewest.
    """

    groups: tuple[tuple[tuple[str, str], ...], ...]
    rest: Callable[[Unit, int], str]
    static: bool = False


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
        groups.append(group if kv_first or layer not in attention else (*group, ("kv", attention[layer])))
    return tuple(groups)


def _attention_then_ffn(spec: ModelSpec, pin_attention: bool = True) -> tuple:
    """KV, then attention, then the head, then FFNs, layer by layer."""
    groups: list[tuple] = [(("kv", u.name),) for u in spec.units if u.kind.state]
    if pin_attention:
        groups += [(("pin", u.name),) for u in _treated_as(spec, "first")]
    return (*groups, *_head(spec), *((("pin", u.name),) for u in _treated_as(spec, "bulk")))


def whole_layer_fit(spec: ModelSpec) -> Strategy:
    """The head and the last layers in VRAM with their KV, the other layers on the CPU."""
    return Strategy((*_head(spec), *_whole_layers(spec, False)), _compute_on_host)


def attention_first(spec: ModelSpec) -> Strategy:
    """KV and attention in VRAM, then FFNs as they fit; the rest on the CPU."""
    return Strategy(_attention_then_ffn(spec), _compute_on_host)


def layer_stream(spec: ModelSpec) -> Strategy:
    """KV and some layers in VRAM; the other layers streamed whole. Of a model with routed experts all else stays in
    VRAM, and the experts of whole layers are streamed."""
    if has_experts(spec):
        return Strategy((*_all_but_experts(spec), *_experts_from_the_last(spec)), _stream)
    return Strategy((*_head(spec), *_whole_layers(spec, True)), _stream)


def ffn_stream(spec: ModelSpec) -> Strategy:
    """KV and attention in VRAM, then FFNs as they fit; the other FFNs streamed."""
    return Strategy(_attention_then_ffn(spec), _stream)


def ffn_cpu_attention_stream(spec: ModelSpec) -> Strategy:
    """KV in VRAM and FFNs as they fit, the others on the CPU; attention streamed."""
    return Strategy(
        _attention_then_ffn(spec, pin_attention=False),
        lambda u, tokens: STREAMED if u.kind.strategy == "first" else ON_CPU,
    )


def alternate_ffn(spec: ModelSpec) -> Strategy:
    """KV and attention in VRAM, then FFNs as they fit; the others by turns on the CPU and streamed."""
    return Strategy(
        _attention_then_ffn(spec),
        lambda u, tokens: ON_CPU if u.kind.strategy == "bulk" and u.layer % 2 else STREAMED,
    )


def cpu_moe(spec: ModelSpec) -> Strategy:
    """All routed experts on the CPU, everything else in VRAM: llama.cpp's --cpu-moe."""
    return Strategy(_all_but_experts(spec), _as_llama_cpp, static=True)


def n_cpu_moe(spec: ModelSpec) -> Strategy:
    """The routed experts of the first layers on the CPU, of as few as fit, everything else in VRAM: llama.cpp's
    --n-cpu-moe."""
    return Strategy((*_all_but_experts(spec), *_experts_from_the_last(spec)), _as_llama_cpp, static=True)


def hot_experts(spec: ModelSpec) -> Strategy:
    """As many routed experts of every layer in VRAM as fit, the same number of each, and everything else; the other
    experts on the CPU."""
    experts = _experts(spec)
    most = max((count_shares(u) for u in experts), default=0)
    one_more = tuple(("part", u.name) for u in experts)
    return Strategy((*_all_but_experts(spec), *(one_more,) * most), _as_llama_cpp, static=True)


def expert_lru(spec: ModelSpec) -> Strategy:
    """All routed experts outside VRAM, everything else in it; what room is left is slots for the experts that were used
    last (`plan_baseline` adds them). One that is missed is read over the link, and fetched."""
    return Strategy(_all_but_experts(spec), _stream, static=True)


def _compute_on_host(unit: Unit, tokens: int) -> str:
    return ON_CPU


def _stream(unit: Unit, tokens: int) -> str:
    return STREAMED


def _as_llama_cpp(unit: Unit, tokens: int) -> str:
    return STREAMED if unit.kind.parts and tokens >= COPIED_FROM else ON_CPU


def has_experts(spec: ModelSpec) -> bool:
    """Whether a model has routed experts."""
    return spec.config.experts is not None


def _experts(spec: ModelSpec) -> list[Unit]:
    return [u for u in spec.units if u.kind.parts]


def find_left_out(tier: TierPlan, spec: ModelSpec) -> tuple[str, ...]:
    """Units with parts of which none is in VRAM in a tier."""
    there = {p.unit for p in tier.placements if p.in_arena}
    return tuple(u.name for u in _experts(spec) if u.tensors and u.name not in there)


def _experts_from_the_last(spec: ModelSpec) -> tuple:
    return tuple((("pin", u.name),) for u in reversed(_experts(spec)))


def _all_but_experts(spec: ModelSpec) -> tuple:
    """KV, then attention, then the head, then dense FFNs, layer by layer."""
    routed = {u.name for u in _experts(spec)}
    return tuple(group for group in _attention_then_ffn(spec) if group[0][1] not in routed)


STRATEGIES: dict[str, Callable[[ModelSpec], Strategy]] = {
    "fit": whole_layer_fit,
    "attention-first": attention_first,
    "layer-stream": layer_stream,
    "ffn-stream": ffn_stream,
    "ffn-cpu": ffn_cpu_attention_stream,
    "alternate-ffn": alternate_ffn,
    "cpu-moe": cpu_moe,
    "n-cpu-moe": n_cpu_moe,
    "hot-experts": hot_experts,
    "expert-lru": expert_lru,
}
HOT_EXPERTS = "hot-experts"
EXPERT_LRU = "expert-lru"  # its slots are no placements: see `plan_baseline`
OF_EXPERTS = ("cpu-moe", "n-cpu-moe", HOT_EXPERTS, EXPERT_LRU)  # place nothing else than routed experts

PER_TIER = "per-tier"  # the best of the published planner's own four in each tier, see per_tier.py
NAMES = (*STRATEGIES, PER_TIER)


IMPROVED = "improved "  # before the name of a strategy whose plan was improved


def name_improved(strategy: str) -> str:
    """What a plan is called that was improved; only published ones are called otherwise then."""
    return f"{IMPROVED}{strategy}" if strategy in NAMES else strategy


def list_strategies(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the strategies that are placements alone, of those that there are for a model: those of experts only
    where it has some."""
    placed = (name for name in STRATEGIES if name != EXPERT_LRU)
    return tuple(name for name in placed if has_experts(spec) or name not in OF_EXPERTS)


def list_published(spec: ModelSpec) -> tuple[str, ...]:
    """The same, and where a model has experts the one with slots."""
    return (*list_strategies(spec), *((EXPERT_LRU,) if has_experts(spec) else ()))


def check_strategy(name: str, spec: ModelSpec) -> None:
    """Raise UserError where there is no such strategy for the model."""
    if name not in NAMES:
        raise UserError(f"unknown strategy {name!r}; choose from ilp, {', '.join(NAMES)}")
    if name in OF_EXPERTS and not has_experts(spec):
        others = ", ".join((*list_strategies(spec), PER_TIER))
        raise UserError(f"strategy {name!r} places routed experts, and {spec.name} has none; choose from {others}")


@dataclass(frozen=True)
class Baseline:
    """A strategy's tiers with the orders that all of them share, and how units are divided that are pinned in part."""

    pin_order: tuple[str, ...]
    kv_order: tuple[str, ...]
    tiers: tuple[TierPlan, ...]
    shares: Mapping[str, Share]


def place_strategy(name: str, room: Room, tiers: tuple[int, ...]) -> Baseline | None:
    """All tiers under a strategy; None when its staging does not fit beside the scratch of some tier.

    A plan is compared with it before it is refined and afterwards: the room remembers it.
    """
    if (name, tiers) not in room.baselines:
        room.baselines[name, tiers] = _place_tiers(STRATEGIES[name](room.spec), room, tiers)
    return room.baselines[name, tiers]


def _place_tiers(strategy: Strategy, room: Room, tiers: tuple[int, ...]) -> Baseline | None:
    rest = cache(lambda tokens: _place_rest(strategy, room, tokens))
    order = _Order(strategy.groups)

    @cache
    def take(tokens: int, n: int) -> TierPlan:
        return _take(order, room, rest(tokens), tokens, n)

    def held(n: int, like: int) -> int:
        return take(like, n).buffers.total - room.scratch(like)

    lengths, taken = [], len(strategy.groups)
    for tokens in tiers:
        in_place = room.spec.ways_to_read(tokens)[0]
        like = tokens if in_place else tiers[-1]  # slots are as large in all tiers that have some
        taken = _fill(partial(held, like=like), room.arena - room.scratch(tokens), taken)
        if taken < 0:
            return None
        lengths.append(taken)
    if strategy.static:  # those of the last tier, which takes fewest
        while taken >= 0 and any(take(n, taken).buffers.total > room.arena for n in tiers):
            taken -= 1  # less in VRAM may take scratch that all of it does not
        if taken < 0:
            return None
        lengths = [taken] * len(tiers)
    plans = tuple(map(take, tiers, lengths))
    items = dict.fromkeys(item for group in strategy.groups for item in group)
    shares = {p.unit: p.share for p in plans[0].placements if p.share}
    return Baseline(
        tuple(n for what, n in items if what != "kv"), tuple(n for what, n in items if what == "kv"), plans, shares
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


class _Order:
    """What a strategy takes into VRAM, in order: units pinned, parts of units, and units with their KV."""

    def __init__(self, groups: tuple[tuple[tuple[str, str], ...], ...]) -> None:
        self._names: dict[str, list[str]] = {"pin": [], "part": [], "kv": []}
        self._ends = [(0, 0, 0)]
        for group in groups:
            for what, name in group:
                self._names[what].append(name)
            pins, parts, kv = map(len, self._names.values())
            self._ends.append((pins, parts, kv))

    def first(self, n: int) -> tuple[list[str], list[str], list[str]]:
        """What is in the first `n` groups: pinned, parts, with KV."""
        pins, parts, kv = (names[:end] for names, end in zip(self._names.values(), self._ends[n]))
        return pins, parts, kv


def _take(order: _Order, room: Room, rest: Mapping[str, str], tokens: int, n: int) -> TierPlan:
    """The tier with the first `n` groups in VRAM and the other units as `rest` says."""
    pinned, parts, with_kv = order.first(n)
    where = {**rest, **dict.fromkeys(pinned, PINNED)}
    shares = dict[str, Share]()
    for name, count in Counter(parts).items():
        where[name], shares[name] = _place_parts(count, count_shares(room.spec.unit(name)), where[name])
    kv = frozenset(name for name in with_kv if where[name] != ON_CPU)
    return draft_tier(room, tokens, where, kv, SLOTS, {name: share for name, share in shares.items() if share})


def _place_rest(strategy: Strategy, room: Room, tokens: int) -> dict[str, str]:
    """Where units are that are not in VRAM: as the strategy says, if they may be there."""
    legal = {kind: {where for where, _ in places_of(kind, room.sums)} for kind in {u.kind for u in room.spec.units}}
    found = {}
    for unit in room.spec.units:
        wanted = ON_CPU if unit.kind.is_looked_up else strategy.rest(unit, tokens)
        found[unit.name] = next(where for where in (wanted, STREAMED, PINNED) if where in legal[unit.kind])
    return found


def _place_parts(count: int, total: int, rest: str) -> tuple[str, Share]:
    """A unit with its first `count` parts in VRAM and the others as `rest` says."""
    if count >= total:
        return PINNED, WHOLE
    return (STREAMED, Share(kept=count)) if rest == STREAMED else (PINNED, Share(cpu=total - count))
