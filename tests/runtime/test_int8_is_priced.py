"""Which products of a prompt a GPU makes in int8, and which are priced so. Nothing is computed here: launches are noted
as they would start."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engines import open_engine
from tiny_files import LIKE, write_like

from pshard.batch import Batch
from pshard.batch_sizes import SMALL_BATCH
from pshard.models import open_model
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.runtime import build_engine as session
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.products import int8_rows, many_rows
from pshard.runtime.kernels.gpu.products.int8_rows import Target
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.times.gpu_tiles import INT8_KERNEL, INT8_TYPES, Tile, TileChoice
from pshard.units.operations import Operation
from pshard.units.unit import Unit

TOKENS = 80  # of a prompt, which is one micro-batch
FASTER = tuple(TileChoice("acc", INT8_KERNEL, q, 128, Tile(64, 1, 2, 1, tokens=64), 1.0, 2.0) for q in INT8_TYPES)
Shapes = Counter[tuple[str, int, int]]  # of matrices: types, rows, columns


class Noted:
    """Tables of a machine on which all takes a second. int8: matrices of products of many tokens, as they are asked
    for; those in bfloat16 are not noted."""

    kind, vector_tokens = "cuda", 1

    def __init__(self, int8: Shapes | None) -> None:
        self.int8 = int8
        self.routed = SimpleNamespace(route=lambda *_: 1.0, experts=lambda *_: 1.0)
        self.deltas = SimpleNamespace(seconds=lambda *_: 1.0)

    @property
    def in_bf16(self) -> "Noted":
        return Noted(None)

    def matmul(self, device: str, qtype: str, rows: int, cols: int, tokens: int) -> float:
        if self.int8 is not None and tokens > SMALL_BATCH and qtype in INT8_TYPES:
            self.int8[qtype, rows, cols] += 1
        return 1.0

    def elementwise(self, *_: object) -> float:
        return 1.0

    attention = decode_attention = has_attention = elementwise


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Shapes]:
    """By unit, the matrices that a run multiplies by in int8."""
    from triton.runtime.jit import JITFunction

    found: dict[str, Shapes] = {}
    running, run_unit = [""], UnitRuns.run

    def run(self: UnitRuns, step: Any, *arguments: Any, **more: Any) -> None:
        running[0] = step.unit
        run_unit(self, step, *arguments, **more)

    def note(x: Any, targets: Sequence[Target], *_: object) -> None:
        found.setdefault(running[0], Counter()).update((w.qtype, w.rows, w.cols) for w, *_ in targets)

    monkeypatch.setattr(UnitRuns, "run", run)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    monkeypatch.setattr(int8_rows, "multiply", note)
    monkeypatch.setattr(many_rows, "_multiply_by_library", lambda *_, **__: None)  # which has no such product on a CPU
    kernels = CudaKernels("cpu", TOKENS, limits=KNOWN_CARDS[90])
    kernels.use_tiles(FASTER)
    monkeypatch.setattr(kernels, "use_tiles", lambda _: None)
    monkeypatch.setattr(session, "choose_kernels", lambda *_: (kernels, PlainKernels(), ()))
    return found


def list_priced(unit: Unit, operations: Iterable[Operation]) -> Shapes:
    """The matrices of a unit whose products in a prompt are priced as in int8."""
    found: Shapes = Counter()
    load = TierLoad(Batch.even(TOKENS, 1))
    rows = load.logit_rows if unit.kind.gives_logits else TOKENS
    price_operations(operations, OneSide("acc", cast(Tables, Noted(found)), load, rows, "f32", unit=unit))
    return found


@pytest.mark.quick("qwen3", "next", "lite")
@pytest.mark.parametrize("like", LIKE)
def test_what_a_prompt_multiplies_in_int8_is_what_is_priced_so(
    made: dict[str, Shapes], tmp_path: Path, like: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_like(path, like)
    with open_model(path) as file:
        spec = file.spec
    with open_engine(path, kernels="fast", tokens=(1, TOKENS)) as engine:
        engine.forward([7 * n % 300 for n in range(TOKENS)])
    priced = {unit.name: list_priced(unit, unit.operations(spec.config)) for unit in spec.units}
    assert {name: shapes for name, shapes in priced.items() if shapes} == made
    assert made and not any(unit.layer == 0 for unit in spec.units if unit.name in made)
