"""Tables of a report, as pandas frames of text ready to be shown."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.homes import list_sorts
from pshard.plan import TierPlan, Variant
from pshard.reports.figures.style import RESOURCE_NAMES, format_number, name_strategy
from pshard.reports.tables.bench_formats import format_bytes, table_columns
from pshard.times.measurement import Measurement

if TYPE_CHECKING:
    from pandas import DataFrame


def tabulate_measurements(measurements: Sequence[Measurement]) -> "DataFrame":
    """The columns of the bench's own table, one row per measurement."""
    from pandas import DataFrame

    columns = table_columns(measurements)
    return DataFrame({heading: [text(m) for m in measurements] for heading, text, _ in columns})


def tabulate_plan(variant: Variant) -> "DataFrame":
    """One row per rank and tier: how many units live where, what is predicted, what limits it, and the arena."""
    from pandas import DataFrame

    rows = []
    sorts = list_sorts({place.sort for rank in variant.ranks for tier in rank.tiers for place in tier.placements})
    for rank in variant.ranks:
        for tier in rank.tiers:
            where = [place.sort for place in tier.placements]
            prediction = tier.prediction
            rows.append(
                {
                    "rank": str(rank.rank),
                    "tier (tokens)": str(tier.tokens),
                    **{name: str(where.count(name)) for name in sorts},
                    "predicted ms": format_number(1e3 * prediction.seconds),
                    "predicted tok/s": format_number(tier.tokens / prediction.seconds),
                    "limit": RESOURCE_NAMES.get(prediction.binds, prediction.binds),
                    "link": format_bytes(prediction.link_bytes),
                    "arena": format_bytes(tier.buffers.total),
                    "plan": name_strategy(tier.solve.strategy),
                    "over bound": _over_bound(tier),
                }
            )
    frame = DataFrame(rows)
    return frame if len(variant.ranks) > 1 else frame.drop(columns="rank")


def _over_bound(tier: TierPlan) -> str:
    """By how much the predicted time is over what no plan can beat."""
    bound = tier.prediction.bound_seconds
    return f"{tier.prediction.seconds / bound - 1:.1%}" if bound > 0 else ""


def tabulate_environments(measurements: Sequence[Measurement]) -> "DataFrame":
    """Where and when measurements were made: one column per entry of their environments, without repetitions."""
    from pandas import DataFrame

    runs = dict.fromkeys((m.test_time[:10], m.kernels, m.environment, m.command) for m in measurements)
    rows = [{"date": day, "kernels": kernels, **dict(env), "command": cmd} for day, kernels, env, cmd in runs]
    return DataFrame(rows).fillna("")
