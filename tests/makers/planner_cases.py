"""Models and machines for planner tests, made from a few numbers; random ones through hypothesis."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from short_searches import lengthen_searches

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.model_config import Experts, ModelConfig, Rope
from pshard.plan import TierPlan, Variant
from pshard.planner.make_plan import plan_baseline
from pshard.planner.price.datasheet import Rates
from pshard.planner.price.draft import Room, tier_steps
from pshard.planner.price.simulate import ROUNDS, Simulation, simulate
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.published.strategies import NAMES, PER_TIER
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER
from pshard.units.moe.shared_experts import SHARED_EXPERTS
from pshard.units.output import OUTPUT
from pshard.units.unit import Unit
from pshard.workload import Workload


def make_model(
    layers: int = 4,
    d_model: int = 1024,
    heads: int = 8,
    kv_heads: int = 2,
    d_ffn: int = 4096,
    vocab: int = 8192,
    qtype: str = "Q4_0",
    odd_qtype: str | None = None,
    head_dim: int = 128,
    experts: Experts | None = None,
) -> ModelSpec:
    """A decoder; with `odd_qtype` the FFNs, or experts, of odd layers have another quant type and form their own class.
    Dense, or with routed experts in all but the rule's first layers."""
    config = ModelConfig(
        "qwen3", layers, d_model, heads, kv_heads, head_dim, d_ffn, vocab, 1e-6, 32768, Rope(head_dim, 1e6, "halves"),
        experts=experts,
    )  # fmt: skip
    units = [Unit("embedding", EMBEDDING, -1, (TensorSpec("token_embd.weight", qtype, (vocab, d_model)),))]
    for i in range(layers):
        units.append(_attention(i, config, qtype))
        routed = experts is not None and i >= experts.dense_layers
        units += (_routed if routed else _ffn)(i, config, odd_qtype if odd_qtype and i % 2 else qtype)
    head = (TensorSpec("output_norm.weight", "F32", (d_model,)), TensorSpec("output.weight", "Q6_K", (vocab, d_model)))
    units.append(Unit("output", OUTPUT, -1, head))
    return ModelSpec("made", "", config, tuple(units))


def _attention(layer: int, config: ModelConfig, qtype: str) -> Unit:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {"attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q)}
    tensors = [TensorSpec(f"blk.{layer}.attn_norm.weight", "F32", (d,))]
    tensors += [TensorSpec(f"blk.{layer}.{name}.weight", qtype, shape) for name, shape in shapes.items()]
    return Unit(f"attention.{layer}", ATTENTION, layer, tuple(tensors))


def _ffn(layer: int, config: ModelConfig, qtype: str) -> list[Unit]:
    d, f = config.d_model, config.d_ffn
    shapes = {"ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    tensors = [TensorSpec(f"blk.{layer}.ffn_norm.weight", "F32", (d,))]
    tensors += [TensorSpec(f"blk.{layer}.{name}.weight", qtype, shape) for name, shape in shapes.items()]
    return [Unit(f"ffn.{layer}", FFN, layer, tuple(tensors))]


def _routed(layer: int, config: ModelConfig, qtype: str) -> list[Unit]:
    d, rule, blk = config.d_model, config.experts, f"blk.{layer}."
    assert rule is not None
    norm = TensorSpec(f"{blk}ffn_norm.weight", "F32", (d,))
    scores = TensorSpec(f"{blk}ffn_gate_inp.weight", "F32", (rule.count, d))
    units = [Unit(f"router.{layer}", ROUTER, layer, (norm, scores))]
    for what, kind, n, rows in (
        ("shexp", SHARED_EXPERTS, 1, rule.d_shared),
        ("exps", EXPERTS, rule.count, rule.d_expert),
    ):
        shapes = {"gate": (n * rows, d), "up": (n * rows, d), "down": (n * d, rows)}
        parts = n if kind is EXPERTS else 0
        tensors = [TensorSpec(f"{blk}ffn_{at}_{what}.weight", qtype, s, parts=parts) for at, s in shapes.items()]
        units += [Unit(f"{kind.name}.{layer}", kind, layer, tuple(tensors))] if rows else []
    return units


OWN = TORCH_RESERVE_MIB  # of a CUDA budget beside the arena: budgets below are OWN + the arena's MiB
FEW = 2
MANY = int(os.environ.get("PSHARD_TEST_EXAMPLES", "6"))  # hundreds before a release
few_or_many = pytest.mark.parametrize(
    "cases",
    [pytest.param(FEW, id="few", marks=pytest.mark.stand_in), pytest.param(MANY, id="many", marks=pytest.mark.slow)],
)
DESKTOP = Rates(link=25e9, acc_memory=400e9, acc_flops=40e12, host_memory=45e9, host_flops=0.5e12)


def published_variants(spec: ModelSpec, profile: MachineProfile, workload: Workload) -> Iterator[tuple[str, Variant]]:
    """Name and variant of every published strategy that fits."""
    for name in NAMES:
        try:
            variant = plan_baseline(name, spec, profile, workload)
        except UserError:
            continue
        yield name, variant


def rival_variants(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, variant: Variant
) -> Iterator[tuple[str, Variant]]:
    """Those that a plan may not be slower than: with its micro-batches. Where everything fits nothing is planned, and
    `per-tier` may compute a unit on the host of a CPU that is the accelerator."""
    all_fits = variant.ranks[0].tiers[0].solve.strategy == "all in VRAM"
    same = replace(workload, max_ubatch=variant.workload.max_ubatch)
    for name, published in published_variants(spec, profile, same):
        if published.workload.max_ubatch == variant.workload.max_ubatch and not (all_fits and name == PER_TIER):
            yield name, published


def simulate_tier(room: Room, tier: TierPlan, costs: TierCosts, rounds: int = ROUNDS) -> Simulation:
    """Simulate the expected micro-batch of this tier in its steady state."""
    return simulate(tier_steps(room, tier, costs), costs, rounds)


def try_cases(cases: int, check: Callable[..., None], *strategies: st.SearchStrategy) -> None:
    """Call `check` with so many draws of the strategies, the same ones in every run.

    Of many the first has the whole search, the others the short one, which takes a tenth: the whole one makes up for a
    bad start, so that more must be right. A case that fails is not made smaller: each takes seconds, and a test of
    minutes is ended.
    """
    tried = count()

    @wraps(check)
    def check_one(*drawn: object, **named: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if next(tried) == 0 and cases > FEW:
                lengthen_searches(patch)
            check(*drawn, **named)

    alike = settings(
        max_examples=cases,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    alike(given(*strategies)(check_one))()


@st.composite
def machines(draw) -> Rates:
    """Accelerators from a laptop's to a server's, links from PCIe 3 x4 to PCIe 5 x16, and the CPU as accelerator."""

    def between(low: float, high: float) -> float:
        return low * (high / low) ** draw(st.floats(0, 1))

    return Rates(
        link=between(3e9, 60e9),
        acc_memory=between(50e9, 3e12),
        acc_flops=between(1e12, 7e14),
        host_memory=between(15e9, 200e9),
        host_flops=between(1e11, 4e12),
        kind=draw(st.sampled_from(("cuda", "cuda", "cpu"))),
        handoff_seconds=between(5e-6, 2e-4),
    )


@st.composite
def expert_rules(draw) -> Experts:
    """From few large experts to many small ones, with and without shared ones and a dense first layer."""
    count = draw(st.sampled_from((4, 8, 32, 128)))
    return Experts(
        count,
        draw(st.integers(1, min(8, count))),
        256 * draw(st.integers(1, 4)),
        d_shared=draw(st.sampled_from((0, 0, 256))),
        dense_layers=draw(st.sampled_from((0, 0, 1))),
    )


DENSE = st.none()


@st.composite
def models(draw, most_layers: int = 12, rules: st.SearchStrategy = DENSE) -> ModelSpec:
    """Decoders of one to `most_layers` layers, dense or with such routed experts."""
    heads = draw(st.sampled_from((2, 4, 8)))
    return make_model(
        layers=draw(st.integers(1, most_layers)),
        d_model=128 * heads,
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0])),
        d_ffn=256 * draw(st.integers(1, 16)),
        vocab=draw(st.sampled_from((512, 4096, 32768))),
        qtype=draw(st.sampled_from(("Q4_0", "Q8_0", "BF16"))),
        odd_qtype=draw(st.sampled_from((None, "Q6_K"))),
        experts=draw(rules),
    )


@st.composite
def workloads(draw, spec: ModelSpec, least_mib: int) -> Workload:
    """A workload whose budget lies between the smallest that works and a little more than the model."""
    context = draw(st.sampled_from((128, 512, 2048)))
    sequences = draw(st.sampled_from((1, 1, 3)))
    most = (spec.packed_nbytes >> 20) + 200
    return Workload(
        (least_mib + draw(st.integers(0, most)),),
        context=context,
        sequences=sequences,
        max_ubatch=draw(st.sampled_from((16, 128, 512))),
        prompt=context // 2,
        generated=context // 4,
    )
