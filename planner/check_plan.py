"""Checks a finished variant with code that the solver and the search do not use. Obvious, not quick (15 ms)."""

from dataclasses import replace

from pshard import buffers
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.plan import Placement, RankPlan, TierPlan, Variant
from pshard.planner.routing.check_caches import check_caches
from pshard.quant import ROW_BLOCK, TENSOR_ALIGN
from pshard.steps.sweep import list_moving, waiting_bytes
from pshard.tensor import TensorSpec
from pshard.units.state import StateShape
from pshard.units.unit import Unit, places_of_unit


class PlanError(ValueError):
    """A plan breaks a rule; the message names it."""


def check_variant(specs: tuple[ModelSpec, ...], variant: Variant, kind: str, host_bytes: int | None = None) -> None:
    """Raise PlanError unless every rank's plan of its slice is legal, complete, honest and within its budget, and all
    of them together within `host_bytes` of host memory.

    specs: the ranks' slices of the model. kind: "cuda" or "cpu".
    """
    check_runnable(specs, variant, kind)
    for rank in variant.ranks:
        for tier in rank.tiers:
            if not 0 < tier.prediction.bound_seconds <= tier.prediction.seconds:
                where = f"rank {rank.rank}, tier {tier.tokens}"
                raise PlanError(f"{where}: predicted {tier.prediction.seconds} s is below its bound")
    kept = count_host_bytes(specs, variant, kind)
    if host_bytes is not None and kept > host_bytes:
        raise PlanError(f"{kept} bytes stay in host memory, which has {host_bytes} for them")


def check_runnable(specs: tuple[ModelSpec, ...], variant: Variant, kind: str) -> None:
    """Raise PlanError unless a runtime can rely on the variant: of what `check_variant` checks all but predictions and
    host memory."""
    w = variant.workload
    if len(specs) != len(variant.ranks) or len(w.vram_mib) != len(variant.ranks):
        raise PlanError(f"{len(variant.ranks)} rank plans for {len(specs)} slices and {len(w.vram_mib)} budgets")
    if w.split_mode == "layer" and len(specs) > 1:
        _check_pipeline(specs)
    for spec, rank in zip(specs, variant.ranks):
        tokens = [t.tokens for t in rank.tiers]
        if not tokens or tokens != sorted(set(tokens)) or tokens[-1] != w.max_ubatch:
            raise PlanError(f"rank {rank.rank}: tiers {tokens} do not ascend to {w.max_ubatch}")
        for tier in rank.tiers:
            _check_tier(spec, variant, rank, tier, kind, _have_sums(variant, kind))
        try:
            check_caches(spec, rank)
        except ValueError as error:
            raise PlanError(str(error)) from None
        _check_prefixes(spec, rank)
        _check_same_bytes(spec, rank)
        _check_homes(rank)
    _check_drafter(specs, variant, kind)
    for i, rank in enumerate(variant.ranks):
        if (rank.rank, rank.budget_mib) != (i, w.vram_mib[i]):
            raise PlanError(f"plan {i} is of rank {rank.rank} with {rank.budget_mib} MiB, not {w.vram_mib[i]}")


def _check_drafter(specs: tuple[ModelSpec, ...], variant: Variant, kind: str) -> None:
    """The program that drafts has a plan on each rank that holds some of it."""
    if not variant.drafter:
        return
    sums = _have_sums(variant, kind) and len(variant.drafters) > 1
    for rank, spec in enumerate(specs):
        plan = variant.drafter_on(rank)
        if (plan is None) != (spec.head is None):
            raise PlanError(f"rank {rank} has {'a' if plan else 'no'} plan of what drafts")
        if spec.head and plan:
            for tier in plan.tiers:
                _check_tier(spec.head, variant, plan, tier, kind, sums)
            _check_prefixes(spec.head, plan)


def count_host_bytes(specs: tuple[ModelSpec, ...], variant: Variant, kind: str) -> int:
    """Bytes of host memory that the plans of all ranks take, which hold these slices of the model."""
    return sum(_host_bytes(spec, variant, rank, kind) for spec, rank in zip(specs, variant.ranks))


def _host_bytes(spec: ModelSpec, variant: Variant, rank: RankPlan, kind: str) -> int:
    """What a rank keeps in host memory: all but what every tier pins whole and the parts of stacks that every tier has
    in its arena, slots for experts there, KV that any tier leaves there, and with the CPU as accelerator its arena."""
    total = sum(cache.slots * cache.slot_bytes for cache in rank.caches if cache.on_host)
    total += sum(_kept_nbytes(unit, [tier.placement(unit.name) for tier in rank.tiers]) for unit in spec.units)
    shape = variant.workload.state_shape
    on_host = [u for u in spec.units if any(tier.placement(u.name).has_state_on_host for tier in rank.tiers)]
    total += sum(u.state_nbytes(spec.config, shape) for u in on_host)
    return total + (max(tier.buffers.total for tier in rank.tiers) if kind == "cpu" else 0)


def _kept_nbytes(unit: Unit, places: list[Placement]) -> int:
    """Bytes of a unit in host memory."""
    if any(p.site.is_beyond_host for p in places) or all(p.is_whole_in_arena for p in places):
        return 0
    kept = list(unit.tensors)
    if unit.kind.parts:
        lying = [{t.role: t.parts for t in _acc_tensors(unit, p)[0]} for p in places]
        for i, t in enumerate(kept):
            if t.parts and (gone := min(parts.get(t.role, 0) for parts in lying)):
                kept[i] = replace(t, shape=(t.rows // t.parts * (t.parts - gone), t.cols), parts=t.parts - gone)
    return _nbytes(tuple(kept))


def _check_pipeline(specs: tuple[ModelSpec, ...]) -> None:
    """Every unit is on exactly one rank, and whoever follows the hidden states meets all of them in order."""
    ends = [r for r, spec in enumerate(specs) if spec.embedding.tensors]
    rank, met = ends[0] if len(ends) == 1 else None, list[int]()
    while rank is not None and len(met) <= len(specs):
        met.append(rank)
        link = specs[rank].neighbours
        rank = link.target if link else None
        if rank is not None and (link := specs[rank].neighbours) and link.source != met[-1]:
            raise PlanError(f"rank {met[-1]} hands hidden states to rank {rank}, which expects them from {link.source}")
    along = [unit for rank in met for unit in specs[rank].units if unit.tensors]
    held, everywhere = [u.name for u in along], [u.name for spec in specs for u in spec.units if u.tensors]
    if sorted(held) != sorted(everywhere) or not _is_whole(along, specs[0].config):
        raise PlanError(f"the ranks' layers, {held} along the pipeline, are not the model's units, each once, in order")


def _is_whole(along: list[Unit], config: ModelConfig) -> bool:
    """Whether units are all of a model's, in order: those that take ids, layers with one that leads in each that has
    attention, and others in each that has an FFN, a last one."""
    positions = [u.kind.position for u in along]
    inside = along[positions.count("first") : -1]
    layers = [u.layer for u in inside]
    every = range(config.n_layers)
    leading = [i for i in every if not config.layer_heads or any(config.layer_heads[i])]
    following = {i for i in every if not config.ffn_rows or config.ffn_rows[i]}
    return (
        "first" in positions
        and positions == ["first"] * positions.count("first") + ["layer"] * len(layers) + ["last"]
        and layers == sorted(layers)
        and [u.layer for u in along if u.kind.leads] == leading
        and {u.layer for u in inside if not u.kind.leads} == following
    )


def _check_same_bytes(spec: ModelSpec, rank: RankPlan) -> None:
    """A unit that lies in the arena has the same bytes there in every tier, so that no pin moves."""
    held: dict[str, tuple[TensorSpec, ...]] = {}
    for tier in rank.tiers:
        for unit, place in zip(spec.units, tier.placements):
            in_arena, _ = _acc_tensors(unit, place)
            if in_arena and held.setdefault(unit.name, in_arena) != in_arena:
                raise PlanError(
                    f"rank {rank.rank}: {unit.name} is in VRAM in two tiers with different rows or parts of it there"
                )


def _check_homes(rank: RankPlan) -> None:
    """What a unit lacks in VRAM lives in one home, whatever the tier."""
    homes: dict[str, str] = {}
    for tier in rank.tiers:
        for place in tier.placements:
            where, home = f"rank {rank.rank}, tier {tier.tokens}", place.weights_home.name
            if not place.site.in_arena and homes.setdefault(place.unit, home) != home:
                raise PlanError(f"{where}: {place.unit} lives in {home}, and in {homes[place.unit]} in another tier")


def _check_prefixes(spec: ModelSpec, rank: RankPlan) -> None:
    """Pins and KV in VRAM of every tier are prefixes of the rank's orders, so that residency never moves."""
    pins = [{p.unit for p in t.placements if p.in_arena} for t in rank.tiers]
    kv = [{p.unit for p in t.placements if p.has_state_in_vram} for t in rank.tiers]
    layers = {u.name for u in spec.units if u.kind.state}
    for name, order, sets, known in (
        ("pin", rank.pin_order, pins, set().union(*pins)),
        ("KV", rank.kv_order, kv, layers),
    ):
        if len(set(order)) != len(order):
            raise PlanError(f"rank {rank.rank}: the {name} order names a unit twice")
        if strange := [unit for unit in order if unit not in known]:
            raise PlanError(f"rank {rank.rank}: the {name} order names {strange[0]!r}, which does not belong there")
        for tier, units in zip(rank.tiers, sets):
            if set(order[: len(units)]) != units:
                raise PlanError(f"rank {rank.rank}, tier {tier.tokens}: {name} residency is not a prefix of the order")


def _have_sums(variant: Variant, kind: str) -> bool:
    """Whether GPUs sum their parts of units."""
    return kind == "cuda" and len(variant.ranks) > 1 and variant.workload.split_mode == "tensor"


def _check_tier(spec: ModelSpec, variant: Variant, rank: RankPlan, tier: TierPlan, kind: str, sums: bool) -> None:
    """sums: whether GPUs sum their parts of its units."""
    where = f"rank {rank.rank}, tier {tier.tokens}"
    if [p.unit for p in tier.placements] != [u.name for u in spec.units]:
        raise PlanError(f"{where}: placements are not the model's units, each once, in order")
    demanded = {n for cache in rank.caches if cache.is_on_demand and tier.tokens <= cache.tokens for n in cache.units}
    for unit, place in zip(spec.units, tier.placements):
        from_slots = place.site.is_beyond_host and not place.is_on_acc and place.kv is None
        from_slots = from_slots and unit.name in demanded and not unit.stays_in_memory
        if (place.where, place.kv) not in places_of_unit(unit, sums) and not from_slots:
            raise PlanError(f"{where}: {unit.name} cannot be {place.where} with KV {place.kv}")
        if unit.borrows and not spec.unit(unit.borrows.unit).kind.stands:
            raise PlanError(f"{where}: {unit.name} reads the cells of {unit.borrows.unit}, which do not stand in VRAM")
        _check_divided(unit, place, tier.tokens, where)
    if tier.waves < 1 or (tier.waves > 1 and (tier.sweep or len(variant.ranks) > 1)):
        raise PlanError(f"{where}: layers cannot come in {tier.waves} waves to sweeps or several ranks")
    if tier.in_place and True not in spec.ways_to_read(tier.tokens):
        raise PlanError(f"{where}: nothing is read over the link in place in so large a tier of this model")
    act, shape = 2 if kind == "cuda" else 4, variant.workload.state_shape
    tensors = [_acc_tensors(u, p) for u, p in zip(spec.units, tier.placements)]
    pinned = sum(_nbytes(in_arena) for in_arena, _ in tensors)
    streamed = [
        _nbytes(in_slot if p.share else _list_first_wave(in_slot, tier.waves))
        for (_, in_slot), unit, p in zip(tensors, spec.units, tier.placements)
        if p.moves_each_step and not (tier.in_place and unit.kind.parts and p.weights_home.is_readable)
        if not (p.site.is_beyond_host and p.unit in demanded)
    ]
    sizes = spec.state_sizes(shape)
    kv = sum(sizes[p.unit] for p in tier.placements if p.has_state_in_vram)
    scratch = buffers.scratch_bytes(spec, tier.tokens, shape, act)
    scratch += spec.standing_nbytes(shape)
    if any(p.stages_state for p in tier.placements):
        scratch += max(sizes.values())
    widths = (u.kind.joins(p.cpu_rows, spec.config) for u, p in zip(spec.units, tier.placements) if p.cpu_rows)
    joined = 4 * tier.tokens * max(widths, default=0)  # float32 that the CPU sends over
    scratch += -(-joined // buffers.BUFFER_ALIGN) * buffers.BUFFER_ALIGN
    if tier.sweep and len(variant.ranks) > 1:
        raise PlanError(f"{where}: several ranks have no sweeps")
    scratch += _waiting_nbytes(spec, rank, tier, shape, where)
    b = tier.buffers
    for name, said, is_ in (("pinned", b.pinned, pinned), ("KV", b.kv, kv), ("scratch", b.scratch, scratch)):
        if said != is_:
            raise PlanError(f"{where}: buffers say {said} bytes of {name}, the placements need {is_}")
    if streamed and (b.slots < 1 or b.slot_bytes < max(streamed)):
        raise PlanError(f"{where}: {b.slots} slots of {b.slot_bytes} bytes do not hold what is streamed")
    arena = buffers.arena_bytes(rank.budget_mib, kind, rank.reserve_mib)
    if pinned + kv + scratch + b.slots * b.slot_bytes + b.cached > arena:
        raise PlanError(f"{where}: {b.total} bytes are over the arena of {arena}")


def _waiting_nbytes(spec: ModelSpec, rank: RankPlan, tier: TierPlan, shape: StateShape, where: str) -> int:
    """Bytes in which the micro-batches of a sweep wait: of each the residual stream, its index, and what a later unit
    reads beside them."""
    if tier.sweep is None:
        return 0
    if tier is not rank.tiers[-1] or tier.sweep.batches < 2 or not any(p.moves_each_step for p in tier.placements):
        raise PlanError(f"{where}: a sweep of {tier.sweep.batches} micro-batches has no use here")
    return tier.sweep.batches * sum(waiting_bytes(spec, tier.tokens, shape, list_moving(tier), 2).values())


def _check_divided(unit: Unit, place: Placement, tokens: int, where: str) -> None:
    """Every side has something of the unit, all of them together, and no record of the packed layout is cut."""
    if not place.cpu_rows and not place.kept_parts:
        return
    many = place.cpu_rows and tokens > buffers.SMALL_BATCH and not unit.kind.parts
    if not place.is_on_acc or place.site.is_beyond_host or not unit.kind.divide or many:
        raise PlanError(f"{where}: {unit.name} ({place.where}) cannot be divided")
    if unit.kind.parts:
        _check_parts(unit, place, where)
        return
    if place.kept_parts:
        _check_kept_rows(unit, place, where)
        return
    for tensor in unit.tensors:
        if tensor.role in unit.kind.divided:
            own = tensor.rows - place.cpu_rows
            if own <= 0 or place.cpu_rows < 0 or own % ROW_BLOCK:
                raise PlanError(f"{where}: {place.cpu_rows} of {tensor.rows} rows of {tensor.name} are no part of it")


def _check_kept_rows(unit: Unit, place: Placement, where: str) -> None:
    """The first rows are in VRAM and the last are streamed: there are both, and the CPU has none."""
    total = max((t.rows for t in unit.tensors if t.role in unit.kind.divided), default=0)
    if unit.kind.keep is None or not total:
        raise PlanError(f"{where}: {unit.name} has nothing of which {place.kept_parts} could be kept in VRAM")
    if place.site.in_arena:
        raise PlanError(f"{where}: {unit.name} is pinned, and {place.kept_parts} of its rows are kept beside a slot")
    if place.cpu_rows or not 0 < place.kept_parts < total or place.kept_parts % ROW_BLOCK:
        raise PlanError(f"{where}: {place.kept_parts} of {total} rows of {unit.name} cannot be kept beside a slot")


def _check_parts(unit: Unit, place: Placement, where: str) -> None:
    """Of a streamed unit at least one part is copied, of a pinned one all that the CPU does not have are there."""
    total, cpu, kept = max(t.parts for t in unit.tensors), place.cpu_rows, place.kept_parts
    if place.site.in_arena and kept:
        raise PlanError(f"{where}: {unit.name} is pinned, and {kept} of its parts are kept beside a slot")
    if cpu < 0 or kept < 0 or cpu + kept >= total:
        raise PlanError(
            f"{where}: {cpu} of the {total} parts of {unit.name} on the CPU and {kept} in VRAM leave none between"
        )


def _acc_tensors(unit: Unit, place: Placement) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """What of the unit lies in the arena, and what is copied to a slot."""
    if not place.is_on_acc:
        return (), ()
    if not place.cpu_rows and not place.kept_parts:
        return (unit.tensors, ()) if place.site.in_arena else ((), unit.tensors)
    if unit.kind.parts:
        return _acc_parts(unit, place)
    if place.kept_parts:
        first, last = list[TensorSpec](), list[TensorSpec]()
        for tensor in unit.tensors:
            divided = tensor.role in unit.kind.divided
            first.append(replace(tensor, shape=(place.kept_parts, tensor.cols)) if divided else tensor)
            if divided:
                last.append(replace(tensor, shape=(tensor.rows - place.kept_parts, tensor.cols)))
        return tuple(first), tuple(last)
    here = tuple(
        replace(t, shape=(t.rows - place.cpu_rows, t.cols)) if t.role in unit.kind.divided else t for t in unit.tensors
    )
    return (here, ()) if place.site.in_arena else ((), here)


def _acc_parts(unit: Unit, place: Placement) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The same of a unit with parts: the first of every stack are kept, with what all parts share."""
    stacks, others = [t for t in unit.tensors if t.parts], [t for t in unit.tensors if not t.parts]

    def take(count: int) -> list[TensorSpec]:
        return [replace(t, shape=(t.rows // t.parts * count, t.cols), parts=count) for t in stacks if count]

    own = stacks[0].parts - place.cpu_rows
    if place.site.in_arena:
        return (*take(own), *others), ()
    kept, copied = take(place.kept_parts), take(own - place.kept_parts)
    return ((*kept, *others), tuple(copied)) if kept else ((), (*copied, *others))


def _list_first_wave(tensors: tuple[TensorSpec, ...], waves: int) -> tuple[TensorSpec, ...]:
    """What the first of several waves brings of a unit, which is the largest: of stacks the first parts."""
    firsts = {t.name: -(-t.parts // min(waves, t.parts)) for t in tensors if t.parts}
    return tuple(
        replace(t, shape=(t.rows // t.parts * firsts[t.name], t.cols), parts=firsts[t.name]) if t.parts else t
        for t in tensors
    )


def _nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Bytes of tensors in a blob, each at its alignment."""
    return sum(-(-t.packed_nbytes // TENSOR_ALIGN) * TENSOR_ALIGN for t in tensors)
