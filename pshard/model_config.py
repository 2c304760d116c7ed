"""ModelConfig: the numbers of a decoder that computing and planning need. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `pairing`: "adjacent" rotates (2i, 2i+1), "halves" rotates (i, i + dims/2).

    `scaling`: "none", "linear", "yarn", "llama3" or "longrope"; `rounded`: the range of pairs that yarn blends ends at
    whole ones. `freq_factors` (dims/2 divisors of the frequencies) come from the file when it has them
    (`rope_freqs.weight`); llama3 scaling in safetensors is turned into them. longrope: `long_factors` take their place
    where a sequence may have more than `original_context` tokens.
    """

    dims: int
    base: float
    pairing: str
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    rounded: bool = True
    freq_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Temperature:
    """What queries are multiplied by: 1 + scale ln(1 + floor(p / span)), so 1 below `span`, where p is the position or,
    with `counts`, the tokens up to it. still: in layers whose heads are not rotated, and in no others."""

    scale: float
    span: int
    counts: bool = False
    still: bool = False


def limit_gate(activation: str, limit: float) -> str:
    """The activation of that name within a limit, as kernels take it; 0: without."""
    return f"{activation}<{limit!r}" if limit else activation


def limit_of(activation: str) -> float:
    """The limit in an activation's name; 0 for none."""
    return float(activation.partition("<")[2] or 0)


@dataclass(frozen=True)
class Chunks:
    """One more expert of `rows` rows for each chunk of `each` routed ones, as llama.cpp's grovemoe has them.

    They take the sum of what a token's experts gave, and add to it. A token takes those of its experts' chunks, of the
    best experts where there are fewer chunks; one that two of these have counts twice. Its weight is the softmax score
    of the expert whose number the chunk has, divided by the sum of these, which counts as LEAST_SUM at least, times
    `scale`.
    """

    each: int
    rows: int
    scale: float


LEAST_SUM = 2.0**-14


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer, and how a router chooses among them.

    Each of `count` experts is an FFN of `d_expert` rows; a token takes `used` of them. Their weights are made from the
    router's `scores`: "softmax" over all experts, "sigmoid" of each, or "chosen", a softmax over those that are chosen.
    `normed`: they are divided by their sum, then multiplied by `scale`. A `choice_bias` is added to scores for the
    choice alone. Of `groups` equal groups of experts those of the best `groups_used` may be chosen; a group's score is
    the sum of its best two. `activation`: "silu", as in a SwiGLU, "relu", a gelu as in `ModelConfig`, or "clamped", as
    gpt-oss has it. `biases`: the router and the experts have some. `early`: of what the layer began with, before its
    attention, "scores" are made, not normalised, or the "inputs" of router and experts; "": neither.

    `d_shared`: rows of the FFN that every token takes beside its experts; `shared_gate`: it is multiplied by the
    sigmoid of one more product. The first `dense_layers` layers have an ordinary FFN instead, and of the
    others all but the last of each `every`; or `layers` says of each whether it has experts. `beside`: layers with
    experts have an ordinary FFN too. `weighs_inputs`: a token's one expert takes its input times the weight that others
    multiply the result by. `chunks`: experts that follow them.
    """

    count: int
    used: int
    d_expert: int
    scores: str = "softmax"
    normed: bool = True
    scale: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    groups_used: int = 1
    activation: str = "silu"
    biases: bool = False
    d_shared: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    every: int = 1
    early: str = ""
    beside: bool = False
    layers: tuple[bool, ...] = ()
    weighs_inputs: bool = False
    limits: tuple[float, ...] = ()  # of each layer's, as `ModelConfig.ffn_limits`
    apart: bool = False  # a layer has an FFN too; both results are normalised, and their sum again
    chunks: Chunks | None = None

    def are_in(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if self.layers:
            return layer >= len(self.layers) or self.layers[layer]  # beyond them are those that draft
        return layer >= self.dense_layers and (layer + 1) % self.every == 0

    @property
    def together(self) -> bool:
        """Whether the sum of a token's experts is wanted before it is added to the residual stream."""
        return self.apart or self.chunks is not None

    def of_chunks(self) -> "Experts":
        """The rule of the experts of chunks, and of how many a token takes."""
        assert self.chunks is not None
        count = self.count // self.chunks.each
        return replace(self, count=count, used=min(self.used, count), d_expert=self.chunks.rows, chunks=None)

    def of_layer(self, layer: int) -> "Experts":
        """The same with the activation that the layer's have, within their limit."""
        return replace(self, activation=limit_gate(self.activation, self.limits[layer])) if self.limits else self


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434, 2.1): what is kept of a token is one vector for all heads.

    That vector is the latent of `rank` numbers, from which each head's key and value are made, and a key of `rope`
    numbers that is rotated and the same for all heads. A head's query and key have `nope` numbers that are not rotated
    before these; its value has `value`. Queries are made of a normed vector of `q_rank` numbers; 0: of the hidden
    state. Scores are multiplied by `score_scale` beside 1/sqrt(nope + rope). `eps`: of the norms of latents; 0: as of
    the others.
    """

    q_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    score_scale: float = 1.0
    eps: float = 0.0

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.nope + self.rope

    @property
    def cell(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rope


@dataclass(frozen=True)
class Delta:
    """A gated delta net (arXiv 2412.06464) in all layers but the `full` ones, which have attention.

    Each of `value_heads` heads keeps a matrix of `head` keys times `head` values. It takes queries and keys from one of
    `key_heads` heads: value head j from number j % key_heads when `tiled`, else from number j // group. `gate`: what
    becomes of the product that multiplies a head's normalised output, "silu" or "sigmoid".
    """

    key_heads: int
    value_heads: int
    head: int
    tiled: bool
    full: tuple[int, ...]
    gate: str = "silu"

    @property
    def group(self) -> int:
        """Value heads of each key head; 0 where a rank has none."""
        return self.value_heads // max(1, self.key_heads)


@dataclass(frozen=True)
class ShortConv:
    """Gated short convolutions (LFM2) in all layers but the `full` ones, which have attention: each of `channels`
    channels sees its last `taps` inputs."""

    taps: int
    full: tuple[int, ...]
    channels: int


@dataclass(frozen=True)
class Streams:
    """Gated hyper-connections: in place of one residual stream there are `count`, each as wide as the model.

    A block takes a mix of them, each normalised and multiplied by a gate of every number, which comes from two products
    with `rank` numbers between them. What the block gives is added to each stream, times a share of its own.
    """

    count: int
    rank: int


@dataclass(frozen=True)
class Selection:
    """An index by which a token chooses the cells that it attends to (Qwen's block selection).

    Tokens stand in blocks of `each`. A complete block has one key of `head` numbers, made of the mean of its tokens';
    its score is the sum over the `heads` queries of what is above 0 of their products. A token sees those `most`
    complete blocks that score best, and the tokens of its own one up to itself.
    """

    heads: int
    head: int
    each: int
    most: int

    @property
    def cells(self) -> int:
        """That a token sees at most."""
        return (self.most + 1) * self.each - 1


@dataclass(frozen=True)
class Grams:
    """Rows of a table that a token's last 2, 3, ... `longest` tokens choose, and what `layer` makes of them.

    Each length has so many `heads`: the tokens, each times one of `multipliers`, are combined by exclusive or, taken
    modulo the head's one of `sizes`, and moved by that of `offsets`. From the last `end` token or the text's beginning
    backwards all count as `end`. Rows have `row` numbers. Of what the layer makes of them a convolution sees its last
    `taps` inputs, each `longest` tokens apart.
    """

    layer: int
    longest: int
    heads: int
    row: int
    taps: int
    end: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def each(self) -> int:
        """Rows of a token."""
        return len(self.sizes)

    @property
    def width(self) -> int:
        """Numbers of them."""
        return self.each * self.row

    @property
    def reach(self) -> int:
        """Inputs before a token's own that the convolution sees."""
        return (self.taps - 1) * self.longest


@dataclass(frozen=True)
class ModelConfig:
    """Numbers of a decoder-only transformer that computing and planning need. Sizes in elements.

    With latent attention all heads share one key that is a cell: `n_kv_heads` is 1 and `head_dim` the cell's width.
    `gated`: what attention gives is multiplied by the sigmoid of one more product of its input.
    A model that multiplies by r what layers add to the residual stream runs on a stream that is divided by r, which
    norms do not see: its `embedding_scale` is divided by r, its `norm_eps` by r squared.
    """

    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab: int
    norm_eps: float
    context: int
    rope: Rope
    qk_norm: bool = False
    sliding_window: int = 0  # 0: full attention in every layer
    window_every: int = 1  # of so many layers the first has the window, the others have full attention
    experts: Experts | None = None
    latent: Latent | None = None
    gated: bool = False
    heads_gated: bool = False  # what a head gives is multiplied by one number, of one more product of its input
    gate_curve: str = "sigmoid"  # what becomes of such products first, or "softplus"
    delta: Delta | None = None
    conv: ShortConv | None = None
    full_every: int = 0  # of so many layers the last has full attention, the others the window; 0: see window_every
    first_full: bool = False  # of so many layers as `full_every` and `still_every` say the first is meant, not the last
    window_rope: Rope | None = None  # of layers with a window; None: that of the others
    still_every: int = 0  # of so many layers the last one's heads are not rotated; 0: all are
    temperature: Temperature | None = None  # of attention
    score_scale: float = 0.0  # what attention multiplies scores by; 0: 1/sqrt(head_dim)
    embedding_scale: float = 1.0  # what rows of the embedding are multiplied by
    logit_scale: float = 1.0  # what logits are multiplied by
    activation: str = "silu"  # of gates: "silu", "gelu" by its approximation with tanh, or "gelu16", half as exact
    ungated: bool = False  # FFNs have no gate
    heads_eps: float = 0.0  # of norms of heads; 0: as of others
    own_head_norms: bool = False  # q and k of every head are normalised by weights of their own, as the stream is
    clamp: float = 0.0  # q, k and v are within +-clamp; 0: as they are
    norms: str = "before"  # of attention and FFN: "before" them, "after" them, as it is added, "both", or "none"
    wide_qk_norm: bool = False  # norms of q and k are over all heads at once, not within each
    normed_heads: tuple[int, ...] = ()  # of a rank's slice: query and KV heads of all ranks, over which these norms are
    centred: bool = False  # norms of the residual stream take its mean away first
    parallel: bool = False  # a layer's attention and FFN take the same normed input
    windows_in: tuple[bool, ...] = ()  # whether each layer has the window; (): see full_every and window_every
    still_in: tuple[bool, ...] = ()  # whether each layer's heads are not rotated; (): see still_every
    chunked: bool = False  # windows are chunks of a text that follow each other
    window_head_dim: int = 0  # of layers with a window; 0: as of the others
    window_kv_heads: int = 0  # of layers with a window; 0: as of the others
    ffn_limits: tuple[float, ...] = ()  # silu(gate) of each layer is at most that, up within it; 0, (): as they are
    value_dim: int = 0  # numbers of a head's value, which cells keep as many of as of a key; 0: as many
    value_scale: float = 1.0  # what values are multiplied by
    window_heads: int = 0  # of layers with a window; 0: as of the others
    ffn_rows: tuple[int, ...] = ()  # of each layer; (): d_ffn, which is the most of any; 0: the layer has no FFN
    # query and KV heads of each layer; (): alike in all. Without KV heads attention is one product of the normed
    # stream, without any heads the layer has none.
    layer_heads: tuple[tuple[int, int], ...] = ()
    values_normed: bool = False  # each head's values are normalised, without weights
    logit_cap: float = 0.0  # logits become cap tanh(logits / cap); 0: they stay
    score_cap: float = 0.0  # the same of scores
    sloped: bool = False  # scores fall with the distance of cells, by a slope of each head (ALiBi, arXiv 2108.12409)
    borrowers: int = 0  # the last so many layers keep no cells, and read those of others: see `lender`
    row_width: int = 0  # numbers that each layer takes of a token's own row of a second table; 0: there is none
    streams: Streams | None = None
    selection: Selection | None = None  # by which full attention sees some cells
    grams: Grams | None = None  # whose rows one layer takes

    @property
    def rows_width(self) -> int:
        """Numbers of a token's own rows of a second table: what all layers take of them."""
        return self.grams.width if self.grams else self.n_layers * self.row_width

    @property
    def keeps_fixed(self) -> bool:
        """Whether some layers keep a state of a fixed size of each sequence."""
        return any(own is not None and len(own.full) < self.n_layers for own in (self.delta, self.conv))

    @property
    def keeps_input(self) -> bool:
        """Whether what layers begin with is used after their attention."""
        return self.experts is not None and self.experts.early != ""

    @property
    def normed_before(self) -> bool:
        """Whether attention and FFN take the residual stream as normalised."""
        return self.norms in ("before", "both")

    @property
    def normed_after(self) -> bool:
        """Whether what attention and FFN give is normalised before it is added."""
        return self.norms in ("after", "both")

    def normed_once_turned(self) -> "ModelConfig":
        """The same of a model that normalises heads once they are turned, which undoes what multiplies sine and cosine:
        f is left out, and what is added to the mean of squares divided by f squared."""
        by = self.rope.attention_factor or 1.0
        return replace(self, rope=replace(self.rope, attention_factor=1.0), heads_eps=self.norm_eps / by**2)

    @property
    def inner_eps(self) -> float:
        """What norms within attention add to the mean of squares."""
        return (self.latent.eps if self.latent else 0.0) or self.norm_eps

    @property
    def scores_by(self) -> float:
        """What attention multiplies scores by."""
        return self.score_scale or self.head_dim**-0.5

    @property
    def still_rope(self) -> Rope:
        """Of layers whose heads are not rotated: a few pairs of each, by no angle."""
        return Rope(min(8, self.head_dim), self.rope.base, self.rope.pairing, "linear", math.inf)

    @cached_property
    def windowed(self) -> "ModelConfig":
        """The same with the heads of layers with a window as those of all."""
        dim, kv = self.window_head_dim or self.head_dim, self.window_kv_heads or self.n_kv_heads
        own = replace(self, n_heads=self.window_heads or self.n_heads, n_kv_heads=kv, head_dim=dim)
        return replace(own, window_head_dim=0, window_kv_heads=0, window_heads=0)

    def ffn_activation(self, layer: int) -> str:
        """Of gates of the layer's FFN or shared experts, as kernels take it."""
        return limit_gate(self.activation, self.ffn_limits[layer] if self.ffn_limits else 0.0)

    def has_window(self, layer: int) -> bool:
        """Whether the layer is one of those that see a window, where the model has one."""
        if self.windows_in:
            return self.windows_in[layer]
        if self.full_every:
            return not self._is_nth(layer, self.full_every)
        return layer % self.window_every == 0

    def lender(self, layer: int) -> int:
        """The layer whose cells a layer reads: itself, or of a borrower the last one like it that keeps some."""
        keeping = self.n_layers - self.borrowers
        alike = (i for i in reversed(range(keeping)) if self.has_window(i) == self.has_window(layer))
        return layer if layer < keeping else next(alike)

    def is_lender(self, layer: int) -> bool:
        """Whether other layers read the layer's cells."""
        keeping = self.n_layers - self.borrowers
        return layer < keeping and any(self.lender(i) == layer for i in range(keeping, self.n_layers))

    def is_still(self, layer: int) -> bool:
        """Whether the layer's heads are not rotated."""
        if self.still_in:
            return self.still_in[layer]
        return self.still_every > 0 and self._is_nth(layer, self.still_every)

    def _is_nth(self, layer: int, every: int) -> bool:
        return (layer if self.first_full else layer + 1) % every == 0

    @property
    def window(self) -> int:
        """Tokens that layers with a window see; 0 where no layer sees fewer than the context has, unless such layers
        are turned otherwise."""
        if self.window_rope and self.sliding_window:
            return min(self.sliding_window, self.context)
        return self.sliding_window if 0 < self.sliding_window < self.context else 0

    def resize(self, sizes: Mapping[str, int]) -> "ModelConfig":
        """The same with other numbers, by the names of fields here, in `experts`, `delta` or `conv`."""

        def those_of(noun: Any) -> dict[str, Any]:
            names = {f.name for f in fields(noun)} if noun else set()
            return {name: size for name, size in sizes.items() if name in names}

        experts = replace(self.experts, **those_of(self.experts)) if self.experts else None
        delta = replace(self.delta, **those_of(self.delta)) if self.delta else None
        conv = replace(self.conv, **those_of(self.conv)) if self.conv else None
        return replace(self, **those_of(self), experts=experts, delta=delta, conv=conv)
