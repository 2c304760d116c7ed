"""Steps: the flat list that the planner simulates and the executor runs for one micro-batch. No torch.

Copies of streamed units run ahead: whenever a staging slot becomes free, the next unit that uses that slot is copied
into it, across the end of the micro-batch too (weights don't depend on tokens). So a micro-batch begins with the
first `slots` streamed units already loaded or on their way; `enter` lists those copies for the first one of a tier.
"""

from functools import lru_cache

from pshard.model import ModelSpec
from pshard.plan import Placement, TierPlan
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
    Send,
    Step,
    StepList,
    StepShape,
    WriteBack,
)
from pshard.units.divide_rows import acc_part
from pshard.units.unit import Unit

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

SOURCES = {"pinned": "arena", "streamed": "slot", "cpu": "host"}  # of a unit's weights, by placement
Placed = tuple[Unit, Placement]


def emit_steps(spec: ModelSpec, tier: TierPlan, shape: StepShape) -> StepList:
    """The steps of one micro-batch of `shape` under `tier`, in issue order.

    A split unit begins with a hand-off to the side that lacks its input, so that both have it. Of ranks that sum on the
    accelerator the residual stream stays there: CPU units get a copy of it, and hand over their part of the sum.
    """
    links, hidden = spec.neighbours, shape.tokens * spec.config.d_model * 4
    placed = _placed(spec, tier)
    slots = tier.buffers.slots
    copies = _copy_streamed(placed, slots)
    following = _next_in_slot(copies, slots)
    fetches, writes = _move_states(spec, placed, shape)
    body: list[Step] = fetches[:1]
    side, n_fetched, n_copied = "cpu", 0, 0  # token ids start on the host
    if links and links.source is not None:
        body.append(Receive(links.source, hidden))
        side = "acc"
    add, sums = body.append, shape.ranks > 1 and not links
    stays = sums and not shape.sums_on_host
    for unit, place in placed:
        name, kind, where = unit.name, unit.kind, place.where
        on, slot = "cpu" if where == "cpu" else "acc", n_copied % slots if where == "streamed" else None
        if place.cpu_rows:
            add(_hand_off("cpu" if side == "acc" else "acc", hidden))
            body.extend(_split_steps(place, slot, shape.tokens))
        else:
            if on != side and not kind.is_looked_up:
                add(_hand_off(on, hidden))
            add(_compute(name, on, SOURCES[where], slot, "", 0, kind.position, place.kv))
        side = on
        if stays and side == "cpu" and not kind.gives_logits:
            add(_hand_off("acc", hidden))
            side = "acc"
        if sums and kind.adds:
            add(_all_reduce(name, hidden))
        if name in writes:
            add(writes[name])
            n_fetched += 1
            body += fetches[n_fetched : n_fetched + 1]
        if slot is not None:
            add(_free(slot))
            after = following[n_copied]
            if after is not None:
                add(after)
            n_copied += 1
    body += _deliver(spec, side, shape, hidden)
    return StepList(tuple(copies[:slots]), tuple(body))


def list_residents(spec: ModelSpec, tier: TierPlan) -> tuple[Bring, ...]:
    """Weights and states that a tier holds in VRAM, in the order of need."""
    found = []
    for unit, place in _placed(spec, tier):
        if place.where == "pinned":
            found.append(Bring(unit.name, "weights", place.cpu_rows))
        if place.kv == "vram":
            found.append(Bring(unit.name, "state"))
    return tuple(found)


def _placed(spec: ModelSpec, tier: TierPlan) -> list[Placed]:
    """Units and their placements; another rank of a pipeline may have the embedding or the output."""
    places, links = {p.unit: p for p in tier.placements}, spec.neighbours
    return [(unit, places[unit.name]) for unit in spec.units if unit.tensors or not links]


def _copy_streamed(placed: list[Placed], slots: int) -> list[CopyIn]:
    """The copy of every streamed unit, in turn into every slot."""
    streamed = [(unit, place.cpu_rows) for unit, place in placed if place.where == "streamed"]
    if streamed and slots < 1:
        raise ValueError("a tier that streams needs at least one staging slot")
    return [
        _copy_in(unit.name, i % slots, (acc_part(unit, rows) if rows else unit).packed_nbytes, rows)
        for i, (unit, rows) in enumerate(streamed)
    ]


def _move_states(spec: ModelSpec, placed: list[Placed], shape: StepShape) -> tuple[list[Step], dict[str, WriteBack]]:
    """Of units whose state passes through the stage: fetches, in order, and write-backs by unit."""
    fetches: list[Step] = []
    writes, states = {}, shape.states
    for unit, place in placed:
        if place.kv == "host" and place.where != "cpu":
            law = unit.state(spec.config, states)
            if law is None:
                raise ValueError(f"{unit.name} keeps no state that could be on the host")
            if shape.past:
                fetches.append(_fetch_kv(unit.name, law.fetched(shape.past, shape.sequences)))
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


def _split_steps(place: Placement, slot: int | None, tokens: int) -> tuple[Step, ...]:
    """Both sides compute their rows, the accelerator without holding the host up; then it has them all."""
    source, rows = SOURCES[place.where], place.cpu_rows
    return (
        _compute(place.unit, "acc", source, slot, "rows", rows),
        _compute(place.unit, "cpu", "host", None, "rows", rows),
        _join(place.unit, 4 * tokens * rows, rows),
        _compute(place.unit, "acc", source, slot, "down", rows),
    )


def _next_in_slot(copies: list[CopyIn], slots: int) -> list[CopyIn | None]:
    """By copy, the one into its slot after it; None when the slot keeps its only unit."""
    after = [copies[i + slots] if i + slots < len(copies) else copies[i % slots] for i in range(len(copies))]
    return [None if copy is own else copy for copy, own in zip(after, copies)]
