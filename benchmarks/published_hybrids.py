"""Published figures of hybrids beside predictions: `python benchmarks/published_hybrids.py`.

Prints JSON: the rows of the three models whose layers are gated delta nets for the most part, as
benchmarks/published_experts.py does those of gpt-oss-120b, on the same sheet. `--table FILE` prints the table of
docs/published.md from such a file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import published_experts
from published import SHEET, SINGLE
from published_experts import ExpertRow, describe_row, predict_model, print_rows

from pshard.model import ModelSpec
from pshard.model_config import Delta, Experts, ModelConfig, Rope
from pshard.models.architectures import find_gguf_architecture
from pshard.models.build_units import build_units
from pshard.models.hybrid.arrange_delta import split_hybrid
from pshard.models.stored import StoredTensor
from pshard.planner.price.datasheet import Rates

FULL_EVERY, HEAD_DIM, KV_HEADS, CONTEXT = 4, 256, 2, 262144  # of all three: config.json of the Hub
DELTA_HEAD, KERNEL = 128, 4
LETTERS = "fg"  # of docs/published.md


@dataclass(frozen=True)
class Hybrid:
    """What differs between the published ones. `arch`: as GGUF files call it; `value_heads`: of the delta nets, which
    have 16 key heads; experts have `d_expert` rows, shared ones as many."""

    arch: str
    layers: int
    d_model: int
    heads: int
    vocab: int
    experts: int
    used: int
    d_expert: int
    value_heads: int


HYBRIDS = {
    "Qwen3-Next-80B-A3B": Hybrid("qwen3next", 48, 2048, 16, 151936, 512, 10, 512, 32),
    "Qwen3.5-122B-A10B": Hybrid("qwen35moe", 48, 3072, 32, 248320, 256, 8, 1024, 64),
    "Qwen3.5-397B-A17B": Hybrid("qwen35moe", 60, 4096, 32, 248320, 512, 10, 1024, 64),
}
# seconds to the first token and tokens per second by context, by model and budget in MiB: llama.cpp PR 22692
PUBLISHED = {
    ("Qwen3-Next-80B-A3B", 15000): ((6.8, 53.73), (29.9, 47.53), (69.4, 42.58), (206.2, 33.14)),
    ("Qwen3-Next-80B-A3B", 8000): ((7.1, 46.95), (30.8, 42.24), (70.7, 39.56), (285.0, 12.97)),
    ("Qwen3.5-122B-A10B", 15000): ((11.1, 25.95), (47.9, 24.34), (111.6, 22.00), (288.9, 20.43)),
    ("Qwen3.5-122B-A10B", 8000): ((11.5, 23.88), (49.2, 19.57), (115.3, 10.64), (452.1, 4.88)),
    ("Qwen3.5-397B-A17B", 15000): ((35.0, 12.99), (141.2, 12.13), (294.1, 11.74), (659.4, 5.64)),
}


def list_rows() -> Iterator[tuple[str, ExpertRow]]:
    """All rows, with their models."""
    for (model, mib), figures in PUBLISHED.items():
        for context, own in zip(SINGLE, figures, strict=True):
            yield model, ExpertRow(mib, context, *own)


def make_hybrid(name: str) -> ModelSpec:
    """The model as GGUF files hold it: matrices in Q4_0, the head in Q6_K."""
    shape = HYBRIDS[name]
    arch = find_gguf_architecture(shape.arch, name, has_experts=True)
    full = tuple(range(FULL_EVERY - 1, shape.layers, FULL_EVERY))
    delta = Delta(16, shape.value_heads, DELTA_HEAD, arch.delta == "tiled", full)
    rule = Experts(shape.experts, shape.used, shape.d_expert, d_shared=shape.d_expert, shared_gate=True)
    config = ModelConfig(
        shape.arch, shape.layers, shape.d_model, shape.heads, KV_HEADS, HEAD_DIM, shape.d_expert, shape.vocab, 1e-6,
        CONTEXT, Rope(int(HEAD_DIM * arch.rotated), 1e7, arch.gguf_pairing), True, experts=rule, gated=True,
        delta=delta,
    )  # fmt: skip
    no_file: Any = None
    shapes = (*_list_matrices(config, delta, rule), *_list_small(config, delta, rule))
    stored = {n: StoredTensor(n, qtype, rows_cols, no_file, 0) for n, qtype, rows_cols in shapes}
    return ModelSpec(name, "", config, build_units(arch, config, split_hybrid(config, stored), name))


def _list_matrices(config: ModelConfig, delta: Delta, rule: Experts) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    d, q, kv = config.d_model, config.n_heads * HEAD_DIM, KV_HEADS * HEAD_DIM
    values = delta.value_heads * delta.head
    mixers = {
        "attn_qkv": (2 * delta.key_heads * delta.head + values, d),
        "attn_gate": (values, d),
        "ssm_out": (d, values),
    }
    mixers |= (
        {"ssm_beta": (delta.value_heads, d), "ssm_alpha": (delta.value_heads, d)}
        if delta.tiled
        else {"ssm_ba": (2 * delta.value_heads, d)}
    )
    attention = {"attn_q": (2 * q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q)}
    n, f = rule.count, rule.d_expert
    ffn: dict[str, tuple[int, ...]] = {f"ffn_{r}_exps": (n, f, d) for r in ("gate", "up")} | {
        "ffn_down_exps": (n, d, f)
    }
    ffn |= {f"ffn_{r}_shexp": (f, d) for r in ("gate", "up")} | {"ffn_down_shexp": (d, f)}
    yield "token_embd.weight", "Q4_0", (config.vocab, d)
    yield "output.weight", "Q6_K", (config.vocab, d)
    for layer in range(config.n_layers):
        for role, shape in ((attention if layer in delta.full else mixers) | ffn).items():
            yield f"blk.{layer}.{role}.weight", "Q4_0", shape


def _list_small(config: ModelConfig, delta: Delta, rule: Experts) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    d, heads = config.d_model, delta.value_heads
    channels = (2 * delta.key_heads + heads) * delta.head
    mixers = {"ssm_conv1d.weight": (channels, KERNEL), "ssm_dt.bias": (heads,), "ssm_a": (heads,)}
    mixers["ssm_norm.weight"] = (delta.head,)
    attention = {f"attn_{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    shared = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,), "ffn_gate_inp_shexp.weight": (d,)}
    yield "output_norm.weight", "F32", (d,)
    for layer in range(config.n_layers):
        own: dict[str, tuple[int, ...]] = {**(attention if layer in delta.full else mixers), **shared}
        for role, shape in (own | {"ffn_gate_inp.weight": (rule.count, d)}).items():
            yield f"blk.{layer}.{role}", "F32", shape


def predict(model: str, row: ExpertRow, rates: Rates = SHEET) -> tuple[float, float]:
    """Seconds to the first token and tokens per second."""
    return predict_model(make_hybrid(model), row, rates)


def predict_rows() -> Iterator[dict[str, Any]]:
    """Every row with its predictions."""
    for model, row in list_rows():
        yield describe_row(model, row, predict(model, row))


def compare_table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of rows as published and predicted; what is too far off is bold."""
    return published_experts.compare_table(rows, ("model", "row"), LETTERS)


def find_reasons(row: dict[str, Any]) -> list[str]:
    """Letters of docs/published.md: "f" for prompts that are predicted faster, "g" for answers that are."""
    return published_experts.find_reasons(row, LETTERS)


if __name__ == "__main__":
    print_rows(__doc__, predict_rows, compare_table)
