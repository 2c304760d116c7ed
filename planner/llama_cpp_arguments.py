"""The static part of a plan as llama.cpp arguments: what is in VRAM while decoding.

llama.cpp keeps a tensor where it was put at load; it cannot stream units or move them between prefill and decode.
`-ngl` puts all layers on the GPU and `-ot` (a regular expression over tensor names = buffer type) brings units back.
The head too: which end `-ngl` begins to count at differs between versions of llama.cpp.
"""

from collections.abc import Mapping

from pshard.errors import UserError
from pshard.plan import TierPlan, Variant
from pshard.units.unit import Unit
from pshard.workload import MIB

HEAD = "'^(output|token_embd)\\.weight=CPU'"  # with tied weights the head is the embedding, which is there anyway


def llama_arguments(variant: Variant, units: Mapping[str, Unit]) -> str:
    """Arguments for `llama-cli`, `llama-server` and `llama-bench`. units: by name.

    Units that the plan streams or splits stay on the host: llama.cpp computes them there, or copies them for large
    batches. The KV cache is in VRAM as a whole or not at all: where the plan has a part of it there, all of it if it
    fits the budget in place of the staging slots.
    Raises UserError for a split plan.
    """
    if len(variant.ranks) > 1:
        raise UserError("--emit llama.cpp needs a plan for one device; leave out -sm")
    w = variant.workload
    tier = variant.ranks[0].covering(w.sequences)
    outside = [p for p in tier.placements if p.sort != "pinned"]
    words = ["-ngl", "999"]
    for tensors in dict.fromkeys(unit.kind.llama_cpp for unit in units.values()):
        layers = sorted(units[p.unit].layer for p in outside if units[p.unit].kind.llama_cpp == tensors)
        if tensors and layers:
            words += ["-ot", f"'blk\\.({'|'.join(map(str, layers))})\\.{tensors}=CPU'"]
    if any(units[p.unit].kind.gives_logits for p in outside):
        words += ["-ot", HEAD]
    if not _holds_all_kv(tier, w.vram_mib[0]):
        words.append("-nkvo")
    words += ["-c", str(w.context), "-np", str(w.sequences)]
    words += ["-b", str(w.max_ubatch), "-ub", str(w.max_ubatch)]
    words += ["-ctk", w.type_k, "-ctv", w.type_v]
    return " ".join(words)


def _holds_all_kv(tier: TierPlan, budget_mib: int) -> bool:
    """Whether the budget holds the KV cache of all layers beside what else the plan has in VRAM, less its slots."""
    sides = [p.kv for p in tier.placements if p.kv]
    if "host" not in sides:
        return True
    held, there = tier.buffers, sides.count("vram")
    more = held.kv * (len(sides) - there) // there if there else 0
    return bool(there) and held.total - held.slots * held.slot_bytes + more <= budget_mib * MIB
