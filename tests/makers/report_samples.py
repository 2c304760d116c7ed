"""Measurements, plans and profiles of an invented machine for tests of reports: true shapes, invented figures."""

from dataclasses import replace
from pathlib import Path

import pytest
from registry_samples import make_profile

from pshard.machine import CopyTiming, MachineProfile, MatmulTiming, ReadTiming
from pshard.plan import Buffers, Placement, PlanSet, Prediction, RankPlan, Registry, Solve, TierPlan, Variant
from pshard.registries.fingerprint import digest
from pshard.routing.expert_map import ExpertMap, LayerExperts, TierExperts
from pshard.times.measurement import Measurement, TimelineEvent, summarise_samples
from pshard.times.measurement import test_name as name_test
from pshard.times.outlook import Forecast, Outlook
from pshard.workload import Workload

LAYERS = 32


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Reports write their figures' names instead of figures, which take most of the time, until the patch ends."""

    def save(figure: object, folder: Path, name: str) -> str:
        for kind in ("png", "svg"):
            (folder / f"{name}.{kind}").write_text(name)
        return f"<svg>{name}</svg>"

    patch.setattr("pshard.reports.write.save_figure", save)


def make_measurement(
    n_prompt: int = 0,
    n_gen: int = 0,
    rate: float = 10.0,
    strategy: str = "ilp",
    predicted: float | None = None,
    budget_mib: tuple[int, ...] = (12000,),
    n_depth: int = 0,
    **changes,
) -> Measurement:
    tokens = (n_prompt + n_gen) * changes.get("n_sequences", 1)
    samples = tuple(round(tokens / (rate * wobble) * 1e9) for wobble in (0.98, 1.0, 1.03))
    fields = {
        "test": name_test(n_prompt, n_gen, n_depth),
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "n_sequences": 1,
        "test_time": "2026-01-02T03:04:05+00:00",
        "model": "Invented 32B Q4_0",
        "model_bytes": 19 << 30,
        "strategy": strategy,
        "budget_mib": budget_mib,
        "tier": 1 if n_gen else 4096,
        "predicted_ts": predicted,
        "peak_vram_mib": 0.97 * budget_mib[0],
        "link_bytes": 7 * 10**9,
        "ranks": len(budget_mib),
        "type_k": "bf16",
        "type_v": "bf16",
        "n_ubatch": 4096,
        "kernels": "native",
        "environment": (("cpu", "Some CPU"), ("accelerator", "Some GPU"), ("threads", "8")),
        "command": "pshard-bench -m invented.gguf --vram 12000 -p 4096 -n 64 --baseline fit",
    }
    return Measurement(**(fields | summarise_samples(samples, tokens) | changes))


def make_outlook() -> Outlook:
    """The planner's plan, the best strategy, and one whose prompts are faster."""
    rows = (("ilp", 1.0, 30.0, 3.0), ("fit", 2.0, 20.0, 5.0), ("layer-stream", 0.5, 10.0, 7.0))
    forecasts = tuple(Forecast(*row) for row in rows)
    return Outlook("Invented 32B Q4_0", "Some GPU (datasheet)", (6000,), "context 8192, KV bf16", forecasts)


def make_bench() -> list[Measurement]:
    """The planner's plan and two baselines at two budgets, with predictions."""
    rates = {  # strategy -> budget -> (pp4096, tg64, tg64 @ d4096)
        "ilp": {6000: (5200.0, 7.4, 6.9), 12000: (9800.0, 15.2, 14.1)},
        "fit": {6000: (1909.0, 4.4, 3.1), 12000: (2236.0, 8.4, 6.2)},
        "accelerate": {12000: (449.0, 0.11, 0.1)},
    }
    bench = []
    for strategy, by_budget in rates.items():
        for budget, (prefill, decode, deep) in by_budget.items():
            known = strategy != "accelerate"
            common = {"strategy": strategy, "budget_mib": (budget,)}
            bench += [
                make_measurement(4096, 0, prefill, predicted=prefill * 1.08 if known else None, **common),
                make_measurement(0, 64, decode, predicted=decode * 0.95 if known else None, **common),
                make_measurement(0, 64, deep, predicted=deep * 1.22 if known else None, n_depth=4096, **common),
            ]
    return bench


def make_scaling() -> list[Measurement]:
    """One to four ranks of the same budget, at two depths and batches."""
    return [
        make_measurement(
            prompt,
            gen,
            rate * gain * batch**0.5,
            predicted=1.1 * rate * gain * batch**0.5,
            budget_mib=(8000,) * ranks,
            n_depth=depth,
            n_sequences=batch,
            command="pshard-bench" + (" -sm tensor" if ranks > 1 else ""),
        )
        for ranks, gain in ((1, 1.0), (2, 1.8), (3, 2.4), (4, 3.3))
        for prompt, gen, rate in ((4096, 0, 3000.0), (0, 64, 9.0 if ranks < 4 else 7.0))
        for depth in (0, 2048)
        for batch in (1, 8)
    ]


def make_placements(pinned: int, where: str, kv_vram: int) -> tuple[Placement, ...]:
    places = [Placement("embedding", "cpu")]
    for layer in range(LAYERS):
        kv = "vram" if layer < kv_vram else "host"
        places.append(Placement(f"blk.{layer}.attention", "pinned" if layer < 28 else "streamed", kv))
        ffn = "pinned" if (layer * pinned) % LAYERS < pinned else "cpu" if where == "both" and layer % 3 else where
        rows = 512 if ffn == "both" and layer % 2 else 0
        places.append(Placement(f"blk.{layer}.ffn", "streamed" if ffn == "both" else ffn, None, rows))
    return (*places, Placement("output", "pinned"))


def make_plan_tier(tokens: int, seconds: float, pinned: int) -> TierPlan:
    where = "both" if tokens == 1 else "cpu" if tokens == 16 else "streamed"
    busy = (("acc", 0.6 * seconds), ("cpu", 0.5 * seconds), ("link", 0.9 * seconds), ("dram", 0.8 * seconds))
    return TierPlan(
        tokens,
        make_placements(pinned, where, LAYERS if tokens < 512 else 20),
        Buffers(8 << 30, 300 << 20, 2, 200 << 20, 2 << 30),
        Prediction(seconds, 0.95 * seconds, busy, "link" if tokens < 4096 else "acc", 7 * 10**9, 4096),
        Solve("optimal", 0.05, 0.02, "CBC", "ilp" if tokens != 16 else "ffn_on_cpu"),
    )


def make_plan_variant(vram_mib: tuple[int, ...] = (12000,)) -> Variant:
    slow = 12000 / vram_mib[0]
    tiers = tuple(
        make_plan_tier(tokens, seconds * slow, max(1, int(10 / slow)))
        for tokens, seconds in (
            (1, 0.065),
            (16, 0.09),
            (128, 0.14),
            (512, 0.15),
            (1024, 0.18),
            (2048, 0.26),
            (4096, 0.43),
        )
    )
    ranks = tuple(RankPlan(i, mib, 1 / len(vram_mib), (), (), tiers) for i, mib in enumerate(vram_mib))
    split = "tensor" if len(ranks) > 1 else "none"
    return Variant(Workload(vram_mib, split_mode=split), True, ranks)


def make_expert_map() -> ExpertMap:
    """Two layers in two tiers, with experts in every place."""
    decode = (LayerExperts(0, 16, 0, 0, 48), LayerExperts(1, 16, 0, 8, 40))
    prompt = (LayerExperts(0, 16, 48, 0, 0), LayerExperts(1, 16, 8, 0, 40))
    tiers = (TierExperts(1, decode, 3_000_000), TierExperts(512, prompt, 512_000_000))
    return ExpertMap("Invented 30B", 0, 6000, "context 8192", 64, 4, ("blk.0.experts", "blk.1.experts"), tiers)


def make_plan_registry(*budgets: tuple[int, ...]) -> Registry:
    inputs = (("model bytes", "123"), ("threads", "8"))
    variants = tuple(make_plan_variant(b) for b in budgets or ((12000,),))
    return Registry((PlanSet(digest(inputs), inputs, "Invented 32B Q4_0", "2026-01-02T03:04:05+00:00", variants),))


def make_timeline(layers: int = LAYERS) -> tuple[TimelineEvent, ...]:
    """A step in which copies of every second FFN run under the compute of others, some on the CPU."""
    events, now, link = [TimelineEvent("cpu", 0.0, 0.0002, "embedding")], 0.0002, 0.0
    for layer in range(layers):
        events.append(TimelineEvent("acc", now, now + 0.0004, f"blk.{layer}.attention"))
        now += 0.0004
        if layer % 4 == 3:
            events.append(TimelineEvent("cpu", now, now + 0.0031, f"blk.{layer}.ffn"))
            now += 0.0031
            continue
        if layer % 2:
            start = max(link, now - 0.004)
            events.append(TimelineEvent("link", start, start + 0.0028, f"copy blk.{layer}.ffn"))
            link = start + 0.0028
            now = max(now, link)
        events.append(TimelineEvent("acc", now, now + 0.0006, f"blk.{layer}.ffn"))
        now += 0.0006
    return (*events, TimelineEvent("acc", now, now + 0.001, "output"))


def make_full_profile() -> MachineProfile:
    """Tables with the shapes that a profile has: rates that rise with size, threads and tokens."""
    sizes = [1 << n for n in range(16, 29, 2)]
    copies = tuple(
        CopyTiming(direction, memory, n, 2e-5 + n / rate)
        for direction, memory, rate in (
            ("h2d", "pinned", 53e9),
            ("d2h", "pinned", 55e9),
            ("h2d", "pageable", 6.5e9),
            ("d2h", "pageable", 7.1e9),
        )
        for n in sizes
    )
    matmuls = tuple(
        MatmulTiming(device, qtype, 25600, 5120, tokens, max(read, 2 * tokens * 25600 * 5120 / flops))
        for device, qtype, read, flops in (
            ("host", "Q4_0", 1.6e-3, 0.7e12),
            ("host", "Q6_K", 2.4e-3, 0.6e12),
            ("acc", "Q4_0", 5e-5, 6e14),
            ("acc", "Q6_K", 7e-5, 5.5e14),
        )
        for tokens in (1, 4, 16, 64, 512, 4096)
    )
    reads = tuple(ReadTiming(n, 50e9 * (1 - 0.7**n)) for n in (1, 2, 4, 8, 12, 16))
    return replace(make_profile(), copies=copies, matmuls=matmuls, reads=reads)
