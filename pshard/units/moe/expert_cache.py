"""ExpertCache: slots for experts that follow which are used, as a plan has them. No torch."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pshard.quant import TENSOR_ALIGN, align
from pshard.units.moe.in_place import ALWAYS_TOKENS, IN_PLACE_TOKENS
from pshard.units.operations import used_share
from pshard.units.unit import Unit

# larger tiers leave the slots as they are: a prompt uses nearly all experts, and would throw out what decoding chose
FOLLOW_TOKENS = ALWAYS_TOKENS
MOST_FOLLOW_TOKENS = IN_PLACE_TOKENS  # of the tier in which more sequences decode
POLICIES = ("lru", "frequency")
DEMAND = "demand"  # of experts that live beyond host memory
STEPS = 255  # of a share, that it fits a byte


@dataclass(frozen=True)
class ExpertCache:
    """A pool of slots for the experts of like layers, `units`, in tiers of up to `tokens` tokens, which read what they
    have outside VRAM in place.

    A slot of `slot_bytes` holds any expert of these layers that lies outside VRAM in the largest of these tiers.
    `policy`: "lru" or "frequency" (see follow_use.py). `admits`: how many experts are brought in after a micro-batch at
    most; 0: what was there at the start stays. Or "demand": the experts live beyond host memory, and what a layer
    misses is brought there before it is computed, all of it; `on_host`: to host memory beside an accelerator, where the
    CPU computes from them.
    `hits`: what share of the choices of the expert at each place finds it in a slot, as a replay or nothing ("") says;
    one byte each, 255ths, as base64. `found`: what share of all choices of these layers that is. `admitted`: how many
    experts the replay brings in for each token, in micro-batches as wide as the plan is for; `alone`: how many after a
    micro-batch of one token, where the plan is for wider ones. So many are not brought for each token then: a step of
    one token has as much time to fill as one of four.
    `width`: tokens of the micro-batches that `hits` are of.
    """

    units: tuple[str, ...]
    slots: int
    slot_bytes: int
    policy: str
    admits: int
    hits: str = ""
    found: float = 0.0
    admitted: float = 0.0
    alone: float = 0.0
    tokens: int = FOLLOW_TOKENS
    on_host: bool = False
    width: int = 1

    @property
    def is_on_demand(self) -> bool:
        """Whether micro-batches wait for the experts that they miss."""
        return self.policy == DEMAND

    def refill(self, tokens: int) -> float:
        """How many experts are expected to be brought in after a micro-batch of so many tokens; 0 where it uses no
        slots, or has brought them itself. One of more tokens misses no fewer."""
        expected = max(self.alone, self.admitted * tokens)
        return min(float(self.admits), expected) if tokens <= self.tokens else 0.0

    def find_alike(self, chosen: int, of: int, tokens: int) -> float:
        """What share of its uses an expert on demand is found in a slot, where all are used alike, in micro-batches of
        so many tokens, of which each takes `chosen` of the `of` experts of each layer. See `DemandFollower`.

        Layers take turns, and what was used longest ago goes. So when a layer's turn comes, slots have what it used in
        as many of the last steps as there is room for in all layers, and a part of one step more. Where not even one
        step has room, what is missed goes through the same slots, and all others keep what they have.
        """
        used, layers = used_share(chosen, of, tokens), len(self.units)
        if self.slots >= layers * of:
            return 1.0
        if layers * of * used > self.slots:
            return max(0.0, self.slots - of * used) / max(1.0, layers * of - of * used)
        left = 1.0  # the share of experts that the last steps did not use
        while layers * of * (1 - left * (1 - used)) <= self.slots:
            left *= 1 - used
        more = left * used  # that one more step used
        part = self.slots - layers * of * (1 - left) - (layers - 1) * of * more
        return 1 - left + max(0.0, part) / of

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.slots * self.slot_bytes

    @cached_property
    def hits_by_place(self) -> tuple[float, ...]:
        """Shares from 0 to 1; none where nothing is known."""
        return tuple(step / STEPS for step in base64.b64decode(self.hits, validate=True))


def pack_hits(shares: Sequence[float]) -> str:
    """Shares from 0 to 1 by place as `ExpertCache.hits` has them."""
    return base64.b64encode(bytes(round(STEPS * min(1.0, max(0.0, share))) for share in shares)).decode()


def part_sizes(unit: Unit) -> dict[str, int]:
    """Bytes of one expert's part of each stack, by role."""
    return {t.role: t.packed_nbytes // t.parts for t in unit.tensors if t.parts}


def slot_nbytes(unit: Unit) -> int:
    """Bytes of a slot for one of a unit's experts: its parts in turn, each where a tensor may begin."""
    return sum(align(nbytes, TENSOR_ALIGN) for nbytes in part_sizes(unit).values())


def check_cache(cache: ExpertCache, where: str) -> None:
    """Raise ValueError, which names the field, for what no plan has."""
    if not cache.units or len(set(cache.units)) != len(cache.units):
        raise ValueError(f"{where}.units names no unit, or one twice")
    if cache.slots < 1 or cache.slot_bytes < 1:
        raise ValueError(f"{where} has {cache.slots} slots of {cache.slot_bytes} bytes")
    if cache.policy not in (*POLICIES, DEMAND):
        raise ValueError(f"{where}.policy is {cache.policy!r}, not one of {', '.join((*POLICIES, DEMAND))}")
    if cache.on_host and not cache.is_on_demand:
        raise ValueError(f"{where}.on_host is true, but what comes there comes on demand, not by {cache.policy!r}")
    if min(cache.admits, cache.admitted, cache.alone) < 0:
        raise ValueError(f"{where} admits {cache.admits} experts, {cache.admitted} expected; neither is less than 0")
    if not 1 <= cache.tokens <= MOST_FOLLOW_TOKENS:
        raise ValueError(f"{where}.tokens is {cache.tokens}, not 1 to {MOST_FOLLOW_TOKENS}")
    if not 1 <= cache.width <= cache.tokens:
        raise ValueError(f"{where}.width is {cache.width}, not 1 to {cache.tokens}, as `tokens` says")
    if not 0 <= cache.found <= 1:
        raise ValueError(f"{where}.found is {cache.found}, no share of all choices")
    try:
        base64.b64decode(cache.hits, validate=True)
    except ValueError:
        raise ValueError(f"{where}.hits is no base64") from None
