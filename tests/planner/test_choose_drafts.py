"""The number of drafts is chosen together with places: of plans for each number the one with the shortest round."""

from dataclasses import replace
from functools import cache

import pytest
from head_files import write_headed
from hybrid_files import random_hybrid, write_hybrid_gguf
from planner_cases import DESKTOP, OWN, make_model

from pshard.errors import NoPlan, UserError
from pshard.machine import ElementwiseTiming
from pshard.model_config import Experts
from pshard.models import open_model
from pshard.plan import Variant
from pshard.planner.choose_drafts import choose_drafts, time_rows
from pshard.planner.make_plan import plan_roughly
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.shown.show_drafts import describe_drafts, tabulate_drafts
from pshard.predicted_times import decode_rate, round_seconds
from pshard.speculation import ASSUMED, Acceptance, DraftQuestion, best_drafts
from pshard.units.moe.popularity import Popularity
from pshard.workload import Workload

DENSE = make_model(layers=4, d_model=2048, heads=16, d_ffn=8192)
SPARSE = make_model(layers=4, d_model=2048, heads=16, experts=Experts(count=64, used=4, d_expert=1024))
PROFILE = profile_from_datasheet(DESKTOP)
WORK = Workload((OWN + 80,), context=4096, prompt=1024, generated=256)


@cache
def plan(spec, workload):
    """Not refined unit by unit, which takes seconds."""
    return plan_roughly(spec, PROFILE, workload).variant


def choose(spec, chance, allowed=(0, 1, 3, 7), workload=WORK):
    question = DraftQuestion("lookup", Acceptance((chance,)), allowed)
    return choose_drafts(lambda asked: plan(spec, asked), spec, PROFILE, workload, question)


@pytest.mark.quick("0.8")
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
def test_no_number_of_drafts_has_a_shorter_round_than_the_chosen_one(chance: float) -> None:
    chosen = choose(DENSE, chance)
    for drafts in (0, 1, 3, 7):
        other = choose(DENSE, chance, (drafts,))
        assert other.workload.drafting.drafts == drafts
        assert round_seconds(chosen) <= round_seconds(other)
    said = chosen.speculation
    assert said is not None and [planned.drafts for planned in said.planned] == [0, 1, 3, 7]
    own = next(p for p in said.planned if p.drafts == chosen.workload.drafting.drafts)
    assert own.round_seconds == round_seconds(chosen) == min(p.round_seconds for p in said.planned)
    assert said.rate(own, said.acceptance) == pytest.approx(decode_rate(chosen))
    assert own.bound <= own.step * (1 + 1e-9)


def test_drafts_pay_where_weights_are_streamed_and_never_where_none_is_accepted() -> None:
    assert choose(DENSE, 0.8).workload.drafting.drafts >= 3
    assert choose(DENSE, 0.0).workload.drafting.drafts == 0
    assert choose(DENSE, 0.0) == replace(plan(DENSE, WORK), speculation=choose(DENSE, 0.0).speculation)


def test_experts_outside_vram_ask_for_a_higher_acceptance_than_a_dense_model() -> None:
    dense, sparse = (choose(spec, 0.5) for spec in (DENSE, SPARSE))
    assert sparse.workload.drafting.drafts < dense.workload.drafting.drafts
    for drafts in (1, 3, 7):
        own, other = (next(p for p in v.speculation.planned if p.drafts == drafts) for v in (sparse, dense))
        assert sparse.speculation.break_even(own) > dense.speculation.break_even(other)


def test_steps_with_drafts_cost_less_where_neighbours_share_their_experts() -> None:
    places = tuple((4 / 64,) * 64)

    def known(overlap):
        popularity = Popularity((), 64, 4, 1000, overlap)
        popularity.__dict__["uses"] = places  # all alike: only the overlap differs
        return replace(SPARSE, popularity=popularity)

    none, much = (choose(known(overlap), 0.5, (3,)).speculation.planned[1].step for overlap in (None, 0.9))
    assert much < none


def test_the_chosen_number_is_the_one_that_the_formula_finds_by_the_times() -> None:
    for chance in (0.3, 0.8):
        chosen = choose(DENSE, chance)
        seconds = {p.drafts: p.step for p in chosen.speculation.planned}
        by_formula = best_drafts(Acceptance((chance,)), seconds)
        rates = {k: Acceptance((chance,)).rate(k, seconds[0], s) for k, s in seconds.items()}
        assert rates[chosen.workload.drafting.drafts] == pytest.approx(rates[by_formula], rel=0.02)


def test_a_plan_says_what_each_number_of_rows_takes_under_it() -> None:
    chosen = time_rows(DENSE, PROFILE, choose(DENSE, 0.8, (3,)))
    tiers = {t.tokens: t.prediction.seconds for t in chosen.ranks[0].tiers}
    rows = chosen.speculation.rows
    assert len(rows) == 4 and rows[0] == pytest.approx(tiers[1]) and rows[3] == pytest.approx(tiers[4])
    assert list(rows) == sorted(rows)
    without = choose(DENSE, 0.0)
    assert time_rows(DENSE, PROFILE, without) is without


def test_more_rows_than_a_micro_batch_has_are_refused_and_left_out_where_others_may_be() -> None:
    small = replace(WORK, max_ubatch=4)
    assert [p.drafts for p in choose(DENSE, 0.8, workload=small).speculation.planned] == [0, 1, 3]
    with pytest.raises(UserError, match="7 drafts need steps of 8 rows for -np 1, and micro-batches have 4 at most"):
        choose(DENSE, 0.8, (7,), small)


def test_what_fits_with_no_number_of_drafts_is_refused_as_without() -> None:
    with pytest.raises(NoPlan):
        choose(DENSE, 0.8, workload=replace(WORK, vram_mib=(OWN + 1,)))


def test_the_table_has_three_acceptances_around_a_given_one_and_usual_ones_beside_an_assumed_one() -> None:
    table = tabulate_drafts(DENSE, choose(DENSE, 0.8))
    assert table is not None and [a.rates[0] for a in table.acceptances] == pytest.approx([0.7, 0.8, 0.9])
    rates = [row.rates[table.own] for row in table.rows]
    assert table.rows[rates.index(max(rates))].drafts == table.chosen
    assert all(row.rates == tuple(sorted(row.rates)) for row in table.rows)
    question = DraftQuestion("lookup", Acceptance((0.27,), ASSUMED), (0, 1))
    assumed = tabulate_drafts(DENSE, choose_drafts(lambda asked: plan(DENSE, asked), DENSE, PROFILE, WORK, question))
    assert [a.rates for a in assumed.acceptances] == [(0.27,), (0.5,), (0.65,), (0.8,)] and assumed.own == 0
    assert tabulate_drafts(DENSE, plan(DENSE, WORK)) is None


def test_the_table_says_where_its_rate_is_not_the_plans() -> None:
    """Predictions are fitted to what was measured after the table's plans were made."""
    chosen = choose(DENSE, 0.8)
    said = "The table is of before plans were run"
    table = tabulate_drafts(DENSE, chosen)
    assert table is not None and not any(line.startswith(said) for line in describe_drafts(table))
    (rank,) = chosen.ranks
    slower = [replace(t, prediction=replace(t.prediction, seconds=2 * t.prediction.seconds)) for t in rank.tiers]
    again = tabulate_drafts(DENSE, replace(chosen, ranks=(replace(rank, tiers=tuple(slower)),)))
    assert again is not None and any(line.startswith(said) for line in describe_drafts(again))


def test_rows_that_hold_take_as_long_to_go_into_states_as_a_token_does(tmp_path) -> None:
    write_hybrid_gguf(tmp_path / "hybrid.gguf", "dense", random_hybrid("dense"))
    with open_model(tmp_path / "hybrid.gguf") as model:
        spec = model.spec
    chosen = choose(spec, 0.5, (3,), replace(WORK, context=256, prompt=64, generated=32))
    none, three = chosen.speculation.planned
    assert none.settling == three.drafting == 0 < three.settling < none.alone
    beside = three.settling
    assert decode_rate(chosen) == pytest.approx(1.875 / (three.step + beside))
    table = tabulate_drafts(spec, chosen)
    assert table is not None and table.rows[1].beside == pytest.approx(beside)
    assert any(line.startswith("More: rows are compared") for line in describe_drafts(table))
    assert all(p.drafting == p.settling == 0 for p in choose(DENSE, 0.5, (3,)).speculation.planned)


def test_what_drafts_take_beside_units_is_priced_and_none_are_chosen_where_it_is_too_much(tmp_path) -> None:
    write_headed(tmp_path / "m.gguf", "llama")
    with open_model(tmp_path / "m.gguf") as model:
        spec = model.spec
    question, work = DraftQuestion("mtp", Acceptance((0.9,)), (0, 1, 3)), replace(WORK, context=256, prompt=64)

    def choose_by(**seconds: float) -> Variant:
        rows = (ElementwiseTiming("acc", what, 1, 1, each) for what, each in seconds.items())
        profile = replace(PROFILE, elementwise=(*PROFILE.elementwise, *rows))
        return choose_drafts(lambda asked: plan_roughly(spec, profile, asked).variant, spec, profile, work, question)

    cheap, dear = choose_by(draft=1e-9), choose_by(verify=1e-2, draft=5e-2, follow=2e-2)
    assert cheap.workload.drafting.drafts and not dear.workload.drafting.drafts
    own, other = ({p.drafts: p for p in v.speculation.planned} for v in (cheap, dear))
    assert other[1].drafting - own[1].drafting == pytest.approx(5e-2)
    assert other[3].drafting - own[3].drafting == pytest.approx(9e-2)
    assert other[3].settling - own[3].settling == pytest.approx(1e-2) and not other[0].settling
