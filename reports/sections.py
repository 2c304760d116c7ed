"""What a report shows: one section per figure, drawn when the inputs hold what it needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pshard.plan import Variant
from pshard.reports.compare_runs import compare_strategies
from pshard.reports.figures.draft_rates import draw_draft_rates, pick_measured
from pshard.reports.figures.expert_hits import draw_hits
from pshard.reports.figures.expert_places import draw_experts
from pshard.reports.figures.foreseen_rates import draw_outlook
from pshard.reports.figures.in_short import draw_in_short
from pshard.reports.figures.machine_ceilings import draw_machine
from pshard.reports.figures.placement_map import draw_placement
from pshard.reports.figures.predicted_rates import draw_predicted, predicted_measurements
from pshard.reports.figures.scaling import draw_scaling, group_scaling
from pshard.reports.figures.server_loads import draw_loads, group_loads
from pshard.reports.figures.speedup import draw_speedup
from pshard.reports.figures.sweep import draw_sweep, group_sweeps
from pshard.reports.figures.timeline import draw_timeline
from pshard.reports.inputs import ReportInputs
from pshard.reports.interactive.explore_step import explore_step
from pshard.reports.summary import choose_plan, find_gains, rates_of, summarise
from pshard.times.measurement import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """A figure, the name of its files, its heading, and how to read it. `live`: HTML that shows the same and answers to
    the mouse."""

    name: str
    heading: str
    caption: str
    figure: "Figure"
    live: str = ""

    @property
    def alt(self) -> str:
        """What the figure shows, for those who do not see it."""
        return f"{self.heading}. {self.caption}"


def draw_sections(inputs: ReportInputs) -> list[Section]:
    """All sections that the inputs allow, in reading order; figures of one kind are numbered when there are several."""
    sections = []
    for draw in (
        _summaries,
        _speedups,
        _scalings,
        _loads,
        _predictions,
        _outlooks,
        _sweeps,
        _drafts,
        _placements,
        _experts,
        _hits,
        _timelines,
        _machines,
    ):
        drawn = list(draw(inputs))
        for number, (name, heading, caption, figure, *live) in enumerate(drawn, 1):
            sections.append(Section(f"{name}-{number}" if len(drawn) > 1 else name, heading, caption, figure, *live))
    return sections


Drawn = Iterator[tuple[str, str, str, "Figure"] | tuple[str, str, str, "Figure", str]]


def _summaries(inputs: ReportInputs) -> Drawn:
    gains = find_gains(inputs.measurements)
    plan = choose_plan(inputs, gains)
    rates = rates_of(inputs.profiles[0]) if inputs.profiles else ()
    if rates or plan or gains:
        yield "in-short", "In short", " ".join(summarise(inputs)), draw_in_short(rates, plan, gains)


def _speedups(inputs: ReportInputs) -> Drawn:
    comparisons = compare_strategies(inputs.measurements)
    if comparisons:
        caption = "Longer bars are faster; every bar names what was measured, and its whisker is "
        caption += "one standard deviation of the samples. Baselines ran with the same VRAM budget."
        if any(c.summed for c in comparisons):
            caption += " End-to-end times are the sum of a prefill and a decode that were measured apart."
        if any(c.same for c in comparisons):
            caption += " Names joined by = are one plan: they do the same work on this machine, as all plans do that "
            caption += "copy no weights where the CPU is the accelerator. What was measured of both counts together."
        yield "speedup", "Speed against the baselines", caption, draw_speedup(comparisons)


def _scalings(inputs: ReportInputs) -> Drawn:
    for title, points in group_scaling(inputs.measurements).items():
        caption = "Each added device brings its own budget. Below each rate the same as a multiple of what the fewest "
        caption += "devices reach; dotted lines are perfect scaling and none."
        yield "scaling", "More devices", caption, draw_scaling(title, points)


def _loads(inputs: ReportInputs) -> Drawn:
    for pattern, group in group_loads(inputs.loads).items():
        caption = "Lines are medians; bands end where 95 of a hundred stay within. Dotted lines are what was promised."
        yield "server-load", "A server under load", caption, draw_loads(pattern, group)


def _predictions(inputs: ReportInputs) -> Drawn:
    if predicted_measurements(inputs.measurements):
        caption = "On the line the planner was right; above it promised more than was measured, below it less."
        yield "predicted", "Predicted against measured", caption, draw_predicted(inputs.measurements)


def _outlooks(inputs: ReportInputs) -> Drawn:
    for outlook in inputs.outlooks:
        caption = f"Nothing here was run: these are the planner's predictions for {outlook.machine}."
        yield "outlook", "What to expect there", caption, draw_outlook(outlook)


def _sweeps(inputs: ReportInputs) -> Drawn:
    models: dict[str, list[Variant]] = {}
    for model, variant in inputs.plans:
        models.setdefault(model, []).append(variant)
    for model, variants in models.items():
        for group in group_sweeps(variants):
            caption = "Predictions of the planner for each budget in the registry."
            yield "sweep", "What more VRAM buys", caption, draw_sweep(model, group)


def _drafts(inputs: ReportInputs) -> Drawn:
    for model, variant in inputs.plans:
        if variant.speculation is not None:
            caption = "Each number of drafts has a plan of its own. A step brings the accepted ones and one token more."
            measured = pick_measured(variant, [m for m in inputs.measurements if m.model == model])
            yield "drafts", "How many drafts pay", caption, draw_draft_rates(model, variant, measured)


def _placements(inputs: ReportInputs) -> Drawn:
    for model, variant in inputs.plans:
        for rank in variant.ranks:
            caption = "One band per tier; a step runs under the smallest tier that covers its tokens."
            if not variant.plan_needed:
                caption += f" Everything is in VRAM{variant.but_for}, so no plan was needed."
            yield "placement", "Where the model lives", caption, draw_placement(model, variant, rank)


def _experts(inputs: ReportInputs) -> Drawn:
    for experts in (each for each in inputs.experts if each.tiers and all(tier.layers for tier in each.tiers)):
        caption = f"Each bar is a layer. A token takes {experts.used} of a layer's {experts.count} experts; bytes over "
        recorded = any(layer.hits is not None for tier in experts.tiers for layer in tier.layers)
        caption += "the link are expected ones, "
        caption += "by the record of routing." if recorded else "every expert chosen alike."
        yield "experts", "Where the experts lie", caption, draw_experts(experts)


def _hits(inputs: ReportInputs) -> Drawn:
    for course in inputs.courses:
        caption = (
            "By a record of the run: how often a token's expert lay in VRAM. What is above the bands was read over "
        )
        caption += "the link or computed by the CPU. Slots are replayed, which finds what a run under this plan finds."
        yield "expert-hits", "Experts found in VRAM over time", caption, draw_hits(course)


def _timelines(inputs: ReportInputs) -> Drawn:
    measured = [Timeline(f"{m.model}, {m.test}, one step as measured", m.timeline) for m in inputs.measurements]
    for timeline in (*inputs.timelines, *measured):
        if timeline.events:
            caption = "Bars are work, grey is waiting. Where bars lie above each other, copies hide behind compute."
            yield "timeline", "One step over time", caption, draw_timeline(timeline), explore_step(timeline)


def _machines(inputs: ReportInputs) -> Drawn:
    for profile in inputs.profiles:
        p = profile.provenance
        caption = f"Profile of {p.date}, {p.source}{' quickly' if p.quick else ''} by {p.command}."
        yield "machine", "The machine", caption, draw_machine(profile)
