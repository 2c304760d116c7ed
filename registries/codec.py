"""Registry <-> text. One innermost object or list per line, so that a plan reads and diffs placement by placement."""

import json
from math import isinf
from typing import Any

from pshard.collectives import REDUCE_DTYPES
from pshard.homes import SITES
from pshard.jsonio import from_json, to_json
from pshard.plan import REGISTRY_VERSION, RankPlan, Registry, TierPlan, Variant, to_newest_format
from pshard.registries.fingerprint import digest
from pshard.speculation import Speculation
from pshard.times.gpu_tiles import PROMPT_MATHS
from pshard.times.running_requests import MOST_CONCURRENCY
from pshard.units.kinds import kinds_by_flag
from pshard.units.moe.expert_cache import check_cache
from pshard.units.moe.in_place import ALWAYS_TOKENS
from pshard.units.moe.popularity import check_popularity
from pshard.workload import SPLIT_MODES, Workload

KV = (None, "vram", "host")


def encode_registry(registry: Registry) -> str:
    """The text of a registry file (format: registries/FORMAT.md). Raises ValueError for NaN or infinite numbers."""
    return _format(to_json(registry), 0) + "\n"


def decode_registry(text: str) -> Registry:
    """Read the text of a registry file.

    Raises ValueError that names the place of what is wrong, NewerFormat or OlderFormat for another format version.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_read_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    registry = from_json(Registry, to_newest_format(data))
    check_registry(registry)
    return registry


def check_registry(registry: Registry) -> None:
    """Check what types alone do not say. Raises ValueError that names the place."""
    if registry.version != REGISTRY_VERSION:
        raise ValueError(f"Registry.version is {registry.version}, not {REGISTRY_VERSION}")
    prints = [plans.fingerprint for plans in registry.sets]
    if len(prints) != len(set(prints)):
        raise ValueError("Registry.sets has a fingerprint twice")
    for i, plans in enumerate(registry.sets):
        if plans.fingerprint != digest(plans.inputs):
            raise ValueError(f"Registry.sets[{i}].fingerprint is not the digest of its inputs")
        for j, variant in enumerate(plans.variants):
            _check_variant(variant, f"Registry.sets[{i}].variants[{j}]")


def _check_variant(variant: Variant, where: str) -> None:
    _check_workload(variant.workload, f"{where}.workload")
    if variant.popularity:
        check_popularity(variant.popularity, f"{where}.popularity")
    if variant.speculation:
        _check_speculation(variant.speculation, variant.workload, f"{where}.speculation")
    budgets = len(variant.workload.vram_mib)
    if not variant.ranks or len(variant.ranks) != budgets:
        raise ValueError(f"{where} has {len(variant.ranks)} ranks for {budgets} budgets")
    for i, rank in enumerate(variant.ranks):
        _check_rank(rank, f"{where}.ranks[{i}]")
    if variant.drafter_parts and not variant.drafter:
        raise ValueError(f"{where}.drafter_parts are of no drafter")
    for i, plan in enumerate(variant.drafters):
        _check_rank(plan, f"{where}.drafter_parts[{i - 1}]" if i else f"{where}.drafter")


def _check_speculation(said: Speculation, workload: Workload, where: str) -> None:
    drafts = [planned.drafts for planned in said.planned]
    if drafts[:1] != [0] or drafts != sorted(set(drafts)) or workload.drafting.drafts not in drafts:
        raise ValueError(f"{where}.planned must ascend from no drafts and have the plan's own; it has {drafts}")
    for i, planned in enumerate(said.planned):
        beside = min(planned.drafting, planned.settling, planned.round_seconds)
        if min(planned.alone, planned.step, planned.bound) <= 0 or beside < 0:
            raise ValueError(f"{where}.planned[{i}] has seconds that no step takes")
    if len(said.rows) not in (0, workload.drafting.rows) or any(seconds <= 0 for seconds in said.rows):
        raise ValueError(f"{where}.rows has not the seconds of 1 to {workload.drafting.rows} rows")
    if said.texts <= 0:
        raise ValueError(f"{where}.texts is {said.texts}, not above 0")


def _check_workload(workload: Workload, where: str) -> None:
    settings = (("split_mode", SPLIT_MODES), ("reduce_dtype", REDUCE_DTYPES), ("prompt_math", PROMPT_MATHS))
    for name, allowed in settings:
        if (value := getattr(workload, name)) not in allowed:
            raise ValueError(f"{where}.{name} is {value!r}, not one of {', '.join(allowed)}")
    if not 1 <= workload.sequences <= workload.context:
        raise ValueError(f"{where}.sequences is {workload.sequences}, not 1 to the context of {workload.context}")
    for name in ("max_ubatch", "prompt", "generated"):
        if (value := getattr(workload, name)) < 1:
            raise ValueError(f"{where}.{name} is {value}, not 1 or more")
    for name in ("drafter_mib", "ram_mib"):
        if (value := getattr(workload, name)) < 0:
            raise ValueError(f"{where}.{name} is {value}, not 0 or more")
    if not 0 <= workload.concurrency <= min(workload.sequences, MOST_CONCURRENCY):
        raise ValueError(f"{where}.concurrency is {workload.concurrency}, not 0 to the number of sequences")
    if workload.drafting.drafts and workload.acceptance is None:
        raise ValueError(f"{where}.drafting has drafts, and acceptance does not say how likely they hold")
    kinds = sorted(kind.name for kind in kinds_by_flag().values())
    if unknown := [kind for kind, _ in workload.max_tp if kind not in kinds]:
        raise ValueError(f"{where}.max_tp names {unknown[0]!r}, not one of {', '.join(kinds)}")
    if bad := [most for _, most in workload.max_tp if most < 1]:
        raise ValueError(f"{where}.max_tp limits a unit to {bad[0]} ranks")


def _check_rank(rank: RankPlan, where: str) -> None:
    if rank.reserve_mib < 0:
        raise ValueError(f"{where}.reserve_mib is {rank.reserve_mib}, not 0 or more")
    for i, cache in enumerate(rank.caches):
        check_cache(cache, f"{where}.caches[{i}]")
    tokens = [tier.tokens for tier in rank.tiers]
    if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
        raise ValueError(f"{where}.tiers must have ascending token counts, at least one; they are {tokens}")
    rows: dict[str, int] = {}  # of pinned units, on the CPU
    for i, tier in enumerate(rank.tiers):
        _check_tier(tier, f"{where}.tiers[{i}]")
        for p in tier.placements:
            if p.site.in_arena and rows.setdefault(p.unit, p.cpu_rows) != p.cpu_rows:
                raise ValueError(f"{where}.tiers[{i}] pins {p.unit!r} with other cpu_rows than a tier before it")


def _check_tier(tier: TierPlan, where: str) -> None:
    for i, place in enumerate(tier.placements):
        if place.where not in SITES:
            raise ValueError(f"{where}.placements[{i}].where is {place.where!r}, not one of {', '.join(SITES)}")
        if place.kv not in KV:
            raise ValueError(f"{where}.placements[{i}].kv is {place.kv!r}, not vram, host or null")
        rows, kept = place.cpu_rows, place.kept_parts
        if rows < 0 or (rows and (not place.is_on_acc or place.kv is not None)):
            raise ValueError(f"{where}.placements[{i}].cpu_rows is {rows}, which this unit or tier cannot have")
        if kept < 0 or (kept and not place.moves_each_step):
            raise ValueError(f"{where}.placements[{i}].kept_parts is {kept}, which this unit cannot have")
    units = [place.unit for place in tier.placements]
    if len(units) != len(set(units)):
        raise ValueError(f"{where}.placements names a unit twice")
    for name in ("seconds", "bound_seconds", "link_bytes", "past"):
        if (value := getattr(tier.prediction, name)) < 0:
            raise ValueError(f"{where}.prediction.{name} is {value}, not 0 or more")
    if tier.sweep and (tier.sweep.batches < 2 or not tier.sweep.seconds > 0):
        raise ValueError(f"{where}.sweep is no sweep of 2 micro-batches or more that take time")
    copies = any(place.moves_each_step for place in tier.placements)
    if tier.buffers.slots < 1 and copies and not tier.in_place and tier.tokens > ALWAYS_TOKENS:
        raise ValueError(f"{where}.buffers.slots is 0, but units are streamed")


def _format(value: Any, depth: int) -> str:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(child, dict | list) for child in children):
        return json.dumps(value, allow_nan=False)
    pad, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        fields = (f"{json.dumps(key)}: {_format(v, depth + 1)}" for key, v in value.items())
        return "{" + pad + f",{pad}".join(fields) + end + "}"
    return "[" + pad + f",{pad}".join(_format(v, depth + 1) for v in value) + end + "]"


def _read_finite(text: str) -> float:
    value = float(text)
    if isinf(value):  # 1e999 is valid JSON
        raise ValueError(f"{text[:20]} is no number that there is")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
