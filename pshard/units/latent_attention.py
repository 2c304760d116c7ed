"""Multi-head latent attention (arXiv 2405.04434, 2.1): what is kept of a token is its latent and one rotated key.

The matrices that make keys and values of a latent are absorbed: each head's query is brought to the latent's space
(k_b), attends there over the cells as they lie, and what it finds becomes the head's value (v_b). So a token reads
each cell once, whatever the number of heads. Prompts go the same way: one way for all is simpler to keep right, and
keys and values of all heads need no room; it costs them (2 rank + rope) / (nope + rope + value) times the products of
attention, three to four times as a rule, which is a small part of a prompt's work up to some thousand tokens.
"""

from pshard.batch_sizes import SMALL_BATCH
from pshard.model_config import Latent, ModelConfig
from pshard.units.attention import decode_pieces
from pshard.units.kv_cells import longest_sequence
from pshard.units.operands import NORMED, Rows
from pshard.units.operations import AttendLatent, HeadProducts, Norm, Operation, Product, ProductGroup, StoreLatent
from pshard.units.scratch import Buffer
from pshard.units.state import LatentState, StateShape
from pshard.units.unit import ANYWHERE_WITH_STATE, Tensors, UnitKind

NORM, OUT = "attn_norm.weight", "attn_output.weight"
QUERY, KV_A, KV_NORM = "attn_q.weight", "attn_kv_a_mqa.weight", "attn_kv_a_norm.weight"
QUERY_A, QUERY_NORM, QUERY_B = "attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight"
KEY_B, VALUE_B = "attn_k_b.weight", "attn_v_b.weight"
HEADS_TOGETHER = 16  # that one program of a GPU's decode attention computes


def sizes_of(config: ModelConfig) -> Latent:
    """The model's latent, which it has where it has such attention."""
    assert config.latent is not None
    return config.latent


def latent_pieces(tokens: int, n_heads: int) -> int:
    """Most pieces along the context that the decode attention of so many rows is cut into."""
    return decode_pieces(tokens, -(-n_heads // HEADS_TOGETHER))


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    latent, heads = sizes_of(config), config.n_heads
    first = tensors[QUERY_A if latent.q_rank else QUERY]
    multiply = ProductGroup((first, tensors[KV_A]), (None, None), out=Rows("latent_in"))
    queries, kept = multiply.writes
    lower: tuple[Operation, ...] = ()
    if latent.q_rank:
        lowered, made = Rows(NORMED.buffer, 0, latent.q_rank), Rows("latent_rows", 0, tensors[QUERY_B].rows)
        lower = (
            Norm(tensors[QUERY_NORM], latent.q_rank, x=queries, out=lowered),
            Product(tensors[QUERY_B], x=lowered, out=made),
        )
        queries = made
    absorbed, mixed, values = Rows("latent_heads"), Rows("latent_mixed"), Rows("latent_rows", 0, heads * latent.value)
    return (
        Norm(tensors[NORM], config.d_model),
        multiply,
        *lower,
        HeadProducts(tensors[KEY_B], queries, absorbed),
        StoreLatent(tensors[KV_NORM], heads, latent.rank, latent.rope, kept, queries, absorbed),
        AttendLatent(heads, latent.rank, latent.rope, absorbed, mixed),
        HeadProducts(tensors[VALUE_B], mixed, values),
        Product(tensors[OUT], adds=True, x=values),
    )


def _state(config: ModelConfig, shape: StateShape) -> LatentState:
    return LatentState(sizes_of(config).cell, shape.type_k)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    latent, heads = sizes_of(config), config.n_heads
    most = max(n * latent_pieces(n, heads) for n in range(1, min(tokens, SMALL_BATCH) + 1))
    return (
        Buffer("latent_in", (tokens, (latent.q_rank or heads * latent.query) + latent.cell), "act"),
        Buffer("latent_rows", (tokens, heads * max(latent.query, latent.value)), "act"),
        Buffer("latent_heads", (tokens, heads, latent.cell), "act"),
        Buffer("latent_mixed", (tokens, heads, latent.cell), "act"),
        Buffer("rope", (2, longest_sequence(config, shape.context), config.rope.dims // 2), "f32"),
        Buffer("partial", (most, heads, latent.rank + 2), "f32"),
    )


LATENT_ATTENTION = UnitKind(
    "mla",
    position="layer",
    places=ANYWHERE_WITH_STATE,
    operations=_operations,
    cut=None,
    state=_state,
    scratch=_scratch,
    leads=True,
    llama_cpp="attn_.*",
    strategy="first",
    contends="state",
    phase=0.35,
    lock_order=1,
)
