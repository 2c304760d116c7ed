"""The kernels of a plan's steps are found without a GPU and without weights, and compiled once, as the model loads."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrid_files
import latent_files
import psutil
import pytest
import torch
from engines import open_engine
from head_files import write_headed
from model_files import write_gguf
from plan_samples import make_tier, make_variant, with_workload

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")

from pshard.models import open_model
from pshard.models.attach_draft import open_drafted
from pshard.models.model_file import ModelFile
from pshard.planner.place_head import place_head
from pshard.profile.tuning.compile_ahead import OnlyTarget, requests_of
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime import build_engine as building
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.count_compiled import count_compiled
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.products.many_rows import library_left_out
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.rehearse import SilentDevice, list_steps, verify_drafts
from pshard.session.readiness import compile_kernels, ready_kernels
from pshard.session.readiness.compile_kernels import Task, list_kernels
from pshard.session.readiness.ready_kernels import kernels_ready
from pshard.speculation import Drafting

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


def task_of(file: Any, variant: Any) -> Task:
    return Task(file.spec.path, file.draft_path, variant, (), CARD)


def write_family(path: Path, like: str) -> Path:
    """A model with attention of every token, with latents, or with delta nets."""
    if like in hybrid_files.LIKE:
        return hybrid_files.write_hybrid_gguf(path, like, hybrid_files.random_hybrid(like), qtype="Q8_0")
    if like in latent_files.LIKE:
        return latent_files.write_latent_gguf(path, like, latent_files.random_tensors(like), qtype="Q8_0")
    return write_gguf(path, like)


@pytest.mark.parametrize("like", ["llama", "qwen3moe", "gpt-oss", *hybrid_files.LIKE, *latent_files.LIKE])
def test_kernels_of_every_family_are_found_and_nothing_of_the_file_is_read(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variant = open_variant(write_family(tmp_path / "m.gguf", like))
    for name in ("tensor_bytes", "part_bytes", "run_bytes"):
        monkeypatch.setattr(ModelFile, name, None)
    found = {request.kernel for request in list_kernels(task_of(file, variant))}
    assert {"rms_norm_kernel", "sort_kernel"} & found and len(found) > 8


@contextmanager
def loaded_silently(file: Any, variant: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine of the loaded model, whose kernels of a GPU can be asked what they start."""
    kernels = CudaKernels(torch.device("cpu"), 80, limits=CARD)
    monkeypatch.setattr(building, "choose_kernels", lambda *_: (kernels, PlainKernels(), ()))
    with file, library_left_out(), building.build_engine(file, variant, SilentDevice()) as engine:
        yield engine


@pytest.mark.parametrize("where", PLACES)
def test_a_rehearsal_finds_what_a_loaded_model_starts(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    file, variant = open_variant(path, where)
    rehearsed = list_kernels(task_of(file, variant))
    with loaded_silently(file, variant, monkeypatch) as engine:
        steps = list_steps(variant, engine.longest)
        started = [request for step in steps for request in requests_of(partial(take, engine, step))]
    assert set(started) == set(rehearsed) and len(rehearsed) == len(set(rehearsed)) > 10


@pytest.mark.skipif(sys.platform != "linux", reason="other systems set aside what is mapped")
def test_a_rehearsal_has_room_for_more_than_the_hosts_memory() -> None:
    memory = SilentDevice().allocate(1 << 43)
    assert memory.nbytes == 1 << 43 and memory[-4:].zero_().sum() == 0


def open_drafting(folder: Path, who: str) -> tuple[Any, Any]:
    """A model with a head or another model that drafts two tokens a step, all in VRAM, and its plan."""
    if who == "head":
        write_headed(folder / "m.gguf", "dense")
        file = open_model(folder / "m.gguf")
    else:
        model, other = (write_gguf(folder / f"{name}.gguf", "qwen3", qtype="Q8_0") for name in ("m", "other"))
        file = open_drafted(model, other)
    spec = replace(file.spec, keeps_states=who == "head")
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1, batch=80) for n in (4, 24, 80))
    variant = make_variant(spec, tiers, CONTEXT, 1, reserve_mib=TORCH_RESERVE_MIB)
    variant = with_workload(variant, type_k="bf16", type_v="bf16", drafting=Drafting("mtp", 2))
    in_vram = {unit.name for unit in spec.head.units}
    return file, replace(variant, drafter=place_head(spec.head, variant.workload.state_shape, 2, in_vram))


@pytest.mark.parametrize("who", ["head", "draft model"])
def test_drafts_are_rehearsed_as_a_loaded_model_makes_and_verifies_them(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variant = open_drafting(tmp_path, who)
    rehearsed = list_kernels(task_of(file, variant))
    with loaded_silently(file, variant, monkeypatch) as engine:
        steps = list_steps(variant, engine.longest)
        started = [request for step in steps for request in requests_of(partial(take, engine, step))]
        engine.reset()
        whole = variant.drafter.tiers[-1].tokens
        drafted = set(requests_of(partial(verify_drafts, engine, 2, whole)))
    assert {*started, *drafted} == set(rehearsed) and drafted - set(started)


def take(engine: Any, step: list[list[int]]) -> None:
    engine.reset()
    engine.forward(step)


def test_prompts_of_each_tier_short_ones_and_answers_of_several_texts_are_rehearsed(tmp_path: Path) -> None:
    _, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"), sequences=3)
    steps = [[len(text) for text in step] for step in list_steps(variant, 4096)]
    assert steps == [[4], [8], [16], [24], [32], [64], [80], [1], [1, 1]]
    assert [step for step in list_steps(variant, 8) if len(step[0]) > 8] == []


@pytest.mark.parametrize("sequences", [1, 4])
def test_plans_of_few_tiers_and_contexts_longer_than_the_models_own_are_rehearsed(
    sequences: int, tmp_path: Path
) -> None:
    file = open_model(write_gguf(tmp_path / "m.gguf", "llama"))
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
    tiers = tuple(make_tier(file.spec, n, places, 2, 4096, sequences, batch=2048) for n in (4, 24, 512, 2048))
    variant = make_variant(file.spec, tiers, 4096, sequences, reserve_mib=TORCH_RESERVE_MIB)
    assert len(list_kernels(task_of(file, variant))) > 10


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Triton keeps kernels."""
    monkeypatch.setattr("pshard.runtime.kernels.gpu.card_limits.card_limits", lambda _: CARD)
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "kept"))
    return tmp_path / "kept"


def answer(monkeypatch: pytest.MonkeyPatch, log: Path, program: str) -> None:
    """Let this program stand for the process that compiles; it notes that it runs."""
    monkeypatch.setattr(ready_kernels, "RUN", f"open({str(log)!r}, 'a').write('begun ')\n{program}")


def enter(file: Any, variant: Any, error: type[BaseException] | None = None) -> list[str]:
    """Go through what compiles kernels meanwhile; the notes."""
    notes, opened = list[str](), SimpleNamespace(file=file, profile=SimpleNamespace(tiles_of=lambda _: ()))
    with kernels_ready(opened, variant, 0, notes):  # type: ignore[arg-type]
        if error:
            raise error
    return notes


COMPILED = """print('{"kernels": 3, "left": 1, "compiled": null, "error": ""}', flush=True)
print('{"kernels": 3, "left": 0, "compiled": 3, "error": ""}')"""


def test_a_plans_kernels_are_compiled_once_and_another_plans_again(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    answer(monkeypatch, tmp_path / "log", COMPILED)
    for plan, times in ((variant, 1), (variant, 1), (with_workload(variant, type_k="q8_0"), 2)):
        assert enter(file, plan) == [] and (tmp_path / "log").read_text() == "begun " * times
    assert len(list(kept.glob("pshard-*"))) == 2  # a kernel of any other test may have been compiled meanwhile


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("""print('{"kernels": 0, "left": 0, "compiled": null, "error": "OSError: full"}')""", "OSError: full"),
        ("raise SystemExit(1)", "the process ended"),
        ("print('{')", "JSONDecodeError"),
    ],
)
def test_what_could_not_be_compiled_is_told_and_tried_again(
    program: str, why: str, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    answer(monkeypatch, tmp_path / "log", program)
    for times in (1, 2):
        (note,) = enter(file, variant)
        assert "compiled one by one as they are first used" in note and why in note
        assert (tmp_path / "log").read_text() == "begun " * times and not kept.exists()


def test_an_interrupted_load_ends_the_process_that_compiles(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    answer(monkeypatch, tmp_path / "log", "import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        enter(file, variant, KeyboardInterrupt)
    assert not kept.exists()


@pytest.mark.parametrize("why", ["ranks", "ram"])
def test_plans_of_several_ranks_or_with_a_limit_of_memory_are_left_alone(why: str, tmp_path: Path, kept: Path) -> None:
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    if why == "ram":
        variant = with_workload(variant, ram_mib=4000)
    else:
        variant = SimpleNamespace(ranks=variant.ranks * 2, workload=variant.workload)
    assert enter(file, variant) == [] and not kept.exists()


@pytest.mark.slow
def test_a_process_compiles_what_a_plan_starts(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept))
    file, variant = open_variant(write_gguf(tmp_path / "m.gguf", "llama"))
    assert enter(file, variant) == [] and "GPU kernels were compiled for this plan" in capsys.readouterr().err
    assert len(list(kept.rglob("*.cubin"))) >= len(list_kernels(task_of(file, variant))) > 10


@pytest.mark.parametrize(
    ("errors", "told"),
    [({1: None, 2: ValueError("spills")}, ""), ({1: None, 2: OSError("full")}, "full"), ({1: None}, "1 of 2 kernels")],
)
def test_a_kernel_that_no_compiler_takes_is_not_tried_again_and_one_that_was_lost_is(
    errors: dict[int, Exception | None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_kernels, "become", lambda _: None)
    monkeypatch.setattr(compile_kernels, "list_kernels", lambda _: [1, 2])
    compiling = SimpleNamespace(left=0, finish=lambda _: errors)
    monkeypatch.setattr(compile_kernels, "Compiling", lambda *_: compiling)
    heard = list[Any]()
    with pytest.raises((OSError, TimeoutError), match=told) if told else nullcontext():
        compile_kernels.compile_plan(SimpleNamespace(limits=CARD), heard.append)  # type: ignore[arg-type]
    assert [one.compiled for one in heard] == ([] if told else [1])


def test_who_loses_its_parent_ends_with_the_processes_it_started(tmp_path: Path) -> None:
    words = "import subprocess as s, time; from pshard.session.readiness import compile_kernels as c\n"
    words += "c.compile_plan = lambda *_: print(s.Popen(['sleep', '600']).pid, flush=True) or time.sleep(600)\n"
    words += "c.from_json = lambda *_: None; c.main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write("{}\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    process.stdin.close()  # as the system does for a process that was killed
    assert process.wait(20) == -signal.SIGKILL
    end = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.gpu
def test_a_gpu_has_nothing_left_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "kept"))
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    file, variant = open_variant(path, "streamed")
    notes, opened = list[str](), SimpleNamespace(file=file, profile=SimpleNamespace(tiles_of=lambda _: ()))
    with kernels_ready(opened, variant, 0, notes):  # type: ignore[arg-type]
        engine = open_engine(path, variant.ranks[0].tiers, "fast", CONTEXT, device="cuda", kv_types=("bf16", "bf16"))
    compiled = count_compiled()
    with engine:
        for step in list_steps(variant, engine.longest):
            take(engine, step)
    assert notes == [] and compiled.kernels == 0
