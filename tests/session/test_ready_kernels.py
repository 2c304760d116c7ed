"""The kernels of a plan's steps are found without a GPU and without weights, and compiled once, as the model loads."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrid_files
import latent_files
import pytest
import torch
from engines import open_engine
from model_files import write_gguf
from plan_samples import make_tier, make_variant, with_workload

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")

from pshard.models import open_model
from pshard.profile.tuning import compile_ahead
from pshard.profile.tuning.compile_ahead import OnlyTarget, requests_of
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime import build_engine as building
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.count_compiled import count_compiled
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.products.many_rows import library_left_out
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.rehearse import SilentDevice, list_steps
from pshard.session.readiness.ready_kernels import kernels_ready, list_kernels

CONTEXT = 256
CARD = KNOWN_CARDS[90]  # as other tests of the process have it: Triton asks once
PLACES = {"pinned": ("pinned", None), "streamed": ("streamed", None), "cpu": ("cpu", None)}


@pytest.fixture(autouse=True)
def other_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", OnlyTarget(GPUTarget("cuda", CARD.capability, 32)))


def open_variant(path: Path, where: str = "pinned", sequences: int = 1) -> tuple[Any, Any]:
    """The model, and a plan in which all units but those that have cells lie there."""
    file = open_model(path)
    places = {u.name: ("pinned", "vram") if u.kind.state else PLACES[where] for u in file.spec.units}
    tiers = tuple(make_tier(file.spec, n, places, 2, CONTEXT, sequences, batch=80) for n in (4, 24, 80))
    variant = make_variant(file.spec, tiers, CONTEXT, sequences, reserve_mib=TORCH_RESERVE_MIB)
    return file, with_workload(variant, type_k="bf16", type_v="bf16")


def find(file: Any, variant: Any) -> set[str]:
    return {r.kernel for r in list_kernels(SimpleNamespace(file=file), variant, (), CARD)}  # type: ignore[arg-type]


def write_family(path: Path, like: str) -> Path:
    """A model with attention of every token, with latents, or with delta nets."""
    if like in hybrid_files.LIKE:
        return hybrid_files.write_hybrid_gguf(path, like, hybrid_files.random_hybrid(like), qtype="Q8_0")
    if like in latent_files.LIKE:
        return latent_files.write_latent_gguf(path, like, latent_files.random_tensors(like), qtype="Q8_0")
    return write_gguf(path, like)


@pytest.mark.parametrize("like", ["llama", "qwen3moe", "gpt-oss", *hybrid_files.LIKE, *latent_files.LIKE])
def test_kernels_of_every_family_are_found_and_nothing_of_the_file_is_read(like: str, tmp_path: Path) -> None:
    file, variant = open_variant(write_family(tmp_path / "m.gguf", like))
    for name in ("tensor_bytes", "part_bytes", "run_bytes"):
        setattr(file, name, None)
    with file:
        found = find(file, variant)
    assert {"rms_norm_kernel", "sort_kernel"} & found and len(found) > 8


@pytest.mark.parametrize("where", PLACES)
def test_a_rehearsal_finds_what_a_loaded_model_starts(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    file, variant = open_variant(path, where)
    with file:
        rehearsed = list_kernels(SimpleNamespace(file=file), variant, (), CARD)  # type: ignore[arg-type]
        kernels = CudaKernels(torch.device("cpu"), 80, limits=CARD)
        monkeypatch.setattr(building, "choose_kernels", lambda *_: (kernels, PlainKernels(), ()))
        with library_left_out(), building.build_engine(file, variant, SilentDevice()) as engine:
            started = [r for step in list_steps(variant) for r in requests_of(lambda s=step: take(engine, s))]
    assert set(started) == set(rehearsed) and len(rehearsed) == len(set(rehearsed)) > 10


def take(engine: Any, step: list[list[int]]) -> None:
    engine.reset()
    engine.forward(step)


def test_prompts_of_each_tier_short_ones_and_answers_of_several_texts_are_rehearsed(tmp_path: Path) -> None:
    _, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"), sequences=3)
    steps = [[len(text) for text in step] for step in list_steps(variant)]
    assert steps == [[4], [16], [24], [32], [64], [80], [1], [1, 1]]


class Pool:
    """Stands for the processes that compile."""

    def __init__(self, requests: list[Any], processes: int) -> None:
        self.requests, self.left, self.waited = requests, 0, list[float]()
        pools.append(self)

    def finish(self, seconds: float) -> dict[Any, None]:
        self.waited.append(seconds)
        return dict.fromkeys(self.requests)


pools: list[Pool] = []


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Triton keeps kernels."""
    pools.clear()
    monkeypatch.setattr(compile_ahead, "Compiling", Pool)
    monkeypatch.setattr("pshard.runtime.kernels.gpu.card_limits.card_limits", lambda _: CARD)
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "kept"))
    yield tmp_path / "kept"


def enter(file: Any, variant: Any, error: type[BaseException] | None = None) -> list[str]:
    """Go through what compiles kernels meanwhile; the notes."""
    notes, opened = list[str](), SimpleNamespace(file=file, profile=SimpleNamespace(tiles_of=lambda _: ()))
    with kernels_ready(opened, variant, 0, notes):  # type: ignore[arg-type]
        if error:
            raise error
    return notes


def test_a_plans_kernels_are_compiled_once_and_another_plans_again(tmp_path: Path, kept: Path) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    for plan, times in ((variant, 1), (variant, 1), (with_workload(variant, type_k="q8_0"), 2)):
        assert enter(file, plan) == [] and len(pools) == times
    assert len(pools[0].requests) > 10 and len(list(kept.iterdir())) == 2


def test_what_was_interrupted_is_compiled_again(tmp_path: Path, kept: Path) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    with pytest.raises(KeyboardInterrupt):
        enter(file, variant, KeyboardInterrupt)
    assert pools[0].waited == [0.0] and not kept.exists()
    enter(file, variant)
    assert len(pools) == 2


def test_a_plan_that_cannot_be_rehearsed_runs_with_a_note(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    monkeypatch.setattr("pshard.runtime.rehearse.list_steps", lambda _: 1 / 0)
    (note,) = enter(file, variant)
    assert "compiled one by one as they are first used (ZeroDivisionError" in note and not pools


@pytest.mark.parametrize("why", ["ranks", "ram"])
def test_plans_of_several_ranks_or_with_a_limit_of_memory_are_left_alone(why: str, tmp_path: Path, kept: Path) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    if why == "ram":
        variant = with_workload(variant, ram_mib=4000)
    else:
        variant = SimpleNamespace(ranks=variant.ranks * 2, workload=variant.workload)
    assert enter(file, variant) == [] and not pools


@pytest.mark.gpu
def test_a_gpu_has_nothing_left_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "kept"))
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    file, variant = open_variant(path, "streamed")
    notes, opened = list[str](), SimpleNamespace(file=file, profile=SimpleNamespace(tiles_of=lambda _: ()))
    with kernels_ready(opened, variant, 0, notes):  # type: ignore[arg-type]
        engine = open_engine(path, variant.ranks[0].tiers, "fast", CONTEXT, device="cuda", kv_types=("bf16", "bf16"))
    compiled = count_compiled()
    with engine:
        for step in list_steps(variant):
            take(engine, step)
    assert notes == [] and compiled.kernels == 0
