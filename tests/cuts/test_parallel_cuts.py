"""Cuts over fake ranks: every weight is on the right rank once, cut results add up, and memory follows the ratio."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.buffers import scratch_bytes, state_stage_bytes
from pshard.cuts.check_cut import TensorCut, UnitCut, check_cut
from pshard.cuts.tensor_cuts import cut_model, cut_units, limit_shares, source_ranges, vocab_sizes
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig, Rope
from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION, count_heads
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.output import OUTPUT
from pshard.units.state import StateShape
from pshard.units.unit import Unit, UnitKind
from pshard.workload import Limits

FLOAT = np.float64


def make_spec(
    layers: int = 2,
    d_model: int = 32,
    groups: int = 2,
    group: int = 2,
    head_dim: int = 16,
    d_ffn: int = 96,
    vocab: int = 100,
    qtype: str = "F32",
    biases: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
) -> ModelSpec:
    heads = groups * group
    config = ModelConfig(
        "llama", layers, d_model, heads, groups, head_dim, d_ffn, vocab, 1e-5, 512, Rope(head_dim, 1e4, "halves"),
        qk_norm=qk_norm,
    )  # fmt: skip

    def unit(name: str, kind: UnitKind, layer: int, shapes: dict[str, tuple[int, ...]]) -> Unit:
        prefix = f"blk.{layer}." if layer >= 0 else ""
        return Unit(
            name,
            kind,
            layer,
            tuple(TensorSpec(prefix + r, qtype if len(s) == 2 else "F32", s) for r, s in shapes.items()),
        )

    q, kv = heads * head_dim, groups * head_dim
    attention: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (d_model,),
        "attn_q.weight": (q, d_model),
        "attn_k.weight": (kv, d_model),
        "attn_v.weight": (kv, d_model),
        "attn_output.weight": (d_model, q),
    }
    ffn: dict[str, tuple[int, ...]] = {
        "ffn_norm.weight": (d_model,),
        "ffn_gate.weight": (d_ffn, d_model),
        "ffn_up.weight": (d_ffn, d_model),
        "ffn_down.weight": (d_model, d_ffn),
    }
    if biases:
        attention |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,), "attn_output.bias": (d_model,)}
        ffn |= {"ffn_gate.bias": (d_ffn,), "ffn_up.bias": (d_ffn,), "ffn_down.bias": (d_model,)}
    if qk_norm:
        attention |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    units = [unit("embedding", EMBEDDING, -1, {"token_embd.weight": (vocab, d_model)})]
    for i in range(layers):
        units += [unit(f"attention.{i}", ATTENTION, i, attention), unit(f"ffn.{i}", FFN, i, ffn)]
    head = "token_embd.weight" if tied else "output.weight"
    units.append(unit("output", OUTPUT, -1, {"output_norm.weight": (d_model,), head: (vocab, d_model)}))
    return ModelSpec("tiny", "tiny.gguf", config, tuple(units))


def slice_of(whole: np.ndarray, ranges: tuple[int, int, int, int]) -> np.ndarray:
    r0, r1, c0, c1 = ranges
    return whole[c0:c1] if whole.ndim == 1 else whole[r0:r1, c0:c1]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def attention(x: np.ndarray, w: dict[str, np.ndarray], head_dim: int) -> np.ndarray:
    """Causal attention of one sequence [T, D] with grouped KV heads: heads are counted from the weights at hand."""
    x, tokens = norm(x, w["attn_norm.weight"]), len(x)

    def heads(name: str) -> np.ndarray:
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
        y = y.reshape(tokens, -1, head_dim)
        scale = w.get(f"{name}_norm.weight")
        return norm(y, scale) if scale is not None else y

    q, k, v = heads("attn_q"), heads("attn_k"), heads("attn_v")
    assert q.shape[1] % k.shape[1] == 0
    k, v = (np.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(head_dim)
    scores[:, ~np.tri(tokens, dtype=bool)] = -np.inf
    mixed = np.einsum("hts,shd->thd", softmax(scores), v).reshape(tokens, -1)
    return mixed @ w["attn_output.weight"].T + w.get("attn_output.bias", 0.0)


def ffn(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    x = norm(x, w["ffn_norm.weight"])
    gate, up = (x @ w[f"ffn_{n}.weight"].T + w.get(f"ffn_{n}.bias", 0.0) for n in ("gate", "up"))
    return gate / (1 + np.exp(-gate)) * up @ w["ffn_down.weight"].T + w.get("ffn_down.bias", 0.0)


def run_unit(unit: Unit, x: np.ndarray, w: dict[str, np.ndarray], head_dim: int) -> np.ndarray:
    if unit.kind is ATTENTION:
        return attention(x, w, head_dim)
    if unit.kind is FFN:
        return ffn(x, w)
    (head,) = (v for v in w.values() if v.ndim == 2)
    return norm(x, w["output_norm.weight"]) @ head.T


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    head_dim = draw(st.sampled_from([8, 16, 64, 80, 128]))
    qtype = draw(st.sampled_from(["F32", "Q8_0", "Q4_K"]))
    block = QUANT_TYPES[qtype].block
    groups, group = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    if groups * group * head_dim % block:  # as in any file of that type
        groups *= block
    if groups * group > 96:
        groups, group = 32 if head_dim == 8 else 16, 1
    return make_spec(
        layers=draw(st.integers(1, 4)),
        d_model=block if block > 1 else 24,
        groups=groups,
        group=group,
        head_dim=head_dim,
        d_ffn=block * draw(st.integers(1, 9)) if block > 1 else draw(st.integers(1, 200)),
        vocab=draw(st.integers(1, 300)),
        qtype=qtype,
        biases=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


limits = st.dictionaries(st.sampled_from(("attention", "ffn", "output")), st.integers(1, 4), max_size=3).map(
    lambda most: tuple(sorted(most.items()))
)
ratios = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=6).filter(lambda r: sum(r) > 0).map(tuple)


@settings(max_examples=150)
@given(specs(), ratios)
def test_every_weight_is_held_and_cut_ones_once(spec: ModelSpec, shares: tuple[float, ...]) -> None:
    tables = [source_ranges(spec, shares, r) for r in range(len(shares))]
    for unit in spec.units:
        for tensor in unit.tensors:
            held = np.zeros(tensor.shape if len(tensor.shape) == 2 else (1, tensor.cols), int)
            for table in tables:
                r0, r1, c0, c1 = table[unit.name].get(tensor.name, (0, 0, 0, 0))
                held[r0:r1, c0:c1] += 1
            assert held.min() >= 1, tensor.name
            mirrored = "norm" in tensor.name or unit.kind is EMBEDDING
            shared_kv = tensor.role.startswith(("attn_k", "attn_v"))
            if not mirrored and not shared_kv:
                assert held.max() == 1, tensor.name


@settings(max_examples=150)
@given(specs(), ratios)
def test_a_rank_is_a_model_of_whole_heads_and_blocks(spec: ModelSpec, shares: tuple[float, ...]) -> None:
    for rank, share in enumerate(shares):
        own, table = cut_model(spec, shares, rank), source_ranges(spec, shares, rank)
        assert [u.name for u in own.units] == [u.name for u in spec.units]
        for unit in own.units:
            for t in unit.tensors:
                r0, r1, c0, c1 = table[unit.name][t.name]
                assert (t.rows, t.cols) == (r1 - r0, c1 - c0)
                assert c0 % QUANT_TYPES[t.qtype].block == c1 % QUANT_TYPES[t.qtype].block == 0
                if t.role == "ffn_up.weight":
                    assert r0 % ROW_BLOCK == 0
            if unit.kind is ATTENTION and unit.tensors:
                heads, groups = count_heads(unit.by_role, own.config)
                assert heads % groups == 0
                assert own.config.n_heads >= heads and own.config.n_kv_heads >= groups
            if share == 0 and unit.kind is not EMBEDDING:
                assert unit.tensors == ()
    assert sum(vocab_sizes(spec, shares)) == spec.config.vocab


@settings(max_examples=60)
@given(specs(), ratios, limits, st.integers(0, 99))
def test_cut_results_add_up_to_the_uncut_one(
    spec: ModelSpec, shares: tuple[float, ...], limits: Limits, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, spec.config.d_model))
    for unit in spec.units[1:]:
        whole = {t.role: rng.standard_normal(t.shape).astype(FLOAT) for t in unit.tensors}
        wanted = run_unit(unit, x, whole, spec.config.head_dim)
        parts = []
        for rank in range(len(shares)):
            own = cut_model(spec, shares, rank, limits).unit(unit.name)
            table = source_ranges(spec, shares, rank, limits)
            held = {t.role: slice_of(whole[t.role], table[unit.name][t.name]) for t in own.tensors}
            if held:
                parts.append(run_unit(own, x, held, spec.config.head_dim))
        got = np.concatenate(parts, axis=1) if unit.kind is OUTPUT else sum(parts)
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max())


@settings(max_examples=60)
@given(specs(), ratios, limits)
def test_limited_kinds_are_on_the_ranks_with_the_largest_shares(
    spec: ModelSpec, shares: tuple[float, ...], limits: Limits
) -> None:
    parts = [cut_model(spec, shares, rank, limits) for rank in range(len(shares))]
    for kind in ("attention", "ffn", "output"):
        holders = {r for r, part in enumerate(parts) for u in part.units if u.kind.name == kind and u.tensors}
        most = dict(limits).get(kind, len(shares))
        assert 1 <= len(holders) <= min(most, sum(share > 0 for share in shares))
        chosen = sorted(shares)[-most:]
        assert all(shares[r] in chosen for r in holders)
    assert sum(vocab_sizes(spec, shares, limits)) == spec.config.vocab


def test_limits_keep_the_ratio_of_those_who_hold_a_unit() -> None:
    assert limit_shares((0.5, 0.2, 0.3), 2) == pytest.approx((0.625, 0.0, 0.375))
    assert limit_shares((1.0, 1.0, 1.0), 2) == (0.5, 0.5, 0.0)
    with pytest.raises(ValueError, match="cannot hold"):
        limit_shares((1.0,), 0)


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (3.0, 1.0), (5.0, 0.0, 2.0), (4.0, 3.0, 2.0, 1.0), (1.0,) * 5])
def test_memory_follows_the_ratio_over_the_layers(shares: tuple[float, ...]) -> None:
    spec = make_spec(layers=40, d_model=64, groups=8, group=2, head_dim=16, d_ffn=224, vocab=1600)
    for kind in ("attention", "ffn"):
        held = [
            sum(u.packed_nbytes for u in cut_model(spec, shares, r).units if u.kind.name == kind)
            for r in range(len(shares))
        ]
        for nbytes, share in zip(held, shares):
            assert nbytes == pytest.approx(sum(held) * share / sum(shares), rel=0.03)


def test_one_rank_gets_the_model_as_it_is() -> None:
    spec = make_spec()
    assert cut_model(spec, (1.0,), 0) == spec


def test_equal_ranks_of_a_32b_shape_get_equal_parts() -> None:
    spec = make_spec(layers=1, d_model=5120, groups=8, group=8, head_dim=128, d_ffn=25600, vocab=151936, qtype="Q4_0")
    for n in (2, 4):
        parts = [cut_model(spec, (1.0,) * n, r) for r in range(n)]
        assert {(p.config.n_heads, p.config.n_kv_heads, p.config.d_ffn) for p in parts} == {
            (64 // n, 8 // n, 25600 // n)
        }
        assert vocab_sizes(spec, (1.0,) * n) == (151936 // n,) * n


def test_more_ranks_than_kv_heads_share_them() -> None:
    spec = make_spec(groups=2, group=4)
    parts = [cut_model(spec, (1.0,) * 4, r).config for r in range(4)]
    assert [(p.n_heads, p.n_kv_heads) for p in parts] == [(2, 1)] * 4
    assert source_ranges(spec, (1.0,) * 4, 2)["attention.0"]["blk.0.attn_k.weight"] == (16, 32, 0, 32)


def test_wide_quant_blocks_join_kv_groups() -> None:
    """Q4_K blocks of 256 columns over groups of 3 heads of 64: only every fourth group is a bound."""
    spec = make_spec(layers=1, d_model=256, groups=8, group=3, head_dim=64, d_ffn=512, qtype="Q4_K")
    assert [cut_model(spec, (1.0, 1.0), r).config.n_heads for r in range(2)] == [12, 12]
    assert sorted(cut_model(spec, (1.0, 1.0, 1.0), r).config.n_kv_heads for r in range(3)) == [0, 4, 4]


def test_layers_alternate_when_there_are_fewer_blocks_than_ranks() -> None:
    spec = make_spec(layers=4, groups=1, group=1, d_ffn=16)
    held = [[bool(u.tensors) for u in cut_model(spec, (1.0, 1.0), r).units if u.ports.adds] for r in range(2)]
    assert all(a != b for a, b in zip(*held))
    assert sum(held[0]) == sum(held[1]) == 4


def with_tensor(spec: ModelSpec, unit: str, tensor: TensorSpec) -> ModelSpec:
    units = tuple(replace(u, tensors=(*u.tensors, tensor)) if u.name == unit else u for u in spec.units)
    return replace(spec, units=units)


def test_a_tensor_without_a_rule_is_named() -> None:
    spec = with_tensor(make_spec(), "ffn.1", TensorSpec("blk.1.ffn_post_norm.weight", "F32", (32,)))
    with pytest.raises(UserError, match=r"llama: blk\.1\.ffn_post_norm\.weight has no rule"):
        cut_units(spec, (1.0, 1.0))
    assert cut_model(spec, (1.0,), 0) == spec


def test_a_norm_over_all_heads_is_refused() -> None:
    spec = with_tensor(make_spec(), "attention.0", TensorSpec("blk.0.attn_q_norm.weight", "F32", (64,)))
    with pytest.raises(UserError, match=r"blk\.0\.attn_q_norm\.weight normalises over 64 columns"):
        cut_units(spec, (1.0, 1.0))


def changed(cut: UnitCut, role: str, **fields: object) -> UnitCut:
    return UnitCut(cut.unit, tuple(replace(t, **fields) if t.role == role else t for t in cut.tensors))


@pytest.mark.parametrize(
    ("unit", "role", "fields", "reason"),
    [
        ("ffn.0", "ffn_down.weight", {"ranges": ((0, 32), (32, 96))}, "has its columns cut elsewhere"),
        ("ffn.0", "ffn_up.weight", {"ranges": ((0, 32), (32, 96))}, "ffn_up.bias is not cut as"),
        ("ffn.0", "ffn_down.weight", {"axis": "none", "ranges": ()}, "needs all of its inputs"),
        ("ffn.0", "ffn_down.bias", {"axis": "none", "ranges": ()}, "added on exactly one rank"),
        ("ffn.0", "ffn_norm.weight", {"axis": "rows", "ranges": ((0, 16), (16, 32))}, "normalises over the whole"),
        ("attention.0", "attn_k.weight", {"ranges": ((0, 32), (0, 32))}, "attn_k.bias is not cut as"),
        ("attention.0", "attn_q.weight", {"ranges": ((0, 24), (24, 64))}, "attn_q.bias is not cut as"),
        ("attention.0", "attn_output.weight", {"ranges": ((0, 32), (32, 48))}, "is cut up to 48 of 64"),
        ("output", "output.weight", {"ranges": ((0, 48), (64, 100))}, "leave a gap or overlap"),
    ],
)
def test_a_wrong_cut_is_refused_with_its_reason(unit: str, role: str, fields: dict, reason: str) -> None:
    spec = make_spec(biases=True)
    cut = next(c for c in cut_units(spec, (1.0, 1.0)) if c.unit == unit)
    check_cut(spec, spec.unit(unit), cut)
    with pytest.raises(UserError, match=reason):
        check_cut(spec, spec.unit(unit), changed(cut, role, **fields))


def test_heads_of_unequal_groups_on_one_rank_are_refused() -> None:
    spec = make_spec(layers=1, groups=2, group=4, head_dim=16)
    bounds = ((0, 6 * 16), (6 * 16, 8 * 16))
    cut = next(c for c in cut_units(spec, (1.0, 1.0)) if c.unit == "attention.0")
    kv = ((0, 32), (16, 32))
    for role, ranges in (("attn_q", bounds), ("attn_output", bounds), ("attn_k", kv), ("attn_v", kv)):
        cut = changed(cut, f"{role}.weight", ranges=ranges)
    with pytest.raises(UserError, match="unequal numbers of q heads"):
        check_cut(spec, spec.unit("attention.0"), cut)


def test_shares_that_are_no_ratios_are_an_error() -> None:
    for shares in ((), (0.0, 0.0), (-1.0, 2.0)):
        with pytest.raises(ValueError, match="not ratios"):
            cut_units(make_spec(), shares)


def test_tensor_cut_is_data() -> None:
    assert cut_units(make_spec(layers=1), (1.0, 1.0))[2].tensors[1] == TensorCut(
        "ffn_gate.weight", "rows", ((0, 48), (48, 96))
    )


def test_a_rank_that_holds_nothing_can_be_planned() -> None:
    own = cut_model(make_spec(), (1.0, 0.0), 1)
    shape = StateShape(512, 1, "f32", "f32")
    assert scratch_bytes(own, 512, shape, 4) > 0 and state_stage_bytes(own, shape) == 0
    assert {u.kind.name for u in own.units if u.tensors} == {"embedding"}
