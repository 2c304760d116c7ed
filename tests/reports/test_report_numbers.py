"""What figures say is what was measured or planned."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from plan_samples import with_workload
from report_samples import make_bench, make_measurement, make_outlook, make_plan_variant, make_scaling, make_timeline

from pshard.reports.compare_runs import compare_strategies
from pshard.reports.figures.foreseen_rates import draw_outlook
from pshard.reports.figures.in_short import draw_in_short
from pshard.reports.figures.placement_map import COLOURS, draw_placement
from pshard.reports.figures.predicted_rates import draw_predicted, spread_apart
from pshard.reports.figures.scaling import draw_scaling, group_scaling
from pshard.reports.figures.speedup import draw_speedup
from pshard.reports.figures.style import format_number
from pshard.reports.figures.sweep import group_sweeps, predict_decode, predict_first_token
from pshard.reports.figures.timeline import draw_timeline
from pshard.reports.summary import find_gains
from pshard.reports.tables.bench_formats import format_measurements
from pshard.reports.tables.report_tables import tabulate_plan
from pshard.times.measurement import Timeline, summarise_samples


def test_speedups_are_ratios_to_the_baseline_of_the_same_test_and_budget():
    found = {(c.test, c.budget_mib): c for c in compare_strategies(make_bench())}
    prefill = found["pp4096", (12000,)]
    assert prefill.reference == "fit" and prefill.quantity == "prefill"
    assert prefill.speedup("ilp") == pytest.approx(9800 / 2236)
    assert prefill.speedup("accelerate") == pytest.approx(449 / 2236)
    assert found["tg64", (6000,)].speedup("ilp") == pytest.approx(7.4 / 4.4)


def test_end_to_end_is_measured_or_summed_from_the_decode_that_follows_the_prefill():
    (summed,) = [c for c in compare_strategies(make_bench()) if c.quantity == "end to end" and c.budget_mib == (6000,)]
    assert summed.summed and summed.test == "pp4096 + tg64 @ d4096"
    assert dict(summed.seconds)["ilp"] == pytest.approx(4096 / 5200 + 64 / 6.9, rel=0.01)
    whole = [make_measurement(4096, 64, rate, s) for rate, s in ((900.0, "ilp"), (300.0, "fit"))]
    (measured,) = [c for c in compare_strategies(whole) if c.quantity == "end to end"]
    assert not measured.summed and measured.speedup("ilp") == pytest.approx(3)


def test_the_fastest_run_of_a_baseline_counts():
    runs = [
        make_measurement(64, 0, r, s, n_ubatch=u) for r, s, u in ((9.0, "ilp", 1), (3.0, "fit", 1), (6.0, "fit", 2))
    ]
    (comparison,) = compare_strategies(runs)
    assert comparison.speedup("ilp") == pytest.approx(1.5)


def test_without_a_baseline_nothing_is_compared():
    assert compare_strategies([make_measurement(64, 0)]) == []
    assert compare_strategies([make_measurement(64, 0, budget_mib=(1,)), make_measurement(64, 0, strategy="fit")]) == []


def test_speedup_bars_have_the_lengths_of_the_comparisons():
    comparisons = compare_strategies(make_bench())
    figure = draw_speedup(comparisons)
    drawn = sorted(bar.get_width() for ax in figure.axes for bar in ax.patches)
    assert drawn == pytest.approx(sorted(c.speedup(name) for c in comparisons for name, _ in c.seconds))


def test_tables_sentences_and_figures_give_one_figure_for_a_test() -> None:
    """A table had the mean of the rates, the speed figure the rate at the mean time: 382 tok/s and 365."""
    uneven = {"ilp": (2 * 10**8, 3 * 10**8), "fit": (10**8, 3 * 10**8)}  # rates of tg64 whose mean time says otherwise
    runs = [make_measurement(0, 64, strategy=s, **summarise_samples(ns, 64)) for s, ns in uneven.items()]
    own, fit = (fmean(64e9 / ns for ns in samples) for samples in uneven.values())
    assert f" {own:.2f} ± " in format_measurements(runs[:1], "md")
    (gain,) = find_gains(runs)
    (panel,) = draw_in_short((), None, (gain,)).axes
    assert gain.times == pytest.approx(own / fit) and panel.get_title("left") == f"Answers: {own / fit:.2f} times"
    assert sorted(bar.get_height() for bar in panel.patches) == pytest.approx([own, fit])
    (comparison,) = compare_strategies(runs)
    assert comparison.speedup("ilp") == pytest.approx(own / fit)
    labels = " ".join(text.get_text() for text in draw_speedup([comparison]).axes[0].texts)
    assert f"pshard  {format_number(own)} tok/s" in labels and f"fit  {format_number(fit)} tok/s" in labels


def one_plan_under_two_names():
    """The plan, `fit` that does the same work, and a strategy that does not."""
    runs = {"ilp": 12.0, "fit": 10.0, "layer-stream": 5.0}
    return [
        make_measurement(n_prompt, n_gen, rate, name, same_as="ilp" if name == "fit" else "")
        for n_prompt, n_gen in ((64, 0), (0, 16))
        for name, rate in runs.items()
    ]


def test_a_strategy_that_is_the_plan_is_no_rival_of_it():
    runs = one_plan_under_two_names()
    for comparison in compare_strategies(runs):
        assert comparison.same == ("fit",) and comparison.reference == "ilp" and comparison.speedup("ilp") == 1
        assert {name for name, _ in comparison.seconds} == {"ilp", "layer-stream"}
        assert comparison.name("ilp") == "pshard = fit" and comparison.name("layer-stream") == "layer-stream"
    prefill, _, summed = compare_strategies(runs)
    rates = [rate for run in runs[:2] for rate in run.samples_ts]
    assert 64 / dict(prefill.seconds)["ilp"] == pytest.approx(sum(rates) / 6)
    assert dict(prefill.spreads)["ilp"] == pytest.approx(stdev(rates) / (sum(rates) / 6))
    assert dict(summed.seconds)["layer-stream"] == pytest.approx(64 / runs[2].avg_ts + 16 / runs[5].avg_ts)
    (alone, *_) = compare_strategies(runs[:2])
    assert alone.same == ("fit",)


def test_the_figure_shows_one_plan_once_and_how_sure_each_bar_is():
    comparisons = compare_strategies(one_plan_under_two_names())
    figure = draw_speedup(comparisons)
    labels = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert len(labels) == 6 and sum(label.startswith("pshard = fit ") for label in labels) == 3
    assert not any(label.startswith("fit") for label in labels)
    assert figure.axes[-1].get_xlabel() == "times as fast as pshard = fit (dashed line = 1)"
    whiskers = [line for ax in figure.axes for lines in ax.collections for line in lines.get_segments()]
    widths = sorted(end[0] - begin[0] for begin, end in whiskers)
    expected = sorted(2 * c.speedup(name) * spread for c in comparisons for name, spread in c.spreads)
    assert widths == pytest.approx(expected)


def test_an_outlook_says_that_nothing_was_run():
    figure = draw_outlook(make_outlook())
    assert figure.get_suptitle().startswith("Predicted, not run: Invented 32B Q4_0 on Some GPU (datasheet), 6000 MiB\n")
    (first, decode) = figure.axes
    assert [bar.get_width() for bar in first.patches] == pytest.approx([2.0, 1.0, 4.0])  # `fit` has the best round
    assert [bar.get_width() for bar in decode.patches] == pytest.approx([1.5, 1.0, 0.5])
    assert all(bar.get_hatch() for bar in (*first.patches, *decode.patches))
    assert [text.get_text() for text in decode.texts] == [
        "pshard  30.0 tok/s  (1.5×)", "fit  20.0 tok/s", "layer-stream  10.0 tok/s  (0.5×)",
    ]  # fmt: skip


def test_placement_map_colours_every_unit_of_every_tier():
    from matplotlib.colors import to_rgba

    variant = make_plan_variant()
    figure = draw_placement("m", variant, variant.ranks[0])
    drawn = [bar.get_facecolor() for bar in figure.axes[0].patches]
    placements = [p for tier in variant.ranks[0].tiers for p in tier.placements]
    for where, colour in COLOURS.items():
        assert drawn.count(to_rgba(colour)) == sum(p.sort == where for p in placements) > 0
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == sum(p.kv == "vram" for p in placements)


def test_plans_that_differ_in_kv_type_sequences_or_lengths_have_maps_of_other_titles():
    first = make_plan_variant()
    (whole,) = first.ranks
    small = replace(whole, tiers=tuple(replace(tier, placements=tier.placements[:4]) for tier in whole.tiers))
    others = [
        with_workload(first, **change)
        for change in (
            {"type_k": "q8_0"},
            {"sequences": 4},
            {"context": 99},
            {"max_ubatch": 8},
            {"prompt": 7},
            {"device": 1},
        )
    ]
    titles = {draw_placement("m", v, small).get_suptitle() for v in (first, *others)}
    assert len(titles) == 7 and any("KV q8_0 keys and bf16 values" in t for t in titles)


def test_prediction_title_counts_those_within_the_band():
    inside = [make_measurement(0, 8, 10.0, predicted=p) for p in (9.0, 11.0)]
    figure = draw_predicted([*inside, make_measurement(8, 0, 10.0, predicted=15.0), make_measurement(8, 0)])
    assert figure.axes[0].get_title(loc="left").endswith("2 of 3")


def test_labels_are_pushed_apart_and_stay_inside():
    placed = spread_apart([0.5, 0.5, 0.5, 0.98, 0.99], 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed)) and placed[-1] <= 1
    assert spread_apart([0.1, 0.9], 0.1) == [0.1, 0.9]


def test_timeline_bars_are_the_events():
    events = make_timeline(8)
    figure = draw_timeline(Timeline("t", events))
    end = max(e.end for e in events) * 1e3
    widths = sorted(bar.get_width() for bar in figure.axes[0].patches)
    lanes = {e.lane for e in events}
    assert widths == pytest.approx(sorted([(e.end - e.start) * 1e3 for e in events] + [end] * len(lanes)))


def test_scaling_needs_several_rank_counts():
    ((title, points),) = group_scaling(make_scaling()).items()
    assert title == "Invented 32B Q4_0, tensors cut over all devices, 8000 MiB each"
    assert len(points) == 4 * 2 * 2 * 2
    assert [p.devices for p in points if (p.test, p.depth, p.batch) == ("pp4096", 2048, 8)] == [1, 2, 3, 4]
    assert group_scaling([make_measurement(0, 8)]) == {}
    assert group_scaling([make_measurement(0, 8), make_measurement(0, 9, budget_mib=(9, 9), split_mode="layer")]) == {}


def test_scaling_keeps_modes_and_budgets_apart_and_takes_the_fastest_run():
    def run(rate: float, *budget: int, mode: str = "", command: str = "pshard-bench"):
        return make_measurement(0, 64, rate, budget_mib=budget, split_mode=mode, command=command)

    one = run(10, 900)
    groups = group_scaling([one, run(18, 900, 900, mode="tensor"), run(12, 900, 900, command="x -sm layer")])
    assert {t: [round(p.measured) for p in points] for t, points in groups.items()} == {
        "Invented 32B Q4_0, tensors cut over all devices, 900 MiB each": [10, 18],
        "Invented 32B Q4_0, whole layers on each device, 900 MiB each": [10, 12],
    }
    (title,) = group_scaling([one, run(18, 500, 500, mode="tensor")])  # one budget for each number: compared, not named
    assert title == "Invented 32B Q4_0, tensors cut over all devices"
    budgets = group_scaling([one, run(6, 500), run(18, 900, 900, mode="tensor"), run(11, 500, 500, mode="tensor")])
    assert [[round(p.measured) for p in points] for points in budgets.values()] == [[10, 18], [6, 11]]
    (points,) = group_scaling([run(9, 900), one, run(18, 900, 900, mode="tensor")]).values()
    assert [round(p.measured) for p in points] == [10, 18]


def test_scaling_draws_rates_and_ratios_over_devices_depth_and_batch():
    ((title, points),) = group_scaling(make_scaling()).items()
    figure = draw_scaling(title, points)
    decoding, prompts = figure.subfigs
    assert len(decoding.axes) == len(prompts.axes) == 6
    rates, ratios = decoding.axes[0], decoding.axes[3]
    assert [ax.get_title("left") for ax in decoding.axes[:3]] == [
        f"Decoding over {x}" for x in ("devices", "depth", "batch")
    ]
    measured, predicted = rates.lines[:2]
    assert list(measured.get_xdata()) == [1, 2, 3, 4]
    assert list(measured.get_ydata()) == pytest.approx([9.0, 16.2, 21.6, 23.1], rel=0.02)
    assert list(predicted.get_ydata()) == pytest.approx([1.1 * y for y in (9.0, 16.2, 21.6, 23.1)])
    assert list(ratios.lines[0].get_ydata()) == pytest.approx([1, 1.8, 2.4, 3.3 * 7 / 9], rel=0.01)
    over_depth = prompts.axes[4]
    assert [line.get_label() for line in over_depth.lines[::2]][:3] == ["2 devices", "3 devices", "4 devices"]
    assert list(over_depth.lines[0].get_xdata()) == [0, 2048]
    assert list(prompts.axes[5].lines[0].get_xdata()) == [1, 8]
    fewer = [p for p in points if p.devices > 1 or p.test != "pp4096" or p.depth]  # no base: no ratio
    ratios = draw_scaling(title, fewer).subfigs[1].axes[3]
    assert {line.get_label() for line in ratios.lines} >= {"depth 2048, batch 1"}
    assert "depth 0, batch 1" not in {line.get_label() for line in ratios.lines}
    flat = [p for p in points if p.depth == 0 and p.batch == 1 and p.prefill]
    (only,) = draw_scaling(title, flat).subfigs
    assert len(only.axes) == 2


def test_sweep_groups_budgets_of_one_workload():
    small, large = make_plan_variant((6000,)), make_plan_variant((12000,))
    assert group_sweeps([large, small]) == [[small, large]] and group_sweeps([large]) == []


def test_first_token_adds_up_micro_batches_under_their_tiers():
    variant = make_plan_variant((12000,))
    assert predict_decode(variant) == pytest.approx(1 / 0.065)
    assert predict_first_token(variant) == pytest.approx(0.43)
    assert predict_first_token(with_workload(variant, prompt=9000)) == pytest.approx(2 * 0.43 + 0.18)


def test_plan_table_counts_placements():
    variant = make_plan_variant((8000, 8000))
    table = tabulate_plan(variant)
    assert len(table) == 2 * len(variant.ranks[0].tiers) and list(table["rank"].unique()) == ["0", "1"]
    placements = variant.ranks[0].tiers[0].placements
    for sort in ("streamed", "divided"):
        assert table[sort][0] == str(sum(p.sort == sort for p in placements)) != "0"
