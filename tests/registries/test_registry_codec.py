"""Registry files: what is written is read back, and what is wrong is refused with its place."""

import dataclasses
import json
import types
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_samples import make_registry, make_tier, make_variant
from routing_samples import make_record

from pshard.collectives import REDUCE_DTYPES
from pshard.jsonio import to_json
from pshard.plan import (
    REGISTRY_VERSION,
    Buffers,
    NewerFormat,
    OlderFormat,
    Placement,
    PlanSet,
    Prediction,
    RankPlan,
    Registry,
    Sweep,
    TierPlan,
    Variant,
)
from pshard.registries.codec import decode_registry, encode_registry
from pshard.registries.fingerprint import digest
from pshard.routing.measure_popularity import measure_popularity
from pshard.speculation import Acceptance, Drafting, PlannedDrafts, Speculation
from pshard.times.gpu_tiles import PROMPT_MATHS
from pshard.units.moe.expert_cache import ExpertCache, pack_hits
from pshard.workload import Workload

POPULARITY = measure_popularity(make_record(50, layers=2))
CHOICES = {
    (Variant, "popularity"): st.sampled_from([None, POPULARITY]),
    (RankPlan, "caches"): st.sampled_from(
        [(), (ExpertCache(("a", "b"), 3, 256, "lru", 6, pack_hits([0.0, 0.4]), 0.25, 2.5),)]
    ),
    (Placement, "where"): st.sampled_from(["pinned", "streamed", "cpu"]),
    (Placement, "kv"): st.sampled_from([None, "vram", "host"]),
    (Placement, "cpu_rows"): st.sampled_from([0, 16, 512]),
    (Placement, "kept_parts"): st.sampled_from([0, 3]),
    (Buffers, "slots"): st.integers(1, 8),
    (TierPlan, "sweep"): st.sampled_from([None, Sweep(2, 0.5)]),
    (Prediction, "seconds"): st.floats(0, 1e300),
    (Prediction, "bound_seconds"): st.floats(0, 1e300),
    (Workload, "context"): st.integers(64, 1 << 53),
    (Workload, "sequences"): st.integers(1, 64),
    **{(Workload, name): st.integers(1, 1 << 53) for name in ("max_ubatch", "prompt", "generated")},
    (Workload, "split_mode"): st.sampled_from(["none", "tensor"]),
    (Workload, "reduce_dtype"): st.sampled_from(REDUCE_DTYPES),
    (Workload, "prompt_math"): st.sampled_from(PROMPT_MATHS),
    (Workload, "concurrency"): st.sampled_from([0, 1]),
    (Workload, "max_tp"): st.sampled_from([(), (("attention", 2),), (("ffn", 1), ("output", 3))]),
    (Variant, "speculation"): st.none(),
    (Variant, "drafter_parts"): st.just(()),  # as `ranks` are, and a search of twice as many takes minutes
    (Workload, "drafting"): st.sampled_from([Drafting(), Drafting("lookup", 3)]),
    (Workload, "acceptance"): st.sampled_from([Acceptance((0.8, 0.5), "recorded", 0.4)]),
    (Registry, "version"): st.just(REGISTRY_VERSION),
}


def strategy_for(kind):
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return st.one_of(*(strategy_for(a) for a in args))
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(strategy_for(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(strategy_for(a) for a in args))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {
            f.name: CHOICES[kind, f.name] if (kind, f.name) in CHOICES else strategy_for(hints[f.name])
            for f in dataclasses.fields(kind)
        }
        return st.builds(kind, **fields).map(make_valid)
    return {
        int: st.integers(0, 1 << 53),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=12),
        bool: st.booleans(),
        type(None): st.none(),
    }[kind]


def make_valid(value):
    """Bring what the types leave open in line with the format's rules."""
    if isinstance(value, Placement):
        value = value if value.where != "cpu" and value.kv is None else replace(value, cpu_rows=0)
        return value if value.where == "streamed" else replace(value, kept_parts=0)
    if isinstance(value, TierPlan):
        units = {p.unit: p for p in value.placements}
        return replace(value, placements=tuple(units.values()))
    if isinstance(value, RankPlan):
        tiers = value.tiers or (ONE_TIER,)
        rows: dict[str, int] = {}  # what tiers pin they split alike
        for tier in tiers:
            rows |= {p.unit: p.cpu_rows for p in tier.placements if p.where == "pinned" and p.unit not in rows}
        return replace(value, tiers=tuple(split_alike(replace(t, tokens=1 + i * 7), rows) for i, t in enumerate(tiers)))
    if isinstance(value, Variant):
        rank = RankPlan(0, 1, 1.0, (), (), (ONE_TIER,))
        ranks = value.ranks or (rank,)
        workload = replace(value.workload, vram_mib=tuple(100 + i for i in range(len(ranks))))
        return replace(value, ranks=ranks, workload=workload)
    if isinstance(value, PlanSet):
        return replace(value, fingerprint=digest(value.inputs))
    if isinstance(value, Registry):
        return replace(value, sets=tuple({plans.fingerprint: plans for plans in value.sets}.values()))
    return value


def split_alike(tier, rows):
    places = (replace(p, cpu_rows=rows[p.unit]) if p.where == "pinned" else p for p in tier.placements)
    return replace(tier, placements=tuple(places))


ONE_TIER = make_tier()


@settings(max_examples=60)
@given(strategy_for(Registry))
def test_any_registry_survives_the_round_trip(registry):
    assert decode_registry(encode_registry(registry)) == registry


def damaged(registry, edit):
    data = json.loads(encode_registry(registry))
    edit(data)
    return json.dumps(data)


def set_at(data, value, *path):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


WORKLOAD = ("sets", 0, "variants", 0, "workload")
TIER = ("sets", 0, "variants", 0, "ranks", 0, "tiers", 0)


def pin_with_other_rows(data):
    for tier, rows in ((0, 16), (1, 32)):
        place = data["sets"][0]["variants"][0]["ranks"][0]["tiers"][tier]["placements"][0]
        place.update(where="pinned", cpu_rows=rows)


def add_drafter_without_tiers(data):
    variant = data["sets"][0]["variants"][0]
    variant["drafter"] = variant["ranks"][0] | {"tiers": []}


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda d: d["sets"][0].pop("model"), "Registry.sets[0] lacks the field 'model'"),
        (lambda d: d.update(extra=1), "unknown field 'extra'"),
        (
            lambda d: set_at(d, "many", *TIER, "tokens"),
            "Registry.sets[0].variants[0].ranks[0].tiers[0].tokens is 'many'",
        ),
        (lambda d: set_at(d, "gpu", *TIER, "placements", 0, "where"), "tiers[0].placements[0].where is 'gpu'"),
        (lambda d: set_at(d, "disk", *TIER, "placements", 0, "kv"), "placements[0].kv is 'disk'"),
        (lambda d: set_at(d, -16, *TIER, "placements", 0, "cpu_rows"), "placements[0].cpu_rows is -16"),
        (lambda d: set_at(d, 16, *TIER, "placements", 1, "cpu_rows"), "placements[1].cpu_rows is 16"),
        (lambda d: set_at(d, 2, *TIER, "placements", 1, "kept_parts"), "placements[1].kept_parts is 2"),
        (pin_with_other_rows, "tiers[1] pins 'a' with other cpu_rows"),
        (lambda d: set_at(d, "b", *TIER, "placements", 0, "unit"), "names a unit twice"),
        (lambda d: set_at(d, 0, *TIER[:-1], 1, "buffers", "slots"), "slots is 0"),
        (lambda d: set_at(d, 0, *TIER, "tokens"), "ascending token counts"),
        (lambda d: set_at(d, [], "sets", 0, "variants", 0, "ranks"), "0 ranks for 1 budgets"),
        (add_drafter_without_tiers, "variants[0].drafter.tiers must have ascending token counts, at least one"),
        (lambda d: set_at(d, -1, *WORKLOAD, "drafter_mib"), "workload.drafter_mib is -1"),
        (lambda d: set_at(d, -1, *WORKLOAD, "ram_mib"), "workload.ram_mib is -1"),
        (
            lambda d: set_at(d, "pipeline", "sets", 0, "variants", 0, "workload", "split_mode"),
            "workload.split_mode is 'pipeline'",
        ),
        (
            lambda d: set_at(d, {"kind": "tea", "drafts": 2}, *WORKLOAD, "drafting"),
            "drafting: 2 drafts of 'tea'",
        ),
        (
            lambda d: set_at(d, {"kind": "lookup", "drafts": 2}, *WORKLOAD, "drafting"),
            "workload.drafting has drafts, and acceptance does not say",
        ),
        (lambda d: set_at(d, {"rates": [0.5, 0.6]}, *WORKLOAD, "acceptance"), "workload.acceptance: chances that more"),
        (lambda d: set_at(d, "12", "sets", 0, "inputs", 0, 1), "sets[0].fingerprint is not the digest"),
        (lambda d: d["sets"].append(d["sets"][0]), "sets has a fingerprint twice"),
        (lambda d: set_at(d, 0, "version"), "version is 0"),
        (
            lambda d: set_at(d, to_json(replace(POPULARITY, used=17)), "sets", 0, "variants", 0, "popularity"),
            "sets[0].variants[0].popularity has no layers, no tokens, or takes more experts than there are",
        ),
        (lambda d: set_at(d, float("nan"), *TIER, "prediction", "seconds"), "NaN is not a number"),
    ],
)
def test_damage_is_refused_with_its_place(edit, place):
    registry = make_registry()
    with pytest.raises(ValueError) as caught:
        decode_registry(damaged(registry, edit))
    assert place in str(caught.value)


HELD = Acceptance((0.8, 0.5), "recorded", 0.4)
SAID = Speculation(
    "lookup", HELD, 1.0, (PlannedDrafts(0, 0.06, 0.06, 0.05), PlannedDrafts(1, 0.06, 0.07, 0.05)), (0.06, 0.07)
)


def make_drafting(**changes):
    variant = make_variant()
    work = replace(variant.workload, drafting=Drafting("lookup", 1), acceptance=HELD)
    return make_registry(variants=(replace(variant, workload=work, speculation=replace(SAID, **changes)),))


def test_a_plan_says_whose_drafts_it_has_how_likely_they_hold_and_what_steps_take():
    assert decode_registry(encode_registry(make_drafting())) == make_drafting()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"planned": SAID.planned[1:]}, "speculation.planned must ascend from no drafts"),
        ({"planned": SAID.planned[:1]}, "speculation.planned must ascend from no drafts and have the plan's own"),
        ({"planned": (SAID.planned[0], replace(SAID.planned[1], step=0.0))}, "planned[1] has seconds that no step"),
        ({"rows": (0.06,)}, "speculation.rows has not the seconds of 1 to 2 rows"),
        ({"rows": (0.06, -1.0)}, "speculation.rows has not"),
        ({"texts": 0.0}, "speculation.texts is 0.0"),
    ],
)
def test_what_no_plan_says_of_drafts_is_refused_with_its_place(changes, place):
    with pytest.raises(ValueError) as caught:
        decode_registry(encode_registry(make_drafting(**changes)))
    assert place in str(caught.value)


def test_plans_of_before_there_were_drafts_have_none():
    data = json.loads(encode_registry(make_registry()))
    for name in ("drafting", "acceptance"):
        del data["sets"][0]["variants"][0]["workload"][name]
    del data["sets"][0]["variants"][0]["speculation"]
    assert decode_registry(json.dumps(data)) == make_registry()


def test_a_newer_format_is_told_apart_from_damage():
    newer = REGISTRY_VERSION + 1
    with pytest.raises(NewerFormat, match=f"format version {newer}, this program reads up to {REGISTRY_VERSION}"):
        decode_registry(damaged(make_registry(), lambda d: d.update(version=newer, something="new")))


def flatten_workloads(data):
    """As version 1 had it: a variant with the fields of its workload."""
    data |= data.pop("sets")[0] | {"version": 1}
    for variant in data["variants"]:
        variant.update(variant.pop("workload"))


def test_an_older_format_is_told_apart_from_damage_and_says_how_many_plans_it_has():
    with pytest.raises(OlderFormat, match="older format version 1, this program reads 2") as caught:
        decode_registry(damaged(make_registry(variants=(make_variant(), make_variant((200,)))), flatten_workloads))
    assert caught.value.plans == 2


VARIANT = TIER[:-4]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ((*VARIANT, "workload", "sequences"), 10**9, "sequences is 1000000000, not 1 to the context of 512"),
        ((*VARIANT, "workload", "concurrency"), 2, "concurrency is 2, not 0 to the number of sequences"),
        ((*VARIANT, "workload", "sequences"), 0, "sequences is 0, not 1 to the context"),
        ((*VARIANT, "workload", "max_ubatch"), 0, "max_ubatch is 0, not 1 or more"),
        (
            (*VARIANT, "workload", "max_tp"),
            [["gearbox", 2]],
            "max_tp names 'gearbox', not one of attention, delta net, experts",
        ),
        ((*TIER, "prediction", "seconds"), -1.0, "prediction.seconds is -1.0, not 0 or more"),
        ((*TIER, "prediction", "link_bytes"), -1, "prediction.link_bytes is -1, not 0 or more"),
    ],
)
def test_absurd_numbers_are_refused_with_their_place(path, value, says):
    with pytest.raises(ValueError, match=says):
        decode_registry(damaged(make_registry(), lambda data: set_at(data, value, *path)))


def test_a_number_too_large_for_a_float_is_refused():
    text = encode_registry(make_registry(seconds=0.0625)).replace("0.0625", "1e999")
    with pytest.raises(ValueError, match="1e999 is no number"):
        decode_registry(text)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '"registry"'])
def test_text_that_is_no_registry_is_a_value_error(text):
    with pytest.raises(ValueError):
        decode_registry(text)


def test_the_format_names_every_field():
    text = (Path(__file__).parents[2] / "registries/FORMAT.md").read_text()
    lacking = [f"{kind.__name__}.{f.name}" for kind in list_nouns(Registry) for f in dataclasses.fields(kind)
               if f"`{f.name}`" not in text]  # fmt: skip
    assert not lacking


def list_nouns(kind):
    """The dataclasses that a type is made of."""
    inner = (*typing.get_args(kind), *(typing.get_type_hints(kind).values() if dataclasses.is_dataclass(kind) else ()))
    return {kind for _ in range(dataclasses.is_dataclass(kind))}.union(*map(list_nouns, inner))


def test_one_placement_per_line():
    lines = encode_registry(make_registry()).splitlines()
    assert [line.strip().rstrip(",") for line in lines if '"unit"' in line] == [
        '{"unit": "a", "where": "streamed", "kv": null, "cpu_rows": 0, "kept_parts": 0}',
        '{"unit": "b", "where": "cpu", "kv": null, "cpu_rows": 0, "kept_parts": 0}',
    ] * 2


def test_infinite_numbers_are_not_written():
    registry = make_registry(seconds=float("inf"))
    with pytest.raises(ValueError):
        encode_registry(registry)
