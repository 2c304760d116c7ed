"""Registry <-> text. One innermost object or list per line, so that a plan reads and diffs placement by placement."""

import json
from typing import Any

from pshard.batch_sizes import SMALL_BATCH
from pshard.jsonio import from_json, to_json
from pshard.plan import REGISTRY_VERSION, RankPlan, Registry, TierPlan, Variant
from pshard.registries.fingerprint import digest
from pshard.times.collectives import REDUCE_DTYPES
from pshard.workload import SPLIT_MODES

WHERE = ("pinned", "streamed", "cpu")
KV = (None, "vram", "host")


class NewerFormat(ValueError):
    """The file was written in a format version that this program does not know."""


def encode_registry(registry: Registry) -> str:
    """The text of a registry file (format: registries/FORMAT.md). Raises ValueError for NaN or infinite numbers."""
    return _format(to_json(registry), 0) + "\n"


def decode_registry(text: str) -> Registry:
    """Read the text of a registry file.

    Raises ValueError that names the place of what is wrong, NewerFormat for a format version from the future.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version > REGISTRY_VERSION:
        raise NewerFormat(f"format version {version}, this program reads up to {REGISTRY_VERSION}")
    registry = from_json(Registry, data)
    check_registry(registry)
    return registry


def check_registry(registry: Registry) -> None:
    """Check what types alone do not say. Raises ValueError that names the place."""
    if registry.version != REGISTRY_VERSION:
        raise ValueError(f"Registry.version is {registry.version}, not {REGISTRY_VERSION}")
    if registry.fingerprint != digest(registry.inputs):
        raise ValueError("Registry.fingerprint is not the digest of Registry.inputs")
    for i, variant in enumerate(registry.variants):
        _check_variant(variant, f"Registry.variants[{i}]")


def _check_variant(variant: Variant, where: str) -> None:
    if variant.split_mode not in SPLIT_MODES:
        raise ValueError(f"{where}.split_mode is {variant.split_mode!r}, not one of {', '.join(SPLIT_MODES)}")
    if variant.reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(f"{where}.reduce_dtype is {variant.reduce_dtype!r}, not one of {', '.join(REDUCE_DTYPES)}")
    if bad := [most for _, most in variant.max_tp if most < 1]:
        raise ValueError(f"{where}.max_tp limits a unit to {bad[0]} ranks")
    if not variant.ranks or len(variant.ranks) != len(variant.vram_mib):
        raise ValueError(f"{where} has {len(variant.ranks)} ranks for {len(variant.vram_mib)} budgets")
    for i, rank in enumerate(variant.ranks):
        _check_rank(rank, f"{where}.ranks[{i}]")


def _check_rank(rank: RankPlan, where: str) -> None:
    tokens = [tier.tokens for tier in rank.tiers]
    if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
        raise ValueError(f"{where}.tiers must have ascending token counts, at least one; they are {tokens}")
    rows: dict[str, int] = {}
    for i, tier in enumerate(rank.tiers):
        _check_tier(tier, f"{where}.tiers[{i}]")
        for p in tier.placements:
            if p.where == "pinned" and rows.setdefault(p.unit, p.cpu_rows) != p.cpu_rows:
                raise ValueError(f"{where}.tiers[{i}] pins {p.unit!r} with other cpu_rows than a tier before it")


def _check_tier(tier: TierPlan, where: str) -> None:
    for i, place in enumerate(tier.placements):
        if place.where not in WHERE:
            raise ValueError(f"{where}.placements[{i}].where is {place.where!r}, not one of {', '.join(WHERE)}")
        if place.kv not in KV:
            raise ValueError(f"{where}.placements[{i}].kv is {place.kv!r}, not vram, host or null")
        rows = place.cpu_rows
        if rows < 0 or (rows and (place.where == "cpu" or place.kv is not None or tier.tokens > SMALL_BATCH)):
            raise ValueError(f"{where}.placements[{i}].cpu_rows is {rows}, which this unit or tier cannot have")
    units = [place.unit for place in tier.placements]
    if len(units) != len(set(units)):
        raise ValueError(f"{where}.placements names a unit twice")
    if tier.buffers.slots < 1 and any(place.where == "streamed" for place in tier.placements):
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
