"""How far plans of small models are from the best there is: `python benchmarks/planner_gap.py [seconds]`. Prints JSON.

Random models of 2 to 12 layers on random machines, one decode tier. `bound`: what no placement can beat, by the
integer program with waits free, so a plan may be over it and still be the best one. `searched`: the best that a random
search over single units found that began from the plan and went on for so many seconds, with seeds that the planner
does not use; what it gains is a least value of what the plan misses.
"""

import json
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pshard.planner.datasheet import profile_from_datasheet
from pshard.planner.draft import tier_seconds
from pshard.planner.plan import plan_variant, prepare_ranks
from pshard.planner.refine import anneal
from tests.test_planner_oracle import random_case

LAYERS = (2, 3, 4, 6, 8, 12)
SEEDS = 10
HEATS = (0.02, 0.15, 0.4, 0.05)


def main(seconds: float) -> None:
    """One line per number of layers."""
    for layers in LAYERS:
        over, gained = [], []
        for seed in range(SEEDS):
            spec, rates, workload = random_case(100 * layers + seed, layers)
            profile = profile_from_datasheet(rates)
            tier = plan_variant(spec, profile, workload).ranks[0].tiers[0]
            (task,) = prepare_ranks(spec, profile, workload)
            best, deadline, attempt = tier, time.monotonic() + seconds, 0
            while time.monotonic() < deadline:
                heat = HEATS[attempt % len(HEATS)]
                best = anneal(task.room, best, task.costs[0], heat, Random(f"{seed} {attempt}"))
                attempt += 1
            over.append(tier.prediction.seconds / tier.prediction.bound_seconds - 1)
            gained.append(tier.prediction.seconds / tier_seconds(task.room, best, task.costs[0]) - 1)
        row = {
            "layers": layers,
            "models": SEEDS,
            "seconds_of_search": seconds,
            "within_1_percent_of_bound": sum(gap <= 0.01 for gap in over),
            "worst_over_bound": round(max(over), 4),
            "median_over_bound": round(sorted(over)[SEEDS // 2], 4),
            "search_gains_over_1_percent": sum(gain > 0.01 for gain in gained),
            "most_gained_by_search": round(max(gained), 4),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
