"""What blocks call is what their kinds declare: what runs is what is timed and priced."""

from typing import Any

import pytest
from engines import open_engine
from family_files import RECIPES, write_family
from gemma4_files import SMALL, make_gemma4, write_gemma4
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf
from qwen4exp_files import RECIPES as SEVERAL_STREAMS
from qwen4exp_files import make_weights, write_qwen4exp

from pshard.models import open_model
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.grams import TAKEN_ROWS
from pshard.units.moe.chunks import SCORED
from pshard.units.operations import (
    AddGrams,
    AddRows,
    Attend,
    AttendLatent,
    Bend,
    BendLogits,
    ChooseCells,
    Convolve,
    DeltaNet,
    ExpertProducts,
    GatedProduct,
    GateGrams,
    GateRows,
    HeadProducts,
    InjectStream,
    LookUp,
    MixStreams,
    Norm,
    NormHeads,
    NormStreams,
    NormWide,
    Operation,
    PickRows,
    Product,
    ProductGroup,
    ResizeHeads,
    Rotate,
    Route,
    SpreadStream,
    StoreIndex,
    StoreLatent,
    SumSquares,
    Take,
    TimesRows,
    WeighRows,
)
from pshard.units.ports import ENTERED, ROUTED

CALLS: dict[type, tuple[str, ...]] = {  # of kernels, by the operation that they carry out
    LookUp: (),  # of the weights, not of the kernels
    Norm: ("rms_norm",),
    Take: (),  # activations of plain kernels are of the type of ports
    PickRows: (),  # operators of torch, not kernels
    BendLogits: (),
    WeighRows: ("weigh_rows",),
    ProductGroup: ("linear_group",),
    Rotate: ("rope_store",),
    Attend: ("attention",),
    GateRows: ("gate_rows",),
    TimesRows: ("times_rows",),
    ResizeHeads: ("resize_heads",),
    DeltaNet: ("delta_net",),
    Convolve: ("short_conv",),
    GatedProduct: ("gate_up",),
    Product: ("linear",),
    HeadProducts: ("head_products",),
    Bend: ("bend_rows",),
    NormHeads: ("norm_heads",),
    SumSquares: ("sum_squares",),
    NormWide: ("norm_wide",),
    StoreLatent: ("store_latent",),
    AttendLatent: ("attend_latent",),
    Route: ("route",),
    AddRows: (),
    ExpertProducts: ("experts",),
    StoreIndex: ("store_index",),
    ChooseCells: ("choose_cells",),
    SpreadStream: ("spread_stream",),
    InjectStream: ("inject_stream",),
    NormStreams: ("norm_streams",),
    MixStreams: ("mix_streams",),
    GateGrams: ("gate_grams",),
    AddGrams: ("add_grams",),
}


def list_calls(operation: Operation) -> tuple[str, ...]:
    """What one operation calls."""
    if isinstance(operation, Take) and operation.out.buffer in (ENTERED, ROUTED, TAKEN_ROWS):  # a copy
        return ("place",)
    if isinstance(operation, Route) and operation.out.buffer == SCORED:
        return ("route", "choose_chunks")
    centred = isinstance(operation, Norm) and operation.centred
    scaled = isinstance(operation, GatedProduct) and operation.scale is not None
    return (*(("centre_rows",) if centred else ()), *CALLS[type(operation)], *(("scale_rows",) if scaled else ()))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called, in order."""
    names: list[str] = []
    outer = [True]  # kernels call each other

    def record(name: str) -> Any:
        kernel = getattr(PlainKernels, name)

        def call(self: PlainKernels, *arguments: Any, **keywords: Any) -> Any:
            if outer[0]:
                names.append(name)
            was, outer[0] = outer[0], False
            try:
                return kernel(self, *arguments, **keywords)
            finally:
                outer[0] = was

        return call

    for name in {"centre_rows", "place", "choose_chunks", "scale_rows"}.union(*CALLS.values()):
        monkeypatch.setattr(PlainKernels, name, record(name))
    return names


@pytest.mark.parametrize(
    "like",
    [
        *("qwen3", "lite", "v3", "smollm3", "glm4", "gemma3", "olmo2", "cohere2", "next", "dense"),
        *("jais2", "olmo", "stablelm-12b", "hunyuan-dense", "gemma4", "lfm2", "smallthinker", "laguna", "mimo2"),
        *("grovemoe", "qwen4exp", "llama4"),
    ],
)
def test_a_token_takes_the_calls_that_the_units_declare_in_their_order(called: list[str], tmp_path, like: str) -> None:
    path = tmp_path / "tiny.gguf"
    if like == "qwen3":
        write_gguf(path, like)
    elif like == "gemma4":
        write_gemma4(path, SMALL, make_gemma4(SMALL))
    elif like in ("next", "dense"):
        write_hybrid_gguf(path, like, random_hybrid(like))
    elif like == "qwen4exp":
        write_qwen4exp(path, SEVERAL_STREAMS["plain"], make_weights(SEVERAL_STREAMS["plain"]))
    elif like in RECIPES:
        write_family(path, like)
    else:
        write_latent_gguf(path, like, random_tensors(like))
    with open_model(path) as file:
        spec = file.spec
    declared: list[Operation] = [o for unit in spec.units for o in unit.operations(spec.config)]
    with open_engine(path, kernels="plain") as engine:
        engine.forward([1, 2])
        called.clear()
        engine.forward([3])
    assert called == [name for operation in declared for name in list_calls(operation)]
