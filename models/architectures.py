"""The architectures that pshard knows, as data: what differs between them stands in this table and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pshard.errors import UserError


@dataclass(frozen=True)
class Routing:
    """How an architecture's layers choose among experts where its files do not say.

    `scores`, `normed`, `early`, `beside` and what follows `choice_bias` are as in `Experts`; files of latent attention
    are V3's where they have a bias for the choice, and else V2's. `shared`: it has shared experts.
    `norm_fixed`: `normed` is so whatever files say; `norm_told`: whatever GGUF files say, but folders tell. `fixed`: of
    "scores", "norm" and "scale" those that keys of GGUF files do not change, as llama.cpp does not read them.
    `shared_unsaid`: shared experts where a GGUF file has no number of them; None: it must have one. `shared_sized`: it
    says how many rows they have, whatever their number. `sizes_as_dense`: experts have as many rows as the FFN of its
    dense relative. `listed`: files say of each layer whether it has experts. `beside` says how many rows the FFN beside
    experts has: as many as an expert ("expert"), which then is the expert that all tokens share, or as the stream is
    wide ("width").
    """

    scores: str = "softmax"
    normed: bool = True
    sizes_as_dense: bool = False
    shared: bool = False
    choice_bias: bool = False
    shared_gate: bool = False
    activation: str = "silu"
    biases: bool = False
    norm_fixed: bool = False
    norm_told: bool = False
    shared_unsaid: int | None = None
    shared_sized: bool = False
    early: str = ""
    beside: str = ""
    weighs_inputs: bool = False
    chunked: bool = False
    listed: bool = False
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """A decoder: RMSNorm, rotary grouped-query attention, SwiGLU or routed experts of it; and its variations.

    `name` is the model_type of Hugging Face (of the text part, where there is another), `gguf` what GGUF files say.
    `gguf_pairing`, `hf_pairing`: RoPE pairs as files of this architecture store q and k. `biases` must be there,
    `optional_biases` may, `file_biases` in GGUF files alone. `optional_qk_norm`: some of its models normalise q and k.
    `rotated`: the share of each head that is rotated where config.json does not say; below 1, and with `partial`, other
    shares are possible too.
    `ffn_norm`: what GGUF files call the norm before the FFN. `sinks`: a logit of each head joins the softmax without a
    value. `window_every`: of so many layers the first has the sliding window. `latent`: multi-head latent attention.
    `delta`: most layers have a gated delta net, whose value heads stand in GGUF files "grouped" by the key heads that
    they use or "tiled", one of each in turn; the others' attention is gated, and folders have norms' weights less 1.
    `conv`: most layers have a short convolution instead of attention. `routing`: its layers have experts.

    As in `ModelConfig`: `first_full`, `full_every`, whose layers with windows have positions of their own unless the
    others are still, `still_every`, `activation`, `ungated`, `wide_qk_norm`, `norms`, `centred`, `parallel`,
    `gate_curve`.
    `fused`: q, k and v are one tensor, or gate and up.
    `multiplied`: what is multiplied by a number that files give: "embedding", "residual" (what layers add), "score",
    "logits", or "1/logits", which these are divided by. `warmed`: queries are multiplied by a temperature where files
    give one. `embedded_by_root`: embeddings by the root of their width. `norms_less_one`: folders have norms' weights
    less 1. `windows`: files may give all its layers a window; `folder_windows`: folders may, "all" of them or those
    that they have "listed". `by_layer`: files say which layers have a window, whose heads are others; values are
    normalised, and are what keys are made of where a layer has no matrix for them.
    `defaults`: what config.json may leave out.
    `remote`: its folders need code of their own, so only its GGUF files are read. `sloped`: scores fall with
    distance (ALiBi), and heads are not rotated; `sloped_layers`: so is one with so many, and its files do not say
    so. `may_lack_windows`: some of its models have none, and then all layers alike. `may_be_parallel`,
    `own_head_norms`: some of its models are so, or have such. `turned_norms`: norms of heads follow their rotation.
    `unweighted`: norms of the stream have no weights. `clamped`: files may say within what q, k and v are;
    `capped`: at what scores and logits are capped. `window_unsaid`: tokens of a window where GGUF files do not say.
    `chunked`: windows are chunks. `bare_head_norms`: norms of heads have no weights, follow the rotation, and are in
    layers with one alone. `window_base`: of angles in layers with windows where files do not say; 0: as in others.
    `sorted`: layers are of two sorts, with a window and without. Files list which layer is of which sort, and give each
    sort a number of heads and a rotation (families/layer_sorts.py). `gated_heads`: what heads give is gated.
    `short_values`: MiMo-V2's ways: values may be shorter than keys, and layers may have sinks.
    `limited`: Step 3.5's ways: layers may bound what gates give, and may lack gates of heads.
    `uneven`: files say of each layer how many heads and rows of an FFN it has, if any.
    `one_base`: GGUF files have no base of their own for layers with a window. `yarn_keys`: the numbers of YaRN
    (`rope.scaling.yarn_*`) that llama.cpp reads of its GGUF files. `sections`: how pairs of heads are shared out among
    positions of several dimensions, "blocks" or "interleaved".
    `streamed`: Qwen3.8-Flash-Next's ways: several residual streams, an index by which attention chooses cells, a table
    of n-grams (hybrid/many_streams.py).
    """

    name: str
    gguf: str
    gguf_pairing: str
    biases: tuple[str, ...] = ()
    optional_biases: tuple[str, ...] = ()
    file_biases: tuple[str, ...] = ()
    qk_norm: bool = False
    optional_qk_norm: bool = False
    wide_qk_norm: bool = False
    rotated: float = 1.0
    ffn_norm: str = "ffn_norm.weight"
    sinks: bool = False
    window_every: int = 1
    latent: bool = False
    delta: str = ""
    conv: bool = False
    routing: Routing | None = None
    hf_pairing: str = "halves"
    full_every: int = 0
    still_every: int = 0
    first_full: bool = False
    activation: str = "silu"
    norms: str = "before"
    centred: bool = False
    parallel: bool = False
    fused: bool = False
    partial: bool = False
    warmed: bool = False
    multiplied: tuple[str, ...] = ()
    embedded_by_root: bool = False
    norms_less_one: bool = False
    windows: bool = False
    folder_windows: str = ""
    remote: bool = False
    sloped: bool = False
    sloped_layers: int = 0
    may_lack_windows: bool = False
    may_be_parallel: bool = False
    own_head_norms: bool = False
    turned_norms: bool = False
    unweighted: bool = False
    chunked: bool = False
    bare_head_norms: bool = False
    clamped: bool = False
    capped: bool = False
    window_unsaid: int = 0
    ungated: bool = False
    window_base: float = 0.0
    by_layer: bool = False
    sorted: bool = False
    uneven: bool = False
    gate_curve: str = "sigmoid"
    gated_heads: bool = False
    short_values: bool = False
    limited: bool = False
    streamed: bool = False
    one_base: bool = False
    yarn_keys: tuple[str, ...] = ()
    sections: str = ""
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def of_windows(self, window: object) -> "Architecture":
        """The same of a model whose file says so of its window; 0: it has none, None: nothing."""
        lacks = not window and not (window is None and self.window_unsaid)
        return replace(self, full_every=0, still_every=0) if self.may_lack_windows and lacks else self

    def of_layers(self, n_layers: int) -> "Architecture":
        """The same of a model with so many layers, of which ALiBi leaves all heads as they are. Of as few as one in so
        many is still, llama.cpp rotates all where the first would be."""
        if self.first_full and n_layers == self.still_every:
            return replace(self, still_every=0)
        sloped = self.sloped or n_layers == self.sloped_layers > 0
        return replace(self, sloped=True, still_every=1) if sloped else self

    def of_settings(self, settings: Mapping[str, Any]) -> "Architecture":
        """The same of a folder, whose settings may say that it lacks biases."""
        said = {"attention_bias": _ATTENTION_BIASES, "qkv_bias": _QKV, "mlp_bias": _FFN_BIASES}
        lacks = {bias for key, biases in said.items() if settings.get(key) is False for bias in biases}
        kept = tuple(bias for bias in self.biases if bias not in lacks)
        optional = (*self.optional_biases, *(lacks & set(self.biases)))
        return replace(self, biases=kept, optional_biases=optional, file_biases=())

    @property
    def declared(self) -> dict[str, Any]:
        """What `ModelConfig` has of it under the same names, whatever a file says."""
        return {name: getattr(self, name) for name in _DECLARED}


_DECLARED = (
    *("window_every", "full_every", "still_every", "first_full", "activation", "ungated"),
    *("wide_qk_norm", "norms", "centred", "parallel", "sloped", "gate_curve", "chunked"),
)
_QKV = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_ATTENTION_BIASES = (*_QKV, "attn_output.bias")
_NORM_BIASES = ("attn_norm.bias", "ffn_norm.bias", "output_norm.bias")
_FFN_BIASES = ("ffn_up.bias", "ffn_down.bias")
_GATED_BIASES = (*_ATTENTION_BIASES, "ffn_gate.bias", *_FFN_BIASES)
_ALL_BIASES = (*_ATTENTION_BIASES, *_FFN_BIASES)
_FIXED = ("scores", "norm", "scale")
_QWEN2_MOE = Routing(normed=False, shared=True, shared_gate=True, fixed=_FIXED)


def _defaults(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


_GEMMA3 = _defaults(  # of google/gemma-3-4b-it: Gemma3TextConfig of transformers
    vocab_size=262208,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    max_position_embeddings=131072,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
_OSS = _defaults(  # GptOssConfig of transformers
    rope_theta=150000.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)
_MINISTRAL3 = _defaults(  # Ministral3Config of transformers
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)
_APERTUS = _defaults(  # ApertusConfig of transformers
    rms_norm_eps=1e-5,
    rope_theta=1.2e7,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 1.2e7,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
)
_UNWINDOWED = _defaults(use_sliding_window=False)
_COHERE = _defaults(rope_theta=5e5, logit_scale=0.0625, layer_norm_eps=1e-5, tie_word_embeddings=True)
_OLMO = _defaults(layer_norm_eps=1e-5)
_OLMO3 = _defaults(sliding_window=4096, rms_norm_eps=1e-5, rope_theta=5e5)
_EXAONE4 = _defaults(sliding_window=4096, rms_norm_eps=1e-5)
_EXAONE_MOE = _defaults(
    **_EXAONE4, first_k_dense_replace=1, num_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5
)
_MINIMAX_M2 = _defaults(rope_theta=5e6)
_COHERE2 = _defaults(logit_scale=0.0625, sliding_window=4096, layer_norm_eps=1e-5, tie_word_embeddings=True)
_GEMMA = _defaults(head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=8192, tie_word_embeddings=True)
_LFM2 = _defaults(
    norm_eps=1e-5, rope_theta=1e6, tie_word_embeddings=True, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0
)
_LFM2_MOE = _defaults(norm_eps=1e-5, rope_theta=1e6, tie_word_embeddings=True, num_dense_layers=2, norm_topk_prob=True)
_GEMMA2 = _defaults(
    **_GEMMA,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)
_GEMMA4 = _defaults(  # Gemma4TextConfig of transformers
    head_dim=256,
    rms_norm_eps=1e-6,
    max_position_embeddings=131072,
    sliding_window=512,
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
_LAGUNA = _defaults(  # LagunaConfig of transformers
    head_dim=128,
    num_attention_heads=48,
    num_key_value_heads=8,
    intermediate_size=8192,
    rms_norm_eps=1e-6,
    max_position_embeddings=131072,
    sliding_window=512,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    norm_topk_prob=True,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
_STEP = _defaults(  # Step3p7TextConfig of transformers
    head_dim=128,
    num_attention_heads=64,
    num_key_value_heads=8,
    intermediate_size=11264,
    rms_norm_eps=1e-5,
    max_position_embeddings=128000,
    n_routed_experts=288,
    num_experts_per_tok=8,
    moe_intermediate_size=1280,
    share_expert_dim=1280,
    norm_topk_prob=True,
    use_qk_norm=True,
)
_MIMO2 = _defaults(  # MiMoV2FlashConfig of transformers
    head_dim=192,
    v_head_dim=128,
    num_attention_heads=64,
    num_key_value_heads=4,
    intermediate_size=16384,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    sliding_window=129,
    n_routed_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    norm_topk_prob=True,
    attention_value_scale=0.707,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
    },
)
_ERNIE_ALL = _defaults(rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True)
_ERNIE = _defaults(**_ERNIE_ALL, head_dim=128)
_GRANITE = ("embedding", "residual", "score", "1/logits")
_DEEPSEEK_V3 = Routing(scores="sigmoid", normed=False, shared=True, choice_bias=True)
_ERNIE_MOE = _defaults(
    **_ERNIE_ALL,
    moe_num_experts=64,
    moe_k=6,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_intermediate_size=1536,
)
_GLM_LITE = _defaults(first_k_dense_replace=1, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.8)
_LLAMA4 = _defaults(  # Llama4TextConfig of transformers
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    num_experts_per_tok=1,
    num_local_experts=16,
    use_qk_norm=True,
    rope_theta=5e5,
)
_HY_V3 = _defaults(
    norm_topk_prob=True,
    num_shared_experts=1,
    first_k_dense_replace=1,
    router_scaling_factor=2.826,
    rope_theta=11158840.0,
)
_QWEN3_NEXT = Routing(shared=True, shared_gate=True, fixed=_FIXED)


def _hybrid(name: str, gguf: str, delta: str, routing: Routing | None = None) -> Architecture:
    """Qwen's hybrids: a gated delta net in three of four layers."""
    return Architecture(
        name,
        gguf,
        "halves",
        qk_norm=True,
        rotated=0.25,
        ffn_norm="post_attention_norm.weight",
        delta=delta,
        sections="interleaved" if delta == "tiled" else "",
        routing=routing,
    )


_GEMMA4_DENSE = Architecture(
    "gemma4_text",
    "gemma4",
    "halves",
    qk_norm=True,
    activation="gelu",
    norms="both",
    embedded_by_root=True,
    windows=True,
    window_base=10000.0,
    by_layer=True,
    defaults=_GEMMA4,
)
ARCHITECTURES = (
    Architecture("llama", "llama", "adjacent", optional_biases=_GATED_BIASES),
    Architecture("mistral", "llama", "adjacent", windows=True),
    Architecture("qwen2", "qwen2", "halves", biases=_QKV, folder_windows="listed", defaults=_UNWINDOWED),
    Architecture(
        "qwen3",
        "qwen3",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        qk_norm=True,
        folder_windows="listed",
        defaults=_UNWINDOWED,
    ),
    Architecture(
        "mixtral",
        "llama",
        "adjacent",
        file_biases=_ATTENTION_BIASES,
        routing=Routing(sizes_as_dense=True, fixed=_FIXED),
        folder_windows="all",
        defaults=_defaults(rope_theta=1e6),
    ),
    Architecture(
        "qwen2_moe",
        "qwen2moe",
        "halves",
        biases=_QKV,
        routing=_QWEN2_MOE,
        folder_windows="listed",
        defaults=_UNWINDOWED,
    ),
    Architecture(
        "qwen3_moe",
        "qwen3moe",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        qk_norm=True,
        routing=Routing(fixed=_FIXED),
        folder_windows="all",
        defaults=_UNWINDOWED,
    ),
    Architecture(
        "glm4_moe",
        "glm4moe",
        "halves",
        sections="blocks",
        optional_biases=_QKV,
        optional_qk_norm=True,
        rotated=0.5,
        ffn_norm="post_attention_norm.weight",
        routing=Routing(scores="sigmoid", normed=False, choice_bias=True, shared=True),
    ),
    Architecture("deepseek_v2", "deepseek2", "adjacent", latent=True, routing=Routing(normed=False, shared=True)),
    Architecture(
        "deepseek_v3",
        "deepseek2",
        "adjacent",
        latent=True,
        routing=_DEEPSEEK_V3,
        defaults=_defaults(routed_scaling_factor=2.5),
    ),
    Architecture("kimi_k2", "deepseek2", "adjacent", latent=True, routing=_DEEPSEEK_V3),
    Architecture("glm4_moe_lite", "deepseek2", "adjacent", latent=True, routing=_DEEPSEEK_V3, defaults=_GLM_LITE),
    Architecture(
        "dots1",
        "dots1",
        "halves",
        qk_norm=True,
        routing=_DEEPSEEK_V3,
        folder_windows="listed",
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "hy_v3",
        "hy_v3",
        "halves",
        qk_norm=True,
        routing=replace(_DEEPSEEK_V3, shared_unsaid=1, shared_sized=True),
        defaults=_HY_V3,
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "ernie4_5_moe",
        "ernie4_5-moe",
        "adjacent",
        file_biases=_QKV,
        hf_pairing="adjacent",
        routing=Routing(shared=True, choice_bias=True, norm_fixed=True, shared_unsaid=0, fixed=("scores", "scale")),
        defaults=_ERNIE_MOE,
    ),
    Architecture(
        "deepseek",
        "deepseek",
        "adjacent",
        optional_biases=_QKV,
        routing=Routing(normed=False, norm_fixed=True, shared=True, fixed=("scores",)),
        remote=True,
    ),
    Architecture(
        "bailing_moe",
        "bailingmoe",
        "adjacent",
        optional_biases=_QKV,
        routing=Routing(normed=False, shared=True, fixed=("scores",)),
        remote=True,
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        "adjacent",
        multiplied=_GRANITE,
        routing=Routing(sizes_as_dense=True, norm_fixed=True, shared=True, shared_unsaid=0, fixed=("scores", "scale")),
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        "halves",
        biases=_ATTENTION_BIASES,
        ffn_norm="post_attention_norm.weight",
        sinks=True,
        window_every=2,
        defaults=_OSS,
        routing=Routing(
            scores="chosen", sizes_as_dense=True, activation="clamped", biases=True, fixed=("scores", "scale")
        ),
    ),
    _hybrid("qwen3_next", "qwen3next", "grouped", _QWEN3_NEXT),
    _hybrid("qwen3_5_text", "qwen35", "tiled"),
    _hybrid("qwen3_5_moe_text", "qwen35moe", "tiled", replace(_QWEN3_NEXT, norm_fixed=True)),
    replace(
        _hybrid("qwen4_exp_text", "qwen4exp", "tiled", _QWEN3_NEXT),
        norms="none",
        streamed=True,
        rotated=1.0,
        partial=True,
    ),
    Architecture(
        "smollm3",
        "smollm3",
        "adjacent",
        optional_biases=_GATED_BIASES,
        still_every=4,
        folder_windows="listed",
        defaults=_defaults(**_UNWINDOWED, rope_theta=2e6, tie_word_embeddings=True),
    ),
    Architecture("granite", "granite", "adjacent", multiplied=_GRANITE, optional_biases=_GATED_BIASES),
    Architecture(
        "seed_oss",
        "seed_oss",
        "halves",
        optional_biases=_GATED_BIASES,
        ffn_norm="post_attention_norm.weight",
        defaults=_defaults(attention_bias=True),
    ),
    Architecture(
        "qwen3_vl_text",
        "qwen3vl",
        "halves",
        qk_norm=True,
        sections="interleaved",
        defaults=_defaults(rope_theta=5e5),
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "qwen3_vl_moe_text",
        "qwen3vlmoe",
        "halves",
        qk_norm=True,
        sections="interleaved",
        routing=Routing(fixed=_FIXED),
        defaults=_defaults(rope_theta=5e5, norm_topk_prob=True),
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "ministral3",
        "mistral3",
        "adjacent",
        file_biases=_GATED_BIASES,
        warmed=True,
        folder_windows="all",
        defaults=_MINISTRAL3,
        yarn_keys=("log_multiplier", "beta_fast", "beta_slow"),
    ),
    Architecture(
        "glm4",
        "glm4",
        "adjacent",
        optional_biases=_QKV,
        rotated=0.5,
        hf_pairing="adjacent",
        norms="both",
        fused=True,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        "adjacent",
        one_base=True,
        hf_pairing="adjacent",
        full_every=4,
        still_every=4,
        centred=True,
        parallel=True,
        multiplied=("logits",),
        defaults=_COHERE2,
        optional_biases=_ATTENTION_BIASES,
    ),
    *(
        Architecture(
            name,
            "olmo2",
            "halves",
            one_base=True,
            optional_biases=_ATTENTION_BIASES,
            qk_norm=True,
            wide_qk_norm=True,
            norms="after",
            full_every=4,
            may_lack_windows=True,
            window_base=base,
            defaults=defaults,
        )
        for name, base, defaults in (("olmo2", 0.0, _defaults()), ("olmo3", 5e5, _OLMO3))
    ),
    Architecture(
        "minimax_m2",
        "minimax-m2",
        "halves",
        file_biases=_QKV,
        qk_norm=True,
        wide_qk_norm=True,
        partial=True,
        routing=Routing(scores="sigmoid", choice_bias=True, norm_fixed=True, sizes_as_dense=True, fixed=("scale",)),
        defaults=_MINIMAX_M2,
    ),
    Architecture(
        "cohere",
        "command-r",
        "adjacent",
        optional_biases=_ATTENTION_BIASES,
        hf_pairing="adjacent",
        centred=True,
        parallel=True,
        own_head_norms=True,
        multiplied=("logits",),
        defaults=_COHERE,
    ),
    Architecture(
        "exaone4",
        "exaone4",
        "halves",
        one_base=True,
        file_biases=_QKV,
        qk_norm=True,
        norms="after",
        full_every=4,
        still_every=4,
        may_lack_windows=True,
        defaults=_EXAONE4,
    ),
    Architecture(
        "exaone_moe",
        "exaone-moe",
        "halves",
        one_base=True,
        file_biases=_QKV,
        qk_norm=True,
        full_every=4,
        still_every=4,
        may_lack_windows=True,
        routing=replace(_DEEPSEEK_V3, shared_unsaid=1, shared_sized=True),
        defaults=_EXAONE_MOE,
    ),
    Architecture(
        "arctic",
        "arctic",
        "adjacent",
        optional_biases=_QKV,
        routing=Routing(
            norm_fixed=True, sizes_as_dense=True, early="inputs", beside="width", fixed=("scores", "scale")
        ),
        remote=True,
    ),
    Architecture(
        "grove_moe",
        "grovemoe",
        "halves",
        optional_biases=_QKV,
        qk_norm=True,
        routing=Routing(norm_fixed=True, chunked=True, fixed=("scale",)),
        remote=True,
    ),
    Architecture("nemotron-nas", "deci", "adjacent", optional_biases=_GATED_BIASES, uneven=True, remote=True),
    Architecture(
        "smallthinker",
        "smallthinker",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        full_every=4,
        still_every=4,
        first_full=True,
        may_lack_windows=True,
        routing=Routing(
            scores="sigmoid",
            norm_fixed=True,
            activation="relu",
            early="scores",
            sizes_as_dense=True,
            fixed=("scale",),
        ),
        remote=True,
    ),
    Architecture(
        "llama4_text",
        "llama4",
        "adjacent",
        optional_biases=_ATTENTION_BIASES,
        optional_qk_norm=True,
        bare_head_norms=True,
        hf_pairing="adjacent",
        full_every=4,
        still_every=4,
        chunked=True,
        window_unsaid=8192,
        may_lack_windows=True,
        routing=Routing(
            scores="sigmoid",
            normed=False,
            norm_fixed=True,
            sizes_as_dense=True,
            beside="expert",
            weighs_inputs=True,
        ),
        defaults=_LLAMA4,
    ),
    Architecture("plamo", "plamo", "halves", optional_biases=_QKV, parallel=True, remote=True),
    Architecture(
        "olmo",
        "olmo",
        "adjacent",
        centred=True,
        unweighted=True,
        clamped=True,
        defaults=_OLMO,
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture("orion", "orion", "halves", optional_biases=_QKV, biases=_NORM_BIASES, centred=True, remote=True),
    Architecture(
        "stablelm",
        "stablelm",
        "halves",
        biases=_NORM_BIASES,
        optional_biases=_QKV,
        rotated=0.25,
        partial=True,
        centred=True,
        may_be_parallel=True,
        own_head_norms=True,
        defaults=_defaults(layer_norm_eps=1e-5, partial_rotary_factor=0.25),
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        "halves",
        biases=_NORM_BIASES,
        optional_biases=_ALL_BIASES,
        centred=True,
        activation="gelu",
        ungated=True,
        windows=True,
        defaults=_defaults(norm_epsilon=1e-5, tie_word_embeddings=True),
    ),
    Architecture(
        "jais2",
        "jais2",
        "halves",
        biases=(*_NORM_BIASES, *_ALL_BIASES),
        centred=True,
        activation="relu2",
        ungated=True,
        defaults=_defaults(layer_norm_eps=1e-5),
    ),
    Architecture(
        "nemotron",
        "nemotron",
        "halves",
        biases=_NORM_BIASES,
        optional_biases=_ALL_BIASES,
        rotated=0.5,
        partial=True,
        centred=True,
        norms_less_one=True,
        activation="relu2",
        ungated=True,
        defaults=_defaults(norm_eps=1e-5),
    ),
    Architecture(
        "arcee",
        "arcee",
        "adjacent",
        optional_biases=_ALL_BIASES,
        activation="relu2",
        ungated=True,
        defaults=_defaults(rms_norm_eps=1e-5),
    ),
    Architecture(
        "apertus",
        "apertus",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        qk_norm=True,
        activation="xielu",
        ungated=True,
        defaults=_APERTUS,
    ),
    Architecture(
        "hunyuan_v1_dense",
        "hunyuan-dense",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        qk_norm=True,
        turned_norms=True,
        defaults=_defaults(rms_norm_eps=1e-5),
    ),
    Architecture(
        "hunyuan_v1_moe",
        "hunyuan-moe",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        qk_norm=True,
        turned_norms=True,
        routing=Routing(
            norm_fixed=True,
            sizes_as_dense=True,
            shared=True,
            shared_unsaid=1,
            shared_sized=True,
            fixed=("scores", "scale"),
        ),
        defaults=_defaults(rms_norm_eps=1e-5, num_shared_experts=1),
    ),
    Architecture(
        "maincoder", "maincoder", "adjacent", optional_biases=_QKV, qk_norm=True, turned_norms=True, remote=True
    ),
    Architecture(
        "phi3",
        "phi3",
        "halves",
        fused=True,
        partial=True,
        windows=True,
        defaults=_defaults(original_max_position_embeddings=4096),
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        "halves",
        qk_norm=True,
        full_every=6,
        window_base=10000.0,
        activation="gelu",
        norms="both",
        embedded_by_root=True,
        norms_less_one=True,
        defaults=_GEMMA3,
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "gemma",
        "gemma",
        "halves",
        activation="gelu",
        embedded_by_root=True,
        norms_less_one=True,
        defaults=_GEMMA,
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "gemma2",
        "gemma2",
        "halves",
        window_every=2,
        window_unsaid=4096,
        activation="gelu",
        norms="both",
        capped=True,
        embedded_by_root=True,
        norms_less_one=True,
        defaults=_GEMMA2,
        optional_biases=_ATTENTION_BIASES,
    ),
    Architecture("lfm2", "lfm2", "halves", file_biases=_QKV, qk_norm=True, conv=True, defaults=_LFM2),
    Architecture(
        "lfm2_moe",
        "lfm2moe",
        "halves",
        file_biases=_QKV,
        qk_norm=True,
        conv=True,
        routing=Routing(scores="sigmoid", choice_bias=True, norm_fixed=True, norm_told=True, fixed=("scale",)),
        defaults=_LFM2_MOE,
    ),
    _GEMMA4_DENSE,
    replace(_GEMMA4_DENSE, routing=Routing(norm_fixed=True, fixed=("scores", "scale"))),
    Architecture(
        "laguna",
        "laguna",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        qk_norm=True,
        partial=True,
        windows=True,
        sorted=True,
        gated_heads=True,
        gate_curve="softplus",
        routing=replace(_DEEPSEEK_V3, listed=True),
        defaults=_LAGUNA,
    ),
    Architecture(
        "step3p5",
        "step35",
        "halves",
        optional_biases=_ATTENTION_BIASES,
        optional_qk_norm=True,
        partial=True,
        windows=True,
        sorted=True,
        gated_heads=True,
        limited=True,
        norms_less_one=True,
        routing=Routing(scores="sigmoid", normed=False, choice_bias=True, listed=True),
        defaults=_STEP,
    ),
    Architecture(
        "mimo_v2_flash",
        "mimo2",
        "halves",
        optional_biases=_QKV,
        rotated=0.334,
        partial=True,
        windows=True,
        sorted=True,
        short_values=True,
        routing=Routing(scores="sigmoid", choice_bias=True, norm_fixed=True, listed=True),
        defaults=_MIMO2,
    ),
    Architecture("ernie4_5", "ernie4_5", "adjacent", file_biases=_QKV, hf_pairing="adjacent", defaults=_ERNIE),
    Architecture(
        "paddleocr_vl_text", "paddleocr", "halves", file_biases=_ATTENTION_BIASES, sections="blocks", defaults=_ERNIE
    ),
    *(
        Architecture(
            name,
            "qwen2vl",
            "halves",
            biases=_QKV,
            folder_windows="listed",
            sections="blocks",
            defaults=_defaults(**_UNWINDOWED, rope_theta=1e6),
        )
        for name in ("qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl")
    ),
    Architecture("exaone", "exaone", "halves", optional_biases=_QKV, remote=True),
    Architecture("internlm2", "internlm2", "adjacent", optional_biases=_QKV, remote=True),
    Architecture(
        "minicpm",
        "minicpm",
        "adjacent",
        multiplied=("embedding", "residual", "1/logits"),
        optional_biases=_GATED_BIASES,
        remote=True,
    ),
    Architecture("xverse", "xverse", "adjacent", optional_biases=_QKV, remote=True),
    Architecture("baichuan", "baichuan", "adjacent", optional_biases=_QKV, remote=True, sloped_layers=40),
    Architecture("refact", "refact", "halves", optional_biases=_QKV, sloped=True, remote=True),
    Architecture("PanguEmbedded", "pangu-embedded", "halves", optional_biases=_ATTENTION_BIASES, remote=True),
)


# What models have that is not computed, by what files call them, with - for _.
_MAMBA = "state-space layers (Mamba-2)"
_SELECTS = "attention that selects its tokens by an index (DSA)"
_LACKING = {
    **dict.fromkeys(("deepseek4", "deepseek-v4"), "hyper-connections and compressed attention"),
    **dict.fromkeys(("qwen4-exp", "qwen4-exp-text"), "hyper-connections that are read from GGUF files alone"),
    **dict.fromkeys(("glm5-next", "glm5next"), "hyper-connections and a delta net that decays by channel"),
    "kimi-linear": "a delta net that decays by channel",
    **dict.fromkeys(("deepseek32", "deepseek-v32", "glm-dsa", "glm-moe-dsa"), _SELECTS),
    **dict.fromkeys(("granitehybrid", "granitemoehybrid", "nemotron-h", "nemotron-h-moe", "falcon-h1"), _MAMBA),
    "mistral4": "latent attention with a temperature",
}


def find_gguf_architecture(name: object, where: str, has_experts: bool = False) -> Architecture:
    """The architecture that a GGUF file calls `name`; a name that two have is that of the one with experts or without.

    Raises UserError that lists the supported ones.
    """
    by_name = {a.gguf: a for a in reversed(ARCHITECTURES)}
    by_name |= {a.gguf: a for a in reversed(ARCHITECTURES) if bool(a.routing) == has_experts}
    return _find(by_name, name, where)


def find_hf_architecture(name: object, where: str, has_experts: bool = False) -> Architecture:
    """The architecture that a config.json calls `name` (model_type); a name that two have is that of the one with
    experts or without. Raises UserError that lists the supported ones."""
    here = [a for a in ARCHITECTURES if not a.remote]
    by_name = {a.name: a for a in here} | {a.name: a for a in here if bool(a.routing) == has_experts}
    return _find(by_name, name, where)


def _find(table: dict[str, Architecture], name: object, where: str) -> Architecture:
    if isinstance(name, str) and name in table:
        return table[name]
    if isinstance(name, str) and (lacks := _LACKING.get(name.replace("_", "-"))):
        raise UserError(f"{where}: architecture {name!r} is not supported yet: it has {lacks}; take another model")
    supported = ", ".join(sorted(table))
    raise UserError(f"{where}: architecture {name!r} is not supported yet; take a model of one of these: {supported}")
