"""Prompts of a mixture of experts: the CPU takes some experts of a layer while the others are streamed."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from io import StringIO

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from planner_cases import simulate_tier
from rich.console import Console

from pshard.cuts.rank_parts import cut_ranks
from pshard.model_config import Experts
from pshard.plan import TierPlan, Variant
from pshard.planner.check_plan import check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks, split_of
from pshard.planner.price.draft import draft_tier, simulated_seconds
from pshard.planner.program import bounds, coefficients
from pshard.planner.program.coefficients import count_tier, offered_shares, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import solve_tiers
from pshard.planner.rank_task import RankTask
from pshard.planner.search import climb
from pshard.planner.search.divide_ffns import _keep_none
from pshard.planner.search.residency_order import spread_parts
from pshard.planner.show_plan import print_explanation
from pshard.predicted_times import round_seconds
from pshard.routing.expert_map import map_experts
from pshard.steps.move import Move, Part, Weights
from pshard.units.moe import in_place
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.in_place import ways_to_read
from pshard.units.share import Share
from pshard.workload import Workload

MODEL, MACHINE, WORK = "qwen3-30b-a3b", "h100", Workload((6000,))
MANY = 64  # tokens, above which other kernels run


@cache
def planned() -> Variant:
    return plan_variant(make_shape(MODEL), find_machine(MACHINE), WORK, 1e4)


@cache
def task() -> RankTask:
    return prepare_ranks(make_shape(MODEL), find_machine(MACHINE), WORK)[0]


def stream_experts(tokens: int, cpu: int = 0) -> TierPlan:
    """The tier that streams every layer's experts but those that the CPU has; all else is in VRAM."""
    room = task().room
    where = {u.name: "cpu" if u.kind.is_looked_up else "pinned" for u in room.spec.units}
    experts = [u.name for u in room.spec.units if u.kind is EXPERTS]
    kv = frozenset(u.name for u in room.spec.units if u.kind.state)
    where |= dict.fromkeys(experts, "streamed")
    return draft_tier(room, tokens, where, kv, 2, dict.fromkeys(experts, Share(cpu)) if cpu else {})


def costs_of(tokens: int):
    return next(c for c in task().costs if c.load.tokens == tokens)


@pytest.fixture(scope="module")
def without() -> Variant:
    """The plan that divides experts in no prompt."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (coefficients, climb, bounds):
            patch.setattr(module, "may_spread", lambda costs, cls: False)
        return plan_variant(make_shape(MODEL), find_machine(MACHINE), WORK, 1e4)


@pytest.mark.slow
def test_a_bound_of_decoding_has_a_layer_take_as_long_as_its_reading_and_its_cpu_part() -> None:
    decoding = planned().ranks[0].covering(1).prediction
    assert 0.76 * decoding.seconds < decoding.bound_seconds < decoding.seconds  # it was 0.68


def test_what_is_partly_kept_in_vram_leaves_the_cpu_as_much_less() -> None:
    (cls,) = (c for c in task().classes if c.kind is EXPERTS)
    first, second, *_ = names = [u.name for u in cls.units]
    where = dict.fromkeys(names, "pinned") | {first: "streamed", second: "streamed"}
    kept = {second: Share(kept=96)}
    assert spread_parts((cls,), (40,), where, kept) == {first: Share(32), second: Share(8, 96)}
    assert spread_parts((cls,), (160,), where, kept) is None  # nothing would be left to copy


def test_the_program_can_be_asked_for_whole_layers_in_vram_instead_of_parts_of_many() -> None:
    costs, room, classes = costs_of(1), task().room, task().classes
    (c,) = (i for i, cls in enumerate(classes) if cls.kind is EXPERTS)
    problem = _keep_none(coefficients.tier_problem(room, classes, costs, 2, divide=True))
    (counts,) = solve_tiers(Question((problem,)), gap=0.02).counts
    kept = [n for share, n in zip(classes[c].shares, counts[c].divided) if share.kept]
    assert kept and not any(map(any, kept)) and counts[c].n_divided > 10


def test_a_prompt_of_512_tokens_is_faster_as_the_cpu_takes_part_of_the_experts(without: Variant) -> None:
    tier, whole = (variant.ranks[0].covering(512) for variant in (planned(), without))
    assert sum(p.where == "streamed" and p.cpu_rows > 0 for p in tier.placements) > 30
    assert tier.prediction.seconds < 0.87 * whole.prediction.seconds
    assert not any(p.cpu_rows for p in whole.placements)
    check_variant(cut_ranks(make_shape(MODEL), split_of(WORK)), planned(), "cuda")


def test_a_plan_with_divided_prompts_is_no_slower_than_one_without(without: Variant) -> None:
    assert round_seconds(planned()) <= round_seconds(without)


def test_an_explanation_says_how_many_experts_the_cpu_takes() -> None:
    out = StringIO()
    print_explanation(planned(), (), (), Console(file=out, width=200), map_experts(make_shape(MODEL), planned()))
    ((cpu, _), _) = Counter(p.share for p in planned().ranks[0].covering(512).placements if p.cpu_rows).most_common()[0]
    text = out.getvalue().split("tier 512")[1].split("tier 1024")[0]
    assert f"{128 - cpu} streamed, {cpu} on the CPU" in text
    assert "rows of gate and up" not in text


def test_few_of_many_experts_are_offered_where_the_cpu_is_slow() -> None:
    """Of a prompt of thousands of tokens a few of 128 experts take the CPU as long as the link takes for the others."""
    (cls,) = (c for c in task().classes if c.kind is EXPERTS)
    for costs in task().costs:
        most = max(share.cpu for share in offered_shares(cls, costs))
        if costs.load.tokens > MANY:
            name = cls.units[0].name
            assert costs.divided(name, Share(most)).cpu >= costs.divided(name, Share(most)).link
            assert most == 1 or costs.divided(name, Share(most - 1)).cpu < costs.divided(name, Share(most - 1)).link
    assert most < 8


@pytest.mark.quick("4096")
@pytest.mark.parametrize("tokens", [1, 16, 128, 512, 4096])
def test_no_division_of_experts_beats_the_bound(tokens: int) -> None:
    """Any number of parts on the CPU, kept in VRAM or streamed, copied or read in place; whole layers in any place."""
    rng, room, costs = random.Random(tokens), task().room, costs_of(tokens)
    bound = task().divided_bounds[task().costs.index(costs)]
    experts = [u.name for u in room.spec.units if u.kind is EXPERTS]
    base = {u.name: "cpu" if u.kind.is_looked_up else "pinned" for u in room.spec.units}
    kv, near = frozenset(u.name for u in room.spec.units if u.kind.state), []
    for i in range(30):
        most, likely = rng.randrange(2, 128), [rng.random() for _ in range(4)]
        even = i % 2 and rng.choice((1, 2, 4, 8, 16, 32, 64, 96))
        where, shares = dict(base), dict[str, Share]()
        for name in experts:
            where[name] = rng.choices(("pinned", "streamed", "cpu", "divided"), likely)[0]
            if where[name] == "divided":
                where[name], cpu = "streamed", even or rng.randrange(1, most)
                shares[name] = Share(cpu, rng.choice((0, rng.randrange(0, 128 - cpu))))
        reads = rng.choice(ways_to_read(room.spec.config, tokens))
        tier = draft_tier(room, tokens, where, kv, rng.choice((1, 2, 3, 4)), shares, reads)
        if tier.buffers.total <= room.arena:
            near.append(simulated_seconds(room, tier, costs) / bound)
            assert near[-1] >= 1 - 1e-9
    assert near


def test_what_many_tokens_hand_over_takes_the_link_from_the_copies() -> None:
    costs = costs_of(512)
    events = simulate_tier(task().room, stream_experts(512, 8), costs).events
    copies = [e for e in events if isinstance(e.step, Move) and e.step.brings(Weights)]
    joins = [e for e in events if isinstance(e.step, Move) and e.step.brings(Part)]
    alone = costs.handoff("acc", joins[0].step.nbytes)
    assert max(e.end - e.start for e in joins) > 1.5 * alone
    assert max(e.end - e.start for e in copies) > costs.divided("blk.0.experts", Share(8)).link + 0.9 * alone


@pytest.mark.slow
def test_sixteen_tokens_read_what_they_chose_whatever_was_thought_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use 82 of 128 experts: a planner that begins with copies of whole layers finds the same."""
    assert planned().ranks[0].covering(16).in_place and not planned().ranks[0].covering(17).in_place
    (cost,) = (c for c in task().costs if c.load.tokens == 16)
    assert [way.in_place for way in cost.ways] == [True, False]
    monkeypatch.setattr(in_place, "USUALLY_USED", 0.1)
    other = plan_variant(make_shape(MODEL), find_machine(MACHINE), WORK, 1e4).ranks[0].covering(16)
    assert other.in_place
    assert other.prediction.seconds == pytest.approx(planned().ranks[0].covering(16).prediction.seconds, rel=0.02)


def test_experts_that_nearly_all_are_used_are_likely_to_be_copied() -> None:
    few = replace(make_shape(MODEL).config, experts=Experts(8, 2, 768))
    assert ways_to_read(few, 16) == (False, True) and ways_to_read(few, 8) == (True,)
    assert ways_to_read(make_shape(MODEL).config, 33) == (False,)


def test_what_is_read_in_place_is_not_hidden_under_other_work() -> None:
    """Kernels read experts over the link when they run, not before: the program's time of a token adds that up."""
    costs, tier = costs_of(1), stream_experts(1)
    problem = tier_problem(task().room, task().classes, costs, 1)
    least = fluid_seconds(problem, count_tier(task().classes, tier), relaxed=True)
    reads = sum(costs.units[u.name].read for u in task().room.spec.units if u.kind is EXPERTS)
    others = sum(costs.units[u.name].acc for u in task().room.spec.units if u.kind is not EXPERTS)
    assert least >= 0.99 * (reads + others - costs.units["embedding"].acc)
    assert least <= simulated_seconds(task().room, tier, costs)
