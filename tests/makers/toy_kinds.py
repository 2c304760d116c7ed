"""A toy kind of units whose state has a fixed size, and a model with it: what any recurrent kind will need is tested.

Issues on hybrids delete the toy when the real one comes. "decay" keeps per sequence a float32 vector s of d_model
numbers: for each token s = s / 2 + norm(x), and W s is added to the residual stream. It is known only between
`know_decay` and the end of a test.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig, Rope
from pshard.runtime.blocks import find_block
from pshard.runtime.blocks.block import Block, Residual, Work, leave, normalise
from pshard.runtime.memory.weights import UnitWeights
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION, WINDOWED_ATTENTION
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.kinds import KINDS
from pshard.units.operations import Norm, Operation, Product
from pshard.units.output import OUTPUT
from pshard.units.ranges import Targets, place_rows
from pshard.units.scratch import Buffer
from pshard.units.state import FixedState, StateShape
from pshard.units.unit import Cut, Tensors, Unit, UnitKind

NORM, OUT = "decay_norm.weight", "decay_out.weight"
CONTEXT, VOCAB = 256, 320
WINDOW = 100  # of layers that have one


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return Norm(tensors.get(NORM), config.d_model), Product(tensors[OUT], adds=True)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_rows(config.d_model, config.d_model, targets)  # a rank holds all of it or nothing


DECAY = UnitKind(
    "decay",
    position="layer",
    places=ATTENTION.places,
    operations=_operations,
    cut=Cut(
        {NORM: ("none", "all"), OUT: ("cols", "cut")}, length=lambda config, tensors: config.d_model, bounds=_bounds
    ),
    state=lambda config, shape: FixedState(4 * config.d_model),
    scratch=lambda config, tokens, shape: (Buffer("decayed", (tokens, config.d_model), "act"),),
    leads=True,
    strategy="first",
    contends="state",
    lock_order=1,
)


class DecayBlock(Block):
    """Its state is float32 [sequences, d_model]."""

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(shape.sequences, -1)[:, : 4 * config.d_model].view(torch.float32)

    def run(self, work: Work, weights: UnitWeights, state: torch.Tensor, residual: Residual) -> None:
        side, n = work.side, work.rows.tokens
        normed, out = normalise(side, weights.vectors[NORM], n, residual), side.space.rows("decayed", n)
        for segment in work.rows.segments:
            kept = state[segment.sequence]
            for row in range(segment.start, segment.start + segment.tokens):
                kept.mul_(0.5).add_(normed[row])
                out[row].copy_(kept)
        leave(side, out, weights.matrices[OUT], None, residual)


@pytest.fixture
def know_decay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kind and its block are known during a test."""
    monkeypatch.setitem(KINDS._known, DECAY.name, DECAY)
    monkeypatch.setitem(find_block.BLOCKS, DECAY.name, DecayBlock())
    yield


class ToyFile:
    """A model file in memory: float32 weights, no tokenizer. `layers`: the kind of each one's first unit: decay,
    attention, or attention with a window and sinks."""

    def __init__(
        self, layers: str = "dad", d_model: int = 64, d_ffn: int = 128, seed: int = 0, context: int = CONTEXT
    ) -> None:
        config = ModelConfig(
            architecture="toy", n_layers=len(layers), d_model=d_model, n_heads=2, n_kv_heads=1, head_dim=32,
            d_ffn=d_ffn, vocab=VOCAB, norm_eps=1e-6, context=context, rope=Rope(32, 1e4, "halves"),
            sliding_window=WINDOW if "w" in layers else 0,
        )  # fmt: skip
        units = [make_unit("embedding", EMBEDDING, -1, {"token_embd.weight": (VOCAB, d_model)})]
        for i, letter in enumerate(layers):
            lead = _decay(i, d_model) if letter == "d" else _attention(i, d_model, letter == "w")
            gates = {f"ffn_{part}.weight": (d_ffn, d_model) for part in ("gate", "up")}
            ffn = {"ffn_norm.weight": (d_model,), **gates, "ffn_down.weight": (d_model, d_ffn)}
            units += [lead, make_unit(f"blk.{i}.ffn", FFN, i, ffn)]
        units.append(
            make_unit("output", OUTPUT, -1, {"output_norm.weight": (d_model,), "output.weight": (VOCAB, d_model)})
        )
        self.spec = ModelSpec("toy", "", config, tuple(units))
        self.seed, self.drawn = seed, [units]

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Numbers by tensor, drawn when they are first needed: those of the last units, after those of the others."""
        rng, values = np.random.default_rng(self.seed), dict[str, np.ndarray]()
        for units in self.drawn:
            values = {t.name: self._draw(rng, t.shape) for unit in units for t in unit.tensors}
        return values

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        return (scale * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)

    def tensor_bytes(self, name: str) -> np.ndarray:
        return self.values[name].reshape(-1).view(np.uint8)

    def part_bytes(self, name: str, part: int) -> np.ndarray:
        stack = next(t for unit in self.spec.units for t in unit.tensors if t.name == name)
        return self.values[name].reshape(stack.parts, -1)[part].view(np.uint8)

    def run_bytes(self, name: str, first: int, end: int) -> np.ndarray:
        stack = next(t for unit in self.spec.units for t in unit.tensors if t.name == name)
        return self.values[name].reshape(stack.parts, -1)[first:end].reshape(-1, stack.cols).view(np.uint8)

    def expect_tensor(self, name: str) -> None:
        pass

    forget_tensor = expect_tensor

    def map_files(self, guard: object, unguard: object) -> None:
        pass

    def tokenizer(self) -> object:
        raise UserError("a toy has no tokenizer")

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of every token, the plain way in float64: [n, vocabulary]."""
        w = {name: torch.from_numpy(values).double() for name, values in self.values.items()}
        x = w["token_embd.weight"][ids]
        for unit in self.spec.units:
            own = {t.role: w[t.name] for t in unit.tensors}
            if unit.kind is DECAY:
                x = x + _decay_forward(norm(x, own[NORM])) @ own[OUT].T
            elif unit.kind in (ATTENTION, WINDOWED_ATTENTION):
                window = WINDOW if unit.kind is WINDOWED_ATTENTION else len(ids)
                x = x + attention_forward(norm(x, own["attn_norm.weight"]), own, self.spec.config, window)
            elif unit.kind is FFN:
                y = norm(x, own["ffn_norm.weight"])
                gated = torch.nn.functional.silu(y @ own["ffn_gate.weight"].T) * (y @ own["ffn_up.weight"].T)
                x = x + gated @ own["ffn_down.weight"].T
        return norm(x, w["output_norm.weight"]) @ w["output.weight"].T


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _decay_forward(x: torch.Tensor) -> torch.Tensor:
    kept, rows = torch.zeros_like(x[0]), []
    for row in x:
        kept = kept / 2 + row
        rows.append(kept)
    return torch.stack(rows)


def attention_forward(
    x: torch.Tensor, own: dict[str, torch.Tensor], config: ModelConfig, window: int = 1 << 30
) -> torch.Tensor:
    n, d = len(x), config.head_dim
    freq = config.rope.base ** (-torch.arange(0, d, 2).double() / d)
    angle = torch.arange(n)[:, None] * freq

    def turn(heads: torch.Tensor) -> torch.Tensor:  # [heads, n, d]
        a, b = heads[..., : d // 2], heads[..., d // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    q, k, v = ((x @ own[f"attn_{part}.weight"].T).unflatten(1, (-1, d)).transpose(0, 1) for part in "qkv")
    scores = turn(q) @ turn(k).repeat_interleave(config.n_heads // config.n_kv_heads, 0).transpose(1, 2) * d**-0.5
    ahead = torch.arange(n)[:, None] - torch.arange(n)  # of the key
    scores = scores.masked_fill((ahead < 0) | (ahead >= window), -torch.inf)
    sinks = own["attn_sinks.weight"] if "attn_sinks.weight" in own else torch.full((config.n_heads,), -torch.inf)
    scores = torch.cat((scores, sinks[:, None, None].expand(-1, n, 1)), -1)
    mixed = scores.softmax(-1)[..., :n] @ v.repeat_interleave(config.n_heads // config.n_kv_heads, 0)
    return mixed.transpose(0, 1).flatten(1) @ own["attn_output.weight"].T


def make_unit(name: str, kind: UnitKind, layer: int, shapes: dict[str, tuple[int, ...]]) -> Unit:
    prefix = f"blk.{layer}." if layer >= 0 else ""
    return Unit(name, kind, layer, tuple(TensorSpec(prefix + role, "F32", shape) for role, shape in shapes.items()))


def _decay(layer: int, d: int) -> Unit:
    return make_unit(f"blk.{layer}.decay", DECAY, layer, {NORM: (d,), OUT: (d, d)})


def _attention(layer: int, d: int, windowed: bool) -> Unit:
    shapes: dict[str, Any] = {"attn_norm.weight": (d,), "attn_q.weight": (64, d), "attn_k.weight": (32, d)}
    shapes |= {"attn_v.weight": (32, d), "attn_output.weight": (d, 64)}
    if windowed:
        return make_unit(f"blk.{layer}.attention", WINDOWED_ATTENTION, layer, shapes | {"attn_sinks.weight": (2,)})
    return make_unit(f"blk.{layer}.attention", ATTENTION, layer, shapes)
