"""Plans made by hand for runtime tests: any mix of placements that keeps the prefix rule of pins and KV."""

import random
from dataclasses import replace

from pshard.buffers import row_stage_bytes, scratch_bytes, state_stage_bytes, widest_join
from pshard.model import ModelSpec
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, Sweep, TierPlan, Variant
from pshard.quant import TENSOR_ALIGN, align
from pshard.speculation import Drafting
from pshard.steps.sweep import waiting_bytes
from pshard.units.divide_unit import arena_portion, count_shares, divided_sizes, find_wave
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.moe.in_place import ways_to_read
from pshard.units.state import StateShape
from pshard.workload import Workload

NO_PREDICTION = Prediction(0.0, 0.0, (), "none", 0, 0)
NO_SOLVE = Solve("by hand", 0.0, 0.0, "none")


Places = dict[str, tuple]  # unit -> (where, kv), with rows or parts on the CPU, and parts in VRAM, of a divided one


def make_tier(
    spec: ModelSpec,
    tokens: int,
    places: Places,
    slots: int,
    context: int,
    sequences: int,
    *,
    in_place: bool | None = None,
    batch: int = 0,
    drafts: int = 0,
    sweep: int = 0,
    waves: int = 1,
) -> TierPlan:
    """A tier of such placements, with honest buffers for float32 activations, and slots for what is read in place too.
    in_place: whether experts are read so; None: as is likely to be faster. batch: see StateShape. drafts: of a step.
    sweep: micro-batches of one."""
    placements = tuple(Placement(u.name, *places[u.name]) for u in spec.units)
    moves = [(spec.unit(p.unit), p.share) for p in placements if p.moves_each_step]
    streamed = [
        find_wave(unit, 0, waves).nbytes if unit.kind.parts and not share else divided_sizes(unit, share).brought
        for unit, share in moves
    ]
    reads = ways_to_read(spec.config, tokens)[0] if in_place is None else in_place
    held = [arena_portion(spec.unit(p.unit), p.where, p.share) for p in placements]
    drafting = Drafting("lookup", drafts) if drafts else Drafting()
    workload = Workload((1,), context, sequences, "f32", "f32", tokens, prompt=1, generated=1, drafting=drafting)
    shape = StateShape(context, sequences, "f32", "f32", batch, workload.open_rows)
    scratch = scratch_bytes(spec, tokens, shape, 4) + spec.standing_nbytes(shape)
    scratch += row_stage_bytes(tokens, widest_join(spec, placements))
    if any(p.stages_state for p in placements):
        scratch += state_stage_bytes(spec, shape)
    moving = {p.unit for p in placements if p.moves_each_step}
    scratch += sweep * sum(waiting_bytes(spec, tokens, shape, moving, sweep).values())
    buffers = Buffers(
        pinned=sum(align(portion.nbytes, TENSOR_ALIGN) for portion in held if portion),
        scratch=scratch,
        slots=slots if streamed else 0,
        slot_bytes=align(max(streamed, default=0), TENSOR_ALIGN),
        kv=sum(spec.unit(p.unit).state_nbytes(spec.config, shape) for p in placements if p.kv == "vram"),
    )
    swept = Sweep(sweep) if sweep else None
    return TierPlan(tokens, placements, buffers, NO_PREDICTION, NO_SOLVE, reads, swept, waves)


def make_variant(
    spec: ModelSpec,
    tiers: tuple[TierPlan, ...],
    context: int,
    sequences: int,
    ranks: tuple[RankPlan, ...] = (),
    reserve_mib: int = 0,
) -> Variant:
    """A variant of one rank (or of the given ranks) whose budget is just enough, and `reserve_mib` more."""
    ranks = ranks or (make_rank_plan(spec, tiers),)
    ranks = tuple(replace(r, budget_mib=r.budget_mib + reserve_mib) for r in ranks)
    budgets = tuple(r.budget_mib for r in ranks)
    workload = Workload(budgets, context, sequences, "f32", "f32", tiers[-1].tokens, prompt=1, generated=1)
    return Variant(workload, True, ranks)


def with_workload(variant: Variant, **fields) -> Variant:
    """The variant with these fields of its workload."""
    return replace(variant, workload=replace(variant.workload, **fields))


def make_rank_plan(spec: ModelSpec, tiers: tuple[TierPlan, ...], rank: int = 0, share: float = 1.0) -> RankPlan:
    """A rank's plan: orders by how many tiers pin a unit, a budget that holds the largest tier."""
    pins = {u.name: sum(t.placement(u.name).in_arena for t in tiers) for u in spec.units}
    kv = {u.name: sum(t.placement(u.name).kv == "vram" for t in tiers) for u in spec.units}
    need = max(t.buffers.total for t in tiers)
    return RankPlan(
        rank,
        -(-(need + 4096) // (1 << 20)),
        share,
        tuple(sorted((n for n in pins if pins[n]), key=lambda n: -pins[n])),
        tuple(sorted((n for n in kv if kv[n]), key=lambda n: -kv[n])),
        tiers,
    )


def random_places(spec: ModelSpec, rng: random.Random) -> Places:
    """A random legal placement of every unit, none of them split."""
    places: Places = {}
    for unit in spec.units:
        if unit.kind is EMBEDDING:
            places[unit.name] = (rng.choice(("cpu", "pinned")), None)
        elif unit.kind.state:
            where = rng.choice(("pinned", "streamed", "cpu"))
            places[unit.name] = (where, "host" if where == "cpu" else rng.choice(("vram", "host")))
        else:
            places[unit.name] = (rng.choice(("pinned", "streamed", "cpu")), None)
    return places


def split_places(spec: ModelSpec, places: Places, rng: random.Random) -> Places:
    """The placements with every FFN that is not pinned split, streamed or pinned, at random rows; pinned ones stay."""
    split = dict(places)
    for unit in spec.units:
        if unit.kind is FFN and places[unit.name][0] != "pinned":
            rows = 16 * rng.randrange(1, count_shares(unit) // 16)
            split[unit.name] = (rng.choice(("streamed", "streamed", "pinned")), None, rows)
    return split


def keep_rows(spec: ModelSpec, smaller: Places, *tiers: Places) -> Places:
    """The placements with what all of `tiers` have in VRAM of a unit kept there, while the rest of it is streamed."""
    kept = dict(smaller)
    for unit in spec.units:
        first, *others = (tier[unit.name] for tier in tiers)
        if len(first) > 2 and all(place == first for place in others):
            here = count_shares(unit) - first[2] if first[0] == "pinned" else sum(first[3:])
            if here:
                kept[unit.name] = ("streamed", None, 0, here)
    return kept


def mix_parts(spec: ModelSpec, places: Places, rng: random.Random) -> Places:
    """The placements with the parts of every unit that is not pinned on several sides; pinned ones stay."""
    mixed = dict(places)
    for unit in spec.units:
        total = count_shares(unit)
        if unit.kind.parts and total and places[unit.name][0] != "pinned":
            kept = rng.randrange(total - 1)
            cpu = rng.randrange(1, total - kept)
            ways = (("pinned", None, cpu), ("streamed", None, cpu), ("streamed", None, cpu, kept))
            mixed[unit.name] = rng.choice(ways)
    return mixed


def shrink_places(spec: ModelSpec, places: Places, rng: random.Random) -> Places:
    """Placements of a larger tier: pins and KV in VRAM are a subset of those of `places`, the rest at random."""
    smaller = random_places(spec, rng)
    for name, (where, kv) in smaller.items():
        old_where, old_kv = places[name]
        if where == "pinned" and old_where != "pinned":
            where = "cpu" if name == "embedding" else "streamed"
        if kv == "vram" and old_kv != "vram":
            kv = "host"
        smaller[name] = (where, kv)
    return smaller
