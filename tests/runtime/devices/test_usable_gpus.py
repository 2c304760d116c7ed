"""GPUs that the kernels cannot run on: the CPU computes, a note says why and what is needed, and nothing ends in a
traceback."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_world import make_world

from pshard.commands.program import one_program
from pshard.errors import UserError
from pshard.machine import AS_CARD
from pshard.profile.identify import default_accelerator, identify_accelerators
from pshard.runtime.build_executor import choose_kernels
from pshard.runtime.devices import usable_gpus
from pshard.runtime.devices.cuda_driver import cuda_driver
from pshard.runtime.devices.device import open_device
from pshard.runtime.devices.usable_gpus import count_usable, describe_unused
from pshard.runtime.kernels.gpu.card_limits import _read_limits

Insert = Callable[..., None]


@pytest.fixture
def insert(monkeypatch: pytest.MonkeyPatch) -> Insert:
    """Makes torch see GPUs, of the capabilities given; with `hip` AMD's."""
    monkeypatch.delenv(AS_CARD, raising=False)

    def see(*capabilities: tuple[int, int], hip: str | None = None, triton: bool = True) -> None:
        def describe(index: int) -> SimpleNamespace:
            major, minor = capabilities[index]
            return SimpleNamespace(
                name=f"Card {major}.{minor}", major=major, minor=minor, shared_memory_per_block_optin=65536,
                shared_memory_per_multiprocessor=65536, regs_per_multiprocessor=65536, L2_cache_size=4 << 20,
                max_threads_per_multi_processor=1024, multi_processor_count=40, uuid="0", total_memory=8 << 30,
            )  # fmt: skip

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: describe(index).name)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 << 30, 8 << 30))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(usable_gpus, "find_spec", lambda name: object() if triton else None)
        _read_limits.cache_clear()

    yield see
    _read_limits.cache_clear()


NEED = "need an NVIDIA card of compute capability 8.0 or newer"


@pytest.mark.parametrize(
    ("see", "why"),
    [
        ({"capabilities": ((7, 5),)}, f"Card 7.5 has compute capability 7.5; the GPU kernels {NEED}"),
        ({"capabilities": ((9, 4),), "hip": "6.4"}, f"an AMD card, on which nothing was tried; the GPU kernels {NEED}"),
        ({"capabilities": ((8, 6),), "triton": False}, "Triton is not installed; pip install triton"),
        ({"capabilities": ((6, 1), (6, 1), (5, 2))}, "GPU 0 is left alone, and those behind it (to GPU 2): Card 6.1"),
    ],
)  # fmt: skip
def test_the_cpu_computes_where_the_kernels_cannot_and_a_note_says_why(see: dict, why: str, insert: Insert) -> None:
    insert(*see.pop("capabilities"), **see)
    assert count_usable() == 0 and default_accelerator() == "cpu"
    (line,) = describe_unused()
    assert why in line
    *_, notes = choose_kernels(open_device("cpu"), "fast", 16)
    assert line in notes
    with pytest.raises(UserError, match="use a profile of --device cpu"):
        open_device("cuda")
    with pytest.raises(UserError) as refused:
        identify_accelerators("cuda")
    assert line in str(refused.value) and str(refused.value).endswith("use --device cpu")


def test_windows_is_sent_to_wsl(insert: Insert, monkeypatch: pytest.MonkeyPatch) -> None:
    insert((8, 6))
    assert count_usable() == 1 and describe_unused() == ()
    monkeypatch.setattr(usable_gpus.sys, "platform", "win32")
    assert "Windows has no Triton; install WSL 2, and pshard in it" in describe_unused()[0]


def test_an_old_card_behind_a_newer_one_is_left_out_alone(insert: Insert) -> None:
    insert((8, 9), (6, 1))
    assert default_accelerator() == "cuda"
    assert [(a.name, a.capability) for a in identify_accelerators("cuda")] == [("Card 8.9", "8.9")]
    assert "GPU 1 is left alone: Card 6.1" in describe_unused()[0]


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_commands_run_on_the_cpu_beside_such_a_gpu_without_touching_its_driver(
    hip: str | None, insert: Insert, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    world = make_world(tmp_path)
    cuda_driver.cache_clear()
    insert((7, 5), hip=hip)
    assert one_program.main(["plan", str(world.model), "--vram", "6", "-c", "128"]) == 0
    assert one_program.main(["run", str(world.model), "-p", "a", "-n", "2"]) == 0
    said = capsys.readouterr().err
    assert said.count("GPU 0 is left alone: Card 7.5") == 1 and NEED in said
    assert one_program.main(["profile", "--device", "cuda"]) == 2
    assert "error: --device cuda: GPU 0 is left alone" in capsys.readouterr().err
    assert not cuda_driver.cache_info().currsize


def test_the_doctor_names_the_least_capability(insert: Insert, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_world(tmp_path)
    insert((7, 5))
    one_program.main(["doctor"])
    said = capsys.readouterr().out
    assert "note  GPU: Card 7.5" in said and "the CPU computes: GPU 0 is left alone" in said and NEED in said
    insert((8, 6))
    one_program.main(["doctor"])
    assert "compute capability 8.6, of which 8.0 is the least" in capsys.readouterr().out
    insert((8, 6), triton=False)
    assert one_program.main(["doctor"]) == 1
    assert "-> pip install triton" in capsys.readouterr().out
