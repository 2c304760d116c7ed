"""-ts auto: ratios follow budgets, links and kernels, may leave a device out, and are never worse than equal ones."""

from dataclasses import dataclass, replace

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from hypothesis import strategies as st
from planner_cases import DESKTOP, MANY, OWN, make_model, try_cases

from pshard.cuts import rank_parts
from pshard.cuts.rank_parts import cut_ranks
from pshard.cuts.tensor_cuts import cut_units
from pshard.errors import BudgetTooSmall
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner import choose_ratios, make_plan
from pshard.planner.check_plan import check_variant
from pshard.planner.choose_ratios import plan_ratios
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.draft import tier_steps
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import simulate, simulate_together
from pshard.predicted_times import decode_seconds, first_token_seconds, round_seconds
from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.steps.step import AllReduce
from pshard.units.attention import ATTENTION
from pshard.workload import Limits, Split, Workload

PAIR = replace(DESKTOP, ranks=2, collective_rate=20e9)
SPEC = make_model(layers=24, d_model=1024, heads=16, kv_heads=8, d_ffn=4096, vocab=4096)


def unlike(first: Rates, second: Rates) -> MachineProfile:
    """A machine whose accelerator 1 has kernels and a link of its own."""
    one, other = profile_from_datasheet(first), profile_from_datasheet(second)

    def both(name: str) -> tuple:
        own = (replace(row, device="acc1") for row in getattr(other, name) if row.device == "acc")
        return (*getattr(one, name), *own)

    return replace(one, **{name: both(name) for name in ("matmuls", "attention", "elementwise", "copies")})


def workload(*budgets: int, **more) -> Workload:
    return Workload(tuple(OWN + mib for mib in budgets), 512, prompt=256, split_mode="tensor", **more)


def expect_granular(spec: ModelSpec, shares: tuple[float, ...], limits: Limits) -> None:
    """Every rank has whole KV groups (or part of one), and whole quant blocks of columns and records of rows."""
    group = spec.config.n_heads // spec.config.n_kv_heads
    for unit, cut in zip(spec.units, cut_units(spec, shares, limits)):
        for tensor in cut.tensors:
            (whole,) = (t for t in unit.tensors if t.role == tensor.role)
            step = QUANT_TYPES[whole.qtype].block if tensor.axis == "cols" else 1
            if unit.kind.name in ("ffn", "output") and tensor.axis == "rows":
                step = ROW_BLOCK
            step = spec.config.head_dim if tensor.role in ("attn_q.weight", "attn_k.weight") else step
            length = whole.cols if tensor.axis == "cols" else whole.rows
            assert all(at % step == 0 or at == length for ends in tensor.ranges for at in ends)
        if unit.kind is ATTENTION:
            q = next(t for t in cut.tensors if t.role == "attn_q.weight")
            for start, stop in ((a // spec.config.head_dim, b // spec.config.head_dim) for a, b in q.ranges if a < b):
                assert start % group == stop % group == 0 or start // group == (stop - 1) // group


def test_equal_devices_share_equally():
    best = plan_ratios(SPEC, profile_from_datasheet(PAIR), workload(150, 150))
    assert best.workload.tensor_split == (0.5, 0.5)


@dataclass
class Watched:
    """What planning with ratios to choose did: the plan, cuts that were asked for, ranks' plans that were written out,
    and those of which only the seconds were compared."""

    best: Variant
    cuts: list[tuple]
    joined: int
    compared: int


@pytest.fixture(scope="module")
def unequal() -> Watched:
    """Of two devices of unequal budgets."""
    cuts, joined, compared = [], [], []
    cut, join, compare = rank_parts.cut_model, make_plan.join_ranks, make_plan.joint_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_parts, "cut_model", lambda *how: cuts.append(how[1:]) or cut(*how))
        patch.setattr(make_plan, "join_ranks", lambda *plans: joined.append(plans) or join(*plans))
        patch.setattr(make_plan, "joint_seconds", lambda *plans: compared.append(plans) or compare(*plans))
        rank_parts.cut_ranks.cache_clear()
        best = plan_ratios(SPEC, profile_from_datasheet(PAIR), workload(120, 60))
    return Watched(best, cuts, len(joined), len(compared))


@pytest.mark.slow
def test_the_larger_budget_gets_more_of_the_model(unequal):
    best = unequal.best
    assert best.workload.tensor_split[0] > 0.55
    assert [c.way for c in best.considered[1:]].count("-sm tensor -ts 0.5,0.5") == 1
    equal = plan_variant(SPEC, profile_from_datasheet(PAIR), workload(120, 60))
    assert round_seconds(best) < 0.98 * round_seconds(equal)
    check_variant(cut_ranks(SPEC, best.split), best, "cuda")


@pytest.mark.slow
def test_the_faster_device_gets_more_of_the_model_and_the_slower_link_less():
    slow = replace(PAIR, acc_memory=PAIR.acc_memory / 3, acc_flops=PAIR.acc_flops / 3)
    best = plan_ratios(SPEC, unlike(PAIR, slow), workload(900, 900))
    assert not best.plan_needed and 0.6 < best.workload.tensor_split[0] < 0.9
    no_cpu = replace(PAIR, host_flops=PAIR.host_flops / 100)
    best = plan_ratios(SPEC, unlike(no_cpu, replace(no_cpu, link=PAIR.link / 4)), workload(60, 60))
    assert best.plan_needed and best.workload.tensor_split[0] > 0.55


def test_a_device_that_only_costs_time_is_left_out():
    useless = replace(PAIR, acc_memory=PAIR.acc_memory / 100, acc_flops=PAIR.acc_flops / 100)
    best = plan_ratios(SPEC, unlike(PAIR, useless), workload(900, 900))
    assert best.workload.tensor_split == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_a_small_second_device_does_not_make_a_cut_without_it_run_in_its_small_micro_batches(mode):
    """The scratch of the small device bounds micro-batches of cuts that give it something to do: each cut is compared
    with its own best ones."""
    spec, profile = make_shape("qwen3-32b"), find_machine("rtx5080")
    wanted = Workload((10000, 400), split_mode=mode)
    best = plan_ratios(spec, profile, wanted)
    alone = plan_variant(spec, profile, replace(wanted, tensor_split=(1.0, 0.0)))
    assert round_seconds(best) <= round_seconds(alone) * 1.001
    equal = next(c for c in best.considered if c.way.endswith("-ts 0.5,0.5"))
    assert equal.seconds and equal.seconds > 2 * round_seconds(best)


def test_layers_go_to_the_device_that_is_faster_as_long_as_they_fit():
    slow = replace(PAIR, acc_memory=PAIR.acc_memory / 3, acc_flops=PAIR.acc_flops / 3)
    answers = replace(workload(900, 900), split_mode="layer", generated=200)
    assert plan_ratios(SPEC, unlike(PAIR, slow), answers).workload.tensor_split == (1.0, 0.0)
    prompts = replace(answers, prompt=500, generated=1, max_ubatch=64)  # the pipeline is worth the slow device's time
    best = plan_ratios(SPEC, unlike(PAIR, slow), prompts)
    assert 0.6 < best.workload.tensor_split[0] < 0.9 and best.considered[0].way.startswith("-sm layer -ts 0.")


@pytest.mark.slow
def test_attention_stays_off_a_device_whose_attention_is_slow():
    slow = unlike(PAIR, PAIR)
    slow = replace(
        slow, attention=tuple(replace(a, seconds=a.seconds * 5) if a.device == "acc1" else a for a in slow.attention)
    )
    load = Workload((OWN + 900,) * 2, 8192, prompt=6000, split_mode="tensor")
    best = plan_ratios(SPEC, slow, load)
    assert best.workload.max_tp == (("attention", 1),) and min(best.workload.tensor_split) > 0.2
    assert best.considered[0].way.endswith("--max-tp attn=1") and len(best.considered) > 1
    parts = cut_ranks(SPEC, best.split)
    assert {u.kind.name for u in parts[1].units if u.tensors} == {"embedding", "ffn", "output"}
    check_variant(parts, best, "cuda")


def test_budgets_too_small_for_any_ratio_are_an_error():
    with pytest.raises(BudgetTooSmall, match="smallest budget that works"):
        plan_ratios(SPEC, profile_from_datasheet(PAIR), workload(1 - OWN, 1 - OWN))


@pytest.mark.parametrize(
    ("cases", "modes"),
    [
        pytest.param(1, ("tensor",), marks=pytest.mark.stand_in),
        pytest.param(MANY // 2, ("tensor", "layer"), marks=pytest.mark.slow),
    ],
)
def test_chosen_ratios_are_never_predicted_slower_than_equal_ones(cases, modes):
    budgets = st.lists(st.integers(10, 50), min_size=2, max_size=3)
    speed, link = st.sampled_from((1.0, 0.5, 0.2)), st.sampled_from((1.0, 0.3))
    try_cases(cases, expect_no_slower_than_equal, budgets, speed, link, st.sampled_from(modes))


@pytest.mark.slow
def test_layers_of_equal_devices_are_no_slower_than_equal_ones():
    expect_no_slower_than_equal([10, 10], 1.0, 1.0, "layer")


def expect_no_slower_than_equal(budgets, speed, link, mode):
    second = replace(PAIR, acc_memory=speed * PAIR.acc_memory, link=link * PAIR.link)
    spec, profile, wanted = (
        make_model(layers=24, d_model=512, heads=4, d_ffn=1024),
        unlike(PAIR, second),
        replace(workload(*budgets, max_ubatch=128), split_mode=mode),
    )
    best = plan_ratios(spec, profile, wanted)
    check_variant(cut_ranks(spec, best.split), best, "cuda")
    if mode == "tensor":
        expect_granular(spec, best.workload.tensor_split, best.workload.max_tp)
    assert best.considered[0].seconds == round_seconds(best) <= min(c.seconds for c in best.considered)
    assert round_seconds(best) <= round_seconds(plan_variant(spec, profile, wanted))
    assert round_seconds(best) == pytest.approx(
        first_token_seconds(best) + best.workload.generated * decode_seconds(best), rel=1e-12
    )


def test_ranks_wait_for_each_other_at_every_sum():
    """Two ranks that are slow in turn take longer together than either of them alone."""
    profile, wanted = profile_from_datasheet(PAIR), workload(60, 60)
    variant = plan_variant(SPEC, profile, wanted)
    tiers = tuple(t.tokens for t in variant.ranks[0].tiers)
    tasks = price_tiers(SPEC, Tables(profile), variant.workload, tiers)
    costs = [task.costs[0] for task in tasks]
    for rank, kind in enumerate(("attention", "ffn")):
        units = {n: replace(c, acc=c.acc * 40) if n.startswith(kind) else c for n, c in costs[rank].units.items()}
        costs[rank] = replace(costs[rank], units=units)
    steps = [tier_steps(t.room, r.tiers[0], c) for t, r, c in zip(tasks, variant.ranks, costs)]
    alone = [simulate(s, c).seconds for s, c in zip(steps, costs)]
    together = simulate_together(steps, costs)
    assert len({round(t.seconds, 12) for t in together}) == 1
    assert together[0].seconds > 1.5 * max(alone)
    for one, other in zip(*([e for e in t.events if isinstance(e.step, AllReduce)] for t in together)):
        assert one.start == pytest.approx(other.start, abs=1e-12)


@pytest.mark.slow
def test_a_cut_is_made_once_for_all_that_ask_about_it(unequal):
    assert len(unequal.cuts) < 1.3 * len(set(unequal.cuts))  # one that is planned in full may have been forgotten since


@pytest.mark.slow
def test_only_the_chosen_cut_is_written_out_and_bounded(unequal):
    """Of unlike ranks many plans are compared: one placement for all of them, published strategies. Bounds of divided
    units, which are printed beside a plan, take longer than to compare it."""
    assert unequal.joined <= 2 < len(unequal.best.considered) < unequal.compared  # placed, and refined
    seconds = [way.seconds for way in unequal.best.considered]
    assert all(s is not None and s > 0 for s in seconds) and seconds[0] == min(s for s in seconds if s)
    assert all(0 < (way.first_token or 0) < (way.seconds or 0) for way in unequal.best.considered)


@pytest.mark.quick("tensor")
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_ranks_of_cuts_that_are_compared_are_bounded_once_and_only_as_far_as_needed(monkeypatch, mode):
    asked, bounded = [], []
    take, bound = choose_ratios.take_parts, choose_ratios.bound_roughly
    monkeypatch.setattr(choose_ratios, "take_parts", lambda *how: asked.extend(found := [*take(*how)]) or found)
    monkeypatch.setattr(choose_ratios, "bound_roughly", lambda task: bounded.append(task) or bound(task))
    wanted = replace(workload(120, 100, 80, 60), split_mode=mode)
    profile = profile_from_datasheet(replace(PAIR, ranks=4))
    climb = choose_ratios._Climb(SPEC, profile, wanted)
    start = climb.estimate(Split(mode, (0.25,) * 4))
    assert start
    best = climb.improve(start)
    assert 1.5 * len(bounded) < len(asked)  # every rank of every cut, before
    alone = choose_ratios._Climb(SPEC, profile, wanted).estimate(best.split)
    assert alone and best.total <= start.total
    assert best.largest != alone.largest or (best.total, best.by_rank) == (alone.total, alone.by_rank)


def test_the_seconds_by_which_plans_are_compared_are_those_of_the_variant():
    for mode in ("tensor", "layer"):
        wanted = replace(workload(120, 60, max_ubatch=128), split_mode=mode)
        tasks = make_plan.prepare_ranks(SPEC, profile_from_datasheet(PAIR), wanted)
        placed = make_plan.place_ranks(tasks, 10.0)
        seconds = make_plan.joint_seconds(tasks, placed)
        assert seconds == round_seconds(make_plan.join_ranks(tasks, placed))
        assert make_plan.joint_seconds(tasks, placed, seconds) == float("inf")
