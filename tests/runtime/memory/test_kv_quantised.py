"""A KV cache in q8_0 and q4_0: what its blocks lose, what that costs logits, and that placements do not matter."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from hypothesis import given
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import make_tier, random_places, shrink_places
from thread_ranks import random_tiers, run_ranks

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells, put_head, take_head
from pshard.runtime.memory.kv_cache import KV_DTYPES, view_layer
from pshard.units.kv_cells import KV_BLOCK, KV_TYPES, check_kv_types
from pshard.units.state import CellState, StateShape

CONTEXT, SEQUENCES = 4 * 96, 4
MIXES = [("q8_0", "q8_0"), ("q8_0", "bf16"), ("f16", "q8_0"), ("q8_0", "q4_0")]
# NMSE of logits against float32 cells and kernels: q8_0 costs these random models up to 1.8e-4 (bf16 cells 1.5e-5), the
# fast kernels add up to 0.9e-4 of their own
BOUNDS = {"plain": 3e-4, "fast": 4e-4}
FOUR = 100  # times as much, of values in q4_0


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from((32, 64, 96)),
    st.floats(-6, 6),
    st.integers(0, 2**31),
)
def test_a_number_is_at_most_half_a_scale_off(cells: int, heads: int, dim: int, exponent: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(cells, heads, dim, generator=generator) * 10**exponent
    values *= torch.rand(cells, heads, dim, generator=generator) < 0.7  # zeros, sometimes a whole block
    encoded = encode_cells(values, torch.int8)
    assert encoded.shape == (cells, heads * dim * 34 // 32) and encoded.is_contiguous()
    scale = (values.unflatten(-1, (-1, 32)).abs().amax(-1) / 127).half().float()
    lost = (decode_cells(encoded, dim) - values).abs().unflatten(-1, (-1, 32)).amax(-1)
    # below 2^-14 the scale itself is cut to whole 2^-24: a number may be 127 halves of that off
    assert (lost <= 0.5001 * scale + 127 * 2.0**-25).all()


def test_blocks_are_those_of_gguf() -> None:
    import gguf

    values = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(3))
    cells = encode_cells(values, torch.int8)
    blocks = gguf.quants.quantize(values.flatten(1).numpy(), gguf.GGMLQuantizationType.Q8_0).reshape(6, 4, 34)
    assert torch.equal(cells[:, 128:].flatten(), torch.from_numpy(blocks[:, :, :2].copy()).view(torch.int8).flatten())
    codes = torch.from_numpy(blocks[:, :, 2:].copy()).view(torch.int8).flatten(1)
    assert (codes.int() - cells[:, :128].int()).abs().max() <= 1  # theirs divides by the scale before it is rounded


def test_blocks_of_four_bits_are_those_of_gguf_two_codes_a_byte() -> None:
    import gguf

    values = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(3))
    values[0, 0, :32] = 0
    cells = encode_cells(values, torch.uint8)
    assert cells.shape == (6, 128 * 18 // 32) and not decode_cells(cells, 64)[0, 0, :32].any()
    blocks = gguf.quants.quantize(values.flatten(1).numpy(), gguf.GGMLQuantizationType.Q4_0).reshape(6, 4, 18)
    scales = torch.from_numpy(blocks[:, :, :2].copy()).view(torch.float16)
    assert torch.equal(cells[:, 64:].contiguous().view(torch.float16).abs().flatten(), scales.abs().flatten())
    lost = (decode_cells(cells, 64) - values).abs().unflatten(-1, (-1, 32)).amax(-1)
    assert (lost <= 1.001 * scales.abs().float().view(lost.shape)).all()  # the largest of the other sign has no code
    theirs = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType.Q4_0))
    differ = (decode_cells(cells, 64).flatten(1) - theirs).abs() > 1e-6  # theirs divides before the scale is rounded
    assert differ.float().mean() < 0.01


@pytest.mark.parametrize("kind", KV_TYPES)
def test_heads_are_taken_out_and_put_back(kind: str) -> None:
    cells = encode_cells(torch.randn(5, 3, 64), KV_DTYPES[kind])
    again = torch.zeros_like(cells)
    for head in (2, 0, 1):
        put_head(again, head, 64, take_head(cells, head, 64))
    assert torch.equal(again, cells)
    one = encode_cells(decode_cells(cells, 64)[:, 1:2].contiguous(), KV_DTYPES[kind])
    assert torch.equal(take_head(one, 0, 64), take_head(cells, 1, 64))


@pytest.mark.parametrize(("type_k", "type_v"), zip(KV_TYPES, (*KV_TYPES[1:], *KV_TYPES)))
def test_planner_and_runtime_agree_on_sizes(tmp_path: Path, type_k: str, type_v: str) -> None:
    config = open_model(write_gguf(tmp_path / "m.gguf", "qwen3")).spec.config
    shape = StateShape(7, 3, type_k, type_v)
    law = CellState(config.n_kv_heads * config.head_dim, type_k, type_v)
    memory = torch.zeros(law.nbytes(shape), dtype=torch.uint8)
    kv = view_layer(memory, config.n_kv_heads, config.head_dim, shape)
    assert kv.k.nbytes + kv.v.nbytes == 3 * KV_BLOCK * law.cell
    kv.v.fill_(1)
    assert not kv.k.any() and (kv.v.data_ptr() - memory.data_ptr()) % 256 == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, "qwen3", qtype="Q8_0", n_layers=3)


def talk(engine, rng: random.Random) -> torch.Tensor:
    """Prompts and single tokens of several sequences that begin anew: the logits, [n, vocabulary]."""
    found = []
    with engine:
        for turn, sizes in enumerate([(23, 0, 9, 70), (1, 3, 1, 1), (1, 1, 0, 1), (4, 1, 1, 1), (1, 1, 1, 0)]):
            if turn == 3:
                engine.reset(2)
            outputs = engine.forward([[rng.randrange(320) for _ in range(n)] for n in sizes], all_logits=True)
            found += [rows for rows in outputs if rows.numel()]
    return torch.cat([rows.view(-1, rows.shape[-1]) for rows in found])


def open_reference(model: Path, kernels: str, kv_types: tuple[str, str]):
    tiers = pinned_everywhere(open_model(model).spec, (4, 80), CONTEXT, SEQUENCES)
    return open_engine(model, tiers, kernels, CONTEXT, SEQUENCES, kv_types=kv_types)


@pytest.mark.quick("fast-kv_types2")
@pytest.mark.parametrize(
    ("kernels", "kv_types"), [("plain", MIXES[0]), ("plain", MIXES[3]), *(("fast", m) for m in MIXES)]
)
def test_logits_are_those_of_float_cells(tmp_path: Path, kernels: str, kv_types: tuple[str, str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="BF16", n_layers=3)
    expected = talk(open_reference(path, "plain", ("f32", "f32")), random.Random(1))
    got = talk(open_reference(path, kernels, kv_types), random.Random(1))
    error = float(((got - expected) ** 2).sum() / (expected**2).sum())
    assert 0 < error < BOUNDS[kernels] * (FOUR if "q4_0" in kv_types else 1), error


@pytest.mark.quick("3-fast")
@pytest.mark.parametrize(("seed", "kernels"), [(0, "plain"), (3, "fast")])
def test_placements_do_not_matter(model: Path, kernels: str, seed: int) -> None:
    spec, rng, kv_types = open_model(model).spec, random.Random(seed), MIXES[seed % len(MIXES)]
    decode = random_places(spec, rng)
    tiers = tuple(
        make_tier(spec, n, places, 2, CONTEXT, SEQUENCES)
        for n, places in ((4, decode), (80, shrink_places(spec, decode, rng)))
    )
    expected = talk(open_reference(model, kernels, kv_types), random.Random(seed))
    got = talk(open_engine(model, tiers, kernels, CONTEXT, SEQUENCES, kv_types=kv_types), random.Random(seed))
    assert torch.equal(got, expected)


def test_a_saved_cache_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    file, prompt, after = tmp_path / "cache", [(7 * i) % 320 for i in range(30)], [[5], [6], [7, 8, 9]]
    with open_engine(model, context=CONTEXT, kv_types=MIXES[3]) as engine:
        engine.forward(prompt)
        engine.save(file)
        expected = [engine.forward(ids) for ids in after]
    with open_engine(model, context=CONTEXT, kv_types=MIXES[3]) as engine:
        assert engine.load(file) == tuple(prompt)
        assert all(torch.equal(engine.forward(ids), e) for ids, e in zip(after, expected, strict=True))
    with open_engine(model, context=CONTEXT) as engine, pytest.raises(UserError, match="type_k q8_0; this run has f32"):
        engine.load(file)


@pytest.mark.parametrize(("seed", "shares"), [(1, (3.0, 1.0)), (3, (0.0, 1.0, 2.0))])
def test_ranks_quantise_and_save_as_one_device_does(
    model: Path, tmp_path: Path, seed: int, shares: tuple[float, ...]
) -> None:
    file, prompt, after = tmp_path / "cache", [(7 * i) % 320 for i in range(30)], [5, 6, 7]
    kv_types = MIXES[3 if seed == 1 else 1]
    with open_engine(model, context=CONTEXT, kv_types=kv_types, tokens=(4, 16)) as engine:
        engine.forward(prompt)
        engine.save(file)
        expected = engine.forward(after, all_logits=True)

    def go_on(engine) -> torch.Tensor:
        assert engine.load(file) == tuple(prompt)
        return engine.forward(after, all_logits=True)

    found = run_ranks(model, shares, go_on, CONTEXT, random_tiers(seed, CONTEXT), kv_types)
    # the ranks' sums are rounded elsewhere, so that a code may fall on the other side
    assert float(((found[0] - expected) ** 2).sum() / (expected**2).sum()) < 1e-5
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_heads_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = open_model(write_gguf(tmp_path / "m.gguf", "qwen3", head_dim=48)).spec.config
    check_kv_types(config, "bf16", "f16")
    with pytest.raises(UserError, match="blocks of 32, and this model's heads have 48 numbers; give -ctv bf16"):
        check_kv_types(config, "bf16", "q8_0")
    for own in (replace(config, head_dim=64, window_head_dim=48), replace(config, window_head_dim=64)):
        with pytest.raises(UserError, match="this model's heads have 48 numbers"):
            check_kv_types(own, "q8_0", "bf16")
    with pytest.raises(UserError, match=r"q4_0 keeps the KV cache in blocks of 32, and .*; give -ctk bf16"):
        check_kv_types(config, "q4_0", "bf16")
    with pytest.raises(UserError, match="unknown KV cache type 'q5_0'"):
        check_kv_types(config, "q5_0", "bf16")
