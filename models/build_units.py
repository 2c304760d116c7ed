"""Turns stored tensors into the units of a ModelSpec, in execution order, and checks every shape and type."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pshard.errors import UserError
from pshard.model_config import Delta, Experts, Grams, Latent, ModelConfig, ShortConv
from pshard.models.architectures import Architecture
from pshard.models.stored import FETCH_AGAIN, StoredTensor
from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.tensor import TensorSpec
from pshard.units.attention import (
    ATTENTION,
    BORROWING_ATTENTION,
    BORROWING_WINDOWED,
    GATE,
    HEAD_GATE,
    IN_ORDER,
    INDEX,
    INDEX_NORMS,
    LENDING_ATTENTION,
    LENDING_WINDOWED,
    MAPPING,
    OUT_ORDER,
    QKV,
    SINKS,
    STILL_ATTENTION,
    WINDOWED_ATTENTION,
)
from pshard.units.delta_net import DELTA_NET
from pshard.units.embedding import EMBEDDING
from pshard.units.enter import LAYER_SCALE
from pshard.units.ffn import FFN
from pshard.units.ffn import ORDER as FFN_ORDER
from pshard.units.grams import GRAM_ROWS, GRAMS
from pshard.units.latent_attention import LATENT_ATTENTION
from pshard.units.layer_rows import LAYER_ROWS, MIXED_ROWS, TOKEN_ROWS
from pshard.units.layer_rows import TABLE as ROW_TABLE
from pshard.units.moe.blend import BLEND
from pshard.units.moe.chunks import CHUNKS
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import FACTORS as ROUTER_FACTORS
from pshard.units.moe.router import NORMS as ROUTER_NORMS
from pshard.units.moe.router import ROUTER
from pshard.units.moe.shared_experts import SHARED_EXPERTS
from pshard.units.output import OUTPUT
from pshard.units.ports import (
    ADDS_GRAMS,
    ENTERS,
    FOLLOWS,
    GIVES_DENSE,
    GIVES_EXPERTED,
    GIVES_SUM,
    MIXES,
    MIXES_LAST,
    MIXES_ON,
    NORMS_WIDE,
    ROUTES,
    SCORES_EARLY,
    SPREADS,
    SPREADS_GRAMS,
    TAKES_EARLY,
    Ports,
)
from pshard.units.short_conv import PARTS as CONV_PARTS
from pshard.units.short_conv import SHORT_CONV
from pshard.units.streams import MIX
from pshard.units.unit import Cells, Unit, UnitKind

TABLE, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Expected(NamedTuple):
    """A tensor's name and its shape in the file; with parts, the first dimension counts these."""

    name: str
    shape: tuple[int, ...]
    parts: int = 0


def build_units(
    arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor], where: str
) -> tuple[Unit, ...]:
    """The units of a model from its tensors by GGUF name; without `output.weight` the head is the embedding.

    Raises UserError for a tensor that is missing, misshapen, of a type that cannot be used, or has no place in the
    architecture (computing without it would be silently wrong).
    """
    make = UnitMaker(arch, config, stored, where)
    units = [make.unit("embedding", EMBEDDING, -1, iter([Expected(TABLE, (config.vocab, config.d_model))]))]
    if config.grams:  # in front: what stays on the host is looked up before the accelerator begins
        row = Expected(ROW_TABLE, (make.rows_of(ROW_TABLE), config.grams.row))
        units.insert(0, make.unit("rows", GRAM_ROWS, -1, iter([row])))
    if config.row_width:
        table = Expected(ROW_TABLE, (config.vocab, config.rows_width))
        units.insert(0, make.unit("rows", TOKEN_ROWS, -1, iter([table])))
        units.append(make.unit("blk.0.mixed_rows", MIXED_ROWS, 0, _mixed_rows(config)))
    for i in range(config.n_layers):
        units += make.layer(i, units)
    if config.streams:
        last = config.n_layers - 1
        units.append(make.unit(f"blk.{last}.last_mix", MIX, last, _mix(config, "output_hc"), MIXES_LAST))
    norm = () if config.streams else _norm("output_norm", config.d_model, make.biases)
    head = HEAD if HEAD in stored else TABLE
    output = [*norm, Expected(head, (config.vocab, config.d_model))]
    units.append(make.unit("output", OUTPUT, -1, iter(output)))
    refuse_others(arch, units, stored)
    return tuple(units)


def refuse_others(arch: Architecture, units: Sequence[Unit], stored: dict[str, StoredTensor]) -> None:
    """Raise UserError for a tensor that none of the units has."""
    used = {t.name for u in units for t in u.tensors} | {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
    for name, tensor in stored.items():
        if name not in used:
            tensor.fail(f"has no place in architecture {arch.name}, and leaving it out would give wrong results")


class UnitMaker:
    """Makes the units of a model, or of the head that drafts for it, from its tensors by GGUF name. biases: the roles
    of those that there are, and of orders of columns."""

    def __init__(self, arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor], where: str) -> None:
        self._roles = {name.split(".", 2)[2] for name in stored if name.count(".") > 2}
        self._arch, self._config, self._stored, self._where = arch, config, stored, where
        optional = {*arch.optional_biases, *arch.file_biases, IN_ORDER, OUT_ORDER, FFN_ORDER}
        self.biases = set(arch.biases) | (optional & self._roles)
        self._scaled = arch.by_layer and LAYER_SCALE in self._roles

    def rows_of(self, name: str) -> int:
        """Rows that a table has in the file, which a key has told of; 1 where it is missing."""
        return self._stored[name].shape[0] if name in self._stored else 1

    def unit(
        self, name: str, kind: UnitKind, layer: int, tensors: Iterator[Expected], ports: Ports | None = None
    ) -> Unit:
        """A unit of these tensors. Raises UserError for one that is missing, misshapen or of a type that is unknown."""
        specs = [_tensor_spec(self._stored, tensor, self._where) for tensor in tensors]
        specs.sort(key=lambda t: -len(t.shape))  # matrices, then vectors (the sort is stable)
        return Unit(name, kind, layer, tuple(specs), own_ports=ports)

    def layer(self, i: int, before: Sequence[Unit] = ()) -> Iterator[Unit]:
        """Those of a layer, whose attention may read the cells of one before. Raises as `unit`."""
        config, unit, block = self._config, self.unit, f"blk.{i}."
        yield from self._mixes(i, "attn")
        if config.layer_heads and not config.layer_heads[i][1]:
            if config.layer_heads[i][0]:
                yield unit(block + "attention", MAPPING, i, _mapping(config.d_model, block, self.biases))
        elif config.latent:
            yield unit(block + "attention", LATENT_ATTENTION, i, _latent(config, config.latent, block))
        elif config.delta and i not in config.delta.full:
            ports = FOLLOWS if config.streams else None
            yield unit(block + "delta", DELTA_NET, i, _delta(config, config.delta, block), ports)
        elif config.conv and i not in config.conv.full:
            yield unit(block + "conv", SHORT_CONV, i, _conv(config.conv, config.d_model, block))
        else:
            kind, ports = _kind(config, i), ENTERS if config.parallel or config.keeps_input else None
            ports = NORMS_WIDE if config.wide_qk_norm else ports
            ports = FOLLOWS if config.streams else ports
            lender = config.lender(i)
            roles = [role for role in (GATE, HEAD_GATE, SINKS) if block + role in self._stored]
            own = kind.sees(config)
            if config.layer_heads:
                own = replace(own, n_heads=config.layer_heads[i][0], n_kv_heads=config.layer_heads[i][1])
            if self._arch.bare_head_norms and config.is_still(i):
                own = replace(own, qk_norm=False)
            tensors = _attention(self._arch, own, block, self.biases, roles, lender != i)
            attention = unit(block + "attention", kind, i, tensors, ports)
            yield replace(attention, borrows=_cells_of(lender, before)) if lender != i else attention
        if config.ffn_rows and not config.ffn_rows[i]:
            return
        yield from self._mixes(i, "ffn")
        if config.experts is None or not config.experts.are_in(i):
            ports = FOLLOWS if config.parallel or config.streams else None
            scaled = self._scaled
            yield unit(block + "ffn", FFN, i, _ffn(config, i, self.biases, scaled and not config.row_width), ports)
            if config.row_width:
                yield unit(block + "rows", LAYER_ROWS, i, _layer_rows(config, block, scaled))
            return
        rule, d = config.experts, config.d_model
        ports = {"scores": SCORES_EARLY, "inputs": TAKES_EARLY}.get(rule.early, ROUTES)
        ports = TAKES_EARLY if config.streams else ports
        factors = self._arch.by_layer and ROUTER_FACTORS in self._roles
        yield unit(block + "router", ROUTER, i, _router(config, rule, block, factors), ports)
        if rule.apart or rule.beside:
            yield unit(block + "ffn", FFN, i, _ffn(config, i, self.biases, False), GIVES_DENSE if rule.apart else None)
        if rule.d_shared:
            yield unit(block + "shared", SHARED_EXPERTS, i, _shared(rule, d, block))
        ports = GIVES_EXPERTED if rule.apart else GIVES_SUM if rule.chunks else None
        yield unit(block + "experts", EXPERTS, i, _experts(rule, d, block), ports)
        if rule.chunks:
            yield unit(block + "chunks", CHUNKS, i, _chunks(rule, d, block))
        if rule.apart:
            scaled = self._scaled
            yield unit(block + "blend", BLEND, i, _blend(d, block, scaled and not config.row_width))
            if config.row_width:
                yield unit(block + "rows", LAYER_ROWS, i, _layer_rows(config, block, scaled))

    def _mixes(self, i: int, before: str) -> Iterator[Unit]:
        """The mix of streams before a layer's block, and what n-grams add to them before that."""
        config, block = self._config, f"blk.{i}."
        if config.streams is None:
            return
        ports = SPREADS if i == 0 and before == "attn" else MIXES
        if config.grams and config.grams.layer == i and before == "attn":
            adds = SPREADS_GRAMS if i == 0 else ADDS_GRAMS
            yield self.unit(block + "grams", GRAMS, i, _grams(config, config.grams, block), adds)
            ports = MIXES_ON
        yield self.unit(f"{block}{before}_mix", MIX, i, _mix(config, f"{block}hc_{before}"), ports)


def _kind(config: ModelConfig, layer: int) -> UnitKind:
    """Which kind of attention a layer has."""
    if config.is_still(layer):
        return STILL_ATTENTION
    windowed = config.window > 0 and config.has_window(layer)
    if config.lender(layer) != layer:
        return BORROWING_WINDOWED if windowed else BORROWING_ATTENTION
    if config.is_lender(layer):
        return LENDING_WINDOWED if windowed else LENDING_ATTENTION
    return WINDOWED_ATTENTION if windowed else ATTENTION


def _cells_of(layer: int, units: Sequence[Unit]) -> Cells:
    """The cells that a layer's attention keeps."""
    lender = next(unit for unit in units if unit.kind.stands and unit.layer == layer)
    return Cells(lender.name, tuple(lender.by_role[role] for role in QKV[1:]))


def _attention(
    arch: Architecture, config: ModelConfig, block: str, biases: set[str], roles: list[str], borrows: bool
) -> Iterator[Expected]:
    """roles: of what layers may lack, as far as the layer has tensors of them."""
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    value = config.value_dim or config.head_dim
    if config.normed_before:
        yield from _norm(block + "attn_norm", d, biases)
    made = () if borrows else (("attn_k", kv, d), ("attn_v", config.n_kv_heads * value, d))
    for role, rows, cols in (("attn_q", q, d), *made, ("attn_output", d, config.n_heads * value)):
        yield Expected(f"{block}{role}.weight", (rows, cols))
        if f"{role}.bias" in biases:
            yield Expected(f"{block}{role}.bias", (rows,))
    if config.gated and (GATE in roles or not config.heads_gated):
        yield Expected(block + GATE, (q, d))
    lacks = (config.gated and GATE in roles) or (arch.limited and HEAD_GATE not in roles)
    if config.heads_gated and not lacks:
        yield Expected(block + HEAD_GATE, (config.n_heads, d))
    for role, width in ((IN_ORDER, d), (OUT_ORDER, config.n_heads * value)):
        if role in biases:
            yield Expected(block + role, (width,))
    if arch.sinks or (arch.short_values and SINKS in roles):
        yield Expected(block + "attn_sinks.weight", (config.n_heads,))
    if rule := config.selection:
        for role, rows in zip(INDEX, (rule.heads * rule.head, rule.head)):
            yield Expected(block + role, (rows, d))
        for role in INDEX_NORMS:
            yield Expected(block + role, (rule.head,))
    if config.sloped:
        yield Expected(block + "attn_slopes.weight", (config.n_heads,))
    if config.own_head_norms or config.wide_qk_norm:
        yield Expected(block + "attn_q_norms.weight", (q,))
        yield Expected(block + "attn_k_norms.weight", (kv,))
    if arch.turned_norms:
        yield Expected(block + "attn_q_stretch.weight", (config.head_dim,))
    if config.qk_norm and not config.wide_qk_norm:
        yield Expected(block + "attn_q_norm.weight", (config.head_dim,))
    if config.qk_norm and not (config.wide_qk_norm or borrows):
        yield Expected(block + "attn_k_norm.weight", (config.head_dim,))
    if config.normed_after:
        yield Expected(block + "post_attention_norm.weight", (d,))


def _mapping(d_model: int, block: str, biases: set[str]) -> Iterator[Expected]:
    """What some layers have in place of attention."""
    yield from _norm(block + "attn_norm", d_model, biases)
    yield Expected(block + "attn_output.weight", (d_model, d_model))


def _norm(name: str, width: int, biases: set[str]) -> Iterator[Expected]:
    """A norm of the residual stream."""
    yield Expected(f"{name}.weight", (width,))
    if f"{name.rsplit('.', 1)[-1]}.bias" in biases:
        yield Expected(f"{name}.bias", (width,))


def _latent(config: ModelConfig, latent: Latent, block: str) -> Iterator[Expected]:
    """Multi-head latent attention."""
    d, heads = config.d_model, config.n_heads
    yield Expected(block + "attn_norm.weight", (d,))
    if latent.q_rank:
        yield Expected(block + "attn_q_a.weight", (latent.q_rank, d))
        yield Expected(block + "attn_q_a_norm.weight", (latent.q_rank,))
        yield Expected(block + "attn_q_b.weight", (heads * latent.query, latent.q_rank))
    else:
        yield Expected(block + "attn_q.weight", (heads * latent.query, d))
    yield Expected(block + "attn_kv_a_mqa.weight", (latent.cell, d))
    yield Expected(block + "attn_kv_a_norm.weight", (latent.rank,))
    yield Expected(block + "attn_k_b.weight", (heads, latent.rank, latent.nope), heads)
    yield Expected(block + "attn_v_b.weight", (heads, latent.value, latent.rank), heads)
    yield Expected(block + "attn_output.weight", (d, heads * latent.value))


def _mix(config: ModelConfig, name: str) -> Iterator[Expected]:
    """A mix of streams; the last one says nothing of shares."""
    assert config.streams is not None
    count, rank, wide = config.streams.count, config.streams.rank, config.streams.count * config.d_model
    yield Expected(f"{name}_norm.weight", (wide,))
    yield Expected(f"{name}_down.weight", (rank, wide))
    yield Expected(f"{name}_up.weight", (wide, rank))
    if name.startswith("blk."):
        yield Expected(f"{name}_inject.weight", (count, wide))


def _grams(config: ModelConfig, grams: Grams, block: str) -> Iterator[Expected]:
    """What a layer makes of the rows of n-grams."""
    assert config.streams is not None
    wide = config.streams.count * config.d_model
    yield Expected(block + "ple_key.weight", (wide, grams.width))
    yield Expected(block + "ple_value.weight", (config.d_model, grams.width))
    for part in ("key", "query", "conv"):
        yield Expected(f"{block}ple_norm_{part}.weight", (wide,))
    yield Expected(block + "ple_conv1d.weight", (wide * grams.taps,))


def _delta(config: ModelConfig, delta: Delta, block: str) -> Iterator[Expected]:
    """A gated delta net. The two vectors of its convolution follow each other, as the kernels read them as one."""
    keys, values, heads = 2 * delta.key_heads * delta.head, delta.value_heads * delta.head, delta.value_heads
    d = config.d_model
    if config.normed_before:
        yield Expected(block + "attn_norm.weight", (d,))
    yield Expected(block + "delta_qk.weight", (keys, d))
    yield Expected(block + "delta_v.weight", (values, d))
    yield Expected(block + "attn_gate.weight", (values, d))
    yield Expected(block + "ssm_beta.weight", (heads, d))
    yield Expected(block + "ssm_alpha.weight", (heads, d))
    yield Expected(block + "ssm_out.weight", (d, values))
    yield Expected(block + "delta_conv_qk.weight", (4 * keys,))
    yield Expected(block + "delta_conv_v.weight", (4 * values,))
    yield Expected(block + "ssm_dt.bias", (heads,))
    yield Expected(block + "ssm_a", (heads,))
    yield Expected(block + "ssm_norm.weight", (delta.head,))


def _conv(conv: ShortConv, d: int, block: str) -> Iterator[Expected]:
    """A gated short convolution."""
    yield Expected(block + "attn_norm.weight", (d,))
    for role in CONV_PARTS:
        yield Expected(block + role, (conv.channels, d))
    yield Expected(block + "conv_taps.weight", (conv.channels * conv.taps,))
    yield Expected(block + "conv_out.weight", (d, conv.channels))


def _ffn(config: ModelConfig, layer: int, biases: set[str], scaled: bool) -> Iterator[Expected]:
    block, d, f = f"blk.{layer}.", config.d_model, config.ffn_rows[layer] if config.ffn_rows else config.d_ffn
    beside = config.experts is not None and config.experts.apart
    if config.normed_before and not config.parallel:
        yield from _norm(block + "ffn_norm", d, biases)
    for role, rows, cols in (("gate", f, d), ("up", f, d), ("down", d, f)):
        if role != "gate" or not config.ungated:
            yield Expected(f"{block}ffn_{role}.weight", (rows, cols))
        if f"ffn_{role}.bias" in biases:
            yield Expected(f"{block}ffn_{role}.bias", (rows,))
    if FFN_ORDER in biases:
        yield Expected(block + FFN_ORDER, (d,))
    if config.activation == "xielu":
        yield Expected(block + "ffn_act.weight", (4,))
    if config.normed_after and not beside:
        yield Expected(block + "post_ffw_norm.weight", (d,))
    if scaled:
        yield Expected(block + LAYER_SCALE, (1,))


def _blend(d_model: int, block: str, scaled: bool) -> Iterator[Expected]:
    """The norms behind experts and the FFN beside them."""
    yield Expected(block + "post_ffw_norm_1.weight", (d_model,))
    yield Expected(block + "post_ffw_norm_2.weight", (d_model,))
    yield Expected(block + "post_ffw_norm.weight", (d_model,))
    if scaled:
        yield Expected(block + LAYER_SCALE, (1,))


def _mixed_rows(config: ModelConfig) -> Iterator[Expected]:
    """What the residual stream adds to the rows of its tokens."""
    yield Expected("per_layer_model_proj.weight", (config.rows_width, config.d_model))
    yield Expected("per_layer_proj_norm.weight", (config.row_width,))


def _layer_rows(config: ModelConfig, block: str, scaled: bool) -> Iterator[Expected]:
    """What a layer makes of its part of them."""
    yield Expected(block + "inp_gate.weight", (config.row_width, config.d_model))
    yield Expected(block + "proj.weight", (config.d_model, config.row_width))
    yield Expected(block + "post_norm.weight", (config.d_model,))
    if scaled:
        yield Expected(block + LAYER_SCALE, (1,))


def _router(config: ModelConfig, experts: Experts, block: str, factors: bool) -> Iterator[Expected]:
    """The norm before experts, and what the choice among them takes."""
    if config.streams is None:
        yield Expected(block + ROUTER_NORMS[2 if experts.beside else experts.apart], (config.d_model,))
    yield Expected(block + "ffn_gate_inp.weight", (experts.count, config.d_model))
    if experts.biases:
        yield Expected(block + "ffn_gate_inp.bias", (experts.count,))
    if experts.choice_bias:
        yield Expected(block + "exp_probs_b.bias", (experts.count,))
    if factors:
        yield Expected(block + ROUTER_FACTORS, (experts.count,))


def _shared(experts: Experts, d_model: int, block: str) -> Iterator[Expected]:
    """The FFN that every token takes beside its experts."""
    yield Expected(block + "ffn_gate_shexp.weight", (experts.d_shared, d_model))
    yield Expected(block + "ffn_up_shexp.weight", (experts.d_shared, d_model))
    yield Expected(block + "ffn_down_shexp.weight", (d_model, experts.d_shared))
    if experts.shared_gate:
        yield Expected(block + "ffn_gate_inp_shexp.weight", (d_model,))


def _experts(experts: Experts, d_model: int, block: str) -> Iterator[Expected]:
    n, f = experts.count, experts.d_expert
    for role, rows, cols in (("gate", f, d_model), ("up", f, d_model), ("down", d_model, f)):
        yield Expected(f"{block}ffn_{role}_exps.weight", (n, rows, cols), n)
        if experts.biases:
            yield Expected(f"{block}ffn_{role}_exps.bias", (n, rows), n)


def _chunks(experts: Experts, d_model: int, block: str) -> Iterator[Expected]:
    """Those that follow experts, and by what tokens choose among them."""
    rule = experts.of_chunks()
    n, f = rule.count, rule.d_expert
    yield Expected(block + "ffn_gate_inp.weight", (experts.count, d_model))
    for role, rows, cols in (("gate", f, d_model), ("up", f, d_model), ("down", d_model, f)):
        yield Expected(f"{block}ffn_{role}_chexps.weight", (n, rows, cols), n)


def _tensor_spec(stored: dict[str, StoredTensor], expected: Expected, where: str) -> TensorSpec:
    name, shape, parts = expected
    tensor = stored.get(name)
    if tensor is None:
        raise UserError(
            f"{where}: tensor {name} of shape {list(shape)} is missing: the file is incomplete; {FETCH_AGAIN}"
        )
    tensor.check_shape(shape)
    tensor.check_type()
    if parts:
        if len(shape) == 3 and QUANT_TYPES[tensor.qtype].planes and shape[1] % ROW_BLOCK:
            of = "experts" if "exps." in name else "heads"
            what = f"has {of} of {shape[1]} rows in {tensor.qtype}, which records of {ROW_BLOCK} rows do not divide"
            tensor.fail(what, "use a file that has F16 or BF16 for it")
        shape = (parts * shape[1], *shape[2:])
    if len(shape) == 1 and QUANT_TYPES[tensor.qtype].block > 1:
        tensor.fail(f"is a vector of type {tensor.qtype}, and vectors are F32, F16 or BF16")
    return TensorSpec(name, tensor.qtype, shape, parts if len(shape) == 2 else 0)  # every place has all biases
