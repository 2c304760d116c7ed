"""What a plan keeps in host memory, beside what the machine has."""

from pshard.buffers import kv_layer_bytes
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.plan import cut_ranks


def host_bytes(spec: ModelSpec, variant: Variant, kind: str) -> int:
    """Bytes of weights and KV cache that all ranks keep in host memory; arenas too where the CPU is the accelerator."""
    total = 0
    for part, rank in zip(cut_ranks(spec, variant.split), variant.ranks, strict=True):
        layer = kv_layer_bytes(part.config, variant.context, variant.sequences, variant.type_k, variant.type_v)
        total += sum(u.packed_nbytes for u in part.units if u.name not in rank.resident)
        total += layer * len(rank.kv_on_host)
        total += max(t.buffers.total for t in rank.tiers) if kind == "cpu" else 0
    return total


def why_not_loadable(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> str | None:
    """One line about a plan that needs more host memory than the machine has; None when it does not."""
    needed, there = host_bytes(spec, variant, profile.accelerators[0].kind), profile.host.memory_bytes
    if needed <= there:
        return None
    budgets = ",".join(map(str, variant.vram_mib))
    return (
        f"under {budgets} MiB, {needed >> 20} MiB of weights and KV cache stay in host memory, and the machine has "
        f"{there >> 20}: it will not load; raise --vram, lower -c, or take a smaller model"
    )
