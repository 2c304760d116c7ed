"""Which block computes units of which kind: one table, by the kind's name, but for those that are carried out from
their operations alone, and tables that are looked up."""

from pshard.runtime.blocks.attention_block import AttentionBlock
from pshard.runtime.blocks.block import Block
from pshard.runtime.blocks.conv_block import ConvBlock
from pshard.runtime.blocks.delta_block import DeltaBlock
from pshard.runtime.blocks.embedding_block import EmbeddingBlock
from pshard.runtime.blocks.experts_block import ChunksBlock, ExpertsBlock
from pshard.runtime.blocks.grams_block import GramsBlock
from pshard.runtime.blocks.join_block import JoinBlock
from pshard.runtime.blocks.latent_block import LatentBlock
from pshard.runtime.blocks.listed_block import ListedBlock
from pshard.runtime.blocks.output_block import OutputBlock
from pshard.runtime.blocks.router_block import RouterBlock
from pshard.runtime.blocks.shared_block import SharedBlock
from pshard.units.attention import ATTENTIONS
from pshard.units.delta_net import DELTA_NET
from pshard.units.grams import GRAMS
from pshard.units.join import JOIN
from pshard.units.latent_attention import LATENT_ATTENTION
from pshard.units.moe.chunks import CHUNKS
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER
from pshard.units.moe.shared_experts import SHARED_EXPERTS
from pshard.units.output import OUTPUT
from pshard.units.short_conv import SHORT_CONV
from pshard.units.unit import UnitKind

LISTED, LOOKED_UP = ListedBlock(), EmbeddingBlock()
BLOCKS: dict[str, Block] = {
    GRAMS.name: GramsBlock(),
    JOIN.name: JoinBlock(),
    **{kind.name: AttentionBlock() for kind in ATTENTIONS},
    LATENT_ATTENTION.name: LatentBlock(),
    DELTA_NET.name: DeltaBlock(),
    SHORT_CONV.name: ConvBlock(),
    ROUTER.name: RouterBlock(),
    SHARED_EXPERTS.name: SharedBlock(),
    EXPERTS.name: ExpertsBlock(),
    CHUNKS.name: ChunksBlock(),
    OUTPUT.name: OutputBlock(),
}


def find_block(kind: UnitKind) -> Block:
    """The block of a kind. Raises NotImplementedError for one that has none."""
    if kind.listed:
        return LISTED
    if kind.is_looked_up:
        return LOOKED_UP
    if kind.name not in BLOCKS:
        raise NotImplementedError(f"no block computes units of kind {kind.name!r}; there are {', '.join(BLOCKS)}")
    return BLOCKS[kind.name]
