"""Arguments for llama.cpp of models with routed experts: its rules put each layer's experts where the plan has them."""

import re
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from planner_cases import make_model

from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.llama_cpp_arguments import list_unsaid, llama_arguments
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.units.divide_unit import arena_portion, share_sixteenths
from pshard.workload import Workload

OF_A_LAYER = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # what --n-cpu-moe keeps out of VRAM
SPEC = make_shape("qwen3-30b-a3b")
UNITS = {u.name: u for u in SPEC.units}


def make(how: str, mib: int = 6000) -> Variant:
    profile, workload = find_machine("h100"), Workload((mib,))
    return plan_variant(SPEC, profile, workload) if how == "ilp" else plan_baseline(how, SPEC, profile, workload)


def on_host(words: list[str], spec: ModelSpec = SPEC) -> set[str]:
    """Tensors that the words keep out of VRAM, as llama.cpp reads them."""
    rules = list[str]()
    for flag, value in pairwise(words):
        if flag == "--n-cpu-moe":
            rules += [OF_A_LAYER.format(layer) for layer in range(int(value))]
        if flag == "-ot":
            rules += [rule.removesuffix("=CPU") for rule in value.split(";")]
    names = [tensor.name for unit in spec.units for tensor in unit.tensors]
    return {name for name in names if any(re.search(rule, name) for rule in rules)}


@pytest.mark.parametrize("program", ["llama.cpp", "llama-bench"])
@pytest.mark.parametrize("how", ["n-cpu-moe", "cpu-moe", "attention-first"])
def test_whole_layers_of_experts_lie_where_the_plan_has_them(how: str, program: str) -> None:
    variant = make(how)
    tier = variant.ranks[0].covering(1)
    outside = [p.unit for p in tier.placements[1:] if p.where != "pinned"]
    words = shlex.split(llama_arguments(variant, SPEC, program))
    assert on_host(words) == {t.name for name in outside for t in UNITS[name].tensors}
    assert outside and not list_unsaid(variant, SPEC)
    if how == "attention-first":  # the last layers' experts, which only patterns can say
        assert "--n-cpu-moe" not in words
    else:
        assert words[words.index("--n-cpu-moe") + 1] == str(len(outside)) and "-ot" not in words


def test_what_layers_have_in_part_holds_the_experts_of_whole_layers() -> None:
    variant = make("hot-experts")
    tier = variant.ranks[0].covering(1)
    (share,) = {p.share for p in tier.placements if p.share}
    whole = 48 * (128 - share.cpu) // 128  # as many as the parts amount to
    words = shlex.split(llama_arguments(variant, SPEC))
    assert words[words.index("--n-cpu-moe") + 1] == str(48 - whole) and 0 < whole < 48
    (line,) = list_unsaid(variant, SPEC)
    assert line.startswith("48 layers have some of their experts in VRAM") and f"all those of {whole} of" in line


@pytest.mark.slow
def test_a_plan_that_mixes_places_puts_no_more_into_vram_and_says_what_is_lost() -> None:
    variant = make("ilp")
    tier = variant.ranks[0].covering(1)
    experts = [p for p in tier.placements if p.unit.endswith("experts")]
    away = on_host(shlex.split(llama_arguments(variant, SPEC)))
    inside = [u for u in SPEC.units if u.kind.parts and not {t.name for t in u.tensors} & away]
    whole = {p.unit for p in experts if p.sort == "pinned"}
    assert whole <= {u.name for u in inside}
    assert sum(u.packed_nbytes for u in inside) <= tier.buffers.pinned
    assert bool(list_unsaid(variant, SPEC)) == any(p.share or p.where == "streamed" for p in experts)


def test_streamed_experts_are_said_to_be_the_cpus() -> None:
    (line,) = list_unsaid(make("layer-stream"), SPEC)
    assert re.match(r"decoding streams experts of \d+ layers; llama.cpp has the CPU compute", line)


def test_dense_models_have_no_flag_of_experts() -> None:
    spec, profile = make_model(layers=8), find_machine("rtx4060")
    variant = plan_baseline("attention-first", spec, profile, Workload((360,), context=512, prompt=256))
    assert "-ot" in (words := llama_arguments(variant, spec)) and "moe" not in words
    assert not list_unsaid(variant, spec)


def with_divided_ffns(spec: ModelSpec, mib: int) -> Variant:
    """A plan whose layers in turn have some of their FFN on the CPU, some of it streamed, or all of it pinned."""
    variant = plan_baseline("attention-first", spec, find_machine("rtx4060"), Workload((mib,), context=512, prompt=256))
    tier, turns = variant.ranks[0].tiers[0], {u.name: u.layer % 3 for u in spec.units if u.kind.divided}
    ffn = spec.unit("ffn.0")
    ways = (
        {"where": "pinned", "cpu_rows": share_sixteenths(ffn, 5)},
        {"where": "streamed", "kept_parts": share_sixteenths(ffn, 8)},
        {"where": "pinned"},
    )
    places = tuple(replace(p, **ways[turns[p.unit]]) if p.unit in turns else p for p in tier.placements)
    return replace(variant, ranks=(replace(variant.ranks[0], tiers=(replace(tier, placements=places),)),))


def test_what_layers_have_in_part_of_their_ffns_holds_the_ffns_of_whole_layers() -> None:
    spec = make_model(layers=12)
    variant = with_divided_ffns(spec, 360)
    tier, units = variant.ranks[0].covering(1), {u.name: u for u in spec.units}
    ffns = [p for p in tier.placements if units[p.unit].kind.divided]
    there = [arena_portion(units[p.unit], p.where, p.share) for p in ffns]
    whole, parts = ([t.nbytes for p, t in zip(ffns, there) if t and bool(p.share) is some] for some in (False, True))
    most = sum(parts) // units["ffn.0"].packed_nbytes  # as many as the parts amount to
    away = on_host(shlex.split(llama_arguments(variant, spec)), spec)
    inside = [p.unit for p in ffns if not {t.name for t in units[p.unit].tensors} & away]
    assert (len(whole), len(parts), most) == (4, 8, 5)
    assert inside == [f"ffn.{i}" for i in (2, *range(4, 12))]  # the pinned ones and the last others
    (line,) = list_unsaid(variant, spec)
    assert line == (
        "8 layers have a part of their FFN in VRAM; llama.cpp does not divide a layer's FFN: in as much VRAM it has "
        f"the whole FFN of {most} of these layers"
    )
