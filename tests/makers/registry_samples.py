"""Small valid plans and profiles, made from the nouns, for tests of registries and reports."""

from pshard.machine import AcceleratorInfo, Contention, HostInfo, MachineProfile, Provenance
from pshard.plan import Buffers, Placement, PlanSet, Prediction, RankPlan, Registry, Solve, TierPlan, Variant
from pshard.registries.fingerprint import digest
from pshard.workload import Workload

INPUTS = (("model bytes", "123"), ("threads", "8"))


def make_tier(tokens: int = 1, seconds: float = 0.05) -> TierPlan:
    return TierPlan(
        tokens,
        (Placement("a", "streamed"), Placement("b", "cpu")),
        Buffers(0, 100, 2, 50, 0),
        Prediction(seconds, 0.04, (("link", 0.03),), "link", 10, 0),
        Solve("optimal", 0.2, 0.01, "CBC"),
    )


def make_variant(vram_mib: tuple[int, ...] = (100,), context: int = 512, seconds: float = 0.05, **changes) -> Variant:
    tiers = (make_tier(1, seconds), make_tier(16, seconds))
    ranks = tuple(RankPlan(i, mib, 1 / len(vram_mib), (), (), tiers) for i, mib in enumerate(vram_mib))
    fields = {"max_ubatch": 16, "prompt": 256, "generated": 64} | changes
    return Variant(Workload(vram_mib, context, **fields), True, ranks)


def make_plan_set(seconds: float = 0.05, inputs=INPUTS, variants: tuple[Variant, ...] | None = None) -> PlanSet:
    made = (make_variant(seconds=seconds),) if variants is None else variants
    return PlanSet(digest(inputs), inputs, "tiny", "2026-01-02T03:04:05+00:00", made)


def make_registry(seconds: float = 0.05, inputs=INPUTS, variants: tuple[Variant, ...] | None = None) -> Registry:
    return Registry((make_plan_set(seconds, inputs, variants),))


def make_profile(threads: int = 8, driver: str = "570.1") -> MachineProfile:
    return MachineProfile(
        HostInfo("Some CPU", "avx2", "native", 8, 1, 1 << 25, 1 << 34, threads),
        (AcceleratorInfo("cuda", 0, "Some GPU", 16 << 30, 4, 16, driver),),
        (),
        (),
        (),
        (),
        (),
        Contention(),
        1e-5,
        Provenance("measured", "2026-01-02T03:04:05+00:00", "pshard-profile", "0.1.0", "2.13.0", "3.11", "Linux"),
    )
