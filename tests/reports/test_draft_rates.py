"""The figure of rates over drafts shows what the plan says, and what was measured."""

from dataclasses import replace

import pytest
from report_samples import make_measurement, make_plan_variant

from pshard.reports.figures.draft_rates import draw_draft_rates, pick_measured
from pshard.reports.inputs import ReportInputs
from pshard.reports.sections import draw_sections
from pshard.speculation import ASSUMED, Acceptance, Drafting, PlannedDrafts, Speculation
from pshard.times.measurement import BenchedDrafts

HELD = Acceptance((0.8,), "recorded")
SAID = Speculation("lookup", HELD, 1.0, tuple(PlannedDrafts(k, 0.05, 0.05 + k / 500, 0.04) for k in (0, 1, 3, 7)))


def make_variant():
    variant = make_plan_variant()
    work = replace(variant.workload, drafting=Drafting("lookup", 3), acceptance=HELD)
    return replace(variant, workload=work, speculation=SAID)


def test_each_acceptance_is_a_line_through_the_rates_of_the_plan_with_the_chosen_number_marked():
    (ax,) = draw_draft_rates("m", make_variant(), [(3, 42.0)]).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    own = [[p.drafts, SAID.rate(p, HELD)] for p in SAID.planned]
    assert lines["accepted: .8 (recorded, planned by)"] == own
    lower = [SAID.rate(p, HELD.shift(-0.1)) for p in SAID.planned]
    assert [rate for _, rate in lines["accepted: .7"]] == pytest.approx(lower)
    assert lines["chosen: 3"] == [own[2]] and lines["measured"] == [[3, 42.0]]
    assert lines["no drafts: 20.0 tok/s"][0][1] == pytest.approx(20)


def test_an_acceptance_that_cannot_rise_is_shown_once():
    assert [str(a) for a in replace(SAID, acceptance=Acceptance((1.0,), "recorded")).compared()] == [".9", "1"]
    assert len(replace(SAID, acceptance=Acceptance((0.65,), ASSUMED)).compared()) == 3
    assert len(SAID.compared()) == 3


def test_measured_points_are_those_under_the_plans_budget():
    variant = make_variant()
    drafts = BenchedDrafts("lookup", 3, 100, (0.8, 0.7, 0.6), 19.0)
    own = replace(make_measurement(n_gen=128), budget_mib=variant.workload.vram_mib, drafts=drafts)
    others = replace(own, budget_mib=(7,)), replace(own, drafts=None), replace(own, n_sequences=9)
    assert pick_measured(variant, [own, *others]) == [(0, 19.0), (3, own.avg_ts)]


@pytest.mark.parametrize(("made_up", "shown"), [((0.8,), True), ((0.9, 0.81), True), ((0.65,), False)])
def test_a_point_of_made_up_acceptance_is_shown_where_the_figure_has_its_line(made_up, shown):
    variant = make_variant()
    drafts = BenchedDrafts("lookup", 3, 100, (0.8, 0.7, 0.6), 19.0, made_up)
    own = replace(make_measurement(n_gen=128), budget_mib=variant.workload.vram_mib, drafts=drafts)
    assert bool(pick_measured(variant, [own])) == shown


def test_a_report_has_it_where_drafts_were_asked_for():
    def names(variant):
        return [section.name for section in draw_sections(ReportInputs((), (), (("m", variant),), (), ()))]

    assert "drafts" in names(make_variant()) and "drafts" not in names(make_plan_variant())
