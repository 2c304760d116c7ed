"""The kinds of units that models are made of. A new one is one more file beside this, and one more name here."""

from pshard.units.attention import (
    ATTENTION,
    BORROWING_ATTENTION,
    BORROWING_WINDOWED,
    LENDING_ATTENTION,
    LENDING_WINDOWED,
    MAPPING,
    STILL_ATTENTION,
    WINDOWED_ATTENTION,
)
from pshard.units.delta_net import DELTA_NET
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.grams import GRAM_ROWS, GRAMS
from pshard.units.join import JOIN
from pshard.units.latent_attention import LATENT_ATTENTION
from pshard.units.layer_rows import LAYER_ROWS, MIXED_ROWS, TOKEN_ROWS
from pshard.units.moe.blend import BLEND
from pshard.units.moe.chunks import CHUNKS
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER
from pshard.units.moe.shared_experts import SHARED_EXPERTS
from pshard.units.output import OUTPUT
from pshard.units.short_conv import SHORT_CONV
from pshard.units.streams import MIX
from pshard.units.unit import UnitKind, UnitKinds

KINDS = UnitKinds()
for _kind in (
    EMBEDDING, JOIN, ATTENTION, WINDOWED_ATTENTION, STILL_ATTENTION, LATENT_ATTENTION, DELTA_NET, SHORT_CONV, FFN,
    ROUTER, SHARED_EXPERTS, EXPERTS, BLEND, OUTPUT, LENDING_ATTENTION, LENDING_WINDOWED, BORROWING_ATTENTION,
    BORROWING_WINDOWED, TOKEN_ROWS, MIXED_ROWS, LAYER_ROWS, MAPPING, CHUNKS,
    MIX, GRAM_ROWS, GRAMS,
):  # fmt: skip
    KINDS.add(_kind)


def kinds_by_flag() -> dict[str, UnitKind]:
    """Kinds whose number of ranks can be limited, by what users call them; of several under one name the first, which
    stands for all of them."""
    found: dict[str, UnitKind] = {}
    for kind in KINDS:
        if kind.cut and kind.cut.flag:
            found.setdefault(kind.cut.flag, kind)
    return found
