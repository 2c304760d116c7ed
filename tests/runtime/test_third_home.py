"""A home beyond host memory, added by its declaration alone: planned, simulated, checked and run."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from plan_samples import make_tier, make_variant
from planner_cases import DESKTOP
from slow_home import RATE, READ, SLOW, SlowMemory, declare_slow_home, with_slow_home
from toy_kinds import VOCAB, ToyFile

from pshard.errors import NoPlan, UserError
from pshard.homes import declare_home
from pshard.machine import MachineProfile
from pshard.plan import PlanSet, Registry, TierPlan, Variant
from pshard.planner.check_plan import PlanError, check_runnable, check_variant, count_host_bytes
from pshard.planner.explain import simulate_timelines
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import usable_bytes
from pshard.registries.codec import decode_registry, encode_registry
from pshard.registries.fingerprint import digest
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.workload import Workload

MIB = 1 << 20
WORKLOAD = Workload((4,), context=128, type_k="f32", type_v="f32", max_ubatch=32, prompt=40, generated=20)
FILE = ToyFile("aaaaaa", d_model=256, d_ffn=512)


@pytest.fixture
def stores() -> Iterator[list[SlowMemory]]:
    with declare_slow_home() as opened:
        yield opened


def make_machine(on_host: int, rate: float = RATE) -> MachineProfile:
    """A CPU as accelerator, with so many bytes of host memory beside the arena, and the slow home."""
    profile = with_slow_home(profile_from_datasheet(replace(DESKTOP, kind="cpu")), rate)
    usable = on_host + (WORKLOAD.vram_mib[0] << 20)
    return replace(profile, host=replace(profile.host, memory_bytes=usable * 16 // 15))


def speak(variant: Variant) -> torch.Tensor:
    """Logits of a prompt in several micro-batches, of tokens one by one, and of a second text."""
    rng = random.Random(3)
    with build_engine(FILE, variant, open_device("cpu"), kernels="plain") as engine:
        found = []
        for sizes in ((70, 1, 1, 1), (9, 1)):
            engine.reset(0)
            found += [engine.forward([rng.randrange(VOCAB) for _ in range(n)], all_logits=True) for n in sizes]
    return torch.cat(found)


def test_what_host_memory_does_not_hold_lives_beyond_it_with_the_logits_of_vram(stores: list[SlowMemory]) -> None:
    profile = make_machine(3 * MIB)
    variant = plan_variant(FILE.spec, profile, WORKLOAD)
    (rank,) = variant.ranks
    assert rank.beyond_host and set(rank.beyond_host.values()) == {SLOW}
    check_variant((FILE.spec,), variant, "cpu", usable_bytes(profile, 1))
    everything = plan_variant(FILE.spec, make_machine(64 * MIB), replace(WORKLOAD, vram_mib=(64,)))
    assert not everything.ranks[0].beyond_host
    assert torch.equal(speak(variant), speak(everything))
    (store,) = stores
    assert store.read_bytes >= 4 * sum(portion.nbytes for portion in store.held.values())  # for every micro-batch


def test_a_unit_that_a_tier_pins_comes_to_its_place_from_beyond_host_memory(stores: list[SlowMemory]) -> None:
    """The first tier has half of the FFNs in VRAM, the second one none of them."""
    ffns = [u.name for u in FILE.spec.units if u.name.endswith("ffn")]
    pinned = {u.name: ("pinned", "vram" if u.kind.state else None) for u in FILE.spec.units}
    far = pinned | {name: (SLOW.name, None) for name in ffns}
    near = far | {name: ("pinned", None) for name in ffns[:3]}
    tiers = [make_tier(FILE.spec, n, places, 2, 128, 1) for n, places in ((1, near), (32, far))]
    variant = make_variant(FILE.spec, tuple(tiers), 128, 1)
    assert set(variant.ranks[0].beyond_host) == set(ffns)
    check_runnable((FILE.spec,), variant, "cpu")
    whole = make_variant(FILE.spec, tuple(make_tier(FILE.spec, n, pinned, 0, 128, 1) for n in (1, 32)), 128, 1)
    assert torch.equal(speak(variant), speak(whole))


def test_the_lane_of_a_home_is_simulated_as_the_profile_times_it(stores: list[SlowMemory]) -> None:
    profile, slower = make_machine(3 * MIB), make_machine(3 * MIB, RATE / 10)
    variant = plan_variant(FILE.spec, profile, WORKLOAD)
    behind = plan_variant(FILE.spec, slower, WORKLOAD)
    for one, rate in ((variant, RATE), (behind, RATE / 10)):
        (tier, *_), specs = one.ranks[0].tiers, (FILE.spec,)
        read = sum(FILE.spec.unit(p.unit).packed_nbytes for p in tier.placements if p.site.is_beyond_host)
        busy = dict(tier.prediction.busy)
        assert read and busy[READ.name] == pytest.approx(read / rate, rel=0.3)
        assert tier.prediction.seconds >= 0.99 * read / rate
        assert tier.prediction.link_bytes >= read  # it goes over the link, too
        assert count_host_bytes(specs, one, "cpu") <= usable_bytes(profile, 1)
    assert behind.ranks[0].tiers[0].prediction.binds == READ.name
    events = simulate_timelines(FILE.spec, slower, behind)[0].events
    assert {event.lane for event in events} >= {READ.name, "link", "acc"}


def test_a_plan_that_breaks_a_rule_of_homes_is_refused(stores: list[SlowMemory]) -> None:
    profile = make_machine(3 * MIB)
    variant = plan_variant(FILE.spec, profile, WORKLOAD)
    far = list(variant.ranks[0].beyond_host)

    def put(where: str, names: list[str] = far[:1], tiers: slice = slice(None), **more: int) -> Variant:
        (rank,), made = variant.ranks, list[TierPlan]()
        for i, tier in enumerate(rank.tiers):
            inside = i in range(len(rank.tiers))[tiers]
            places = (
                replace(p, where=where, **more) if inside and p.unit in names and not p.in_arena else p
                for p in tier.placements
            )
            made.append(replace(tier, placements=tuple(places)))
        return replace(variant, ranks=(replace(rank, tiers=tuple(made)),))

    for bad, why in (
        (put("streamed", tiers=slice(1, None)), "in another tier"),
        (put("slow", kept_parts=64), "cannot be divided"),
        (put("streamed", far), "stay in host memory"),
    ):
        with pytest.raises(PlanError, match=why):
            check_variant((FILE.spec,), bad, "cpu", usable_bytes(profile, 1))


def test_host_memory_must_hold_what_cannot_live_beyond_it(stores: list[SlowMemory]) -> None:
    with pytest.raises(NoPlan, match=r"host memory lacks .* cannot live in slow"):
        plan_variant(FILE.spec, make_machine(0), replace(WORKLOAD, vram_mib=(3,), context=2048))


def test_without_its_declaration_a_home_is_unknown() -> None:
    with declare_slow_home():
        profile = make_machine(3 * MIB)
        variant = plan_variant(FILE.spec, profile, WORKLOAD)
        text = encode_registry(Registry((PlanSet(digest(()), (), "toy", "", (variant,)),)))
        assert decode_registry(text).variants == (variant,)
    with pytest.raises(ValueError, match="where is 'slow', not one of pinned, streamed, cpu"):
        decode_registry(text)
    with pytest.raises(UserError, match="host memory"):
        plan_variant(FILE.spec, profile, WORKLOAD)
    with declare_home(SLOW), pytest.raises(UserError, match="'slow', which cannot be read here"):
        speak(variant)
