"""Workload: what a plan is made for."""

from dataclasses import dataclass

MIB = 1 << 20
SPLIT_MODES = ("none", "layer", "tensor")


@dataclass(frozen=True)
class Workload:
    """Budgets and lengths. `vram_mib` has one budget per device; tokens are counted per micro-batch (ubatch).

    context are the cells of the KV cache, which the sequences share as they need them. prompt and generated are the
    expected lengths per sequence; they weigh the tiers against each other.
    """

    vram_mib: tuple[int, ...]
    context: int = 8192
    sequences: int = 1
    type_k: str = "bf16"
    type_v: str = "bf16"
    max_ubatch: int = 4096
    prompt: int = 4096
    generated: int = 256
    split_mode: str = "none"  # one of SPLIT_MODES
    tensor_split: tuple[float, ...] = ()

    @property
    def share(self) -> int:
        """Cells of each sequence when all have equally many."""
        return self.context // self.sequences

    def tiers(self) -> tuple[int, ...]:
        """Token counts that get a plan: decode (one token per sequence), then ubatch sizes up to the largest.

        A step runs under the smallest tier that covers its tokens.
        """
        largest = min(self.max_ubatch, self.context)
        wanted = {1, self.sequences, 16, 128, 512, 1024, 2048, 4096, 8192, 16384, largest}
        return tuple(sorted(t for t in wanted if t <= largest))
