"""Steps: the flat list that the planner simulates and the executor runs for one micro-batch. No torch.

Copies of streamed units run ahead: whenever a staging slot becomes free, the next unit that uses that slot is copied
into it, across the end of the micro-batch too (weights don't depend on tokens). So a micro-batch begins with the
first `slots` streamed units already loaded or on their way; `enter` lists those copies for the first one of a tier.
"""

from functools import lru_cache

from pshard.model import ModelSpec
from pshard.plan import Placement, TierPlan
from pshard.routing.expert_uses import read_nbytes
from pshard.steps.step import (
    AllReduce,
    Bring,
    Compute,
    CopyIn,
    FetchKV,
    Free,
    Gather,
    Handoff,
    Join,
    Receive,
    Refill,
    Send,
    Step,
    StepList,
    StepShape,
    WriteBack,
)
from pshard.units.divide_unit import divided_sizes, joined_width
from pshard.units.moe.routed import ROUTED, routed_words
from pshard.units.unit import Unit, UnitKind

# a search emits the same few steps thousands of times: equal ones are one object
_copy_in = lru_cache(1 << 14)(CopyIn)
_fetch_kv = lru_cache(1 << 14)(FetchKV)
_compute = lru_cache(1 << 14)(Compute)
_write_back = lru_cache(1 << 14)(WriteBack)
_all_reduce = lru_cache(1 << 14)(AllReduce)
_join = lru_cache(1 << 14)(Join)
_free = lru_cache(1 << 14)(Free)
_hand_off = lru_cache(1 << 14)(Handoff)
_gather = lru_cache(1 << 14)(Gather)
_expect_read = lru_cache(1 << 14)(read_nbytes)

SOURCES = {"pinned": "arena", "streamed": "slot", "cpu": "host"}  # of a unit's weights, by placement
PART = "branch"  # the buffer of a rank's part of a sum
Placed = tuple[Unit, Placement]


def emit_steps(spec: ModelSpec, tier: TierPlan, shape: StepShape) -> StepList:
    """The steps of one micro-batch of `shape` under `tier`, in issue order.

    A unit that both sides compute begins with a hand-off to the side that lacks its input. Of ranks that sum on the
    accelerator the residual stream stays there: CPU units get a copy of it, and hand over their part of the sum. A part
    to which the next unit adds is where that one runs.
    """
    links, hidden = spec.neighbours, shape.tokens * spec.config.d_model * 4
    placed = _placed(spec, tier)
    slots = tier.buffers.slots
    copies = _copy_streamed(placed, slots, tier.in_place)
    first, following = copies[:slots], _next_in_slot(copies, slots)
    fetches, writes = _move_states(spec, placed, shape)
    staged = iter(fetches)  # of the next unit whose state passes through the stage: nothing, or its fetch
    body: list[Step] = [*_refill_slots(spec, tier, shape.tokens), *next(staged, ())]
    add, sums = body.append, shape.ranks > 1 and not links
    stays = sums and not shape.sums_on_host
    at, n_copied = _Whereabouts(spec, shape.tokens, stays), 0
    if links and links.source is not None:
        add(Receive(links.source, hidden))
        at.hidden = "acc"
    growing = set(spec.onto_parts.values()) if sums else ()
    for unit, place in placed:
        name, kind, where = unit.name, unit.kind, place.where
        on, source, slot, reads = "cpu" if where == "cpu" else "acc", SOURCES[where], None, 0
        if where == "streamed" and tier.in_place and kind.parts:
            uses = spec.uses_outside(name, tier.tokens)
            source, reads = "link", _expect_read(unit, place.share, spec.config, shape.tokens, uses)
        elif where == "streamed":
            slot = n_copied % slots
        if place.cpu_rows:
            body += [*at.bring("acc", kind), *at.bring("cpu", kind, share=True)]
            body.extend(_compute_on_both(unit, place, (source, slot, reads), 4 * shape.tokens, spec))
        else:
            body += at.bring(on, kind)
            kept = {"kept_parts": place.kept_parts} if place.kept_parts else {}
            if reads:
                kept["reads"] = reads
            add(_compute(name, on, source, slot, "", 0, kind.position, place.kv, **kept))
        at.leave(on, kind, name in growing)
        if stays and on == "cpu" and not kind.gives_logits and name not in growing:
            add(_hand_off("acc", hidden))
            at.hidden = "acc"
        if sums and kind.adds and name not in growing:
            add(_all_reduce(name, hidden))
        if name in writes:
            add(writes[name])
            body += next(staged, ())
        if slot is not None:
            add(_free(slot))
            after = following[n_copied]
            if after is not None:
                add(after)
            n_copied += 1
    body += _deliver(spec, at.hidden, shape, hidden)
    return StepList(tuple(first), tuple(body))


class _Whereabouts:
    """On which sides activations are: the residual stream on one, what a router has found on those that have it, and a
    rank's part of a sum that is not whole yet.

    stays: the residual stream is on the accelerator for good, and units that read what a router found do without it.
    """

    def __init__(self, spec: ModelSpec, tokens: int, stays: bool) -> None:
        self.hidden, self._routed, self._part = "cpu", set[str](), ""  # token ids start on the host
        self._stays, self._nbytes = stays, {"hidden": 4 * tokens * spec.config.d_model}
        self._nbytes[PART] = self._nbytes["hidden"]
        if spec.config.experts:
            self._nbytes[ROUTED] = 4 * tokens * routed_words(spec.config)

    def bring(self, on: str, kind: UnitKind, share: bool = False) -> list[Step]:
        """The hand-off of what a unit lacks on a side; share: it computes its part of one that is divided, and of one
        that reads what a router found no more than that is needed for it."""
        carries = []
        without = kind.is_looked_up or (share and kind.routing) or self._is_spared(kind)
        if on != self.hidden and not without:
            carries.append("hidden")
        if kind.routing == "reads" and on not in self._routed:
            carries.append(ROUTED)
            self._routed.add(on)
        if self._part not in ("", on) and not share:
            carries.append(PART)
        if not carries:
            return []
        if carries == ["hidden"]:
            return [_hand_off(on, self._nbytes["hidden"])]
        return [_hand_off(on, sum(self._nbytes[name] for name in carries), tuple(carries))]

    def leave(self, on: str, kind: UnitKind, part_grows: bool) -> None:
        """A unit has run there; of a divided one the accelerator has all. part_grows: the next one adds to its part."""
        self.hidden = self.hidden if self._is_spared(kind) else on
        self._part = on if part_grows else ""
        if kind.routing == "makes":
            self._routed = {on}

    def _is_spared(self, kind: UnitKind) -> bool:
        return self._stays and kind.routing == "reads"


def list_residents(spec: ModelSpec, tier: TierPlan) -> tuple[Bring, ...]:
    """Weights and states that a tier holds in VRAM, in the order of need."""
    found = []
    for unit, place in _placed(spec, tier):
        if place.in_arena:
            found.append(Bring(unit.name, "weights", place.cpu_rows, place.kept_parts))
        if place.kv == "vram":
            found.append(Bring(unit.name, "state"))
    return tuple(found)


def _refill_slots(spec: ModelSpec, tier: TierPlan, tokens: int) -> list[Step]:
    """Slots for experts that follow use come first: their copies run under all that follows."""
    if tier.tokens > spec.follow_tokens:
        return []
    return [Refill(sum(round(cache.refill(tokens) * cache.slot_bytes) for cache in spec.caches))]


def _placed(spec: ModelSpec, tier: TierPlan) -> list[Placed]:
    """Units and their placements; another rank of a pipeline may have the embedding or the output."""
    places, links = {p.unit: p for p in tier.placements}, spec.neighbours
    return [(unit, places[unit.name]) for unit in spec.units if unit.tensors or not links]


def _copy_streamed(placed: list[Placed], slots: int, in_place: bool) -> list[CopyIn]:
    """The copy of every streamed unit, in turn into every slot, but for those that are read in place."""
    streamed = [
        (unit, place) for unit, place in placed if place.where == "streamed" and not (in_place and unit.kind.parts)
    ]
    if streamed and slots < 1:
        raise ValueError("a tier that streams needs at least one staging slot")
    copies = []
    for i, (unit, place) in enumerate(streamed):
        if place.share:
            nbytes = divided_sizes(unit, place.share).copied
            copies.append(_copy_in(unit.name, i % slots, nbytes, place.cpu_rows, place.kept_parts))
        else:
            copies.append(_copy_in(unit.name, i % slots, unit.packed_nbytes))
    return copies


def _move_states(
    spec: ModelSpec, placed: list[Placed], shape: StepShape
) -> tuple[list[tuple[Step, ...]], dict[str, WriteBack]]:
    """Of units whose state passes through the stage: of each in order its fetch, if there is one, and write-backs by
    unit."""
    fetches: list[tuple[Step, ...]] = []
    writes, laws = {}, spec.states(shape.states)
    for unit, place in placed:
        if place.kv == "host" and place.where != "cpu":
            law = laws.get(unit.name)
            if law is None:
                raise ValueError(f"{unit.name} keeps no state that could be on the host")
            fetched = shape.past or not law.grows  # a sequence's zeros, too, are on the host
            nbytes = law.fetched(shape.past, shape.sequences)
            fetches.append((_fetch_kv(unit.name, nbytes),) if fetched else ())
            writes[unit.name] = _write_back(unit.name, law.written(shape.tokens, shape.sequences))
    return fetches, writes


def _deliver(spec: ModelSpec, side: str, shape: StepShape, hidden: int) -> list[Step]:
    """What follows the units: logits to the host, or hidden states to the next rank of a pipeline."""
    links, logits = spec.neighbours, shape.logit_rows * spec.config.vocab * 4
    steps: list[Step] = []
    if links and not spec.units[-1].tensors:
        logits = 0
        if links.target is not None:
            steps += [_hand_off("acc", hidden)] if side == "cpu" else []
            steps.append(Send(links.target, hidden))
    elif side == "acc":
        steps.append(_hand_off("cpu", logits))
    if shape.ranks > 1:
        steps.append(_gather(spec.units[-1].name, logits))
    return steps


def _compute_on_both(
    unit: Unit, place: Placement, found: tuple[str, int | None, int], column: int, spec: ModelSpec
) -> tuple[Step, ...]:
    """Both sides compute what they have, the accelerator without holding the host up; then it has all. found: source
    and slot of what the accelerator has, and the bytes that it reads over the link. column: bytes of one element of
    every token."""
    (source, slot, reads), rows, kept = found, place.cpu_rows, place.kept_parts
    more = {"reads": reads} if reads else {}
    width = joined_width(unit, place.share, spec.config)
    return (
        _compute(unit.name, "acc", source, slot, "share", rows, kept_parts=kept, **more),
        _compute(unit.name, "cpu", "host", None, "share", rows, kept_parts=kept),
        _join(unit.name, column * width, width),
        _compute(unit.name, "acc", source, slot, "rest", rows, kept_parts=kept),
    )


def _next_in_slot(copies: list[CopyIn], slots: int) -> list[CopyIn | None]:
    """By copy, the one into its slot after it, of the next micro-batch too; None when the slot keeps its only unit."""
    after = [copies[i + slots] if i + slots < len(copies) else copies[i % slots] for i in range(len(copies))]
    return [None if copy is own else copy for copy, own in zip(after, copies)]
