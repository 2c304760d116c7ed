"""Each rewrite of a unit's list of operations can be left out, and the model gives the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine
from family_files import write_family
from gemma4_files import GEMMAS, make_gemma4, write_gemma4
from model_files import write_gguf

from pshard.models import open_model
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units import rewrites
from pshard.units.ffn import DOWN, GATE, UP
from pshard.units.operations import GatedProduct, Product, ProductGroup
from pshard.units.rewrites import END_NORMS, GATE_UP, LEFT_NORM, WHOLE_FFN, EndNorms, Ffn, Gate, rewrite

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def leave_out(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(rewrites, "FUSED", rewrites.FUSED - set(names))


def talk(path: Path, kernels: str) -> torch.Tensor:
    """Logits of a prompt and of single tokens."""
    with open_engine(path, kernels=kernels) as engine:
        return torch.cat([engine.forward(part, all_logits=True) for part in (IDS, [7], [8], [9])])


def watch(monkeypatch: pytest.MonkeyPatch, kernels: type, name: str) -> list[str]:
    """The calls of a kernel from now on."""
    calls, kernel = list[str](), getattr(kernels, name)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return kernel(self, *arguments, **keywords)

    monkeypatch.setattr(kernels, name, call)
    return calls


@pytest.mark.quick("Q4_0-left_out3")
@pytest.mark.parametrize(
    ("qtype", "left_out"),
    [("F32", (GATE_UP,)), ("F32", (GATE_UP, WHOLE_FFN)), ("Q4_0", (WHOLE_FFN,)), ("Q4_0", (GATE_UP, WHOLE_FFN))],
)
def test_each_rewrite_left_out_leaves_the_same_numbers(
    qtype: str, left_out: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", qtype=qtype)
    plain, fast = talk(path, "plain"), talk(path, "fast")
    leave_out(monkeypatch, *left_out)
    whole, gated = (watch(monkeypatch, HostKernels, name) for name in ("ffn", "gate_up"))
    assert torch.equal(talk(path, "plain"), plain)
    found = talk(path, "fast")
    assert float((found - fast).abs().max() / fast.std()) < (1e-5 if qtype == "F32" else 1e-2)
    assert bool(whole) == (WHOLE_FFN not in left_out and GATE_UP not in left_out)
    assert GATE_UP not in left_out or not gated


def test_a_list_shows_what_is_carried_out_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "llama")) as file:
        spec = file.spec
    unit = next(u for u in spec.units if UP in u.by_role)
    declared = unit.operations(spec.config)
    assert [type(step) for step in rewrite(declared)] == [type(declared[0]), Ffn]
    leave_out(monkeypatch, WHOLE_FFN)
    assert rewrite(declared) == declared
    leave_out(monkeypatch, GATE_UP)
    norm, both, gate, down = rewrite(declared)
    assert isinstance(both, ProductGroup) and [m.role for m in both.matrices] == [GATE, UP]
    assert isinstance(gate, Gate) and gate.reads == both.writes
    assert isinstance(down, Product) and down.matrix.role == DOWN and down.reads == gate.writes


def test_a_product_of_something_else_is_not_taken_together_with_a_gate(tmp_path: Path) -> None:
    """As where the last rows of gate and up lie elsewhere: what `down` takes is more than the last of them."""
    with open_model(write_gguf(tmp_path / "m.gguf", "llama")) as file:
        spec = file.spec
    unit = next(u for u in spec.units if u.kind.keep)
    assert unit.kind.keep is not None
    steps = rewrite(unit.kind.keep(unit.by_role, unit.by_role, spec.config))
    assert [type(step) for step in steps[1:]] == [GatedProduct, GatedProduct, Product]


def test_a_product_is_told_of_the_norm_that_follows_unless_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms of routers and of attention that products before them are added to."""
    path, told = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0"), list[str]()
    monkeypatch.setattr(PlainKernels, "leaves_norms", True)
    for name in ("linear", "experts"):
        note_norms(monkeypatch, name, told)
    first, names, count = talk(path, "plain"), set(told), len(told)
    assert names == {"linear", "experts"}
    leave_out(monkeypatch, LEFT_NORM)
    assert torch.equal(talk(path, "plain"), first) and len(told) == count


def note_norms(monkeypatch: pytest.MonkeyPatch, name: str, told: list[str]) -> None:
    """Plain kernels take the norm that follows a product, note that, and leave it to be made."""
    kernel, place = getattr(PlainKernels, name), 6 if name == "linear" else 7

    def call(self: PlainKernels, *arguments: Any, **keywords: Any) -> None:
        told.extend([name] * (len(arguments) > place))
        kernel(self, *arguments[:place], **keywords)

    monkeypatch.setattr(PlainKernels, name, call)


@pytest.mark.quick("mixed")
@pytest.mark.parametrize("like", ["mixed", "dense", "small", "olmo2", "glm4"])
def test_a_unit_leaves_norms_by_which_it_ends_to_the_next_unless_that_is_left_out(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose units begin with no norm makes them all itself."""
    path = tmp_path / "m.gguf"
    if like in GEMMAS:
        write_gemma4(path, GEMMAS[like], make_gemma4(GEMMAS[like]))
    else:
        write_family(path, like)
    made = watch(monkeypatch, PlainKernels, "add_normed")
    first = talk(path, "plain")
    assert bool(made) == (like != "olmo2")
    made.clear()
    leave_out(monkeypatch, END_NORMS)
    assert torch.equal(talk(path, "plain"), first) and not made


def test_a_list_shows_the_norms_by_which_a_unit_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gemma4(tmp_path / "m.gguf", GEMMAS["mixed"], make_gemma4(GEMMAS["mixed"]))
    with open_model(tmp_path / "m.gguf") as file:
        spec = file.spec
    found = {unit.kind.name: rewrite(unit.operations(spec.config)) for unit in spec.units}
    counts = {kind: len(steps[-1].norms) for kind, steps in found.items() if isinstance(steps[-1], EndNorms)}
    assert counts.pop("blend") == 3 and set(counts.values()) == {1} and all("attention" in kind for kind in counts)
    leave_out(monkeypatch, END_NORMS)
    for unit in spec.units:
        assert not any(isinstance(step, EndNorms) for step in rewrite(unit.operations(spec.config)))
