"""Times routed experts on a CUDA GPU beside what the machine allows: bytes against a device copy, FLOPs against a GEMM.

    python benchmarks/gpu_experts.py --out benchmarks/results/gpu_experts.json
    python benchmarks/gpu_experts.py --sweep --out benchmarks/results/gpu_experts_sweep.json

Every timed call is checked first against plain torch. Calls rotate over routes that together take all experts of a
layer, more than any cache holds. Bytes are those of the experts that a batch takes, each counted once.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import Bench, activations, ceilings, check, make_weights, poisoned, time_us

from pshard.model_config import Experts
from pshard.quant import ROW_BLOCK, record_nbytes
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.gpu.card_limits import card_limits
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.default_tiles import TUNING
from pshard.runtime.kernels.plain import PlainKernels
from pshard.times.gpu_tiles import Tile

TOKENS = (1, 2, 4, 8, 16, 64, 512, 4096)


@dataclass(frozen=True)
class Model:
    """A layer of a published model: types of gate, up and down."""

    name: str
    d_model: int
    rule: Experts
    qtypes: tuple[str, str, str]


MODELS = (
    Model("Qwen3-30B-A3B Q4_0", 2048, Experts(128, 8, 768), ("Q4_0",) * 3),
    Model("gpt-oss-20b MXFP4", 2880, Experts(32, 4, 2880, "chosen", activation="clamped", biases=True), ("MXFP4",) * 3),
    Model("Qwen3-30B-A3B Q4_K_M", 2048, Experts(128, 8, 768), ("Q4_K", "Q4_K", "Q6_K")),
)


def make_layer(model: Model) -> ExpertWeights:
    """Experts that differ in the order of their records; no two share memory."""
    inner, width, count = model.rule.d_expert, model.d_model, model.rule.count
    sides = []
    for qtype, rows, cols in zip(model.qtypes, (inner, inner, width), (width, width, inner), strict=True):
        one = make_weights(qtype, rows, cols, total=1)[0][0]
        step = record_nbytes(qtype, cols)
        rolled = (one.data.roll(step * (i % (64 // ROW_BLOCK))) for i in range(count))
        sides.append(tuple(Packed(data.clone(), qtype, rows, cols) for data in rolled))
    at = [[w.data.data_ptr() for w in side] for side in sides]
    biases = tuple(activations(count, n, n).float() for n in (inner, inner, width)) if model.rule.biases else None
    return ExpertWeights(*sides, torch.tensor(at, device="cuda"), biases)


def make_routes(tokens: int, rule: Experts, seed: int) -> Routes:
    """Experts at random, all alike."""
    scores = torch.rand(tokens, rule.count, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    ids = scores.argsort(1)[:, : rule.used]
    return Routes(ids.int().contiguous(), torch.full(ids.shape, 1.0 / rule.used, device="cuda"))


def experts(bench: Bench, model: Model, weights: ExpertWeights, tokens: int) -> dict[str, Any]:
    """One layer's experts of `tokens` tokens."""
    rule, width, pairs = model.rule, model.d_model, tokens * model.rule.used
    x, out = activations(tokens, width) * 0.1, poisoned(tokens, width, dtype=torch.float32)
    scratch = {
        "gated": poisoned(pairs, rule.d_expert), "picked": poisoned(pairs, width),
        "order": torch.zeros(4 * pairs + 4 * rule.count + 64, dtype=torch.int32, device="cuda"),
    }  # fmt: skip
    sets = [make_routes(tokens, rule, seed) for seed in range(16 if tokens <= 64 else 2)]

    def run(routes: Routes) -> None:
        bench.kernels.experts(x, routes, weights, rule, out, scratch, False)

    run(sets[0])
    first, want = out.clone(), torch.empty_like(out)
    PlainKernels().experts(x, sets[0], weights, rule, want, {}, False)
    error = check(float((first - want).norm() / want.norm()), 0.03)
    out.fill_(float("nan"))
    run(sets[0])
    assert torch.equal(first, out), "a repeated run differs"
    us = time_us([lambda r=r: run(r) for r in sets])  # type: ignore[misc]
    each = sum(side[0].data.numel() for side in (weights.gate, weights.up, weights.down))
    taken = sum(len(routes.ids.unique()) for routes in sets) / len(sets)
    tflops = 2 * pairs * 3 * width * rule.d_expert / us / 1e6
    result = bench.bytes_case(us, int(taken * each), round(error, 5))
    return {**result, "tflops": round(tflops, 1), "of_gemm": round(tflops / bench.gemm_tflops, 3)}


def route(bench: Bench, model: Model, tokens: int) -> dict[str, Any]:
    """The router of a layer, F32."""
    rule, width = model.rule, model.d_model
    matrices = [activations(rule.count, width, seed).float() for seed in range(64)]
    routers = [Packed(m.flatten().view(torch.uint8), "F32", rule.count, width) for m in matrices]
    x = activations(tokens, width, 99).float() * 0.05
    got, want = make_routes(tokens, rule, 1), make_routes(tokens, rule, 2)
    bench.kernels.route(x, routers[0], rule, got)
    PlainKernels().route(x, routers[0], rule, want)
    differing = int((got.ids != want.ids).any(1).sum())
    assert differing <= tokens // 1000, f"{differing} of {tokens} tokens take other experts"  # scores nearly equal
    us = time_us([lambda r=r: bench.kernels.route(x, r, rule, got) for r in routers])  # type: ignore[misc]
    return bench.bytes_case(us, routers[0].data.numel() + 4 * x.numel(), float(differing))


GROUPED = {
    "grouped gate": [Tile(128, 64, 4, 2, tokens=128), Tile(128, 64, 4, 3, tokens=128), Tile(128, 128, 8, 2, tokens=128),
                     Tile(128, 128, 8, 3, tokens=128), Tile(128, 32, 2, 2, tokens=128),
                     Tile(128, 64, 8, 2, tokens=256)],
    "grouped down": [Tile(128, 128, 4, 3, tokens=64), Tile(128, 128, 4, 2, tokens=64), Tile(128, 64, 4, 2, tokens=128),
                     Tile(128, 64, 4, 3, tokens=128), Tile(128, 128, 8, 2, tokens=128),
                     Tile(128, 256, 8, 3, tokens=64)],
}  # fmt: skip
SMALL_GROUPED = [Tile(16, 64, 4, 3, tokens=128), Tile(16, 64, 4, 4, tokens=128), Tile(16, 64, 4, 2, tokens=128),
                 Tile(16, 32, 2, 3, tokens=128), Tile(16, 32, 2, 4, tokens=128), Tile(16, 32, 4, 3, tokens=256),
                 Tile(16, 128, 4, 3, tokens=64), Tile(16, 32, 1, 4, tokens=64)]  # fmt: skip
PAIRS = [Tile(32, 32, 4, 1, registers=168), Tile(32, 16, 2, 1, registers=144), Tile(32, 64, 8, 1, registers=128),
         Tile(32, 64, 8, 1, registers=96), Tile(32, 32, 4, 1, registers=96), Tile(32, 32, 4, 2, registers=144),
         Tile(32, 8, 1, 1, registers=168)]  # fmt: skip


def sweep(bench: Bench, model: Model, weights: ExpertWeights) -> None:
    """Other tiles, one kernel at a time, for one token, 16 tokens and thousands."""
    tries: list[tuple[tuple[str, int], list[Tile], int]] = [
        (("pairs gate", 1), PAIRS, 1), (("pairs down", 1), PAIRS, 1),
        *(((kernel, 128), tiles, 4096) for kernel, tiles in GROUPED.items()),
        *(((kernel, 16), SMALL_GROUPED, 16) for kernel in GROUPED),
    ]  # fmt: skip
    for key, tiles, tokens in tries:
        usual, found = TUNING[key], []
        for tile in tiles:
            TUNING[key] = tile
            bench.kernels.use_tiles(())
            name = f"{model.name} M={tokens} {key[0]} {tile.rows, tile.depth, tile.warps, tile.stages, tile.registers}"
            result = bench.case(f"{name} {tile.tokens}", partial(experts, bench, model, weights, tokens))
            if "us" in result:
                found.append((result["us"], tile))
        TUNING[key] = min(found, key=lambda one: one[0])[1] if found else usual
        bench.kernels.use_tiles(())


def main() -> None:
    """Run the cases and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="try other tiles first")
    parser.add_argument("--models", type=int, default=len(MODELS), help="only so many of the models")
    parser.add_argument("--seconds", type=float, default=280, help="start no case after this time")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: these kernels need one")
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(CudaKernels("cuda", 4096), time.perf_counter() + args.seconds)
    ceilings(bench)
    for model in MODELS[: args.models]:
        weights = make_layer(model)
        if args.sweep:
            sweep(bench, model, weights)
        for tokens in TOKENS:
            bench.case(f"{model.name} experts M={tokens}", partial(experts, bench, model, weights, tokens))
        for tokens in (1, 16, 512, 4096):
            bench.case(f"{model.name} route M={tokens}", partial(route, bench, model, tokens))
    report = {
        "device": card_limits("cuda").name, "torch": torch.__version__, "copy_gbs": bench.copy_gbs,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gemm_tflops": bench.gemm_tflops,
        "tiles": {f"{key[0]} {key[1]}": str(tile) for key, tile in TUNING.items() if key[0][:5] in ("pairs", "group")},
        "cases": bench.cases,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
