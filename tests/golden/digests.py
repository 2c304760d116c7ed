"""What is kept of a plan: digests of placements and steps of every rank and tier, and the seconds."""

import hashlib
from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from golden.cases import Case

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan, Variant
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.draft import tier_steps
from pshard.planner.price.profile_tables import Tables
from pshard.steps.move import Activations, Move, Part, UnitState, Weights
from pshard.steps.step import Step

CLOSE = 1e-12  # relative, of seconds
# of steps, that are compared
FIELDS = ("unit", "on", "source", "target", "slot", "part", "cpu_rows", "kept_parts", "to", "nbytes")


def digest_case(case: Case) -> dict[str, Any]:
    """A case's plans as plain data; of one that nothing fits, the message."""
    try:
        spec, profile, variants = case.plan()
    except UserError as error:
        return {"error": str(error)}
    return {f"variant {i}": _digest_variant(spec, profile, variant) for i, variant in enumerate(variants)}


def _digest_variant(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> dict[str, Any]:
    tokens = tuple(t.tokens for t in variant.ranks[0].tiers)
    tasks = price_tiers(spec, Tables(profile, variant.correction), variant.workload, tokens)
    ranks = {}
    for rank, task in zip(variant.ranks, tasks, strict=True):
        tiers = {}
        for tier, cost in zip(rank.tiers, task.costs, strict=True):
            steps = tier_steps(task.room, tier, cost)
            tiers[f"tier {tier.tokens}"] = {
                "placements": _digest(_places(tier)),
                "entering": _digest([_tell(s) for s in steps.enter]),
                "steps": _digest([_tell(s) for s in steps.body]),
                "seconds": _seconds(tier),
                "says": [tier.prediction.binds, tier.prediction.link_bytes, tier.solve.status, tier.solve.strategy],
            }
        ranks[f"rank {rank.rank}"] = {"orders": _digest(_orders(rank)), **tiers}
    said = [(c.way, c.seconds, c.first_token) for c in variant.considered]
    return {"way": variant.way, "needed": variant.plan_needed, "considered": said, **ranks}


def _orders(rank: RankPlan) -> list[Any]:
    return [rank.budget_mib, rank.share, *rank.pin_order, "|", *rank.kv_order, "|", *rank.resident, "|",
            *rank.lock_order]  # fmt: skip


def _places(tier: TierPlan) -> list[Any]:
    b = tier.buffers
    sizes = [b.pinned, b.scratch, b.slots, b.slot_bytes, b.kv]
    return [sizes, *([p.unit, p.where, p.kv, p.cpu_rows, p.kept_parts] for p in tier.placements)]


def _seconds(tier: TierPlan) -> list[float]:
    p = tier.prediction
    return [p.seconds, p.bound_seconds, *(seconds for _, seconds in p.busy)]


def _tell(step: Step) -> list[Any]:
    if isinstance(step, Move):
        return _tell_move(step)
    return [
        type(step).__name__,
        *((name, getattr(step, name)) for name in FIELDS if hasattr(step, name)),
    ]


def _tell_move(step: Move) -> list[Any]:
    """In the words in which plans are stored."""
    match step.portion:
        case Weights(unit, cpu_rows, kept_parts):
            name = "CopyIn"
            told = {"unit": unit, "slot": step.slot, "cpu_rows": cpu_rows, "kept_parts": kept_parts}
        case UnitState(unit):
            name, told = "FetchKV" if step.is_to_acc else "WriteBack", {"unit": unit}
        case Activations():
            name, told = "Handoff", {"to": "acc" if step.is_to_acc else "cpu"}
        case Part(unit):
            name, told = "Join", {"unit": unit}
        case _:
            name, told = "Refill", {}
    return [name, *told.items(), ("nbytes", step.nbytes)]


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def find_differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """One line on each thing that differs, and where; numbers may differ by CLOSE."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            if key not in old or key not in new:
                yield f"{where}{key}: {'not there before' if key not in old else 'gone'}"
            else:
                yield from find_differences(old[key], new[key], f"{where}{key}, ")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new)):
            yield from find_differences(a, b, f"{where}{i}, ")
    elif isinstance(old, float) and isinstance(new, float):
        if not isclose(old, new, rel_tol=CLOSE, abs_tol=1e-15):
            yield f"{where.removesuffix(', ')}: {old!r} -> {new!r} ({new / old - 1 if old else float('inf'):+.2e})"
    elif old != new:
        yield f"{where.removesuffix(', ')}: {old!r} -> {new!r}"
