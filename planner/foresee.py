"""A plan beside the published strategies, by prediction."""

from dataclasses import replace

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.make_plan import plan_baseline
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.published.strategies import PER_TIER, list_published
from pshard.predicted_times import decode_rate, first_token_seconds, round_seconds
from pshard.routing.record import RoutingRecord
from pshard.speculation import NO_DRAFTS, PROGRAMS
from pshard.times.outlook import Forecast, LeftOut, Outlook
from pshard.workload import Workload


def foresee_strategies(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    variant: Variant,
    record: RoutingRecord | None = None,
) -> Outlook:
    """What the variant and each published strategy are predicted to reach for the workload, by the variant's costs.
    record: of which experts texts use. Published strategies have nothing that drafts. Raises UserError as
    `prepare_ranks` does."""
    if workload.drafting.kind in PROGRAMS:
        workload = replace(workload, drafting=NO_DRAFTS, acceptance=None, drafter_mib=0)
    found, left_out, tasks = (
        list[Forecast](),
        list[LeftOut](),
        prepare_ranks(spec, profile, workload, variant.correction),
    )
    for name in (*list_published(spec), PER_TIER):
        try:
            published = plan_baseline(name, spec, profile, workload, variant.correction, record, tasks)
            found.append(_forecast(name, published))
        except UserError as error:  # it does not fit, or is not for several devices
            left_out.append(LeftOut(name, str(error)))
    found.sort(key=lambda forecast: forecast.round_seconds)
    machine = f"{profile.accelerators[0].name} ({profile.provenance.source})"
    own = _forecast("ilp", variant)
    return Outlook(spec.name, machine, workload.vram_mib, variant.terms, (own, *found), tuple(left_out))


def _forecast(name: str, variant: Variant) -> Forecast:
    return Forecast(name, first_token_seconds(variant), decode_rate(variant), round_seconds(variant))
