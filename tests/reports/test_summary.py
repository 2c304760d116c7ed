"""A report begins with what matters, compares only what ran on one machine, and can be read by everyone."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_samples import make_bench, make_full_profile, make_measurement, make_plan_registry, make_timeline

from pshard.reports.inputs import ReportInputs
from pshard.reports.page import build_page
from pshard.reports.sections import draw_sections
from pshard.reports.summary import count_places, find_gains, name_sort, summarise
from pshard.times.measurement import Timeline, summarise_samples


def make_inputs(**fields) -> ReportInputs:
    variants = make_plan_registry((6000,), (12000,)).variants
    given = {
        "measurements": tuple(make_bench()),
        "plans": tuple(("Invented 32B Q4_0", v) for v in variants),
        "profiles": (make_full_profile(),),
        "timelines": (Timeline("A decode step", make_timeline()),),
    }
    return ReportInputs(("files",), **(given | fields))


@pytest.fixture(scope="module")
def page() -> str:
    """The page, with figures that are not rendered: that takes seconds, and other tests do it."""
    inputs = make_inputs()
    return build_page(inputs, [(section, "<svg></svg>") for section in draw_sections(inputs)], "Made now")


def test_three_sentences_say_machine_plan_and_gain() -> None:
    machine, plan, gain = summarise(make_inputs())
    assert "Some" in machine or "GB/s" in machine
    assert plan.startswith("Within 6000 MiB the plan has, while decoding, of the 66 units of Invented 32B Q4_0")
    assert "prompts of 4096 tokens run 2.72 times as fast (2.59 to 2.86 by the repeats) as with fit" in gain
    assert "answers are written 1.68 times as fast" in gain


def test_a_cpu_that_is_the_accelerator_too_is_named_once() -> None:
    profile = make_full_profile()
    acc = replace(profile.accelerators[0], kind="cpu", name=f"{profile.host.cpu} (as accelerator)")
    machine, *_ = summarise(make_inputs(profiles=(replace(profile, accelerators=(acc,)),)))
    assert machine.count(profile.host.cpu) == 1 and "which is the accelerator too" in machine
    assert "GB/s in copies" in machine and "link" not in machine


def test_units_on_disk_are_counted_and_named() -> None:
    (variant,) = make_plan_registry().sets[0].variants
    tier = variant.ranks[0].tiers[0]
    moved = replace(tier.placement("blk.0.ffn"), where="disk", kv=None, cpu_rows=0, kept_parts=0)
    tier = replace(tier, placements=tuple(moved if p.unit == moved.unit else p for p in tier.placements))
    assert sum(count_places(tier).values()) == len(tier.placements)
    assert count_places(tier)["disk"] == 1 and name_sort("disk") == "on disk"


def test_a_gain_is_over_the_best_alternative_and_spans_the_repeats() -> None:
    own = make_measurement(0, 64, 12.0)
    runs = (own, make_measurement(0, 64, 4.0, "fit"), make_measurement(0, 64, 6.0, "layer-stream"))
    (gain,) = find_gains(runs)
    assert gain.best.strategy == "layer-stream" and gain.times == pytest.approx(2.0, rel=1e-3)
    low, high = gain.span
    assert low == pytest.approx(2 * 0.98 / 1.03, rel=1e-3) and high == pytest.approx(2 * 1.03 / 0.98, rel=1e-3)


def test_a_plan_that_is_slower_says_so() -> None:
    runs = (make_measurement(0, 64, 3.0), make_measurement(0, 64, 6.0, "fit"))
    assert "answers are written 0.50 times as fast" in summarise(make_inputs(measurements=runs))[-1]


def test_what_ran_on_another_machine_is_not_compared() -> None:
    elsewhere = make_measurement(0, 64, 4.0, "fit", environment=(("cpu", "Other"), ("accelerator", "Some GPU")))
    assert not find_gains((make_measurement(0, 64, 12.0), elsewhere))
    said = summarise(make_inputs(measurements=(make_measurement(0, 64, 12.0), elsewhere)))[-1]
    assert said.startswith("Nothing else was measured beside the plan")


def test_the_plan_under_another_name_is_no_alternative() -> None:
    assert not find_gains((make_measurement(0, 64, 12.0), make_measurement(0, 64, 11.0, "fit", same_as="ilp")))


def test_strategies_that_all_are_the_plan_are_named_as_what_was_measured() -> None:
    runs = [make_measurement(0, 64, 12.0)]
    runs += [make_measurement(0, 64, 11.0, name, same_as="ilp") for name in ("fit", "layer-stream", "ffn-stream")]
    said = summarise(make_inputs(measurements=tuple(runs)))[-1]
    assert said.startswith("Beside fit, layer-stream and ffn-stream the plan brings nothing here: the same kernels run")
    assert "Beside fit the plan" in summarise(make_inputs(measurements=tuple(runs[:2])))[-1]


def test_a_machine_that_was_busy_is_told_of_in_short() -> None:
    runs = (make_measurement(0, 64, 12.0, disturbed=0.52), make_measurement(0, 64, 6.0, "fit", disturbed=0.04))
    said = summarise(make_inputs(measurements=runs))[-1]
    assert said.startswith("Other programs or machines had cores while 1 of 2 tests ran, for up to 52% of their time")
    assert "Other programs" not in " ".join(summarise(make_inputs(measurements=runs[1:])))


def test_one_run_each_has_no_range() -> None:
    once = {"ilp": summarise_samples((10**9,), 64), "fit": summarise_samples((2 * 10**9,), 64)}
    runs = [make_measurement(0, 64, strategy=strategy, **samples) for strategy, samples in once.items()]
    (gain,) = find_gains(runs)
    assert "(one run each)" in gain.in_words()


class _Images(HTMLParser):
    """Collects what stands for pictures, and where scripts stand."""

    def __init__(self) -> None:
        super().__init__()
        self.alts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the text of every picture."""
        if tag in ("img", "svg"):
            self.alts.append(dict(attrs).get("alt" if tag == "img" else "aria-label") or "")


def test_the_summary_comes_first_and_every_picture_has_a_text(page: str) -> None:
    assert page.index("In short") < page.index("Speed against the baselines")
    images = _Images()
    images.feed(page)
    assert len(images.alts) > 8 and all(len(alt) > 40 for alt in images.alts)


def test_plans_can_be_looked_into_with_and_without_scripts(page: str) -> None:
    explorer = page[page.index('<section class="explorer">') :]
    explorer = explorer[: explorer.index("</section>")]
    assert re.search(r'<p class="slider" hidden>.*max="1" value="1"', explorer)  # a script shows it
    assert explorer.count("<figure data-budget=") == 2 and "<figure hidden" not in explorer
    assert "<title>blk.0.ffn, 1 token" in explorer.replace("tokens", "token")
    assert explorer.count("<rect") == explorer.count("<title>") == 2 * 7 * 66


def test_steps_can_be_looked_into(page: str) -> None:
    assert "<title>copy 1.ffn: 2.80 ms, from" in page


def test_the_page_has_a_dark_side(page: str) -> None:
    assert "@media (prefers-color-scheme: dark)" in page and 'name="color-scheme" content="light dark"' in page
