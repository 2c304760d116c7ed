"""Another card on the GPU at hand: what is compiled, assembled, refused and held back for it; without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pshard.errors import UserError
from pshard.machine import AS_CARD, emulated_capability
from pshard.registries.profile_store import default_profile_path
from pshard.runtime.kernels.as_card import BLOCKS, become_card, pad_shared, room_for_blocks
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS, take_for

H100, RTX_3060 = KNOWN_CARDS[90], KNOWN_CARDS[86]


def test_every_known_card_can_be_taken_for() -> None:
    assert set(BLOCKS) == set(KNOWN_CARDS)
    with pytest.raises(UserError, match="there is no card 87; choose 75, 80, 86"):
        become_card(87, KNOWN_CARDS)


@pytest.mark.parametrize("text", ["8.6", "sm_86", "-86"])
def test_a_card_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AS_CARD, text)
    with pytest.raises(UserError, match=f"PSHARD_AS_CARD: '{text}' is no capability such as 86"):
        emulated_capability()


def test_a_profile_as_another_card_leaves_that_of_the_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AS_CARD, raising=False)
    own = default_profile_path()
    monkeypatch.setenv(AS_CARD, "86")
    assert default_profile_path() != own and default_profile_path().parent == own.parent


def test_a_card_taken_for_another_has_the_smaller_of_both_limits() -> None:
    limits = take_for(H100, RTX_3060)
    assert limits.name == "H100 as sm_86" and limits.capability == 86
    assert (limits.shared_block, limits.shared_processor, limits.threads) == (101376, 102400, 1536)
    assert (limits.processors, limits.l2) == (H100.processors, H100.l2)  # which no code can take away
    assert limits.runs_kernels and not take_for(H100, KNOWN_CARDS[75]).runs_kernels


def test_room_is_what_warps_memory_registers_and_blocks_leave() -> None:
    assert room_for_blocks(RTX_3060, 8, 0, 32) == 6  # 48 warps
    assert room_for_blocks(RTX_3060, 1, 0, 32) == 16  # blocks
    assert room_for_blocks(RTX_3060, 4, 49 << 10, 32) == 2  # 100 KB, of which each block takes one more
    assert room_for_blocks(RTX_3060, 8, 0, 200) == 1  # 256 * 200 registers, twice, are above 65536
    assert room_for_blocks(RTX_3060, 8, 160 << 10, 32) == 1  # with the limit lifted


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shared", [0, 1000, 20480, 49152, 69632, 98304, 163840])
@pytest.mark.parametrize("registers", [16, 40, 64, 128, 255])
def test_padded_kernels_have_the_room_of_the_other_card(warps: int, shared: int, registers: int) -> None:
    padded = pad_shared(RTX_3060, H100, warps, shared, registers)
    room = room_for_blocks(RTX_3060, warps, shared, registers)
    assert shared <= padded <= H100.shared_block
    assert room_for_blocks(H100, warps, padded, registers) == room


PROGRAM = """
import json, struct, sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import compiler
from triton.runtime import driver

loads, launches = [], []
def make(utils):
    utils.get_device_properties = lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}
    utils.load_binary = lambda name, code, shared, device: loads.append((name, code, shared)) or (1, 2, 32, 0, 1024)
nvidia.CudaUtils.__init__ = make
class OnH100(nvidia.CudaDriver):
    def __init__(self):
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = lambda source, metadata: lambda *words: launches.append(words[5])
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 0
        self.get_device_capability = lambda device: (9, 0)

from pshard.runtime.kernels.gpu import triton_rows
driver.set_active(OnH100())
from pshard.profile.tuning.compile_ahead import OnlyTarget, _compile, requests_of
from pshard.runtime.kernels.gpu.cuda import CudaKernels
kernels = CudaKernels("cpu", 128)
both = torch.zeros(2, 2048, dtype=torch.bfloat16)
call = lambda: triton_rows.gate_mul_kernel[(1, 2)](
    both, 2048, both, 2048, both, 2048, 1024, ACTIVATION="silu", BLOCK=1024, num_warps=4)
(request,) = requests_of(call)
compiled = call()
flags = struct.unpack_from("<I", loads[-1][1], 48)[0]
asked = nvidia.CudaUtils.instance.get_device_properties(0)["max_shared_mem"]
print(json.dumps({
    "ptx": ".target sm_86" in compiled.asm["ptx"], "cubin": [flags & 255, flags >> 8 & 255], "launches": launches,
    "loads": [shared for _, _, shared in loads], "limit": compiler.max_shared_mem(0), "asked": asked,
    "requested": '"sm86"' in request.words or "sm86" in request.words,
}))
"""


@pytest.mark.slow
def test_code_of_another_card_is_assembled_for_the_gpu_here_and_held_to_its_limits(tmp_path: Path) -> None:
    """The driver is all that is made up: what it loads and launches is what Triton compiled."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {AS_CARD: "86", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["ptx"] and 90 in found["cubin"] and found["requested"]
    assert found["limit"] == found["asked"] == 101376
    # 4 warps of few registers: 12 blocks of 48 warps there, 16 here unless each takes more shared memory
    padded = pad_shared(RTX_3060, H100, 4, found["loads"][0], 32)
    assert found["launches"] == [[4, 1, padded]] and padded > found["loads"][0]
