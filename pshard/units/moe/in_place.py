"""Reading in place: in small micro-batches the accelerator's kernels may read streamed parts over the link. No torch.

Of a unit with parts few tokens use some only. So nothing is copied to a slot: a kernel that knows what was chosen reads
just that from page-locked host memory, while the CPU computes what it has of the unit. A copy brings all parts, but may
begin before it is known what is chosen. A tier does one or the other.
"""

from pshard.model_config import ModelConfig
from pshard.units.operations import used_share

# in a tier of more tokens nearly all parts are used, and kernels read a part once for every 16 of its tokens
IN_PLACE_TOKENS = 32
ALWAYS_TOKENS = 8  # up to here there is no choice
USUALLY_USED = 0.9  # of the parts: where more are used than that, copies that begin early are likely to be faster


def ways_to_read(config: ModelConfig, tokens: int) -> tuple[bool, ...]:
    """Whether streamed parts are read in place in tiers of so many tokens, as each tier may choose; the likely way
    first."""
    if config.experts is None or tokens > IN_PLACE_TOKENS:
        return (False,)
    if tokens <= ALWAYS_TOKENS:
        return (True,)
    few = used_share(config.experts.used, config.experts.count, tokens) <= USUALLY_USED
    return few, not few
