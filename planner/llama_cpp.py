"""The static part of a plan as llama.cpp arguments: what is in VRAM while decoding.

llama.cpp keeps a tensor where it was put at load; it cannot stream units or move them between prefill and decode.
`-ngl` puts all layers on the GPU and `-ot` (a regular expression over tensor names = buffer type) brings units back.
The head too: which end `-ngl` begins to count at differs between versions of llama.cpp.
"""

from pshard.errors import UserError
from pshard.plan import Variant

TENSORS = {"attention": "attn_.*", "ffn": "ffn_.*"}
HEAD = "'^(output|token_embd)\\.weight=CPU'"  # with tied weights the head is the embedding, which is there anyway


def llama_arguments(variant: Variant, kinds: dict[str, tuple[str, int]]) -> str:
    """Arguments for `llama-cli`, `llama-server` and `llama-bench`. kinds: unit name -> (kind, layer).

    Units that the plan streams or splits stay on the host: llama.cpp computes them there, or copies them for large
    batches.
    Raises UserError for a split plan.
    """
    if len(variant.ranks) > 1:
        raise UserError("--emit llama.cpp needs a plan for one device; leave out -sm")
    tier = variant.ranks[0].covering(variant.sequences)
    outside = [p for p in tier.placements if p.sort != "pinned"]
    words = ["-ngl", "999"]
    for kind, tensors in TENSORS.items():
        layers = sorted(kinds[p.unit][1] for p in outside if kinds[p.unit][0] == kind)
        if layers:
            words += ["-ot", f"'blk\\.({'|'.join(map(str, layers))})\\.{tensors}=CPU'"]
    if any(kinds[p.unit][0] == "output" for p in outside):
        words += ["-ot", HEAD]
    if not any(p.kv == "vram" for p in tier.placements):
        words.append("-nkvo")
    words += ["-c", str(variant.context), "-np", str(variant.sequences)]
    words += ["-b", str(variant.max_ubatch), "-ub", str(variant.max_ubatch)]
    words += ["-ctk", variant.type_k, "-ctv", variant.type_v]
    return " ".join(words)
