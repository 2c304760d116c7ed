"""How far plans of small models are from the best there is: `python benchmarks/planner_gap.py [seconds]`. Prints JSON.

Random models of 2 to 12 layers on random machines, one decode tier, budgets that do not hold the model. `bound`: what
no placement can beat, by the integer program with waits free, so a plan may be over it and still be the best one.
`exact`: the tests' search over every placement of every unit and every number of slots; it says that nothing is faster
than the plan, or what is. `search`: random steps over single units that began from the plan and
went on for so many seconds, with seeds that the planner does not use; what it gains is a least value of what the plan
misses.
"""

import json
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "planner"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "makers"))

from random_steps import UnitSearch
from test_planner_oracle import Oracle, random_case

from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import simulated_seconds

LAYERS = (2, 3, 4, 6, 8, 12)
SEEDS = 12
HEATS = (0.02, 0.15, 0.4, 0.05)
EXACT_LAYERS = 3  # above, the search takes minutes


def main(seconds: float) -> None:
    """One line per number of layers."""
    for layers in LAYERS:
        rows = [measure_case(layers, seed, seconds) for seed in range(SEEDS)]
        over, gained, best = zip(*(row for row in rows if row))
        row = {
            "layers": layers,
            "models": len(over),
            "seconds_of_search": seconds,
            "exact_search_ended": sum(share is not None for share in best),
            "worst_over_exact": round(max((share for share in best if share is not None), default=0.0), 4),
            "within_1_percent_of_bound": sum(gap <= 0.01 for gap in over),
            "worst_over_bound": round(max(over), 4),
            "median_over_bound": round(sorted(over)[len(over) // 2], 4),
            "search_gains_over_1_percent": sum(gain > 0.01 for gain in gained),
            "most_gained_by_search": round(max(gained), 4),
        }
        print(json.dumps(row), flush=True)


def measure_case(layers: int, seed: int, seconds: float) -> tuple[float, float, float | None] | None:
    """Shares by which a plan is over its bound, over what more search finds, and over the best (None: not proven).

    None when the model fits the budget.
    """
    spec, rates, workload = random_case(100 * layers + seed, layers)
    profile = profile_from_datasheet(rates)
    variant = plan_variant(spec, profile, workload)
    if not variant.plan_needed:
        return None
    tier = variant.ranks[0].tiers[0]
    (task,) = prepare_ranks(spec, profile, workload)
    shares = {u.name: cls.shares for cls in task.classes for u in cls.units}
    searches = [UnitSearch(task.room, tier.tokens, task.costs[0], of) for of in ({}, shares)]
    best, deadline, attempt = tier, time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        heat, rng = HEATS[attempt % len(HEATS)], Random(f"{seed} {attempt}")
        best = searches[attempt % 2].anneal(best, heat, rng)
        attempt += 1
    found = simulated_seconds(task.room, best, task.costs[0])
    planned = tier.prediction.seconds
    fastest = None
    if layers <= EXACT_LAYERS:
        oracle = Oracle(task, min(found, planned) * (1 - 1e-9))
        oracle.search()
        fastest = min(oracle.fastest, found, planned)
    over = planned / tier.prediction.bound_seconds - 1
    return over, max(0.0, planned / found - 1), None if fastest is None else planned / fastest - 1


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
