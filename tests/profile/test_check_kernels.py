"""Each kernel of a GPU beside the plain one: which calls there are, and what is told of one that fails or is wrong."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from pshard.commands.program import one_program
from pshard.profile.checked import check_kernels as check_kernels_module
from pshard.profile.checked.check_kernels import CLOSE, Checked, check_kernels
from pshard.profile.checked.kernel_cases import CELLS, PLANED, list_cases
from pshard.runtime.kernels.plain import PlainKernels
from pshard.session.readiness.try_gpu import show_row

CPU = torch.device("cpu")


class BadKernels(PlainKernels):
    """Products are some 20% off, norms fail, and attention of prompts is not a number."""

    def linear(self, x: Any, weight: Any, out: torch.Tensor, *rest: Any, **more: Any) -> None:
        super().linear(x, weight, out, *rest, **more)
        out.mul_(1.2)

    def rms_norm(self, *rest: Any, **more: Any) -> None:
        raise RuntimeError("out of resources: shared memory,\n Required: 163840 | Hardware limit: 101376")

    def attention(self, qkv: torch.Tensor, *rest: Any, **more: Any) -> None:
        super().attention(qkv, *rest, **more)
        if qkv.shape[0] > 64:
            rest[4].fill_(float("nan"))


@pytest.mark.slow
def test_every_case_has_a_plain_answer_that_repeats() -> None:
    rows = list(check_kernels(CPU, PlainKernels(), lambda what: None))
    assert [row for row in rows if not row.passed or row.off != 0] == []
    assert len(rows) == len(list(list_cases()))


def test_there_are_cases_for_all_types_of_weights_and_cells() -> None:
    names = {(case.kernel, case.what) for case in list_cases()}
    assert len(names) == len(list(list_cases()))
    assert {("product", f"{qtype}, 128 tokens") for qtype in PLANED} <= names
    assert {("attention over cells", f"heads of 256, {cells}, 1 token") for cells in CELLS} <= names


def test_a_kernel_that_is_wrong_or_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    few = [case for case in list_cases() if case.kernel != "experts" and "Q" not in case.what.replace("Q4_0", "")]
    monkeypatch.setattr(check_kernels_module, "list_cases", lambda: few)
    rows = {(row.kernel, row.what): row for row in check_kernels(CPU, BadKernels(), shown.append)}
    wrong, failed = rows["product", "Q4_0, 1 token"], rows["norm", "1 token"]
    assert not wrong.passed and wrong.off == pytest.approx(0.2, rel=1e-3)
    assert show_row(wrong) == "| product | Q4_0, 1 token | 2.0e-01 | - | WRONG |"
    assert show_row(failed).endswith(
        "| FAILED: RuntimeError: out of resources: shared memory, Required: 163840 / Hardware limit: 101376 |"
    )
    assert rows["attention over cells", "heads of 64, bf16, 1 token"].passed
    assert not rows["attention over cells", "heads of 64, bf16, 128 tokens"].passed  # what is not a number is no answer
    assert len(shown) == len(rows)
    assert show_row(Checked("norm", "1 token", CLOSE / 30, 1.23e-5)) == "| norm | 1 token | 1.0e-03 | 12 | ok |"


def test_without_a_gpu_the_flag_is_refused(capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert one_program.main(["doctor", "--gpu"]) == 2
    assert capsys.readouterr().err == "error: --gpu: there is no GPU here; leave the flag out\n"


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from interpreted import mend_interpreter
mend_interpreter()
import torch
from pshard.profile.checked.check_kernels import check_case
from pshard.profile.checked.kernel_cases import list_cases
from pshard.runtime.kernels.gpu.cuda import CudaKernels
wanted = [("product", "Q4_0, 1 token"), ("attention over cells", "heads of 64, q8_0, 1 token"), ("look-up", "Q6_K"),
          ("rope and store", "q8_0"), ("norm", "128 tokens"), ("gated delta net", "1 token")]
kernels = CudaKernels("cpu", 1024)
rows = [check_case(case, kernels, torch.device("cpu")) for case in list_cases() if (case.kernel, case.what) in wanted]
assert len(rows) == len(wanted) and all(row.passed for row in rows), rows
"""


@pytest.mark.slow
def test_the_gpu_s_kernels_pass_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    makers = os.path.join(os.path.dirname(__file__), "..", "makers")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, makers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_every_kernel_of_this_gpu_passes(capsys: pytest.CaptureFixture) -> None:
    code = one_program.main(["doctor", "--gpu"])
    said = capsys.readouterr().out
    assert code == 0 and "0 failed" in said, "\n".join(line for line in said.splitlines() if not line.endswith("ok |"))
