"""How far each tier of a plan is from what it could be alone: `python benchmarks/tier_gaps.py`. Prints JSON.

A plan serves all tiers at once: what is in VRAM for one is there for the others. By case and tier: predicted seconds
over those of the best published strategy placed for this tier alone, and over those of a plan for a workload of this
tier alone, both simulated for the same load. `worth_a_switch`: tiers over 10% slower than alone for which one
micro-batch would win more than it takes to bring in what the other plan has in VRAM, and back.
"""

import json
import statistics
from collections.abc import Iterator

from planner import MACHINE, make_spec
from pshard.errors import NoPlan
from pshard.model import ModelSpec
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.draft import simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.published.per_tier import list_choices
from pshard.planner.published.strategies import list_strategies, place_strategy
from pshard.planner.tier_alone import plan_alone, switch_between
from pshard.registries.profile_store import load_profile
from pshard.workload import Workload

SHAPES = {  # layers, d_model, heads, kv_heads, d_ffn, vocab, and budgets in MiB
    "qwen3-32b": (64, 5120, 64, 8, 25600, 151936, (5000, 7000, 9000, 12000, 15000)),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, (2500, 3200, 4000)),
    "qwen3-14b": (40, 5120, 40, 8, 17408, 151936, (4000, 5500, 7000)),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, (8000, 12000, 16000, 24000)),
}
MACHINES = ("rtx4060-ryzen-7700", "rtx5080-xeon-w5-3425", "h100-sxm-xeon")
OVER_PUBLISHED, OVER_ALONE = 0.03, 0.10


def measure_case(spec: ModelSpec, machine: str, mib: int) -> Iterator[dict]:
    """One row for each tier. Raises NoPlan where nothing fits the budget or the host."""
    profile, workload = load_profile(MACHINE.with_name(f"{machine}.json")), Workload((mib,))
    variant = plan_variant(spec, profile, workload)
    (rank,) = variant.ranks
    (task,) = prepare_ranks(spec, profile, workload)
    for tier, cost in zip(rank.tiers, task.costs):
        placed = [place_strategy(name, task.room, (tier.tokens,)) for name in list_strategies(spec)]
        published = [p.tiers[0] for p in placed if p and holds(task.room, p.tiers)]
        published += [choice.tier for choice in list_choices(task.room, task.classes, cost)]
        alone = plan_alone(spec, profile, workload, tier.tokens, variant)
        if alone is None:
            continue
        seconds, best = tier.prediction.seconds, simulated_seconds(task.room, alone, cost)
        switch = switch_between(spec, rank.tiers[0], alone, cost) - switch_between(spec, rank.tiers[0], tier, cost)
        yield {
            "tokens": tier.tokens,
            "ms": round(1e3 * seconds, 1),
            "over_published": max(
                (seconds / simulated_seconds(task.room, p, cost) - 1 for p in published), default=0.0
            ),
            "over_alone": seconds / best - 1,
            "worth_a_switch": tier.tokens > 1 and seconds > best * (1 + OVER_ALONE) and seconds - best > switch,
        }


def main() -> None:
    """A line for each case, then one for all."""
    rows: list[dict] = []
    for name, (*shape, budgets) in SHAPES.items():
        for mib in budgets:
            for machine in MACHINES:
                try:
                    tiers = list(measure_case(make_spec(name, *shape), machine, mib))
                except NoPlan as error:
                    print(json.dumps({"model": name, "vram_mib": mib, "machine": machine, "none": str(error)}))
                    continue
                said = {t["tokens"]: [t["ms"], round(t["over_published"], 3), round(t["over_alone"], 3)] for t in tiers}
                print(json.dumps({"model": name, "vram_mib": mib, "machine": machine, "tiers": said}), flush=True)
                rows += tiers
    summary: dict = {"tiers": len(rows), "worth_a_switch": sum(r["worth_a_switch"] for r in rows)}
    for what, most in (("over_published", OVER_PUBLISHED), ("over_alone", OVER_ALONE)):
        found = [r[what] for r in rows]
        summary[what] = {
            "worst": round(max(found), 3),
            "median": round(statistics.median(found), 4),
            f"more_than_{most}": sum(x > most for x in found),
        }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
