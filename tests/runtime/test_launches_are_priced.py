"""A unit's price for one token is of as many calls as a GPU makes. Nothing is computed here: launches are counted as
they would start. Tables in which all takes a second count what is priced."""

import inspect
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engines import open_engine
from tiny_files import LIKE, write_like
from torch.utils._python_dispatch import TorchDispatchMode

from pshard.batch import Batch
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.runtime import build_engine as session
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.products import many_rows
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.units.operands import CHOSEN, STREAM
from pshard.units.operations import BendLogits, LookUp, Norm, Operation, PickRows, Rotate, Take
from pshard.units.rewrites import end_norms
from pshard.units.unit import Unit

TOKENS = 80  # of a prompt, which is one micro-batch
NORM, INNER_NORMS = "rms_norm_kernel", "add_normed_kernel"
# operators of torch that start nothing on a GPU
VIEWS = {
    "view", "as_strided", "slice", "select", "expand", "unsqueeze", "squeeze", "t", "transpose", "permute", "detach",
    "alias", "split", "split_with_sizes", "_unsafe_view", "_reshape_alias", "unbind", "unfold", "empty", "empty_like",
    "new_empty", "empty_strided", "flatten", "unflatten",
}  # fmt: skip
# of calls that start two kernels, which are timed together, the second
SECOND = {
    "combine_kernel", "decode_combine_kernel", "combine_latent_kernel", "choose_cells_kernel", "down_pairs_kernel",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts launches of kernels and operators of torch by unit. inside: within a call of the kernels' interface."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {}
        self.outside: Counter[str] = Counter()
        self.unit, self.depth = "", 0

    def note(self, name: str) -> None:
        """One more, of the unit at hand."""
        if self.unit:
            self.found.setdefault(self.unit, []).append(name)
            self.outside[name] += not self.depth

    def enter(self, kernel: Any) -> Any:
        """A call of the kernels' interface, all of which is timed and priced."""

        def call(*arguments: Any, **more: Any) -> Any:
            self.depth += 1
            try:
                return kernel(*arguments, **more)
            finally:
                self.depth -= 1

        return call

    def clear(self) -> None:
        """Begin again."""
        self.found, self.outside = {}, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.split("::")[1]) not in VIEWS:
            self.note(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    from triton.runtime.jit import JITFunction

    counted, run_unit = Launches(), UnitRuns.run

    def run(self: UnitRuns, step: Any, *arguments: Any, **more: Any) -> None:
        counted.unit = step.unit
        try:
            run_unit(self, step, *arguments, **more)
        finally:
            counted.unit = ""

    monkeypatch.setattr(UnitRuns, "run", run)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: counted.note(kernel.fn.__name__))
    for name, kernel in inspect.getmembers(CudaKernels, inspect.isfunction):
        if not name.startswith("_"):
            monkeypatch.setattr(CudaKernels, name, counted.enter(kernel))
    monkeypatch.setattr(many_rows, "_multiply_by_library", lambda *_, **__: None)  # which has no such product on a CPU
    kernels = CudaKernels("cpu", TOKENS, limits=KNOWN_CARDS[90])
    monkeypatch.setattr(session, "choose_kernels", lambda *_: (kernels, PlainKernels(), ()))
    yield counted


class OneEach:
    """Tables of a machine that takes a second for whatever was timed by itself: a price then counts calls."""

    kind, vector_tokens = "cuda", 1

    def __init__(self) -> None:
        self.routed = SimpleNamespace(route=lambda *_: 1.0, experts=lambda *_: 1.0)
        self.deltas = SimpleNamespace(seconds=lambda *_: 1.0)

    def elementwise(self, device: str, what: str, tokens: int, width: int) -> float:
        """Adding to what is there comes with what is added."""
        return 0.0 if what == "residual" else 1.0

    def matmul(self, *_: object) -> float:
        """Also of matrices that lie below each other."""
        return 1.0

    attention = decode_attention = has_attention = matmul

    @property
    def in_bf16(self) -> "OneEach":
        return self


def count_priced(unit: Unit, spec: ModelSpec) -> float:
    """How many calls the price of a unit is of, for one token on a GPU."""
    load, ready = TierLoad(Batch.even(1, 1, 2)), CHOSEN if unit.name in spec.behind_routers else None
    behind = unit.name in spec.behind_norms
    by = OneSide("acc", cast(Tables, OneEach()), load, 1, "f32", ready=ready, behind_norms=behind)
    return price_operations(unit.operations(spec.config), by)


def list_made(launches: Launches, unit: Unit, spec: ModelSpec) -> list[str]:
    """The calls that a unit made for one token."""
    made = [name for name in launches.found.get(unit.name, []) if name not in SECOND]
    operations = unit.operations(spec.config)
    opens = next((o for o in operations if not isinstance(o, PickRows | Take)), None)
    ends = end_norms(operations)
    norms = sum(isinstance(o, Norm) for o in operations) - (len(ends.norms) if ends else 0)
    behind = unit.name in spec.behind_norms
    if behind:
        made.remove(INNER_NORMS)  # made here, priced with the unit before
    if following := next((b for a, b in pairwise(spec.units) if a is unit), None):
        made += [INNER_NORMS] * (following.name in spec.behind_norms)
    if not behind and isinstance(opens, Norm) and opens.x == STREAM and made.count(NORM) == norms - 1:
        made.append(NORM)  # the product before has left this norm
    if any(isinstance(o, Rotate) and o.warms for o in operations) and "index_select" not in made:
        made += ["index_select", "mul_"]  # no position of so short a context has another temperature than 1
    return made


def list_postponed(spec: ModelSpec) -> set[str]:
    """Units that do nothing but what the next one does for them."""
    found = [a for a, b in pairwise(spec.units) if b.name in spec.behind_norms]
    return {u.name for u in found if (o := u.operations(spec.config)) and (end := end_norms(o)) and end.norms == o}


def list_beside_calls(operation: Operation) -> list[str]:
    """Operators of torch that an operation makes by itself, outside of calls of the kernels' interface."""
    match operation:
        case LookUp(scale=scale):
            return [] if scale == 1 else ["mul_"]
        case PickRows():
            return ["index_select"]
        case BendLogits(scale=scale, cap=cap):
            return (["mul_"] if scale != 1 else []) + (["div_", "tanh_", "mul_"] if cap else [])
    return []


QUICK = ("next", "mixed")


@pytest.mark.parametrize("like", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LIKE])
def test_what_a_model_launches_is_what_is_priced(launches: Launches, tmp_path: Path, like: str) -> None:
    """Of one token each launch; of a prompt what is launched outside of calls that were timed."""
    path = tmp_path / "tiny.gguf"
    write_like(path, like)
    with open_model(path) as file:
        spec = file.spec
    with open_engine(path, kernels="fast", tokens=(1, TOKENS)) as engine:
        engine.forward([1, 2])
        launches.clear()
        with launches:
            engine.forward([3])
        for unit in spec.units:
            made, priced = list_made(launches, unit, spec), count_priced(unit, spec)
            assert len(made) == priced, (unit.name, priced, made, unit.operations(spec.config))
        launches.clear()
        with launches:
            engine.forward([7 * n % 300 for n in range(TOKENS)])
        operations = [o for unit in spec.units for o in unit.operations(spec.config)]
        beside = Counter(name for o in operations for name in list_beside_calls(o))
        launching = {unit.name for unit in spec.units} - list_postponed(spec)
        assert +launches.outside == beside and set(launches.found) == launching
