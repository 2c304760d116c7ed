"""--prompt-math: prompts are priced, planned and run the way that is asked for, and what has no such way is named."""

from dataclasses import replace

import pytest
from cli_world import World, make_world
from planner_cases import DESKTOP, make_model

from pshard.batch import Batch
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import NotPlanned
from pshard.machine import ExpertTiming
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import Correction, Factor
from pshard.planner.prepare_ranks import split_of
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import draft_tier, rank_room, simulated_seconds
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.prompt_math import describe_math, describe_no_int8, price_math
from pshard.planner.price.tier_costs import TierCosts, tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.program.unit_classes import group_units
from pshard.registries.fingerprint import digest_profile
from pshard.session.open_plan import open_plan
from pshard.session.run_request import RunRequest
from pshard.times.gpu_tiles import INT8_EXPERTS, INT8_KERNEL, LIBRARY, Tile, TileChoice
from pshard.units.ffn import FFN
from pshard.units.share import Share
from pshard.workload import Workload

TILE = Tile(64, 1, 2, 1, tokens=64)
TIMED = (  # Q4_0 is twice as fast in int8 from 512 tokens on, and slower below
    TileChoice("acc", INT8_KERNEL, "Q4_0", 128, TILE, 1.25, 1.0),
    TileChoice("acc", INT8_KERNEL, "Q4_0", 512, TILE, 1.0, 2.0),
    TileChoice("acc", INT8_EXPERTS, "Q4_0", 128, TILE, 1.0, 1.5),
)
EXPERTS = ExpertTiming("acc", "Q4_0", "Q4_0", 8, 2, 64, 64, 4096, 3.0)
PROFILE = replace(profile_from_datasheet(DESKTOP), tiles=TIMED, experts=(EXPERTS,))
ONE = Workload((8000,), 4096, 1)


def under(math: str):
    return replace(PROFILE, prompt_math=math)


@pytest.mark.parametrize(
    ("math", "few", "some", "many"), [("auto", 1.0, 1.0, 1.0), ("bf16", 1.0, 1.0, 2.0), ("int8", 1.0, 1.25, 1.0)]
)
def test_products_are_priced_in_the_way_that_is_asked_for(math: str, few: float, some: float, many: float) -> None:
    for tokens, factor in ((64, few), (128, some), (4096, many)):
        auto, asked = (Tables(under(m)).matmul("acc", "Q4_0", 4096, 4096, tokens) for m in ("auto", math))
        assert asked == pytest.approx(factor * auto)
        assert Tables(under(math)).matmul("acc", "Q6_K", 4096, 4096, tokens) == pytest.approx(
            Tables(PROFILE).matmul("acc", "Q6_K", 4096, 4096, tokens)
        )


def test_experts_are_priced_in_the_way_that_is_asked_for_where_tiles_have_room() -> None:
    few = replace(EXPERTS, tokens=300)  # 75 pairs an expert: tiles of 64 have no room, whatever is asked for
    for math, factor in (("auto", 1.0), ("bf16", 1.5), ("int8", 1.0)):
        priced = price_math(replace(under(math), experts=(EXPERTS, few))).experts
        assert [e.seconds for e in priced] == [factor * 3.0, 3.0]


def costs_of(spec: ModelSpec, math: str, tokens: int, workload: Workload = ONE, ranks: int = 1) -> TierCosts:
    return tier_costs(spec, Tables(under(math)), TierLoad(Batch.even(tokens, 1)), workload, ranks)


@pytest.mark.parametrize(
    ("math", "tokens", "is_slower"),
    [
        ("auto", 4096, 1), ("int8", 4096, 1), ("int8", 128, -1), ("bf16", 4096, 0), ("auto", 128, 0), ("int8", 64, 0),
    ],
)  # fmt: skip
def test_the_first_layer_is_priced_in_bfloat16(math: str, tokens: int, is_slower: int) -> None:
    spec = make_model(layers=3)
    costs, plain = costs_of(spec, math, tokens), costs_of(spec, "bf16", tokens)
    for kind in ("attention", "ffn"):
        first, second, third = (costs.units[f"{kind}.{layer}"] for layer in range(3))
        assert second == third and replace(first, acc=second.acc) == second
        assert first == plain.units[f"{kind}.0"]
        assert (first.acc > second.acc) - (first.acc < second.acc) == is_slower
    for share in (Share(cpu=512), Share(kept=512)):
        first, second = (costs.divided(f"ffn.{layer}", share) for layer in range(2))
        assert replace(first, acc=second.acc, rest=second.rest) == second
        assert first == plain.divided("ffn.0", share)
        assert (first.acc > second.acc) - (first.acc < second.acc) == is_slower
        assert (first.rest > second.rest) - (first.rest < second.rest) == is_slower * bool(share.cpu)


def test_routed_experts_of_the_first_layer_are_priced_as_others() -> None:
    costs = costs_of(make_model(layers=2, experts=Experts(8, 2, 64, d_shared=64)), "auto", 4096)
    assert costs.units["experts.0"] == costs.units["experts.1"]
    assert costs.units["router.0"] == costs.units["router.1"]
    assert costs.units["shared.0"].acc > costs.units["shared.1"].acc


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_ranks_price_what_they_have_of_the_first_layer_in_bfloat16(mode: str) -> None:
    workload = Workload((2000, 2000), 4096, 1, split_mode=mode)
    for spec in cut_ranks(make_model(layers=4), split_of(workload)):
        costs = costs_of(spec, "auto", 4096, workload, 2)
        here = {unit.layer: costs.units[unit.name].acc for unit in spec.units if unit.kind is FFN and unit.is_here}
        assert here and [layer for layer in here if here[layer] > min(here.values())] == [0] * (0 in here)


def test_units_of_the_first_layer_are_classes_of_their_own_where_they_cost_more() -> None:
    spec = make_model(layers=3)
    for math, sizes in (("auto", [1, 1, 1, 2, 2, 1]), ("bf16", [1, 3, 3, 1])):
        few, many = (costs_of(spec, math, tokens) for tokens in (1, 4096))
        assert [c.size for c in group_units(spec, (few, many))] == sizes
        assert len(set(many.stand_ins.values())) == len(sizes)
        assert len(set(few.stand_ins.values())) == 4


@pytest.mark.parametrize("math", ["auto", "bf16"])
def test_what_trials_teach_makes_no_unit_unlike_others(math: str) -> None:
    spec, tables, taught = make_model(layers=3), Tables(under(math)), Correction((Factor("acc", "ffn", "large", 1.1),))

    def list_sizes(tables: Tables) -> list[int]:
        costs = tier_costs(spec, tables, TierLoad(Batch.even(4096, 1)), ONE)
        return [units.size for units in group_units(spec, (costs,))]

    assert list_sizes(tables) == list_sizes(tables.corrected(taught))


def test_a_prompt_in_int8_gains_what_all_layers_but_the_first_do() -> None:
    spec = make_model(layers=4)
    room = rank_room(spec, ONE, ONE.vram_mib[0], "cuda", 2)
    keeping = frozenset(unit.name for unit in spec.units if unit.kind.state)
    tier = draft_tier(room, 4096, dict.fromkeys(room.columns.names, "pinned"), keeping, 1)
    costs, plain = costs_of(spec, "auto", 4096), costs_of(spec, "bf16", 4096)
    names = [f"{kind}.{layer}" for kind in ("attention", "ffn") for layer in (1, 2, 3)]
    gained = sum(plain.units[name].acc - costs.units[name].acc for name in names)
    auto, bf16 = (simulated_seconds(room, tier, priced) for priced in (costs, plain))
    assert gained > 0 and bf16 - auto == pytest.approx(gained, rel=1e-6)


def test_a_run_takes_the_tiles_of_the_way_that_is_asked_for() -> None:
    used = {math: [c.tile for c in under(math).tiles_of(0)] for math in ("auto", "bf16", "int8")}
    assert used == {"auto": [LIBRARY, TILE, TILE], "bf16": [LIBRARY] * 3, "int8": [TILE] * 3}


def test_the_way_that_is_asked_for_is_no_other_profile() -> None:
    assert digest_profile(under("int8")) == digest_profile(PROFILE)


def test_types_are_named_by_the_way_they_are_multiplied() -> None:
    spec = make_model(layers=2, odd_qtype="Q2_K")
    assert describe_math(spec, under("auto")) == "in int8: Q4_0 from 512 tokens; in bf16: Q2_K"
    assert describe_math(spec, under("bf16")) == "in bf16: Q2_K, Q4_0"
    routed = make_model(layers=1, experts=Experts(8, 2, 64))
    assert describe_math(routed, under("int8")) == "in int8: Q4_0 from 128 tokens, experts of Q4_0"


def test_types_without_a_way_in_int8_are_named_once_and_only_where_int8_is_asked_for() -> None:
    spec = make_model(layers=4, odd_qtype="Q2_K")
    assert "Q2_K stay in bf16" in (describe_no_int8(spec, under("int8")) or "")
    assert describe_no_int8(spec, under("auto")) is None
    assert describe_no_int8(make_model(layers=2), under("int8")) is None


@pytest.fixture
def world(tmp_path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path, n_layers=1)


def test_a_run_takes_no_plan_that_was_made_for_another_way(world: World, capfd) -> None:
    request = RunRequest(world.model, (world.roomy,), 256, 1, profile=world.profile, plans=True)
    opened = open_plan(request)
    opened.file.close()
    with pytest.raises(NotPlanned, match=r"no plan has --prompt-math int8; run: .* --prompt-math int8"):
        open_plan(replace(request, prompt_math="int8", plans=False))
    capfd.readouterr()
    opened = open_plan(replace(request, prompt_math="int8"))
    opened.file.close()
    assert opened.variant.workload.prompt_math == opened.profile.prompt_math == "int8"
    assert capfd.readouterr().err.count("note: --prompt-math int8 is for GPUs") == 1
    again = open_plan(replace(request, plans=False))
    again.file.close()
    assert again.variant.workload.prompt_math == "auto"
