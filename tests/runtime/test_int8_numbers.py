"""What int8 prompts cost: logits of the bundled model, its products rounded as a GPU rounds them, beside bfloat16."""

from functools import partial
from pathlib import Path

import pytest
import torch
from engines import open_engine
from model_files import write_gguf
from rounded_products import RoundedProducts, quantise

from pshard.models import open_model
from pshard.paths import bundled_model
from pshard.runtime import build_executor
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.memory.weights import view_unit

TEXT = "It was the best of times, it was the worst of times: the kernel had sums, and the sums had scales. " * 40
WINDOW = 512  # of the model


def read_logits(monkeypatch: pytest.MonkeyPatch, way: str | None, tokens: int, windows: int) -> torch.Tensor:
    path = bundled_model()
    assert path is not None
    file = open_model(path)
    ids = file.tokenizer().encode(TEXT)
    made = PlainKernels if way is None else partial(RoundedProducts, way, file.spec.config.vocab)
    monkeypatch.setattr(build_executor, "PlainKernels", made)
    found = []
    with open_engine(path, tokens=(1, tokens), context=WINDOW) as engine:
        for begin in range(0, windows * tokens, tokens):
            engine.reset(0)
            found.append(engine.forward(ids[begin : begin + tokens], all_logits=True).double())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("tokens", "windows"), [pytest.param(128, 1, id="few"), pytest.param(512, 2, id="many", marks=pytest.mark.slow)]
)
def test_int8_prompts_are_near_bfloat16(monkeypatch: pytest.MonkeyPatch, tokens: int, windows: int) -> None:
    exact, bf16, int8 = (read_logits(monkeypatch, way, tokens, windows) for way in (None, "bf16", "int8"))
    p = exact.log_softmax(1)
    divergence = {}
    for name, got in (("bf16", bf16), ("int8", int8)):
        divergence[name] = float((p.exp() * (p - got.log_softmax(1))).sum(1).mean())
    errors = [float((got - exact).norm() / exact.norm()) for got in (bf16, int8)]
    same = [float((got.argmax(1) == exact.argmax(1)).double().mean()) for got in (bf16, int8)]
    assert 0 < divergence["bf16"] < divergence["int8"] < 6e-4
    assert errors[1] < 2 * errors[0], errors
    assert min(same) > 0.95 and same[1] > same[0] - 0.03


def test_dense_matrices_of_the_first_layer_alone_are_never_multiplied_in_int8(tmp_path: Path) -> None:
    for unit in open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0")).spec.units:
        held = view_unit(unit, torch.empty(unit.packed_nbytes, dtype=torch.uint8)).matrices
        for tensor in (t for t in unit.tensors if t.role in held):
            assert held[tensor.role].never_int8 == (unit.layer == 0 and not tensor.parts), (unit.name, tensor.role)


def test_rounding_leaves_what_int8_holds_and_no_more_than_half_a_step_of_the_rest() -> None:
    held = torch.randint(-127, 128, (3, 64), generator=torch.Generator().manual_seed(1)).float()
    held[:, ::32] = 127.0
    assert torch.equal(quantise(held), held.double())
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).float()
    steps = x.view(5, 3, 32).abs().amax(2, keepdim=True) / 127
    assert ((quantise(x) - x.double()).view(5, 3, 32).abs() <= 0.5001 * steps).all()
    assert torch.equal(quantise(torch.zeros(1, 32)), torch.zeros(1, 32, dtype=torch.float64))
