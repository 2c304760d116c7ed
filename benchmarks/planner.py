"""How long planning takes: `python benchmarks/planner.py`. Prints JSON: seconds per whole plan, per tier, peak memory.

Shapes are those of known models; the machine is a datasheet's. 128 layers with 4 sequences is the largest.
"""

import json
import platform
import resource
import time
from pathlib import Path

from pshard.model import ModelSpec
from pshard.model_config import ModelConfig, Rope
from pshard.planner.make_plan import plan_variant
from pshard.planner.program.solve_tiers import relaxation_bound
from pshard.registries.profile_store import load_profile
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.output import OUTPUT
from pshard.units.unit import Unit
from pshard.workload import Workload

MACHINE = Path(__file__).resolve().parent.parent / "registries" / "examples" / "h100-sxm-xeon.json"
RUNS = 5
SHAPES = {  # layers, d_model, heads, kv_heads, d_ffn, vocab, budget MiB, sequences
    "qwen3-32b": (64, 5120, 64, 8, 25600, 151936, 12000, 1),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, 16000, 1),
    "128-layers": (128, 8192, 64, 8, 28672, 128256, 24000, 4),
}


def make_spec(name: str, layers: int, d: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelSpec:
    """A dense model of that shape in Q4_0 with a Q6_K head; every eighth FFN's down projection is Q6_K."""
    config = ModelConfig("qwen3", layers, d, heads, kv_heads, 128, ffn, vocab, 1e-6, 262144, Rope(128, 1e6, "halves"))
    units = [Unit("embedding", EMBEDDING, -1, (TensorSpec("token_embd.weight", "Q4_0", (vocab, d)),))]
    for i in range(layers):
        attention = {"attn_q": (heads * 128, d), "attn_k": (kv_heads * 128, d), "attn_v": (kv_heads * 128, d)}
        attention["attn_output"] = (d, heads * 128)
        tensors = tuple(TensorSpec(f"blk.{i}.{n}.weight", "Q4_0", shape) for n, shape in attention.items())
        units.append(Unit(f"blk.{i}.attention", ATTENTION, i, tensors))
        down = TensorSpec(f"blk.{i}.ffn_down.weight", "Q4_0" if i % 8 else "Q6_K", (d, ffn))
        wide = tuple(TensorSpec(f"blk.{i}.{n}.weight", "Q4_0", (ffn, d)) for n in ("ffn_gate", "ffn_up"))
        units.append(Unit(f"blk.{i}.ffn", FFN, i, (*wide, down)))
    units.append(Unit("output", OUTPUT, -1, (TensorSpec("output.weight", "Q6_K", (vocab, d)),)))
    return ModelSpec(name, "", config, tuple(units))


def main() -> None:
    """Plan every shape and print what it took: the median of five runs, the first of which is the coldest."""
    profile = load_profile(MACHINE)
    for name, (*shape, mib, sequences) in SHAPES.items():
        spec = make_spec(name, *shape)
        workload = Workload((mib,), 8192 * sequences, sequences)
        timed = []
        for _ in range(RUNS):
            relaxation_bound.cache_clear()
            started, used = time.perf_counter(), time.process_time()
            variant = plan_variant(spec, profile, workload)
            timed.append((time.process_time() - used, time.perf_counter() - started))
        cpu, seconds = sorted(timed)[RUNS // 2]
        tiers = variant.ranks[0].tiers
        row = {
            "model": name,
            "layers": shape[0],
            "tiers": len(tiers),
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu, 2),
            "cpu_ms_per_tier": round(1e3 * cpu / len(tiers)),
            "solver_seconds": round(sum(t.solve.seconds for t in tiers), 3),
            "program_gap": tiers[0].solve.program_gap,
            "decode_over_bound": round(tiers[0].prediction.seconds / tiers[0].prediction.bound_seconds, 4),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "python": platform.python_version(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
