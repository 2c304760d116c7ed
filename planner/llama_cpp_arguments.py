"""The static part of a plan as llama.cpp arguments: what is in VRAM while decoding.

llama.cpp keeps a tensor where it was put at load; it cannot stream units or move them between prefill and decode.
`-ngl` puts all layers on the GPU and `-ot` (a regular expression over tensor names = buffer type) brings units back;
`--n-cpu-moe` does so for the experts of the first layers.
The head too: which end `-ngl` begins to count at differs between versions of llama.cpp.
"""

import shlex
from collections.abc import Mapping, Sequence

from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.plan import TierPlan, Variant
from pshard.units.divide_unit import arena_portion
from pshard.units.unit import Unit
from pshard.workload import MIB

HEAD = r"^(output(_norm)?|token_embd)\.weight"  # with tied weights the head is the embedding, which is there anyway
PROGRAMS = ("llama.cpp", "llama-bench")  # llama-cli and llama-server; llama-bench


def llama_arguments(variant: Variant, spec: ModelSpec, program: str = "llama.cpp") -> str:
    """Arguments, quoted for a shell, for `llama-cli` and `llama-server`, or for `llama-bench`.

    Units that the plan streams stay on the host: llama.cpp computes them there, or copies them for large batches. Of
    layers with a part of their FFN or experts in VRAM as many have all of it there as fit into those parts, the last
    ones. The KV cache, and what else layers keep of a text, is in VRAM as a whole or not at all: where the plan has a
    part of it there, all of it if it fits the budget in place of the staging slots. llama-bench takes context and
    sequences from its tests, and every `-ot` as another test, unless one has all patterns.
    Raises UserError for a split plan, and for a type of KV cache that llama-bench does not know.
    """
    w, bench, units = variant.workload, program == "llama-bench", _by_name(spec)
    check_emit(program, len(variant.ranks), w.type_k, w.type_v)
    tier = variant.ranks[0].covering(w.sequences)
    joined = _join_parts(tier, units)
    outside = [units[p.unit] for p in tier.placements if not p.is_whole_in_arena and p.unit not in joined]
    first = _count_first(outside, units)
    words, patterns = ["-ngl", "999", *(["--n-cpu-moe", str(first)] if first else [])], []
    for kind in dict.fromkeys(unit.kind for unit in units.values() if unit.kind.llama_cpp):
        layers = sorted(unit.layer for unit in outside if unit.kind is kind)
        if layers and not (first and kind.parts):
            patterns.append(rf"blk\.({'|'.join(map(str, layers))})\.{kind.llama_cpp}")
    if any(unit.kind.gives_logits for unit in outside):
        patterns.append(HEAD)
    on_host = [f"{pattern}=CPU" for pattern in patterns]
    for value in [";".join(on_host)] if bench and on_host else on_host:
        words += ["-ot", value]
    if not _holds_all_kv(tier, spec.state_sizes(w.state_shape), _lost_bytes(tier, units), w.vram_mib[0]):
        words += ["-nkvo", "1"] if bench else ["-nkvo"]
    if not bench:
        words += ["-c", str(w.context), "-np", str(w.sequences)]
    words += ["-b", str(w.max_ubatch), "-ub", str(w.max_ubatch)]
    words += ["-ctk", w.type_k, "-ctv", w.type_v]
    return shlex.join(words)


def list_unsaid(variant: Variant, spec: ModelSpec) -> list[str]:
    """What the arguments cannot say of the plan's FFNs and experts, one line for each thing."""
    tier, units = variant.ranks[0].covering(variant.workload.sequences), _by_name(spec)
    joined, lines = _join_parts(tier, units), []
    for parts, some, its in ((False, "a part of their FFN", "FFN"), (True, "some of their experts", "experts")):
        if there := [name for name in _partly_there(tier, units) if bool(units[name].kind.parts) is parts]:
            lines.append(
                f"{len(there)} layers have {some} in VRAM; llama.cpp does not divide a layer's {its}: "
                f"in as much VRAM it has {'all those' if parts else 'the whole FFN'} of "
                f"{len(joined & {*there})} of these layers"
            )
    if read := [p for p in tier.placements if p.moves_each_step and units[p.unit].kind.parts]:
        lines.append(
            f"decoding streams experts of {len(read)} layers; llama.cpp has the CPU compute what is not in VRAM"
        )
    if caches := variant.ranks[0].caches:
        mib = sum(cache.nbytes for cache in caches) // MIB
        lines.append(
            f"{sum(cache.slots for cache in caches)} slots hold experts that follow use; nearest to that is newer "
            f"llama.cpp's --moe-cache-mib {mib}, which fetches every expert that it misses"
        )
    return lines


def _by_name(spec: ModelSpec) -> dict[str, Unit]:
    return {unit.name: unit for unit in spec.units}


def _partly_there(tier: TierPlan, units: Mapping[str, Unit]) -> dict[str, int]:
    """Units of which the tier has a part in VRAM, in the order of the layers, and the bytes of these parts."""
    found = {}
    for p in tier.placements:
        portion = arena_portion(units[p.unit], p.where, p.share) if p.share else None
        if portion:
            found[p.unit] = portion.nbytes
    return found


def _join_parts(tier: TierPlan, units: Mapping[str, Unit]) -> set[str]:
    """The last of the units that are partly in VRAM: so many as fit as a whole into what all have there. FFNs before
    experts, as each token reads all of an FFN."""
    there = _partly_there(tier, units)
    left, joined = sum(there.values()), set[str]()
    for parts in (False, True):
        for name in [name for name in reversed(there) if bool(units[name].kind.parts) is parts]:
            if units[name].packed_nbytes > left:
                break
            left -= units[name].packed_nbytes
            joined.add(name)
    return joined


def _lost_bytes(tier: TierPlan, units: Mapping[str, Unit]) -> int:
    """Bytes of the parts in VRAM that make up no whole unit."""
    joined = sum(units[name].packed_nbytes for name in _join_parts(tier, units))
    return sum(_partly_there(tier, units).values()) - joined


def _count_first(outside: Sequence[Unit], units: Mapping[str, Unit]) -> int:
    """How many of the first layers have their experts on the host, where these are all that are there; else 0."""
    layers = [unit.layer for unit in outside if unit.kind.parts]
    before = [u.layer for u in units.values() if u.kind.parts and u.layer <= max(layers, default=-1)]
    return max(layers) + 1 if layers and sorted(layers) == sorted(before) else 0


def check_emit(program: str, ranks: int, type_k: str, type_v: str) -> None:
    """Raise UserError for what the arguments of `program` cannot say."""
    if ranks > 1:
        raise UserError(f"--emit {program} needs a plan for one device; leave out -sm")
    if program == "llama-bench" and "f32" in (type_k, type_v):
        raise UserError("--emit llama-bench: it has no KV cache of type f32; give another with -ctk and -ctv")


def _holds_all_kv(tier: TierPlan, sizes: Mapping[str, int], lost: int, budget_mib: int) -> bool:
    """Whether the budget holds the states of all layers beside what else the plan has in VRAM, less its slots and the
    parts that are lost. sizes: bytes of each unit's state; with windows or delta nets layers differ."""
    sides = {p.unit: p.kv for p in tier.placements if p.kv}
    if "host" not in sides.values():
        return True
    held, more = tier.buffers, sum(sizes[unit] for unit, side in sides.items() if side == "host")
    fits = held.total - held.slots * held.slot_bytes - lost + more <= budget_mib * MIB
    return "vram" in sides.values() and fits
