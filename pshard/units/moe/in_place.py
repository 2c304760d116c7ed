"""Reading in place: in small micro-batches the accelerator's kernels read streamed parts over the link. No torch.

Of a unit with parts few tokens use few. So nothing is copied to a slot: a kernel that knows what was chosen reads just
that from page-locked host memory, while the CPU computes what it has of the unit.
"""

from pshard.units.unit import UnitKind

IN_PLACE_TOKENS = 8  # up to so many tokens of a tier: kernels of more read a part several times


def reads_in_place(kind: UnitKind, tokens: int) -> bool:
    """Whether streamed units of the kind are read where they lie, in tiers of that many tokens."""
    return kind.parts is not None and tokens <= IN_PLACE_TOKENS
