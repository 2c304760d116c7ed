"""What would more memory bring? Plans a model for several budgets, of this machine or another; nothing is run.

python what_if.py MODEL PROFILE 6000 8000 12000    # a profile: ~/.cache/pshard/profile.json, registries/examples/*.json
"""

import sys
from pathlib import Path

from pshard.errors import NoPlan, UserError
from pshard.models import open_model
from pshard.planner.make_plan import plan_variant
from pshard.predicted_times import decode_seconds, first_token_seconds
from pshard.registries.profile_store import load_profile
from pshard.workload import Workload


def main(model: str, profile: str, *budgets: str) -> None:
    """A line for each budget in MiB."""
    machine = load_profile(Path(profile))
    with open_model(model) as file:
        for budget in map(int, budgets):
            work = Workload((budget,), context=256, prompt=128, generated=128)
            try:
                plan = plan_variant(file.spec, machine, work)
            except NoPlan as error:
                print(f"{budget:>7} MiB  {error}")
                continue
            first, rate = first_token_seconds(plan), 1 / decode_seconds(plan)
            print(f"{budget:>7} MiB  first token after {1e3 * first:.1f} ms, then {rate:.1f} tokens/s")


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all(budget.isdigit() for budget in sys.argv[3:]):
        raise SystemExit(__doc__)
    try:
        main(*sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
