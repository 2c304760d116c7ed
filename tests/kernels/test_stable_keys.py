"""A kernel's key in Triton's cache is the same in every process (runtime/kernels/gpu/stable_keys.py)."""

import pytest

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")

import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from pshard.runtime.kernels.gpu.stable_keys import keep_keys_stable  # noqa: E402

LEVEL = tl.constexpr(3)


def _raise_level(x):
    return x + LEVEL


def _store_level(at):
    tl.store(at, raise_level(1))


raise_level = JITFunction(_raise_level)


def test_a_kernels_key_does_not_depend_on_what_was_met_before(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_keys_stable()
    keys = []
    for met_before in (False, True):
        monkeypatch.setitem(globals(), "raise_level", JITFunction(_raise_level))
        if met_before:
            _ = raise_level.cache_key
        keys.append(JITFunction(_store_level).cache_key)
    assert keys[0] == keys[1]


def test_a_kernels_key_follows_constants_of_the_functions_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_keys_stable()
    keys = []
    for level in (3, 4):
        monkeypatch.setitem(globals(), "LEVEL", tl.constexpr(level))
        monkeypatch.setitem(globals(), "raise_level", JITFunction(_raise_level))
        keys.append(JITFunction(_store_level).cache_key)
    assert keys[0] != keys[1]
