"""Kernels that a process compiled are counted, and told where that took long enough to notice."""

import sys
from pathlib import Path

import pytest

from pshard.runtime.kernels.gpu.count_compiled import Compiled, count_compiled


def test_a_line_tells_what_was_compiled_where_that_took_a_second() -> None:
    assert Compiled().describe() == Compiled(9, 0.9).describe() == ""
    assert (
        Compiled(1, 1.4).describe().startswith("1 GPU kernel had to be compiled meanwhile, which took 1 s; later runs")
    )
    assert "63 GPU kernels had" in Compiled(63, 75.0).describe()


def test_without_triton_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert count_compiled() == Compiled(0, 0.0)


def test_what_triton_compiles_is_counted_and_what_it_finds_in_its_cache_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pshard.runtime.kernels.gpu.triton_copy import copy_words_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    told: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: told.append(cache_hit))
    compiled = count_compiled()
    signature = {"dst": "*i32", "src": "*i32", "words": "i32", "BLOCK": "constexpr"}
    for _ in range(2):
        triton.compile(ASTSource(copy_words_kernel, signature, {"BLOCK": 64}), target=GPUTarget("cuda", 86, 32))
    assert compiled.kernels == 1 and compiled.seconds > 0.0 and told == [False, True]
