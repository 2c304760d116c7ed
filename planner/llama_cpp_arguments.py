"""The static part of a plan as llama.cpp arguments: what is in VRAM while decoding.

llama.cpp keeps a tensor where it was put at load; it cannot stream units or move them between prefill and decode.
`-ngl` puts all layers on the GPU and `-ot` (a regular expression over tensor names = buffer type) brings units back.
The head too: which end `-ngl` begins to count at differs between versions of llama.cpp.
"""

import shlex
from collections.abc import Mapping

from pshard.errors import UserError
from pshard.plan import TierPlan, Variant
from pshard.units.unit import Unit
from pshard.workload import MIB

HEAD = r"^(output(_norm)?|token_embd)\.weight"  # with tied weights the head is the embedding, which is there anyway
PROGRAMS = ("llama.cpp", "llama-bench")  # llama-cli and llama-server; llama-bench


def llama_arguments(variant: Variant, units: Mapping[str, Unit], program: str = "llama.cpp") -> str:
    """Arguments, quoted for a shell, for `llama-cli` and `llama-server`, or for `llama-bench`. units: by name.

    Units that the plan streams or splits stay on the host: llama.cpp computes them there, or copies them for large
    batches. The KV cache is in VRAM as a whole or not at all: where the plan has a part of it there, all of it if it
    fits the budget in place of the staging slots. llama-bench takes context and sequences from its tests, and every
    `-ot` as another test, unless one has all patterns.
    Raises UserError for a split plan, and for a type of KV cache that llama-bench does not know.
    """
    w, bench = variant.workload, program == "llama-bench"
    check_emit(program, len(variant.ranks), w.type_k, w.type_v)
    tier = variant.ranks[0].covering(w.sequences)
    outside = [p for p in tier.placements if p.sort != "pinned"]
    patterns = []
    for tensors in dict.fromkeys(unit.kind.llama_cpp for unit in units.values()):
        layers = sorted(units[p.unit].layer for p in outside if units[p.unit].kind.llama_cpp == tensors)
        if tensors and layers:
            patterns.append(rf"blk\.({'|'.join(map(str, layers))})\.{tensors}")
    if any(units[p.unit].kind.gives_logits for p in outside):
        patterns.append(HEAD)
    on_host = [f"{pattern}=CPU" for pattern in patterns]
    words = ["-ngl", "999"]
    for value in [";".join(on_host)] if bench and on_host else on_host:
        words += ["-ot", value]
    if not _holds_all_kv(tier, w.vram_mib[0]):
        words += ["-nkvo", "1"] if bench else ["-nkvo"]
    if not bench:
        words += ["-c", str(w.context), "-np", str(w.sequences)]
    words += ["-b", str(w.max_ubatch), "-ub", str(w.max_ubatch)]
    words += ["-ctk", w.type_k, "-ctv", w.type_v]
    return shlex.join(words)


def check_emit(program: str, ranks: int, type_k: str, type_v: str) -> None:
    """Raise UserError for what the arguments of `program` cannot say."""
    if ranks > 1:
        raise UserError(f"--emit {program} needs a plan for one device; leave out -sm")
    if program == "llama-bench" and "f32" in (type_k, type_v):
        raise UserError("--emit llama-bench: it has no KV cache of type f32; give another with -ctk and -ctv")


def _holds_all_kv(tier: TierPlan, budget_mib: int) -> bool:
    """Whether the budget holds the KV cache of all layers beside what else the plan has in VRAM, less its slots."""
    sides = [p.kv for p in tier.placements if p.kv]
    if "host" not in sides:
        return True
    held, there = tier.buffers, sides.count("vram")
    more = held.kv * (len(sides) - there) // there if there else 0
    return bool(there) and held.total - held.slots * held.slot_bytes + more <= budget_mib * MIB
